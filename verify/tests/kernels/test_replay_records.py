"""The recorded GPU evidence of replay: of these sources, and what it says."""

import json
from pathlib import Path
from typing import Any

from hyscale_kernels.provenance import source_hash

RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "race_replay.jsonl"


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


def test_the_records_are_of_these_sources() -> None:
    measured = {record["source_hash"] for record in records()}
    assert measured == {source_hash("hytopk", "indexer", "replay")}, (
        "the kernels have changed since they were measured; run benchmarks/replay.py on a GPU"
    )


def test_every_claim_but_a_time_holds() -> None:
    claims = [record for record in records() if record["claim"] != "time"]
    assert len(claims) >= 10
    assert all(record["holds"] for record in claims)


def test_bf16_meets_its_times() -> None:
    timed = {
        record["call"]: record
        for record in records()
        if record["claim"] == "time" and record["dtype"] == "bf16" and "target_ms" in record
    }
    assert len(timed) == 5
    assert all(record["median_ms"] <= record["target_ms"] for record in timed.values())

"""The recorded GPU evidence of replay: of these sources, and what it says."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

from hyscale_kernels.provenance import source_hash
from hyscale_ref.profile import read_profile

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "benchmarks" / "results" / "race_replay.jsonl"
PROFILE = ROOT / "simulator" / "hyscale_simulator" / "data" / "profiles" / "h200-own.jsonl.gz"
README = ROOT / "kernels" / "hyscale_kernels" / "replay" / "README.md"


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


def test_the_readme_s_table_is_the_record() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| call | bf16 | fp8 |"))
    rest = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in rest]
    times = {(record["call"], record["dtype"]): record for record in records() if record["claim"] == "time"}
    assert len(rows) == 5
    for call, bf16, fp8, target, floors in rows:
        for dtype, printed in (("bf16", bf16), ("fp8", fp8)):
            if printed:
                places = len(printed.partition(".")[2])
                assert f"{times[call, dtype]['median_ms']:.{places}f}" == printed, (call, dtype)
        assert times[call, "bf16"]["target_ms"] == float(target)
        recorded = {name.partition("_")[0]: ms for name, ms in times[call, "bf16"]["floor_ms"].items()}
        for name, printed in re.findall(r"(\w+) ([\d.]+)", floors):
            assert f"{recorded[name]:.{len(printed.partition('.')[2])}f}" == printed, (call, name)


def test_the_selection_that_replay_saves_takes_what_the_profile_says() -> None:
    shape = {"rows": 8192, "keys": 2**20, "top_k": 2048}
    took = {
        point.dtype: point.median_us / 1e3
        for point in read_profile(PROFILE)
        if (point.op, point.regime) == ("hytopk", "untrained") and shape.items() <= dict(point.shape).items()
    }
    said = f"{took['bf16']:.0f} ms (fp8: {took['fp8']:.0f}"
    for page in (README, ROOT / "README.md"):
        assert said in " ".join(page.read_text(encoding="utf-8").split()), page


def test_every_time_meets_its_target_and_stands_beside_its_floors() -> None:
    timed = {
        (record["dtype"], record["call"]): record
        for record in records()
        if record["claim"] == "time" and "target_ms" in record
    }
    assert len(timed) == 5 + 3, "encode and decode do not depend on the dtype"
    assert all(record["median_ms"] <= record["target_ms"] for record in timed.values())
    assert all(record["floor_ms"] for record in timed.values())
    for (_, call), record in timed.items():
        if "backward" in call:
            assert set(record["floor_ms"]) == {"memory", "cache_gathers", "products", "additions"}
            assert record["median_ms"] >= max(record["floor_ms"].values())

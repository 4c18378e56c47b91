"""Convert this project's recorded measurements to the shipped H200 profile of selection kernels.

    python simulator/tools/convert_records.py

Reads benchmarks/results/race_hytopk.jsonl (stages of HyTopK) and race_replay.jsonl; the latest record of a
shape counts. Figures of materialised rivals are listed below: each kernel on its own was timed only by the
first probes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyscale_ref.profile import ProfilePoint, as_shape, write_profile

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results"
PROFILE = ROOT / "simulator" / "hyscale_simulator" / "data" / "profiles" / "h200-hytopk.jsonl"
H200 = "NVIDIA H200"
PROBES = "first probes of HyTopK's design on one H200 (Triton 3.6, torch 2.11, median of do_bench)"

# Replay's calls under the names of the simulator's ops.
REPLAY = {
    "encode": ("record_encode", "fp32", ("top_k", "keys", "rows")),
    "decode": ("record_decode", "fp32", ("top_k", "keys", "rows")),
    "selected scores": ("selected_scores", None, ("heads", "dim", "top_k", "rows")),
    "backward, atomic dk": ("selected_scores_bwd", None, ("heads", "dim", "top_k", "rows")),
}


def point(
    op: str, who: str, dtype: str, us: float, source: str = "", regime: str = "", **shape: int
) -> ProfilePoint:
    return ProfilePoint(
        op=op,
        implementation=who,
        dtype=dtype,
        shape=as_shape(shape),
        device=H200,
        median_us=round(us, 1),
        regime=regime,
        source=source,
    )


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDS / name).read_text(encoding="utf-8").splitlines()]


def stages() -> Iterator[ProfilePoint]:
    """HyTopK's stages, every key visible, random scores."""
    latest = {}
    for record in records("race_hytopk.jsonl"):
        plain = record["regime"] == "random" and record["windows"] == "full"
        if record["contender"] == "hytopk" and record["status"] == "ok" and plain:
            latest[record["dtype"], record["rows"], record["keys"]] = record
    for (dtype, rows, keys), record in sorted(latest.items()):
        us = {stage: 1e3 * ms for stage, ms in record["stages"].items()}
        if "scan" not in us or rows < 1024:  # short contexts and few rows take other ways
            continue
        scored = {"heads": record["heads"], "dim": record["dim"], "rows": rows, "keys": keys}
        yield point("hytopk_threshold", "hytopk", dtype, us["threshold"], **scored)
        yield point("hytopk_scan", "hytopk", dtype, us["scan"], **scored)
        if dtype == "fp8":  # these stages do not see the operands
            listed = {"rows": rows, "keys": keys, "top_k": record["top_k"]}
            finish = us["select"] + us["plateau"] + us["repair"]
            yield point("hytopk_compact", "hytopk", "fp32", us["compact"], **listed)
            yield point("hytopk_finish", "hytopk", "fp32", finish, **listed)


def replay() -> Iterator[ProfilePoint]:
    names = {"T": "rows", "S": "keys", "H": "heads", "D": "dim", "K": "top_k"}
    for record in records("race_replay.jsonl"):
        if record["claim"] == "time" and record["call"] in REPLAY:
            op, dtype, axes = REPLAY[record["call"]]
            shape = {names[letter]: size for letter, size in record["shape"].items()}
            shape = {name: size for name, size in shape.items() if name in axes}
            yield point(op, "hytopk", dtype or record["dtype"], 1e3 * record["median_ms"], **shape)


def rivals() -> Iterator[ProfilePoint]:
    """Materialised scoring and selection, 32 heads of 128, every key visible."""
    scored = {"heads": 32, "dim": 128}
    for rows, keys, scores, flashinfer, torch_topk in (
        (4096, 65536, 2410.0, 1120.0, 4070.0),
        (4096, 262144, 9850.0, 3370.0, 15100.0),
        (2048, 1048576, 19500.0, 5770.0, 31700.0),
    ):
        yield point("index_scores", "deepgemm", "fp8", scores, PROBES, rows=rows, keys=keys, **scored)
        for who, us in (("flashinfer", flashinfer), ("torch.topk", torch_topk)):
            yield point(
                "index_select", who, "fp32", us, PROBES, "untrained", rows=rows, keys=keys, top_k=2048
            )
    # bf16 scores written in fp32 by a plain Triton kernel: 544 to 573 TFLOPS.
    us = 2.0 * 32 * 128 * 4096 * 65536 / 558 / 1e6
    yield point("index_scores", "triton", "bf16", us, PROBES, rows=4096, keys=65536, **scored)


def main() -> None:
    points = [*rivals(), *stages(), *replay()]
    write_profile(PROFILE, points)
    print(f"{PROFILE.name}: {len(points)} points, {PROFILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()

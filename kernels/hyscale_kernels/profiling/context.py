"""HyTopK and the pipeline that writes its scores, against context length, with the floor drawn.

Read from a profile, or from the records of ``hyscale profile race``.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyscale_ref.profile import ProfileError, ProfilePoint, read_profile

from .ceilings import NOMINAL
from .ops.selection import selecting

OURS = "hytopk"


@dataclass(frozen=True)
class Timed:
    """One contender at one shape: milliseconds."""

    who: str
    dtype: str
    rows: int
    keys: int
    race: str  # what was measured together
    ms: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True)
class Curve:
    """A line of the picture: (keys, low, median, high) in microseconds a query."""

    label: str
    colour: str
    marker: str
    line: str
    places: tuple[tuple[int, float, float, float], ...]


def from_file(path: Path, faults: list[str]) -> tuple[list[Timed], dict[str, float]]:
    """What the file holds, and product rates by dtype (from its measured ceilings; a profile's alone).

    Bad lines are described in ``faults`` and passed over. ProfileError for a file that cannot be read.
    """
    if path.suffix == ".gz":  # a profile: races are plain
        return from_profile(read_profile(path, faults=faults))
    try:
        lines = path.read_text(encoding="utf-8", errors="backslashreplace").splitlines()
    except OSError as error:
        raise ProfileError(f"{path}: unreadable: {error}") from error
    if '"contender"' not in (lines[0] if lines else ""):
        return from_profile(read_profile(path, faults=faults))
    timed: list[Timed] = []
    for number, line in enumerate(lines, 1):
        try:
            timed += from_race([json.loads(line)] if line.strip() else [])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            faults.append(f"{path}:{number}: not the record of a race: {error!r}")
    return timed, {}


def from_race(records: Iterable[dict[str, Any]]) -> list[Timed]:
    """Records of random scores with every key visible, that passed their gate."""
    return [
        Timed(
            record["contender"], record["dtype"], record["rows"], record["keys"], record["time_utc"],
            record["median_ms"], record["p20_ms"], record["p80_ms"],
        )
        for record in records
        if record["status"] == "ok" and record["windows"] == "full" and record["regime"] == "random"
    ]  # fmt: skip


def from_profile(points: Sequence[ProfilePoint]) -> tuple[list[Timed], dict[str, float]]:
    """HyTopK and PyTorch's materialised pipeline, GLM-5.1's indexer, untrained scores."""
    timed, rates = [], {}
    for point in points:
        if point.status != "ok" or point.median_us is None:
            continue
        shape, who = dict(point.shape), {OURS: OURS, "materialised_topk": "torch"}.get(point.op)
        if point.op == "ceiling" and point.implementation == "gemm" and point.flops_per_s:
            rates[point.dtype] = point.flops_per_s
        usual = (shape.get("heads"), shape.get("dim"), shape.get("top_k")) == (32, 128, 2048)
        if who and usual and point.regime == "untrained":
            low, high = point.p20_us or point.median_us, point.p80_us or point.median_us
            timed.append(
                Timed(
                    who,
                    point.dtype,
                    shape["rows"],
                    shape["keys"],
                    "",
                    point.median_us / 1e3,
                    low / 1e3,
                    high / 1e3,
                )
            )
    return timed, rates


def plot(path: Path, out: Path, faults: list[str]) -> list[tuple[int, float]]:
    """Draw the picture; returns (keys, how many times faster HyTopK is). Bad lines go to ``faults``.

    ValueError when the file has no shape that both HyTopK and a rival ran.
    """
    timed, rates = from_file(path, faults)
    ours, rivals = pairs(timed)
    if not rivals:
        raise ValueError(f"{path}: no shape of at least 512 queries that both HyTopK and a rival ran")
    rival, dtype = rivals[0].who, rivals[0].dtype
    rates = rates or {"fp8": NOMINAL.fp8_flops or 0.0, "bf16": NOMINAL.bf16_flops or 0.0}
    curves = [curve(f"{rival}, {dtype} (scores written)", "#D55E00", "s", "-", rivals)]
    curves += [curve(f"HyTopK, {dtype}", "#0072B2", "o", "-", ours)]
    other = "bf16" if dtype == "fp8" else "fp8"
    alone = latest(item for item in timed if item.who == OURS and item.dtype == other and item.rows >= 512)
    if alone:
        curves.append(curve(f"HyTopK, {other}", "#56B4E9", "o", "--", alone))
    floors = {
        f"floor, {kind}: products at {rates[kind] / 1e12:,.0f} TFLOP/s": [
            (item.keys, floor_us(item.keys, kind, rates[kind])) for item in found
        ]
        for kind, found in ((dtype, ours), (other, alone))
        if found and kind in rates
    }
    ratios = [(mine.keys, theirs.ms / mine.ms) for mine, theirs in zip(ours, rivals, strict=True)]
    from . import figures

    title = "The 2,048 best keys of each query: 32 heads of 128, random scores\n(bands: p20 to p80)"
    figures.context(curves, floors, (ratios, f"{rival}\nover HyTopK"), title, out)
    return ratios


def pairs(timed: Sequence[Timed]) -> tuple[list[Timed], list[Timed]]:
    """HyTopK and its rival at each context length, of the same race, dtype and shape; many rows first."""
    ours = {(t.dtype, t.rows, t.keys, t.race): t for t in timed if t.who == OURS}
    best: dict[int, tuple[Timed, Timed]] = {}
    for rival in timed:
        mine = ours.get((rival.dtype, rival.rows, rival.keys, rival.race))
        if rival.who == OURS or mine is None or rival.rows < 512:
            continue
        held = best.get(rival.keys)
        if held is None or (rival.dtype == "fp8", rival.rows) >= (held[0].dtype == "fp8", held[0].rows):
            best[rival.keys] = (mine, rival)
    dtypes = {mine.dtype for mine, _ in best.values()}
    kept = "fp8" if "fp8" in dtypes else next(iter(dtypes), "")
    found = [best[keys] for keys in sorted(best) if best[keys][0].dtype == kept]
    return [mine for mine, _ in found], [rival for _, rival in found]


def latest(timed: Iterable[Timed]) -> list[Timed]:
    """One measurement for each context length: of the most rows, the last."""
    chosen: dict[int, Timed] = {}
    for item in timed:
        held = chosen.get(item.keys)
        if held is None or item.rows >= held.rows:
            chosen[item.keys] = item
    return [chosen[keys] for keys in sorted(chosen)]


def curve(label: str, colour: str, marker: str, line: str, timed: Sequence[Timed]) -> Curve:
    places = tuple(
        (item.keys, *(1e3 * ms / item.rows for ms in (item.low_ms, item.ms, item.high_ms))) for item in timed
    )
    return Curve(label, colour, marker, line, places)  # type: ignore[arg-type]


def floor_us(keys: int, dtype: str, flops_per_s: float) -> float:
    """Microseconds that a query's scores need on tensor cores, alone."""
    cost = selecting({"rows": 1, "keys": keys, "heads": 32, "dim": 128, "top_k": 2048}, dtype)
    return cost.tensor_flops / flops_per_s * 1e6

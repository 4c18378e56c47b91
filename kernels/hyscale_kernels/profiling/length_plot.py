"""HyTopK and the pipeline that writes its scores, against context length, with the floor drawn.

Read from a profile, or from the records of ``hyscale profile race``. In a profile the pipeline's two parts,
scores and selection, are measured apart: it is their sum.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyscale_ref.profile import ProfileError, ProfilePoint, read_profile

from .ops.selection import GLM, selecting

OURS = "hytopk"
DTYPES = ("fp8", "bf16")
LEAST_ROWS = 512  # of a call that fills the GPU

# TFLOP/s of the fastest products that were measured on an H200 (the shipped profile's; a single call each):
# no floor that is drawn without a profile lies above them.
FASTEST = {"fp8": 1573e12, "bf16": 830e12}

# Who writes the scores of a rival that a profile has in parts, and its name. FlashInfer selects.
SCORERS = {"fp8": "deepgemm", "bf16": "triton"}

# HyTopK's and the rival's.
COLOURS = {"fp8": ("#0072B2", "#D55E00"), "bf16": ("#009E73", "#E69F00")}
LINES = {"fp8": "-", "bf16": "--"}


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
    parts: int = 1  # measured apart and added


@dataclass(frozen=True)
class Gain:
    """How many times faster than ``rival`` HyTopK is, at each context length: (keys, ratio)."""

    dtype: str
    rival: str
    places: list[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """A line of the picture: (keys, low, median, high) in microseconds a query."""

    label: str
    colour: str
    marker: str
    line: str
    places: tuple[tuple[int, float, float, float], ...]


def from_file(path: Path, faults: list[str]) -> tuple[list[Timed], dict[str, float]]:
    """What the file holds, and the rate of its fastest product by dtype (a profile's alone).

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
    """Records of random scores with every key visible, that passed their gate; others are passed over."""
    return [
        Timed(
            record["contender"], record["dtype"], record["rows"], record["keys"], record["time_utc"],
            record["median_ms"], record["p20_ms"], record["p80_ms"],
        )
        for record in records
        if record["status"] == "ok" and record["windows"] == "full" and record["regime"] == "random"
    ]  # fmt: skip


def from_profile(points: Sequence[ProfilePoint]) -> tuple[list[Timed], dict[str, float]]:
    """HyTopK and its rivals, GLM-5.1's indexer, untrained scores: PyTorch's pipeline as a whole, and scores
    with FlashInfer's selection as the sum of two points."""
    found = {(p.op, p.implementation, p.dtype, p.regime, p.shape): p for p in points if p.status == "ok"}
    rates: dict[str, float] = {}
    timed = []
    for (op, implementation, dtype, regime, sizes), point in found.items():
        shape, dims = dict(sizes), {name: size for name, size in sizes if name not in ("rows", "keys")}
        if (op == "gemm" or (op, implementation) == ("ceiling", "gemm")) and point.flops_per_s:
            rates[dtype] = max(rates.get(dtype, 0.0), point.flops_per_s)
        elif op in (OURS, "materialised_topk") and regime == "untrained" and dims == GLM:
            timed.append(added(OURS if op == OURS else "torch", dtype, point))
        elif (op, implementation, regime) == ("index_scores", SCORERS.get(dtype), ""):
            selected = tuple(sorted({**shape, "top_k": GLM["top_k"]}.items()))
            selected = tuple((name, size) for name, size in selected if name in ("rows", "keys", "top_k"))
            second = found.get(("index_select", "flashinfer", "fp32", "untrained", selected))
            if second is not None and {**dims, "top_k": GLM["top_k"]} == GLM:
                timed.append(added(f"{implementation}+flashinfer", dtype, point, second))
    return timed, rates


def added(who: str, dtype: str, *parts: ProfilePoint) -> Timed:
    """Points measured apart as one contender: medians, p20 and p80 added up."""
    shape = dict(parts[0].shape)
    medians = [point.median_us or 0.0 for point in parts]
    low = sum(point.p20_us or us for point, us in zip(parts, medians, strict=True))
    high = sum(point.p80_us or us for point, us in zip(parts, medians, strict=True))
    return Timed(
        who, dtype, shape["rows"], shape["keys"], "", sum(medians) / 1e3, low / 1e3, high / 1e3, len(parts)
    )  # fmt: skip


def plot(path: Path, out: Path, faults: list[str]) -> list[Gain]:
    """Draw the picture; returns what its lower half shows. Bad lines go to ``faults``.

    ValueError when the file has no shape that both HyTopK and a rival ran.
    """
    timed, rates = from_file(path, faults)
    rates = rates or FASTEST
    curves, floors, gains = [], {}, []
    for dtype in DTYPES:
        ours, rivals = pairs(timed, dtype)
        colour, other = COLOURS[dtype]
        if rivals:
            who, parts = rivals[0].who, ", sum of two parts timed apart" if rivals[0].parts > 1 else ""
            curves.append(curve(f"{who}, {dtype}{parts}", other, "s", LINES[dtype], rivals))
            ratios = [(mine.keys, them.ms / mine.ms) for mine, them in zip(ours, rivals, strict=True)]
            gains.append(Gain(dtype, who, ratios))
        else:
            alone = (t for t in timed if t.who == OURS and t.dtype == dtype and t.rows >= LEAST_ROWS)
            ours = latest(alone)
        if ours:
            curves.append(curve(f"HyTopK, {dtype}", colour, "o", LINES[dtype], ours))
        if ours and dtype in rates:
            label = f"floor, {dtype}: products at {rates[dtype] / 1e12:,.0f} TFLOP/s"
            floors[label] = [(item.keys, floor_us(item.keys, dtype, rates[dtype])) for item in ours]
    if not gains:
        raise ValueError(
            f"{path}: no shape of at least {LEAST_ROWS} queries that both HyTopK and a rival ran "
            "on random scores with every key visible"
        )
    from . import figures

    title = "The 2,048 best keys of each query: 32 heads of 128, random scores\n(bands: p20 to p80)"
    below = [(gain.dtype, COLOURS[gain.dtype][0], LINES[gain.dtype], gain.places) for gain in gains]
    figures.context(curves, floors, below, title, out)
    return gains


def pairs(timed: Sequence[Timed], dtype: str) -> tuple[list[Timed], list[Timed]]:
    """HyTopK and one rival at each context length, of the same race and shape; many rows first, the last
    of as many. The rival is the one of most lengths, of several the fastest at the longest."""
    ours = {(t.rows, t.keys, t.race): t for t in timed if t.who == OURS and t.dtype == dtype}
    best: dict[str, dict[int, tuple[Timed, Timed]]] = {}
    for rival in timed:
        mine = ours.get((rival.rows, rival.keys, rival.race))
        if rival.who == OURS or rival.dtype != dtype or mine is None or rival.rows < LEAST_ROWS:
            continue
        lengths = best.setdefault(rival.who, {})
        if rival.keys not in lengths or rival.rows >= lengths[rival.keys][0].rows:
            lengths[rival.keys] = (mine, rival)
    if not best:
        return [], []

    def standing(lengths: dict[int, tuple[Timed, Timed]]) -> tuple[int, float]:
        mine, rival = lengths[max(lengths)]
        return len(lengths), mine.ms / rival.ms

    chosen = max(best.values(), key=standing)
    found = [chosen[keys] for keys in sorted(chosen)]
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
    cost = selecting({"rows": 1, "keys": keys, **GLM}, dtype)
    return cost.tensor_flops / flops_per_s * 1e6

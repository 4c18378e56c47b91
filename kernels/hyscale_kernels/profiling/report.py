"""What a profile holds, as tables and as a roofline plot."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from hyscale_ref.profile import ProfilePoint, shape_text

from .compare import APART, Comparison, Pair

OK = "ok"


def point_table(points: Sequence[ProfilePoint], title: str) -> Table:
    """A row a point."""
    table = Table(
        title=title, caption="of floor: time of its least work at this GPU's measured rates, over the median"
    )
    for heading in ("op", "who", "dtype", "shape", "regime"):
        table.add_column(heading, overflow="fold")
    for heading in ("median us", "p20-p80", "TFLOP/s", "TB/s", "of floor", "extra MiB"):
        table.add_column(heading, justify="right")
    for point in points:
        where = (point.op, point.implementation, point.dtype, shape_text(point.shape), point.regime)
        if point.status != OK:
            table.add_row(*where, "failed", point.error, "", "", "", "")
            continue
        extra = point.peak_extra_bytes
        table.add_row(
            *where,
            f"{point.median_us:,.1f}",
            "" if point.p20_us is None else f"{point.p20_us:,.1f}-{point.p80_us:,.1f}",
            "" if not point.flops_per_s else f"{point.flops_per_s / 1e12:.1f}",
            "" if not point.bytes_per_s else f"{point.bytes_per_s / 1e12:.2f}",
            "" if point.ceiling_fraction is None else f"{point.ceiling_fraction:.0%}",
            "" if extra is None else f"{extra / 2**20:.0f}",
        )
    return table


def summary_table(points: Iterable[ProfilePoint], title: str) -> Table:
    """A row an op: how many points, and how near their floors they come."""
    grouped: dict[tuple[str, str, str, str], list[ProfilePoint]] = defaultdict(list)
    for point in points:
        grouped[point.op, point.implementation, point.dtype, point.regime].append(point)
    table = Table(title=title)
    for heading in ("op", "who", "dtype", "regime"):
        table.add_column(heading, overflow="fold")
    for heading in ("points", "failed", "us", "median of floor", "best", "spread"):
        table.add_column(heading, justify="right")
    for key, members in grouped.items():
        good = [point for point in members if point.status == OK]
        times = sorted(point.median_us for point in good if point.median_us is not None)
        near = sorted(point.ceiling_fraction for point in good if point.ceiling_fraction is not None)
        spreads = sorted(filter(None, (spread(point) for point in good)))
        table.add_row(
            *key,
            str(len(good)),
            str(len(members) - len(good) or ""),
            f"{times[0]:,.0f}-{times[-1]:,.0f}" if times else "",
            f"{near[len(near) // 2]:.0%}" if near else "",
            f"{near[-1]:.0%}" if near else "",
            f"{spreads[len(spreads) // 2]:.1%}" if spreads else "",
        )
    return table


def spread(point: ProfilePoint) -> float | None:
    """Half the p20-p80 width over the median."""
    if point.p20_us is None or point.p80_us is None or point.median_us is None:
        return None
    return (point.p80_us - point.p20_us) / 2 / point.median_us


def comparison_summary(found: Comparison, title: str, apart: float = APART) -> Table:
    """A row an op: how many shapes, and how their ratios spread."""
    table = Table(title=title)
    table.add_column("op", overflow="fold")
    for heading in ("shapes", "median ratio", "least", "most", "within noise", f"over {apart:.0%} apart"):
        table.add_column(heading, justify="right")
    for name, pairs in found.by_op().items():
        ratios = sorted(pair.ratio for pair in pairs)
        table.add_row(
            name,
            str(len(pairs)),
            f"{float(np.median(ratios)):.3f}",
            f"{ratios[0]:.3f}",
            f"{ratios[-1]:.3f}",
            str(sum(pair.noise for pair in pairs)),
            str(sum(pair.verdict(apart) == "apart" for pair in pairs) or ""),
        )
    return table


def comparison_table(found: Comparison, title: str, apart: float = APART, most: int = 60) -> Table:
    """The pairs, the furthest apart first, at most ``most`` of them."""
    table = Table(
        title=title,
        caption=f"ratio: second over first; 'apart': more than {apart:.0%} and outside the noise",
    )
    for heading in ("op", "who", "dtype", "shape", "regime"):
        table.add_column(heading, overflow="fold")
    for heading in ("first us", "second us", "ratio", ""):
        table.add_column(heading, justify="right")
    ranked = sorted(found.pairs, key=lambda pair: -abs(pair.ratio - 1))
    for pair in ranked[:most]:
        point = pair.first
        who = dict.fromkeys((point.implementation, pair.second.implementation))
        table.add_row(
            point.op, " / ".join(who), point.dtype, shape_text(point.shape), point.regime,
            f"{point.median_us:,.1f}", f"{pair.second.median_us:,.1f}", f"{pair.ratio:.3f}",
            pair.verdict(apart),
        )  # fmt: skip
    return table


def comparison_record(found: Comparison, apart: float = APART) -> dict[str, Any]:
    """The same for machines."""

    def record(pair: Pair) -> dict[str, Any]:
        point = pair.first
        return {
            "op": point.op, "dtype": point.dtype, "regime": point.regime, "shape": dict(point.shape),
            "first": point.implementation, "second": pair.second.implementation,
            "first_us": point.median_us, "second_us": pair.second.median_us, "ratio": pair.ratio,
            "verdict": pair.verdict(apart),
        }  # fmt: skip

    return {
        "schema": 1,
        "pairs": [record(pair) for pair in found.pairs],
        "only_first": found.only_first,
        "only_second": found.only_second,
        "median_difference": found.quantile(0.5),
        "p95_difference": found.quantile(0.95),
        "within_noise": sum(pair.noise for pair in found.pairs),
        "apart": sum(pair.verdict(apart) == "apart" for pair in found.pairs),
    }


def roofline(points: Sequence[ProfilePoint], path: Path) -> None:
    """Achieved FLOP/s against FLOPs a byte, with the measured ceilings; PNG, SVG or PDF by the name.

    ValueError when no point has both rates, or the measured ceilings are missing.
    """
    from . import figures

    ceilings = {
        (point.implementation, point.dtype): point
        for point in points
        if point.op == "ceiling" and point.status == OK
    }
    drawn = [
        point for point in points
        if point.op != "ceiling" and point.status == OK and point.flops_per_s and point.bytes_per_s
    ]  # fmt: skip
    if not drawn:
        raise ValueError("no point has both a FLOP rate and a byte rate: there is nothing to plot")
    if ("copy", "bf16") not in ceilings:
        raise ValueError("the profile has no measured copy ceiling: 'hyscale profile run' measures it first")
    figures.roofline(drawn, ceilings, path)

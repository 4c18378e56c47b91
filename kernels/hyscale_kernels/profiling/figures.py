"""Pictures, through matplotlib, drawn without a display."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from hyscale_ref.profile import ProfilePoint

# Okabe-Ito: told apart by everyone. Families of ops share a colour; dtypes differ by marker.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")
GROUPS = {
    "selection": ("hytopk", "index_s", "materialised"),
    "replay, indexer": ("record", "selected", "indexer", "index_loss", "index_unfused"),
    "sparse attention": ("sparse_attention", "attention_mass"),
    "linears": ("gemm", "batched_gemm"),
    "experts": ("grouped",),
    "dense attention": ("attention",),
    "streaming": ("",),
}
MARKERS = {"bf16": "o", "fp8": "^", "fp32": "s", "fp16": "D"}
STYLE: Any = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#DDDDDD", "grid.linewidth": 0.6, "axes.axisbelow": True, "svg.hashsalt": "hyscale",
}  # fmt: skip


def group_of(op: str) -> str:
    """The family an op is drawn with."""
    return next(name for name, starts in GROUPS.items() if any(op.startswith(start) for start in starts))


def roofline(
    points: Sequence[ProfilePoint], ceilings: Mapping[tuple[str, str], ProfilePoint], path: Path
) -> None:
    """Each point at its intensity and rate; a line for the copy rate and each product rate."""
    bandwidth = ceilings["copy", "bf16"].bytes_per_s or 0.0
    rates = {dtype: point.flops_per_s for (what, dtype), point in ceilings.items() if what in ("gemm", "fma")}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 6.2), layout="constrained")
        drawn: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for point in points:
            assert point.flops_per_s is not None
            assert point.bytes_per_s is not None
            place = (point.flops_per_s / point.bytes_per_s, point.flops_per_s / 1e12)
            drawn[group_of(point.op)][point.dtype].append(place)
        for (name, _), colour in zip(GROUPS.items(), COLOURS, strict=True):
            label = name
            for dtype, places in drawn.get(name, {}).items():
                x, y = zip(*places, strict=True)
                axes.scatter(
                    x,
                    y,
                    s=30,
                    marker=MARKERS.get(dtype, "x"),
                    color=colour,
                    alpha=0.75,
                    linewidths=0,
                    label=label,
                )
                label = "_"
        every = [place for group in drawn.values() for places in group.values() for place in places]
        span = np.array([min(x for x, _ in every) / 2, max(x for x, _ in every) * 2])
        for dtype, rate in sorted(rates.items(), key=lambda item: -(item[1] or 0)):
            if not rate:
                continue
            knee = rate / bandwidth
            axes.plot([max(knee, span[0]), span[1]], [rate / 1e12] * 2, color="#333333", linewidth=1.2)
            axes.annotate(
                f"{dtype}: {rate / 1e12:,.0f} TFLOP/s",
                (span[1], rate / 1e12),
                ha="right",
                va="bottom",
                color="#333333",
                fontsize=9,
            )
        top = max(rate for rate in rates.values() if rate) if rates else max(y for _, y in every) * 1e12
        slope = np.array([span[0], min(span[1], top / bandwidth)])
        axes.plot(slope, slope * bandwidth / 1e12, color="#333333", linewidth=1.2)
        axes.annotate(
            f"copy: {bandwidth / 1e12:.2f} TB/s",
            (slope[0], slope[0] * bandwidth / 1e12),
            ha="left",
            va="bottom",
            xytext=(2, 14),
            textcoords="offset points",
            color="#333333",
            fontsize=9,
        )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="least FLOPs / least bytes",
            ylabel="achieved TFLOP/s",
            title=f"{points[0].device}: {len(points)} points and the ceilings measured with them",
            xlim=tuple(span),
        )
        shapes = ", ".join(f"{sign} {dtype}" for dtype, sign in (("bf16", "●"), ("fp8", "▲"), ("fp32", "■")))
        axes.legend(frameon=False, fontsize=9, loc="lower right", title=shapes, title_fontsize=9)
        save(figure, path)


def context(
    curves: Sequence[Any],
    floors: Mapping[str, Sequence[tuple[int, float]]],
    gains: Sequence[tuple[str, str, str, Sequence[tuple[int, float]]]],
    title: str,
    path: Path,
) -> None:
    """Time for each query against context length with its floor, and the speed-ups below it.

    gains: label, colour, line, places of each speed-up. Where there are several, the figure of the largest
    stands above it and the others below theirs.
    """
    with plt.rc_context(STYLE):
        figure, (upper, lower) = plt.subplots(
            2, 1, figsize=(8.6, 7.4), sharex=True, layout="constrained", height_ratios=(2.1, 1)
        )
        for curve in curves:
            keys, low, middle, high = (list(values) for values in zip(*curve.places, strict=True))
            upper.plot(
                keys, middle, color=curve.colour, marker=curve.marker, linestyle=curve.line, label=curve.label
            )
            upper.fill_between(keys, low, high, color=curve.colour, alpha=0.18, linewidth=0)
        for (label, places), (colour, line) in zip(
            floors.items(), (("#333333", (0, (1, 1.4))), ("#999999", (0, (5, 3)))), strict=False
        ):
            x, y = zip(*places, strict=True)
            upper.plot(x, y, color=colour, linestyle=line, linewidth=1.6, label=label)
        upper.set(xscale="log", yscale="log", ylabel="µs for each query", title=title)
        upper.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        upper.legend(frameon=False, fontsize=10)
        lower.axhline(1.0, color="#333333", linewidth=1)
        tops: dict[int, float] = {}
        for *_, gained in gains:
            for place, ratio in gained:
                tops[place] = max(ratio, tops.get(place, 0.0))
        for label, colour, dashes, gained in gains:
            x, y = zip(*gained, strict=True)
            lower.plot(x, y, color=colour, linestyle=dashes, marker="o", label=label)
            for place, ratio in gained:
                above = ratio == tops[place]
                lower.annotate(
                    f"{ratio:.2f}×", (place, ratio), ha="center", va="bottom" if above else "top",
                    xytext=(0, 6 if above else -7), textcoords="offset points", fontsize=10, color=colour,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                )  # fmt: skip
        most = max(ratio for *_, gained in gains for _, ratio in gained)
        lower.set(
            xscale="log",
            ylabel="rival's time\nover HyTopK's",
            xlabel="context length (keys that each query sees)",
            ylim=(0, max(most * 1.25, 1.3)),
        )
        if len(gains) > 1:
            lower.legend(frameon=False, fontsize=10, loc="lower right", ncols=len(gains))
        ticks = sorted({place for curve in curves for place, *_ in curve.places})
        lower.set_xticks(ticks, [tick_label(tick) for tick in ticks])
        lower.minorticks_off()
        save(figure, path)


def tick_label(keys: int) -> str:
    """131072 -> 128K."""
    return f"{keys // 2**20}M" if keys % 2**20 == 0 else f"{keys / 1024:g}K"


def save(figure: Any, path: Path) -> None:
    """Write the picture; the name's ending decides the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)

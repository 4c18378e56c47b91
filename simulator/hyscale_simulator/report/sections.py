"""Sections that every comparison has."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from hyscale_simulator.attribution import elasticity, knee
from hyscale_simulator.critical_path import slack_ns
from hyscale_simulator.explanation import Explanation
from hyscale_simulator.graph import rows as csr_rows
from hyscale_simulator.memory import GIB
from hyscale_simulator.report.charts import (
    COLOURS,
    GREY,
    Bar,
    Line,
    bars,
    legend,
    lines,
    numbers,
    stacked,
    table,
    timeline,
)
from hyscale_simulator.result import Result

__all__ = [
    "Section",
    "causes",
    "certainty",
    "headline",
    "memory",
    "provenance",
    "shares",
    "stages",
    "timelines",
]

BLUE, VERMILLION, GREEN = COLOURS[:3]
NAMED = 7
"""Kinds of work with a colour of their own; the rest is "everything else"."""


@dataclass(frozen=True)
class Section:
    """A titled part of the page."""

    anchor: str
    title: str
    html: str


def headline(found: Explanation) -> str:
    """The answer, and its four numbers."""
    before, after = found.attribution.baseline, found.attribution.improved
    tiles = (
        (f"{found.attribution.speedup:.2f}x", "predicted speed-up"),
        (f"{found.band.low:.2f} to {found.band.high:.2f}", "its 90 % band"),
        (f"{before.step_time_s:.1f} s", f"baseline: {before.scenario.description}"),
        (f"{after.step_time_s:.1f} s", f"improved: {after.scenario.description}"),
    )
    cells = "".join(f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in tiles)
    note = (
        "<p class='soft'>The publication (HyScale, arXiv 2610.32057) names neither its baseline nor the "
        "precision of its linear layers in public. This page takes baseline C, Megatron's recommended path, "
        "with bf16 linear layers, and shows the others beside it. Nothing here was measured on an H20: "
        "kernels measured on an H200 are projected to it term by term.</p>"
        if found.study
        else ""
    )
    return f"<h1>{escape(found.headline)}</h1><div class='tiles'>{cells}</div>{note}"


def shares(found: Explanation) -> Section:
    """Waterfall, Shapley values, interactions."""
    game = found.attribution
    at = game.baseline.step_time_s
    steps = [Bar("baseline", 0.0, at, f"{at:.1f} s", GREY)]
    for switch, saved in zip(game.switches, game.waterfall, strict=True):
        steps.append(
            Bar(switch.title, at, at - saved, f"{-saved:+.1f} s", GREEN if saved >= 0 else VERMILLION)
        )
        at -= saved
    steps.append(Bar("improved", 0.0, at, f"{at:.1f} s", BLUE))
    values = [
        Bar(
            s.title,
            0.0,
            share,
            f"{share + 0.0:.1%}".replace("-0.0%", "0.0%"),
            BLUE if share >= 0 else VERMILLION,
        )
        for s, share in zip(game.switches, game.log_shares, strict=True)
    ]
    rows = [
        (s.title, f"{game.log_shares[i]:.4f}", *(f"{part[i]:.3f}" for part in (
            game.seconds, game.waterfall, game.alone, game.last)))
        for i, s in enumerate(game.switches)
    ]  # fmt: skip
    pairs = [
        (f"{game.switches[i].title} × {game.switches[j].title}", f"{log:+.4f}", f"{seconds:+.3f}")
        for (i, j), (log, seconds) in sorted(game.pairs.items(), key=lambda item: -abs(item[1][0]))
    ]
    unfit = sum(not fits for fits in game.fits)
    html = (
        "<p>Seconds of the step, one change after another. The order matters, so the fair shares are below: "
        "each change's effect averaged over all orders (Shapley values of ln(speed-up)); they add up to the "
        f"whole.</p>{bars(steps)}<h3>Share of ln(speed-up)</h3>{bars(values)}"
        + (f"<p class='soft'>{unfit} of {len(game.fits)} combinations do not fit into memory and are priced "
           "all the same.</p>" if unfit else "")
        + numbers(("change", "share of ln", "Shapley s", "in order s", "alone s", "last s"), rows,
                  f"{found.command} --json explain.json")
        + "<h3>Interactions</h3><p>How much more (or, negative, less) two changes give together.</p>"
        + table(("pair", "on ln(speed-up)", "seconds"), pairs)
    )  # fmt: skip
    return Section("shares", "What makes the difference", html)


def _colours(results: Sequence[Result]) -> dict[str, str]:
    total: dict[str, float] = {}
    for result in results:
        for name, seconds in result.breakdown:
            total[name] = total.get(name, 0.0) + seconds
    named = [n for n in sorted(total, key=lambda n: -total[n]) if n != "bubble"][:NAMED]
    return {**dict(zip(named, COLOURS, strict=False)), "everything else": "#6e7781", "bubble": GREY}


def _by_colour(parts: dict[str, float], colours: dict[str, str]) -> list[tuple[str, float]]:
    found = dict.fromkeys(colours, 0.0)
    for name, seconds in parts.items():
        found[name if name in colours else "everything else"] += seconds
    return list(found.items())


def stages(found: Explanation) -> Section:
    """Each pipeline stage's step, by kind of work."""
    results = (found.attribution.baseline, found.attribution.improved)
    colours = _colours(results)
    html, numbers_rows = "", []
    longest = max(result.step_time_s for result in results)
    for which, result in zip(("baseline", "improved"), results, strict=True):
        bars_of = []
        for stage, parts in enumerate(result.stage_parts_ns):
            kinds: dict[str, float] = {}
            for kind, ns in parts.items():
                name = kind.split("/", 1)[1]
                kinds[name] = kinds.get(name, 0.0) + ns / 1e9
            shown = _by_colour(kinds, colours)
            bars_of.append((f"stage {stage}", shown, f"{sum(s for _, s in shown):.1f} s"))
            numbers_rows.append((f"{which} {stage}", *(f"{seconds:.2f}" for _, seconds in shown)))
        html += f"<h3>{which}</h3>{stacked(bars_of, colours, longest)}"
    return Section(
        "stages",
        "Where a step goes, by pipeline stage",
        f"<p>Every bar is the whole step; the parts add up to it exactly. A bubble is time a stage waits for "
        f"another.</p>{legend(colours)}{html}" + numbers(("stage", *colours), numbers_rows, _simulate(found)),
    )


def _simulate(found: Explanation) -> str:
    name = found.attribution.baseline.scenario.name
    preset = "glm-5.1-1m-512xh20-baseline" if name == "baseline-C" else name
    return f"hyscale simulate --preset {preset} --json step.json --trace step.trace.json"


PASSES = {"forward": COLOURS[4], "backward (with recomputation)": COLOURS[3], "optimizer": COLOURS[7]}


def timelines(found: Explanation) -> Section:
    """One stage's passes from the start to the end of the step."""
    results = (found.attribution.baseline, found.attribution.improved)
    end = max(result.step_time_s for result in results)
    stage = len(results[0].stage_parts_ns) // 2
    html, counted = "", []
    for which, result in zip(("baseline", "improved"), results, strict=True):
        spans = _spans(result, stage)
        html += f"<h3>{which}</h3>{timeline(spans, end, PASSES)}"
        for kind in PASSES:
            some = [stop - start for start, stop, k in spans if k == kind]
            counted.append((f"{which}, {kind}", str(len(some)), f"{sum(some):.2f}"))
    axis = f'<div class="ends"><span>0 s</span><span>{end / 2:.0f} s</span><span>{end:.0f} s</span></div>'
    return Section(
        "timeline",
        f"Timeline of stage {stage}",
        f"<p>The compute stream of one of {len(results[0].stage_parts_ns)} stages; gaps are bubble and "
        f"exposed communication. Both bars have the same scale.</p>{legend(PASSES)}{html}{axis}"
        + numbers(("pass", "spans", "seconds"), counted, _simulate(found)),
    )


def _spans(result: Result, stage: int) -> list[tuple[float, float, str]]:
    graph, ran = result.timeline.graph, result.timeline
    stream = graph.streams.index(f"stage{stage}/compute")
    tasks = csr_rows(graph.stream_ptr)[np.flatnonzero(graph.stream_idx == stream)]
    kinds = list(PASSES)
    spans = []
    for task in tasks.tolist():
        if ran.end_ns[task] == ran.start_ns[task]:
            continue
        first = graph.name(task)[0]
        kind = kinds[0] if first == "F" else kinds[1] if first in "BDW" else kinds[2]
        spans.append((int(ran.start_ns[task]) / 1e9, int(ran.end_ns[task]) / 1e9, kind))
    return spans


def causes(found: Explanation) -> Section:
    """The critical path, and what each class of work would give."""
    before, after = found.attribution.baseline, found.attribution.improved
    paths = [dict(before.critical_path), dict(after.critical_path)]
    rows = [
        (name, *(f"{path.get(name, 0.0):.2f}" for path in paths))
        for name in dict.fromkeys([*paths[0], *paths[1]])
        if max(path.get(name, 0.0) for path in paths) >= 0.005
    ]
    figures = []
    numbers_rows = []
    for cause in found.causes:
        curves = [
            Line(which, [(1 - p.factor, p.seconds) for p in curve], colour, dashed)
            for which, curve, colour, dashed in (
                ("baseline", cause.before, VERMILLION, True), ("improved", cause.after, BLUE, False),
            )
        ]  # fmt: skip
        ticks = [(0.0, "as is"), (0.25, "75%"), (0.5, "50%"), (0.75, "25%"), (1.0, "free")]
        figures.append(lines(cause.name, curves, ticks, "step, s", y_low=0.0))
        for which, curve in (("baseline", cause.before), ("improved", cause.after)):
            bend = knee(curve)
            numbers_rows.append((
                f"{cause.name}, {which}", f"{elasticity(curve):.3f}",
                *(f"{point.seconds:.2f}" for point in curve), "none" if bend is None else f"{bend:.0%}",
            ))  # fmt: skip
    factors = tuple(f"{point.factor:.0%}" for point in found.causes[0].before) if found.causes else ()
    html = (
        "<p>If one class of work took less of its time, down to none, in the <b>improved</b> scenario "
        "(solid, blue) "
        "and the <b>baseline</b> (dashed, red): the first slope is that class's share of the critical "
        "path; a knee "
        "is where another path takes over.</p>"
        f'<div class="grid">{"".join(figures)}</div>'
        + numbers(
            ("class", "elasticity", *factors, "knee"), numbers_rows, f"{found.command} --json explain.json"
        )
        + "<h3>Critical path, seconds</h3>"
        + table(("work", "baseline", "improved"), rows)
        + "<h3>Slack</h3><p>How much later a stage's passes could end before the step grows: a stage with "
        "little slack is worth speeding up next.</p>"
        + table(("stage", "passes", "on the path, baseline", "median slack s", "on the path, improved",
                 "median slack s"), _slack(before, after))
    )  # fmt: skip
    return Section("causes", "What would make it faster still", html)


def _slack(before: Result, after: Result) -> list[tuple[str, ...]]:
    """For each stage: its passes, how many are on a critical path, and the median slack, in both steps."""
    columns = []
    for result in (before, after):
        graph, slack = result.timeline.graph, slack_ns(result.timeline)
        occupant = csr_rows(graph.stream_ptr)
        found = []
        for stage in range(len(result.stage_parts_ns)):
            stream = graph.streams.index(f"stage{stage}/compute")
            mine = slack[occupant[graph.stream_idx == stream]]
            found.append((len(mine), int((mine == 0).sum()), float(np.median(mine)) / 1e9))
        columns.append(found)
    return [
        (f"stage {stage}", str(one[0]), str(one[1]), f"{one[2]:.2f}", str(two[1]), f"{two[2]:.2f}")
        for stage, (one, two) in enumerate(zip(*columns, strict=True))
    ]


def memory(found: Explanation) -> Section:
    """The fullest GPU, item by item."""
    results = (found.attribution.baseline, found.attribution.improved)
    names = list(dict.fromkeys(name for r in results for name, size in r.memory.items if size >= GIB / 2))[:8]
    colours = {**dict(zip(names, COLOURS, strict=False)), "everything else": "#6e7781", "free": "#ffffff"}
    rows, numbers_rows = [], []
    longest = max(max(r.memory.peak_bytes, r.memory.capacity_bytes) for r in results) / GIB
    for which, result in zip(("baseline", "improved"), results, strict=True):
        held = result.memory
        free = max(held.capacity_bytes - held.peak_bytes, 0.0)
        parts = _by_colour({**dict(held.items), "free": free}, colours)
        shown = [(name, size / GIB) for name, size in parts]
        verdict = f"{held.peak_bytes / GIB:.0f}" + ("" if held.fits else " !")
        rows.append((which, shown, verdict))
        numbers_rows.append((which, f"{held.peak_bytes / GIB:.1f}", f"{held.capacity_bytes / GIB:.1f}",
                             *(f"{size:.1f}" for _, size in shown)))  # fmt: skip
    remedies = [
        f"<p class='warn'>{which} does not fit. It would with: "
        f"{escape(' and '.join(r.remedies) or 'more GPUs')}.</p>"
        for which, r in zip(("The baseline", "The improved scenario"), results, strict=True)
        if not r.memory.fits
    ]
    html = (
        f"<p>GiB on the fullest GPU, of {results[0].memory.capacity_bytes / GIB:.1f}; ! marks what does not "
        f"fit.</p>{legend(colours)}"
        f"{stacked(rows, colours, longest)}{''.join(remedies)}"
        + numbers(("scenario", "peak GiB", "of", *colours), numbers_rows, _simulate(found))
    )
    return Section("memory", "Memory", html)


def certainty(found: Explanation) -> Section:
    """The band, and the errors behind it."""
    band = found.band
    ordered = sorted(band.speedups)
    curve = Line("share", [(
        (value - ordered[0]) / ((ordered[-1] - ordered[0]) or 1.0), 100 * (at + 0.5) / len(ordered)
    ) for at, value in enumerate(ordered)])  # fmt: skip
    ticks = [(x, f"{ordered[0] + x * (ordered[-1] - ordered[0]):.2f}x") for x in (0.0, 0.25, 0.5, 0.75, 1.0)]
    errors = [(op, f"{sigma:.0%}") for op, sigma in sorted(band.errors, key=lambda item: -item[1])]
    shown = lines("draws at or below a speed-up", [curve], ticks, "% of draws", y_low=0.0)
    html = (
        f"<p>{len(band.speedups)} draws (Sobol points, seed {band.seed}) of every op's stated error, each "
        "op off by "
        "one factor in both scenarios alike, ops independent of each other: that is cautious for ops that do "
        "the same arithmetic. It covers the errors of durations, not of what the model leaves out.</p>"
        f'<div class="grid">{shown}</div>'
        + numbers(("op", "one standard error"), errors, f"{found.command} --samples {len(band.speedups)} "
                  f"--seed {band.seed}")
    )  # fmt: skip
    return Section("certainty", "How sure", html)


def provenance(found: Explanation) -> Section:
    """How durations are known, warnings, and what the reader can rerun."""
    results = (found.attribution.baseline, found.attribution.improved)
    rows = [
        (which, *(f"{result.provenance[how]:.0%}" for how in result.provenance), result.scenario.hash)
        for which, result in zip(("baseline", "improved"), results, strict=True)
    ]
    warnings = dict.fromkeys(warning for result in results for warning in result.warnings)
    html = (
        "<p>Share of kernel and communication time by how it is known. Measured: on that GPU at that shape. "
        "Interpolated: between measured shapes. Projected: from another GPU, by tensor, vector and memory "
        "terms. Assumed: a stated fraction of a ceiling.</p>"
        + table(("scenario", *results[0].provenance, "hash"), rows)
        + "".join(f"<p class='warn'>{escape(warning)}</p>" for warning in warnings)
        + f"<p>This page: <code>{escape(found.command)} --report page.html</code></p>"
    )
    return Section("provenance", "Provenance and warnings", html)

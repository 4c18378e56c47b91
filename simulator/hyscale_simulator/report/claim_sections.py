"""Sections of the study of the published claim."""

from html import escape

from hyscale_simulator.claim import CLAIMED, PUBLISHED_GAINS, TOLERANCE
from hyscale_simulator.conclusions import gain_range
from hyscale_simulator.explanation import ClaimStudy
from hyscale_simulator.report.charts import COLOURS, Line, lines, numbers, table
from hyscale_simulator.report.sections import Section
from hyscale_simulator.scenario import tokens_label
from hyscale_simulator.sensitivity import Curve

__all__ = ["claims", "consistency", "dependence", "lengths", "public_figures"]

BLUE, VERMILLION = COLOURS[:2]


def consistency(study: ClaimStudy) -> Section:
    """Baseline x linear precision x kernel gain, with the region that agrees with the claim."""
    gains = [cell.kernel_gain for cell in study.cases[0].cells]
    head = "".join(f"<th>{gain:g}x</th>" for gain in gains)
    body = ""
    for case in study.cases:
        cells = "".join(
            f'<td class="{"hit" if cell.consistent else ""}">{cell.speedup:.2f}</td>' for cell in case.cells
        )
        body += (
            f"<tr><td>{case.baseline.letter} {case.precision}</td><td>{escape(gain_range(case))}</td>{cells}"
            f"<td>{case.free_kernel:.2f}</td></tr>"
        )
    rows = [
        (
            f"{case.baseline.letter} {case.precision}", f"{case.before.step_time_s:.1f}",
            f"{case.after.step_time_s:.1f}", f"{case.speedup:.3f}", f"{case.gain:.2f}", f"{case.share:.0%}",
            f"{case.replay_only:.3f}", f"{case.kernel_only:.3f}", f"{case.closed_form:.3f}",
            f"{case.closed_form_error:+.2%}", "yes" if case.before.memory.fits else "no",
        )
        for case in study.cases
    ]  # fmt: skip
    letters = "".join(
        f"<li><b>{case.baseline.letter}</b>: {escape(case.baseline.title)} "
        f"<span class='soft'>({escape(case.baseline.source)})</span>"
        + (
            f" Lower bound: {escape(case.baseline.left_out)} are not priced."
            if case.baseline.left_out
            else ""
        )
        + (
            f" Does not fit; would with: {escape(' and '.join(case.before.remedies) or 'more GPUs')}."
            if not case.before.memory.fits
            else ""
        )
        + "</li>"
        for case in study.cases
        if case.precision == "bf16"
    )
    low, high = PUBLISHED_GAINS
    html = (
        "<p>Speed-up of HyTopK and replay over each baseline, with linear layers in bf16 or fp8, by how "
        "much faster "
        "HyTopK's selection is than a materialised one of the same precision (C for bf16 scores, E for "
        "fp8). Cells "
        f"marked ● lie within {TOLERANCE:.0%} of {CLAIMED:.2f}x. Published kernel gains are {low:g} to "
        f"{high:g}; "
        f"profiled here: {study.headline.gain:.2f} in bf16.</p>"
        '<div class="scroll"><table class="map"><thead><tr><th>baseline</th>'
        f"<th>gain for {CLAIMED:.2f}x</th>{head}<th>free</th></tr></thead><tbody>{body}</tbody></table></div>"
        "<p class='soft swipe'>Swipe the table sideways for larger gains.</p>"
        f"<ul>{letters}</ul>"
        + numbers(
            ("baseline", "step s", "improved s", "speed-up", "gain", "selection share", "replay only",
             "kernel only", "closed form", "its error", "fits"),
            rows, "hyscale explain --json explain.json",
        )
        + "<p class='soft'>Closed form: (T + 2S) / (T + S') of the simulator's own durations; its error is "
        "against the simulated speed-up without bubble and communication. Replay alone stays below 2x "
        "always: it removes one of two equal selections.</p>"
    )  # fmt: skip
    return Section("consistency", f"What {CLAIMED:.2f}x would take", html)


def _curve(curve: Curve, high: float) -> str:
    able = [(at, point) for at, point in enumerate(curve.points) if point.speedup is not None]
    last = max(len(curve.points) - 1, 1)
    points = [(at / last, point.speedup) for at, point in able if point.speedup is not None]
    held = next((at / last for at, point in able if point.held), None)
    ticks = [(at / last, point.label.split(":")[0] + ("" if point.fits else "*")) for at, point in able]
    title = f"{curve.axis.name}, {curve.axis.unit}" if curve.axis.unit else curve.axis.name
    drawn = Line("speed-up", points, BLUE, joined=curve.axis.is_scale)
    return lines(title, [drawn], ticks, "speed-up", marked=held, y_low=0.95, y_high=high)


def dependence(study: ClaimStudy) -> Section:
    """The speed-up under other conditions."""
    high = max(point.speedup or 1.0 for curve in study.curves for point in curve.points)
    figures = "".join(_curve(curve, high) for curve in study.curves)
    rows = [
        (
            curve.axis.name, point.label,
            *(
                (f"{point.before.step_time_s:.1f}", f"{point.after.step_time_s:.1f}", f"{point.speedup:.3f}")
                if point.before and point.after
                else (point.refused, "", "")
            ),
            "" if point.fits else "does not fit",
        )
        for curve in study.curves
        for point in curve.points
    ]  # fmt: skip
    notes = "".join(
        f"<li>{escape(curve.axis.name)}: {escape(curve.axis.note)}</li>"
        for curve in study.curves
        if curve.axis.note
    )
    html = (
        "<p>One condition at a time, for baseline and improved alike; the ring is the headline; all on one "
        "scale. A star "
        "marks a point "
        "that does not fit into memory, priced all the same.</p>"
        f'<div class="grid">{figures}</div><ul class="soft">{notes}</ul>'
        + numbers(
            ("condition", "value", "baseline s", "improved s", "speed-up", ""), rows,
            "hyscale sweep --preset glm-5.1-1m-512xh20 --vary model.indexer.top_k=512,1024,2048,4096",
        )
    )  # fmt: skip
    return Section("dependence", "What it depends on", html)


def lengths(study: ClaimStudy) -> Section:
    """Where HyTopK pays at all."""
    figures, rows = "", []
    for found in study.crossovers:
        last = len(found.ratios) - 1
        points = [(at / last, ratio) for at, (_, ratio) in enumerate(found.ratios)]
        ticks = [(at / last, tokens_label(tokens)) for at, (tokens, _) in enumerate(found.ratios)]
        parity = Line("parity", [(0.0, 1.0), (1.0, 1.0)], "#57606a", dashed=True, bare=True)
        figures += lines(
            f"against {found.baseline.letter}",
            [parity, Line("gain", points, BLUE)],
            ticks,
            "kernel gain",
            y_low=0.0,
        )
        rows += [
            (found.baseline.letter, tokens_label(tokens), f"{ratio:.3f}") for tokens, ratio in found.ratios
        ]
    verdicts = "".join(
        f"<li>Baseline {found.baseline.letter}: "
        + (
            "HyTopK pays at every length tried."
            if found.always
            else f"HyTopK pays from about {found.tokens / 1024:.0f}K tokens on."
            if found.tokens is not None
            else "HyTopK, as profiled, does not pay on its own at any length tried: what it saves is "
            "memory, and what "
            "replay saves comes on top."
        )
        + "</li>"
        for found in study.crossovers
    )
    return Section(
        "lengths",
        "From which context length the kernel pays",
        "<p>One materialised selection pass over one HyTopK pass (without key skipping), on an H20. Below "
        "the dashed "
        f'line the table is faster.</p><div class="grid">{figures}</div><ul>{verdicts}</ul>'
        + numbers(("baseline", "length", "gain"), rows, "hyscale explain --json explain.json"),
    )


def public_figures(study: ClaimStudy) -> Section:
    """The only public selection times on an H20."""
    rows = [
        (
            tokens_label(k.tokens), f"{k.published_ms:.2f}", f"{k.published_fused_ms:.2f}",
            f"{100 * (1 - k.published_fused_ms / k.published_ms):.1f}%", f"{k.predicted_ms:.2f}",
            f"{k.predicted_fused_ms:.2f}",
        )
        for k in study.kernels
    ]  # fmt: skip
    return Section(
        "public",
        "What is public about an H20",
        "<p>vLLM RFC 53563 timed selection on one H20 (fp8, 64 heads, the last 4,096 queries): scoring runs "
        "at 87 % of the fp8 peak, and a fused kernel without a score table is only 3 to 10 % faster. So "
        f"whatever makes {CLAIMED:.2f}x on H20 comes from replay, from skipping keys, from memory, or from a "
        "slower baseline, not from the table alone.</p>"
        + table(("keys", "published ms", "fused ms", "gain", "predicted ms", "HyTopK ms"), rows)
        + "<p class='soft'>HyTopK ms: this project's kernel as profiled so far, projected to the H20; the "
        "fused figure is another kernel.</p>",
    )


def claims(study: ClaimStudy) -> Section:
    """What is claimed, why, and what would refute it."""
    body = "".join(
        f'<tr><td data-name="Claim"><b>{escape(item.claim)}</b></td>'
        f'<td data-name="Evidence">{escape(item.evidence)}</td>'
        f'<td data-name="Falsified by">{escape(item.falsified_by)}</td></tr>'
        for item in study.claims
    )
    return Section(
        "claims",
        "Claims, evidence, and what would falsify them",
        '<div class="scroll"><table class="claims"><thead><tr><th class="text">claim</th>'
        '<th class="text">evidence</th>'
        f'<th class="text">falsified by</th></tr></thead><tbody>{body}</tbody></table></div>',
    )

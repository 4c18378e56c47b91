"""An explanation as a person reads it in a terminal."""

from rich.console import Console
from rich.table import Table

from hyscale_simulator.claim import CLAIMED, PUBLISHED_GAINS, BaselineCase
from hyscale_simulator.conclusions import gain_range
from hyscale_simulator.explanation import ClaimStudy, Explanation
from hyscale_simulator.scenario import tokens_label

__all__ = ["show"]


def show(found: Explanation, console: Console) -> None:
    """Headline, shares by cause, what the claim would take, what it depends on, warnings."""
    console.print(f"[bold]{found.headline}[/bold]")
    before, after = found.attribution.baseline, found.attribution.improved
    console.print(f"baseline  {before.step_time_s:9.2f} s  {before.scenario.description}", highlight=False)
    console.print(f"improved  {after.step_time_s:9.2f} s  {after.scenario.description}", highlight=False)
    if found.study is not None:
        console.print(
            "[dim]The publication names neither its baseline nor the precision of its linear layers: the "
            "headline takes Megatron's recommended path (C) with bf16 linears.[/dim]"
        )
    _shares(found, console)
    if found.study is not None:
        _claim(found.study, console)
    for result in (before, after):
        for warning in result.warnings:
            console.print(f"[yellow]warning:[/yellow] {result.scenario.name}: {warning}", highlight=False)
    console.print(
        f"[dim]scenarios {before.scenario.hash} and {after.scenario.hash}; 90 % band from "
        f"{len(found.band.speedups)} draws of the durations' stated errors, seed {found.band.seed}[/dim]"
    )


def _shares(found: Explanation, console: Console) -> None:
    game = found.attribution
    if not game.switches:
        console.print("The scenarios do not differ.")
        return
    table = Table(
        "what changes", "share of ln", "Shapley s", "in order s", "alone s", "last s",
        title="seconds saved, and shares of ln(speed-up)", title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for at, switch in enumerate(game.switches):
        table.add_row(
            switch.title,
            f"{_positive_zero(game.log_shares[at], 3):.1%}",
            *(
                f"{_positive_zero(part[at], 2):.2f}"
                for part in (game.seconds, game.waterfall, game.alone, game.last)
            ),
        )
    total = f"{sum(game.seconds):.2f}"
    table.add_row("[bold]all[/bold]", "100.0%", total, total, "", "")
    console.print(table)
    unfit = sum(not fits for fits in game.fits)
    if unfit:
        console.print(f"{unfit} of {len(game.fits)} combinations do not fit into memory; they are priced too")


def _positive_zero(value: float, digits: int) -> float:
    """Without the sign that a tiny negative number keeps when it is printed as zero."""
    return round(value, digits) + 0.0


def _claim(study: ClaimStudy, console: Console) -> None:
    table = Table(
        "baseline", "linears", "step s", "→ s", "speed-up", "replay only", "gain", "for 2.07x ±5 %",
        "fits",
        title=f"what {CLAIMED:.2f}x would take", title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for column in table.columns[2:8]:
        column.justify = "right"
    for case in study.cases:
        table.add_row(
            f"{case.baseline.letter}  {case.baseline.title}" if case.precision == "bf16" else "",
            case.precision,
            f"{case.before.step_time_s:.0f}",
            f"{case.after.step_time_s:.0f}",
            f"{case.speedup:.2f}x",
            f"{case.replay_only:.2f}x",
            f"{case.gain:.2f}",
            gain_range(case) + (" ●" if case.possible else ""),
            "yes" if case.before.memory.fits else f"no: {_remedy(case)}",
        )
    console.print(table)
    low, high = PUBLISHED_GAINS
    console.print(
        f"● within the published kernel gains, {low:g} to {high:g}. gain: a materialised selection of the "
        "same precision (C bf16, E fp8) over HyTopK as profiled.",
        highlight=False,
    )
    for case in study.cases:
        if case.baseline.left_out and case.precision == "bf16":
            console.print(
                f"{case.baseline.letter} is a lower bound: not priced are {case.baseline.left_out}.",
                highlight=False,
            )
    console.print("Replay alone stays below 2x for every baseline: it removes one of two equal selections.")
    for kernel in study.kernels:
        console.print(
            f"Published on one H20 at {tokens_label(kernel.tokens)} (fp8, 64 heads): "
            f"{kernel.published_ms:.2f} ms with a score table, {kernel.published_fused_ms:.2f} without "
            f"({100 * (1 - kernel.published_fused_ms / kernel.published_ms):.0f} % less): scoring is close "
            f"to peak there. Predicted: {kernel.predicted_ms:.2f}, and {kernel.predicted_fused_ms:.2f} for "
            "HyTopK, which is another kernel.",
            highlight=False,
        )
    for item in study.claims:
        console.print(f"• {item.claim}", highlight=False)


def _remedy(case: BaselineCase) -> str:
    return " and ".join(case.before.remedies) or "nothing tried suffices"

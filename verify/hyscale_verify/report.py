"""Verdicts as a JSON report, a table and counterexamples in words."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hyscale_verify.runner import FALSIFIED, HOLDS, SKIPPED, Verdict

STYLES = {HOLDS: "green", FALSIFIED: "bold red", SKIPPED: "dim"}


def as_record(target: str, device: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The report of one run, schema 1; the summary counts (property, regime) pairs."""
    counts = Counter(each.verdict for each in verdicts)
    return {
        "schema": 1,
        "target": target,
        "device": device,
        "properties": [each.record() for each in verdicts],
        "summary": {verdict: counts[verdict] for verdict in (HOLDS, FALSIFIED, SKIPPED)},
    }


def print_table(console: Console, verdicts: Sequence[Verdict]) -> None:
    """One line for each property and verdict, with the regimes it covers and the examples drawn."""
    table = Table(box=None, pad_edge=False)
    table.add_column("property", no_wrap=True)
    table.add_column("regimes", ratio=3)
    table.add_column("examples", justify="right")
    table.add_column("verdict")
    table.add_column("remark", ratio=2)
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for each in verdicts:
        remark = each.reason if each.verdict == SKIPPED else ""
        groups.setdefault((each.name, each.verdict, remark), []).append(each)
    for (name, verdict, remark), group in groups.items():
        table.add_row(
            name,
            " ".join(each.regime for each in group),
            str(sum(each.examples for each in group)),
            f"[{STYLES[verdict]}]{verdict}[/]",
            remark or "; ".join(dict.fromkeys(each.reason for each in group if each.reason)),
        )
    console.print(table)


def print_counterexamples(console: Console, verdicts: Sequence[Verdict]) -> None:
    """For each falsified property the smallest counterexample, and the command that finds it again."""
    by_property: dict[str, list[Verdict]] = {}
    for each in verdicts:
        if each.verdict == FALSIFIED:
            by_property.setdefault(each.name, []).append(each)
    for name, failures in by_property.items():
        smallest = min(failures, key=lambda each: each.size)
        console.print(f"\n[{STYLES[FALSIFIED]}]{name}[/] is falsified ({smallest.reason})")
        console.print(smallest.counterexample, markup=False, highlight=False, soft_wrap=True)
        console.print(f"again: {smallest.reproduce}", markup=False, highlight=False, soft_wrap=True)
        others = [each.regime for each in failures if each is not smallest]
        if others:
            console.print(f"also on: {' '.join(others)}", markup=False, highlight=False)


def summary(verdicts: Sequence[Verdict]) -> str:
    """One line: how many properties hold, are falsified, are skipped."""
    names: dict[str, set[str]] = {}
    for each in verdicts:
        names.setdefault(each.name, set()).add(each.verdict)
    falsified = sum(FALSIFIED in each for each in names.values())
    holding = sum(FALSIFIED not in each and HOLDS in each for each in names.values())
    drawn = sum(each.examples for each in verdicts)
    skipped = len(names) - holding - falsified
    hold = "property holds" if holding == 1 else "properties hold"
    return f"{holding} {hold}, {falsified} falsified, {skipped} skipped; {drawn} examples drawn"

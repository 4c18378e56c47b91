"""Measured steps beside their predictions, for people and as JSON: each step, and each part of it."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hyscale_simulator.measured_steps import (
    MEMORY_PCT,
    SPEEDUP_PCT,
    STEP_PCT,
    MeasuredComparison,
    speedups,
    within,
)
from hyscale_simulator.memory import GIB

__all__ = ["record", "show"]


def show(rows: Sequence[MeasuredComparison], console: Console) -> None:
    """Print the steps, then each step's parts, then whether the targets are met."""
    gains = {id(row): (measured, predicted) for row, measured, predicted in speedups(rows)}
    table = _table(
        "measured step", "GPUs", "tokens", "measured s", "predicted s", "error %", "peak GiB", "predicted",
        "error %", "speed-up", "predicted",
    )  # fmt: skip
    for row in rows:
        gain = (f"{value:.3f}" for value in gains.get(id(row), ()))
        table.add_row(
            row.step.mode, str(row.step.gpus), f"{row.step.sequence:,}", f"{row.step.step_ms / 1e3:.3f}",
            f"{row.predicted_s:.3f}", f"{row.error_pct:+.1f}", f"{row.step.peak_bytes / GIB:.1f}",
            f"{row.predicted_bytes / GIB:.1f}", f"{row.memory_error_pct:+.1f}", *gain,
        )  # fmt: skip
    console.print(table)
    for row in rows:
        console.print(_parts(row))
        if row.step.note:
            console.print(f"  note: {row.step.note}")
        for warning in row.warnings:
            console.print(f"  [yellow]{warning}[/yellow]")
    verdict = "[green]met[/green]" if within(rows) else "[red]missed[/red]"
    console.print(
        f"steps within {STEP_PCT:g} %, peak memory within {MEMORY_PCT:g} %, "
        f"speed-ups within {SPEEDUP_PCT:g} %: {verdict}"
    )


def record(rows: Sequence[MeasuredComparison]) -> list[dict[str, Any]]:
    """The same in plain JSON."""
    gains = {
        id(row): {"measured": measured, "predicted": predicted} for row, measured, predicted in speedups(rows)
    }
    return [
        {
            "name": row.step.mode, "gpus": row.step.gpus, "sequence": row.step.sequence,
            "measured": row.step.step_ms / 1e3, "predicted": row.predicted_s, "unit": "s",
            "error_pct": row.error_pct, "speedup": gains.get(id(row)),
            "peak_gib": {
                "measured": row.step.peak_bytes / GIB, "predicted": row.predicted_bytes / GIB,
                "error_pct": row.memory_error_pct,
            },
            "parts": [
                {"part": part, "measured_ms": measured, "predicted_ms": predicted}
                for part, measured, predicted in row.parts()
            ],
            "warnings": list(row.warnings), "note": row.step.note,
        }
        for row in rows
    ]  # fmt: skip


def _parts(row: MeasuredComparison) -> Table:
    """Where a step's error is: each part of the trainer's timer, and its share of the step's error."""
    title = f"{row.step.mode}, {row.step.gpus} GPU, {row.step.sequence:,} tokens"
    table = _table(title, "measured ms", "predicted ms", "error %", "of the step %")
    for part, measured, predicted in row.parts():
        table.add_row(
            part, f"{measured:.1f}", f"{predicted:.1f}",
            f"{100 * (predicted / measured - 1):+.1f}" if measured else "",
            f"{100 * (predicted - measured) / row.step.step_ms:+.2f}",
        )  # fmt: skip
    return table


def _table(*headers: str) -> Table:
    table = Table(*headers, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table

"""Published figures beside their predictions, and held-out errors, for people and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hyscale_simulator.held_out import JUDGED, MEDIAN_PCT, P90_PCT, HeldOut
from hyscale_simulator.validation import KERNEL_PCT, MEMORY_PCT, TARGETS, Validation

__all__ = ["record", "show", "show_held_out"]


def show(found: Validation, console: Console) -> bool:
    """Print every case, then the verdicts; whether all targets are met."""
    table = _table("case", "published s", "predicted s", "error %", "")
    source = ""
    for row in found.steps:
        if row.source != source:
            source = row.source
            table.add_row(f"[bold]{source}[/bold]")
        note = "" if row.compared else "beside the summary"
        table.add_row(
            row.name, f"{row.published_s:.3f}", f"{row.predicted_s:.3f}", f"{row.error_pct:+.1f}", note
        )
    console.print(table)
    others = _table("memory and kernels", "published", "predicted", "error %", "")
    for item in found.memory:
        others.add_row(
            item.name, f"{item.published_gib:.1f}", f"{item.predicted_gib:.1f}", f"{item.error_pct:+.1f}",
            f"GiB, {item.what}",
        )  # fmt: skip
    for figure in found.kernels:
        others.add_row(
            figure.name,
            "-".join(f"{end:.4g}" for end in dict.fromkeys(figure.published)),
            f"{figure.predicted:.4g}",
            f"{figure.error_pct:+.1f}",
            figure.unit,
        )
    console.print(others)
    summary, compared = found.summary, sum(row.compared for row in found.steps)
    console.print(
        f"{compared} steps: mean error {summary.mape_pct:.1f} %, worst {summary.worst_pct:+.1f} %, "
        f"bias {summary.bias_pct:+.1f} %, rank correlation {summary.spearman:.3f}  (targets "
        f"{TARGETS.mape_pct:g}, {TARGETS.worst_pct:g}, {TARGETS.bias_pct:g}, {TARGETS.spearman:g}: "
        f"{_verdict(found.steps_met)})"
    )
    console.print(
        f"{len(found.memory)} figures of memory: worst {found.worst_memory_pct:+.1f} %  "
        f"(target {MEMORY_PCT:g}: {_verdict(found.memory_met)})\n"
        f"{len(found.kernels)} kernels: worst {found.worst_kernel_pct:+.1f} %  "
        f"(target {KERNEL_PCT:g}: {_verdict(found.kernels_met)})"
    )
    for row in found.steps:
        if row.note:
            console.print(f"{row.name}: {row.note}")
    return found.steps_met and found.memory_met and found.kernels_met


def record(found: Validation) -> dict[str, Any]:
    """The same in plain JSON."""
    return {
        "cases": [
            {
                "name": row.name,
                "source": row.source,
                "compared": row.compared,
                "published": row.published_s,
                "predicted": row.predicted_s,
                "unit": "s",
                "error_pct": row.error_pct,
            }
            for row in found.steps
        ],
        "memory": [
            {"name": item.name, "what": item.what, "published": item.published_gib,
             "predicted": item.predicted_gib, "unit": "GiB", "error_pct": item.error_pct}
            for item in found.memory
        ],
        "kernels": [
            {"name": figure.name, "published": figure.published, "predicted": figure.predicted,
             "unit": figure.unit, "error_pct": figure.error_pct}
            for figure in found.kernels
        ],
        "summary": {
            "mape_pct": found.summary.mape_pct,
            "worst_pct": abs(found.summary.worst_pct),
            "bias_pct": found.summary.bias_pct,
            "spearman": found.summary.spearman,
        },
    }  # fmt: skip


def show_held_out(found: Sequence[HeldOut], console: Console) -> bool:
    """Print each table's held-out error; whether all are within their targets."""
    table = _table("op", "dtype", "implementation", "GPU", "points", "median %", "p90 %", "", left=4)
    for row in found:
        name = " ".join(part for part in (row.implementation, row.regime) if part)
        table.add_row(
            row.op, row.dtype, name, row.gpu, f"{row.points:,}", f"{row.median_pct:.1f}",
            f"{row.p90_pct:.1f}", "" if row.within else "[red]missed[/red]" if row.judged else "few shapes",
        )  # fmt: skip
    console.print("Leave-one-shape-out: each measured shape between two others, looked up without it.")
    console.print(table)
    judged = [row for row in found if row.judged]
    met = sum(row.within for row in judged)
    console.print(
        f"{met} of {len(judged)} tables of {JUDGED} shapes or more within a median of {MEDIAN_PCT:g} % and a "
        f"90th percentile of {P90_PCT:g} %: {_verdict(met == len(judged))}"
    )
    return met == len(judged)


def _table(*columns: str, left: int = 1) -> Table:
    """A table whose first columns are text, the rest numbers, the last a remark."""
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[left:-1]:
        column.justify = "right"
    return table


def _verdict(met: bool) -> str:
    return "[green]met[/green]" if met else "[red]missed[/red]"

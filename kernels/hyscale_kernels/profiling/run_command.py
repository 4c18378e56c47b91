"""``hyscale profile run``: measure a suite, or a kernel of one's own."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hyscale_ref.command import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from hyscale_ref.output import to_standard_output, write_json
from hyscale_ref.profile import ProfileError, ProfilePoint, ProfileWriter, read_profile, shape_text

from .environment import err, need_gpu, say, stop, writable

if TYPE_CHECKING:
    from .op import Entry
    from .session import Progress, Summary

DEFAULT_OUT = Path("profile.jsonl")
REPORT_S = 5.0  # between two lines of progress where there is no terminal


def run_command(
    suite: Annotated[str, typer.Option(help="quick, glm-5.1, dense, collectives or all.")] = "quick",
    op: Annotated[
        list[str] | None, typer.Option(help="Only ops of this name or family; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The profile to write, JSON lines.")] = DEFAULT_OUT,
    budget: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds after which nothing new begins.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an existing profile.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the points and how long they take.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(help="MODULE:FUNCTION that prepares a kernel of yours and returns the call.")
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(help="With --target: rows=512:4096,keys=65536 (every combination); may be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="With --target: recorded, and its rate is the floor.")] = "bf16",
    implementation: Annotated[str, typer.Option(help="With --target: recorded.")] = "mine",
    commit: Annotated[str, typer.Option(help="Recorded where there is no git checkout.")] = "",
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write what the run did as JSON; - for standard output.")
    ] = None,
) -> None:
    """Measure a suite: ceilings first, then points in order of value, each on disk before the next begins.

    Exit codes: 0 done or stopped in time, 1 a point failed (and is recorded), 2 usage, 3 no GPU, or lost,
    130 interrupted. However it ends, --resume goes on with the file.
    """
    began = time.monotonic()
    writable("--json", as_json)
    if not dry_run:
        writable("--out", out)
        if out.suffix == ".gz":
            raise stop(EXIT_USAGE, f"{out}: a run writes plain lines; compress the file when it is done")
    from .ops import ALL
    from .suites import suite as suite_of
    from .target import entries, parse_shapes

    try:
        if target is not None:
            if not shapes:
                raise typer.BadParameter("is needed with --target", param_hint="--shapes")
            if op is not None and len(op) > 1:
                raise typer.BadParameter("takes one name with --target", param_hint="--op")
            name = op[0] if op else target.rpartition(":")[2]
            wanted = entries(
                target, parse_shapes(shapes), op=name, implementation=implementation, dtype=dtype, known=ALL
            )
        elif shapes:
            raise typer.BadParameter("goes with --target; a suite has its shapes", param_hint="--shapes")
        else:
            wanted = suite_of(suite, ALL, op or ())
    except ValueError as error:
        raise stop(EXIT_USAGE, str(error)) from None
    if dry_run:
        plan(wanted, suite if target is None else target, as_json)
        return
    need_gpu()
    measure_into(out, wanted, budget, resume, commit, as_json, began)


def measure_into(
    out: Path,
    wanted: "Sequence[Entry]",
    budget: float | None,
    resume: bool,
    commit: str,
    as_json: Path | None,
    began: float,
) -> None:
    """Measure ``wanted`` on this GPU and add the points to ``out``."""
    from .machine import CudaMachine
    from .measure import shared
    from .ranks import measure_collectives
    from .session import DeviceLostError, Session

    known = earlier(out) if resume else []
    if not resume and out.exists() and out.stat().st_size:
        raise stop(EXIT_USAGE, f"{out} exists; --resume goes on with it, --out names another")
    machine = CudaMachine(commit)
    if known and known[0].device != machine.conditions.name:
        raise stop(
            EXIT_USAGE,
            f"{out} holds {known[0].device}, this is {machine.conditions.name}: one GPU model a file",
        )
    single = [entry for entry in wanted if entry.op.family != "collectives"]
    together = [entry for entry in wanted if entry.op.family == "collectives"]
    gpus = machine.conditions.gpus
    if together and gpus < 2:
        say(f"collectives are left out: this machine has {gpus} GPU, and they take at least 2")
    show = Reporter(out)
    with ProfileWriter(out, shared(machine)) as sink:
        session = Session(
            machine,
            single,
            sink,
            known=known,
            budget_s=budget,
            report=show,
            clock=time.monotonic,
            began=began,
        )
        summary, ending = session.summary, None
        try:
            session.run()
            if gpus >= 2 and together:
                machine.clear()
                done = {(*point.shape, point.op) for point in known if point.status == "ok"}
                new = [e for e in together if (*sorted(e.shape.items()), e.op.name) not in done]
                summary.points += measure_collectives(
                    new,
                    machine,
                    sink,
                    time_left=lambda: float("inf") if budget is None else began + budget - time.monotonic(),
                )
        except DeviceLostError as error:
            ending = EXIT_ENVIRONMENT, f"the device was lost at {error}"
        except KeyboardInterrupt:
            ending = EXIT_INTERRUPTED, "interrupted"
        summary.seconds = session.seconds
    show.close()
    finish(out, summary, as_json, ending)


def earlier(out: Path) -> list[ProfilePoint]:
    """What an existing file holds; bad lines are named and passed over. Exit 2 for another schema."""
    if not out.exists() or not out.stat().st_size:
        return []
    faults: list[str] = []
    try:
        points = read_profile(out, faults=faults)
    except ProfileError as error:
        raise stop(EXIT_USAGE, str(error)) from None
    for fault in faults:
        say(f"passed over: {fault}")
    return points


def finish(
    out: Path, summary: "Summary", as_json: Path | None, ending: tuple[int, str] | None = None
) -> None:
    """Say what the run did; exit 1 when a point failed. ending: exit code and reason, if it was cut short."""
    good = [point for point in summary.points if point.status == "ok"]
    for label, reason in summary.left_out.items():
        say(f"left out: {label} {reason}")
    for point in summary.failed:
        say(f"failed: {point.op} {shape_text(point.shape)}: {point.error}")
    if as_json is not None:
        record = {
            "schema": 1,
            "out": str(out),
            "seconds": round(summary.seconds, 1),
            "measured": len(good),
            "failed": [{"op": p.op, "shape": dict(p.shape), "error": p.error} for p in summary.failed],
            "left": [entry.label for entry in summary.left],
            "left_out": summary.left_out,
        }
        write_json(as_json, record)
    left = f"; {len(summary.left)} left for --resume" if summary.left else ""
    if not to_standard_output(as_json):
        Console(highlight=False, soft_wrap=True).print(
            f"{out}: {len(good)} points in {summary.seconds:.0f} s, {len(summary.failed)} failed{left}"
        )
    if ending is not None:
        code, why = ending
        raise stop(code, f"{why}; {out} is safe, --resume goes on with it")
    if summary.failed:
        raise typer.Exit(EXIT_FAILED)


def plan(wanted: "Sequence[Entry]", name: str, as_json: Path | None) -> None:
    """Print what would be measured, and how long that takes on an H200."""
    from .measure import estimate_s
    from .session import planned_s

    here = [entry for entry in wanted if entry.op.missing() is None]
    alone = [entry for entry in here if entry.op.family != "collectives"]
    seconds = planned_s(alone)
    grouped: dict[str, list[Any]] = {}
    for entry in here:
        grouped.setdefault(entry.op.label, []).append(entry)
    if as_json is not None:
        record = {
            "schema": 1,
            "suite": name,
            "seconds": round(seconds, 1),
            "points": [
                {"op": entry.op.label, "shape": dict(entry.shape), "seconds": round(estimate_s(entry), 3)}
                for entry in here
            ],
        }
        write_json(as_json, record)
        if to_standard_output(as_json):
            return
    table = Table(title=f"{name}: {len(alone)} points, about {seconds:.0f} s on an H200")
    for heading in ("op", "points", "seconds", "first shape"):
        table.add_column(
            heading, justify="right" if heading in ("points", "seconds") else "left", overflow="fold"
        )
    for label, members in grouped.items():
        total = sum(estimate_s(entry) for entry in members)
        table.add_row(label, str(len(members)), f"{total:.1f}", shape_text(members[0].shape))
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    together = len(here) - len(alone)
    if together:
        Console(highlight=False, soft_wrap=True).print(
            f"{together} collectives besides, on machines of at least 2 GPUs"
        )
    for label, missing in {entry.op.label: entry.op.missing() for entry in wanted}.items():
        if not missing:
            continue
        Console(highlight=False, soft_wrap=True).print(
            f"left out: {label} needs {missing!r}, which is not installed"
        )


class Reporter:
    """Progress on standard error: one line that is rewritten on a terminal, a line now and then elsewhere."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._last = float("-inf")
        self._status = err.status("starting") if err.is_terminal else None
        if self._status is not None:
            self._status.start()

    def __call__(self, progress: "Progress") -> None:
        done = progress.measured + progress.failed + progress.left
        text = f"{done}/{progress.total} points, {progress.seconds:.0f} s"
        if progress.budget_s is not None:
            text += f", {max(progress.budget_s - progress.seconds, 0):.0f} s left"
        if progress.failed:
            text += f", {progress.failed} failed"
        text = f"{text}  {progress.current}"
        if self._status is not None:
            self._status.update(text)
        elif time.monotonic() - self._last >= REPORT_S or not progress.current:
            self._last = time.monotonic()
            err.print(text)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()

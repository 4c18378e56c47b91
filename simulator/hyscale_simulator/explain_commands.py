"""The verbs ``hyscale explain``, ``hyscale sweep`` and ``hyscale plan``.

Exit codes: 0 done, 2 usage or a bad description, 3 environment (a file that cannot be written), 130
interrupted (a sweep's finished points are kept).
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hyscale_ref.command import EXIT_HOLDS, EXIT_INTERRUPTED
from hyscale_ref.output import write_json
from hyscale_simulator.commands import Json, output, run_command, setting
from hyscale_simulator.descriptions import DescriptionError
from hyscale_simulator.scenario import Scenario, load
from hyscale_simulator.sweep import (
    OBJECTIVES,
    Journal,
    Objective,
    Row,
    Vary,
    check_output,
    check_writable,
    grid,
    pareto,
    ranked,
    write,
)
from hyscale_simulator.sweep import sweep as run_sweep
from hyscale_simulator.switches import BASELINES

__all__ = ["explain", "plan", "sweep"]

SHOWN = 10

Profiles = Annotated[
    list[Path] | None, typer.Option("--profiles", help="Your measurements, ahead of the shipped ones.")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a field: batch.sequence_tokens=131072.")]
Executor_ = Annotated[str, typer.Option("--executor", help="local, local:PROCESSES or dask:ADDRESS.")]
Cache = Annotated[
    Path | None, typer.Option("--cache", help="Where finished points are kept (default: beside --out).")
]
Objective_ = Annotated[str, typer.Option("--objective", help=", ".join(OBJECTIVES))]


def explain(argv: list[str]) -> int:
    """``hyscale explain``."""

    def command(
        baseline: Annotated[str, typer.Argument(help="A to E, a preset, or a scenario file (.toml).")] = "C",
        improved: Annotated[
            str | None, typer.Argument(help="A preset or scenario file; with A to E: HyTopK and replay.")
        ] = None,
        set_: Set = None,
        profiles: Profiles = None,
        json_: Json = None,
        report: Annotated[
            Path | None, typer.Option("--report", help="Write a page (.html) that opens offline.")
        ] = None,
        samples: Annotated[int, typer.Option(help="Draws of the error band: a power of two.")] = 64,
        seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    ) -> int:
        """Explain where a speed-up comes from: by default, whether 2.07x can, and what it would take."""
        from hyscale_simulator.evaluate import evaluator
        from hyscale_simulator.explain_text import show
        from hyscale_simulator.explanation import explain as run

        for path, option in ((json_, "--json"), (report, "--report")):
            if path is not None:
                check_writable(path, option)
        if samples < 2 or samples & (samples - 1):
            raise DescriptionError(f"--samples {samples}: a power of two is wanted, 2 or more")
        before, after = _pair(baseline, improved)
        changes = dict(setting(text) for text in set_ or [])
        if changes:
            before, after = before.with_(**changes), after.with_(**changes)
        study = baseline == "C" and improved is None and not changes
        with _status() as status:
            found = run(
                before,
                after,
                evaluator(tuple(str(path) for path in profiles or [])),
                study=study,
                samples=samples,
                seed=seed,
                command=_asked(argv),
                progress=status,
            )
        show(found, output(json_))
        if json_ is not None:
            write_json(json_, found.to_json(), allow_nan=False)
        if report is not None:
            from hyscale_simulator.report import page

            report.write_text(page(found), encoding="utf-8")
            output(json_).print(f"report: {report}", soft_wrap=True)
        return EXIT_HOLDS

    return run_command(command, argv, "explain")


def _asked(argv: Sequence[str]) -> str:
    """The command line without where its output goes."""
    kept = ["hyscale explain"]
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in ("--json", "--report"):
            if not equals:
                next(words, None)
        else:
            kept.append(shlex.quote(word))
    return " ".join(kept)


def _pair(baseline: str, improved: str | None) -> tuple[Scenario, Scenario]:
    lettered = {item.letter: item for item in BASELINES}
    if baseline in lettered:
        chosen = lettered[baseline]
        return chosen.scenario(), chosen.improved() if improved is None else load(improved)
    if improved is None:
        raise DescriptionError(
            f"{baseline}: compared with what? Give a second scenario (only {', '.join(lettered)} imply one)"
        )
    return load(baseline), load(improved)


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being computed, where that is a terminal."""
    with Console(stderr=True).status("") as status:
        yield status.update


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Points done and time left, on standard error."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield update


def _scenario(name: str | None, preset: str | None, set_: Sequence[str] | None) -> Scenario:
    if (name is None) == (preset is None):
        raise DescriptionError("give a scenario file or --preset NAME, one of them")
    chosen = load(name or preset or "")
    changes = dict(setting(text) for text in set_ or [])
    return chosen.with_(**changes) if changes else chosen


def _objective(name: str, scenario: Scenario) -> Objective:
    if name not in OBJECTIVES:
        raise DescriptionError(f"--objective {name!r}: allowed are {', '.join(OBJECTIVES)}")
    if name == "cost" and scenario.cluster_description.dollars_per_gpu_hour is None:
        raise DescriptionError(
            "--objective cost: the cluster has no price; --set cluster.dollars_per_gpu_hour=2.5"
        )
    return OBJECTIVES[name]


def _journal(cache: Path | None, out: Path | None, profiles: tuple[str, ...], console: Console) -> Journal:
    path = cache or (out.with_name(out.name + ".cache.jsonl") if out else None)
    if path is not None:
        check_writable(path, "--cache")
    journal = Journal(path, profiles)
    if journal.torn:
        console.print(f"{path}: the last entry was cut off by an interruption and is computed again")
    return journal


def sweep(argv: list[str]) -> int:
    """``hyscale sweep``."""

    def command(
        scenario: Annotated[str | None, typer.Argument(help="A scenario file (.toml).")] = None,
        preset: Annotated[str | None, typer.Option(help="A shipped scenario; see hyscale presets.")] = None,
        vary: Annotated[
            list[str] | None, typer.Option("--vary", help="A field and its values: key=v1,v2; repeatable.")
        ] = None,
        set_: Set = None,
        objective: Objective_ = "step_time",
        constraint: Annotated[
            list[str] | None, typer.Option("--constraint", help="fits: only what fits into memory counts.")
        ] = None,
        out: Annotated[
            Path | None, typer.Option("--out", help="Write every point: .csv, .jsonl or .parquet.")
        ] = None,
        cache: Cache = None,
        executor_: Executor_ = "local",
        profiles: Profiles = None,
    ) -> int:
        """Evaluate a grid over any fields, and show what is best; interrupted, it goes on where it was."""
        from hyscale_simulator.executors import executor

        base = _scenario(scenario, preset, set_)
        varied = [Vary.parse(text) for text in vary or []]
        if not varied:
            raise DescriptionError("--vary key=v1,v2: at least one is needed")
        for name in constraint or []:
            if name != "fits":
                raise DescriptionError(f"--constraint {name!r}: allowed is fits")
        goal = _objective(objective, base)
        if out is not None:
            check_output(out)
        files = tuple(str(path) for path in profiles or [])
        notes = Console(stderr=True)
        points = grid(base, varied)
        journal = _journal(cache, out, files, notes)
        with closing(executor(executor_, len(points))) as run, _progress("scenarios") as progress:
            try:
                rows = run_sweep(points, run, journal, files, progress)
            except KeyboardInterrupt:
                kept = f"kept in {journal.path}; the same command goes on" if journal.path else "lost"
                notes.print(f"interrupted: {len(journal.rows)} finished points are {kept}", soft_wrap=True)
                return EXIT_INTERRUPTED
        if out is not None:
            write(rows, out)
        _show_sweep(rows, [v.field for v in varied], goal, bool(constraint), output())
        if out is not None:
            output().print(f"{len(rows)} points: {out}", soft_wrap=True)
        return EXIT_HOLDS

    return run_command(command, argv, "sweep")


def _show_sweep(
    rows: Sequence[Row], fields: Sequence[str], goal: Objective, fits: bool, console: Console
) -> None:
    counted = ranked(rows, goal, fits)
    _table(f"best of {len(counted)} by {goal.column}", counted[:SHOWN], fields, console)
    front = pareto(counted, goal)
    _table(f"Pareto front: {goal.column}, memory, GPUs", front[:SHOWN], fields, console)
    refused = [row for row in rows if row["refused"]]
    if refused:
        console.print(f"{len(refused)} points are refused, such as: {refused[0]['refused']}", soft_wrap=True)
    if any(row["fits"] is False for row in counted):
        console.print("! does not fit into memory; --constraint fits leaves it out")
    if fits and (left := sum(row["fits"] is False for row in rows)):
        console.print(f"{left} points do not fit into memory")


def _table(title: str, rows: Sequence[Row], fields: Sequence[str], console: Console) -> None:
    short = [field.rsplit(".", 1)[-1] for field in fields]
    names = short if len(set(short)) == len(short) else list(fields)
    table = Table(
        *names, "step s", "90 % band", "tokens/s/GPU", "MFU", "GiB", "GPUs", "$/Mtoken",
        title=title, title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for row in rows:
        price = row["dollars_per_million_tokens"]
        table.add_row(
            *(str(row[field]) for field in fields),
            f"{row['step_time_s']:.3f}",
            f"{row['low_s']:.1f}-{row['high_s']:.1f}",
            f"{row['tokens_per_s_per_gpu']:.1f}",
            f"{row['mfu']:.1%}",
            f"{row['peak_gib']:.1f}" + ("" if row["fits"] else " [red]![/red]"),
            str(row["gpus"]),
            "" if price is None else f"{price:.3f}",
        )
    console.print(table)


def plan(argv: list[str]) -> int:
    """``hyscale plan``."""

    def command(
        scenario: Annotated[str | None, typer.Argument(help="A scenario file (.toml).")] = None,
        preset: Annotated[str | None, typer.Option(help="A shipped scenario; see hyscale presets.")] = None,
        set_: Set = None,
        objective: Objective_ = "step_time",
        top: Annotated[int, typer.Option(help="How many layouts to show.")] = SHOWN,
        cache: Cache = None,
        executor_: Executor_ = "local",
        profiles: Profiles = None,
        json_: Json = None,
    ) -> int:
        """Search the legal layouts of a model on a cluster; show the best, and why others are refused."""
        from hyscale_simulator.executors import executor
        from hyscale_simulator.planner import search

        base = _scenario(scenario, preset, set_)
        goal = _objective(objective, base)
        if top < 1:
            raise DescriptionError(f"--top {top}: 1 or more is wanted")
        if json_ is not None:
            check_writable(json_, "--json")
        files = tuple(str(path) for path in profiles or [])
        journal = _journal(cache, None, files, Console(stderr=True))
        with closing(executor(executor_, sys.maxsize)) as run, _progress("layouts") as progress:
            found = search(base, goal, run, journal, profiles=files, top=top, progress=progress)
        console = output(json_)
        console.print(
            f"{base.name}: {found.tried:,} layouts tried on {base.gpus} GPUs; {found.ran:,} are legal and fit"
        )
        table = Table("layout", "step s", "90 % band", "tokens/s/GPU", "MFU", "GiB", box=None, pad_edge=False)
        for choice in found.best:
            row = choice.row
            table.add_row(
                choice.label, f"{row['step_time_s']:.2f}", f"{row['low_s']:.1f}-{row['high_s']:.1f}",
                f"{row['tokens_per_s_per_gpu']:.1f}", f"{row['mfu']:.1%}", f"{row['peak_gib']:.1f}",
            )  # fmt: skip
        console.print(table)
        console.print("refused:")
        for refusal in found.refusals:
            console.print(f"  {refusal.count:,}: {refusal.rule}", soft_wrap=True, highlight=False)
            console.print(f"      such as {refusal.example}", soft_wrap=True, highlight=False)
        if json_ is not None:
            record = {
                "schema": 1,
                "scenario": base.name,
                "tried": found.tried,
                "ran": found.ran,
                "best": [
                    {"layout": c.label, "changes": c.changes, "host_gib": c.host_gib, **c.row}
                    for c in found.best
                ],
                "refused": [{"rule": r.rule, "count": r.count, "example": r.example} for r in found.refusals],
            }
            write_json(json_, record)
        return EXIT_HOLDS

    return run_command(command, argv, "plan")

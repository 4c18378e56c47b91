"""The verbs ``hyscale verify``, ``hyscale mutants`` and ``hyscale doctor``.

Exit codes: 0 holds, 1 falsified, 2 usage, 3 environment, 130 interrupted. Progress goes to stderr, results to
stdout. Torch, Triton and hypothesis are imported only when a verb runs, after its device is settled.
"""

import math
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hyscale_ref.command import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_HOLDS, EXIT_INTERRUPTED
from hyscale_ref.output import check_writable, to_standard_output, write_json
from hyscale_verify.devices import DEVICES, prepare
from hyscale_verify.errors import EnvironmentLackingError

WIDTH = 132  # of tables that do not go to a terminal


def verify(argv: Sequence[str]) -> int:
    """Run ``hyscale verify`` and return its exit code."""
    return _call("verify", _verify, argv)


def mutants(argv: Sequence[str]) -> int:
    """Run ``hyscale mutants`` and return its exit code."""
    return _call("mutants", _mutants, argv)


def doctor(argv: Sequence[str]) -> int:
    """Run ``hyscale doctor`` and return its exit code."""
    return _call("doctor", _doctor, argv)


def _call(verb: str, function: Callable[..., int], argv: Sequence[str]) -> int:
    @wraps(function)
    def exiting(*args: Any, **kwargs: Any) -> None:
        try:
            code = function(*args, **kwargs)
        except EnvironmentLackingError as error:
            print(f"hyscale {verb}: {error}", file=sys.stderr)
            code = EXIT_ENVIRONMENT
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        raise typer.Exit(code)

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name=verb)(exiting)
    try:
        with _interruptible():
            app(args=list(argv), prog_name=f"hyscale {verb}")
    except SystemExit as ended:
        return int(ended.code or EXIT_HOLDS)
    return EXIT_HOLDS


@contextmanager
def _interruptible() -> Iterator[None]:
    """Take SIGTERM, which a scheduler or ``timeout`` sends, for Ctrl-C: what was found is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}; allowed: an integer") from None


def _verify(
    target: Annotated[
        str,
        typer.Option(
            help="hytopk, materialised, slab, torch_topk, reference, flashinfer, or module:function."
        ),
    ] = "hytopk",
    profile: Annotated[str, typer.Option(help="How hard to look: quick, ci or deep.")] = "quick",
    device: Annotated[str, typer.Option(help="auto, cpu (Triton's interpreter) or cuda.")] = "auto",
    only: Annotated[list[str] | None, typer.Option(help="Only this property; repeatable.")] = None,
    regime: Annotated[list[str] | None, typer.Option(help="Only this family of inputs; repeatable.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Only this operand type: fp32, bf16, fp16, fp8.")] = None,
    seed: Annotated[
        int | None, typer.Option(parser=_integer, help="Seed of all draws. [default: 0; deep: a new one]")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(parser=_integer, help="Processes. [default: 2 on cpu, 1 on cuda]")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report here; - for standard output.")] = None,
) -> int:
    """Check a selection kernel against the exact oracle with property-based tests."""
    _writable("--json", json)
    where = _device(device)
    from hyscale_verify import report, runner, targets
    from hyscale_verify.cases import DTYPES
    from hyscale_verify.strategies import REGIMES
    from hyscale_verify.suite import PROPERTIES

    _one_of("--profile", profile, runner.PROFILES)
    _each_of("--only", only or [], PROPERTIES)
    _each_of("--regime", regime or [], REGIMES)
    if dtype is not None:
        _one_of("--dtype", dtype, DTYPES)
    if jobs is not None and jobs < 1:
        raise typer.BadParameter(f"--jobs: {jobs}; allowed: at least 1")
    try:
        judged = targets.load(target, where)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from error
    if dtype is not None and dtype not in judged.dtypes:
        raise typer.BadParameter(
            f"--dtype: {dtype!r}; target {target} on {where} takes {', '.join(judged.dtypes)}"
        )
    if seed is None:
        seed = secrets.randbelow(2**32) if profile == "deep" else 0
    plan = runner.Plan(target, where, profile, seed, dtype)
    work = runner.units(plan, only or [], regime or [])
    if not work:
        raise typer.BadParameter(
            f"--only and --regime: no chosen property is tried on {', '.join(regime or [])}"
        )

    verdicts: list[runner.Verdict] = []
    interrupted = False
    console = Console(stderr=True)
    console.print(f"verify {target} on {where}, profile {profile}, seed {seed}: {len(work)} units")
    try:
        with _progress(console, len(work)) as advance:
            for verdict in runner.run(work, jobs or _jobs(where, len(work))):
                verdicts.append(verdict)
                bad = verdict.verdict == runner.FALSIFIED
                advance(f"{verdict.name} is falsified on {verdict.regime}" if bad else "")
    except KeyboardInterrupt:
        interrupted = True
        verdicts += runner.unfinished(work, verdicts)
    verdicts = runner.in_order(work, verdicts)
    if json is not None:
        write_json(json, report.as_record(target, where, verdicts))
    out = _output(json)
    report.print_table(out, verdicts)
    report.print_counterexamples(out, verdicts)
    out.print(("interrupted; " if interrupted else "") + report.summary(verdicts), highlight=False)
    if interrupted:
        return EXIT_INTERRUPTED
    outcomes = {each.verdict for each in verdicts}
    if runner.FALSIFIED in outcomes:
        return EXIT_FAILED
    return EXIT_HOLDS if runner.HOLDS in outcomes else EXIT_ENVIRONMENT


def _mutants(
    matrix: Annotated[bool, typer.Option("--matrix", help="Run everything against every bug.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only this bug; repeatable.")] = None,
    by: Annotated[
        list[str] | None, typer.Option("--property", help="Try them by this property alone; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    profile: Annotated[str, typer.Option(help="How hard to look: quick, ci or deep.")] = "ci",
    seed: Annotated[int, typer.Option(parser=_integer, help="Seed of all draws.")] = 0,
    limit: Annotated[
        float,
        typer.Option(min=1, help="Seconds after which a surviving bug is given up; not with --matrix."),
    ] = 120,
    jobs: Annotated[
        int | None, typer.Option(parser=_integer, help="Processes. [default: 2 on cpu, 1 on cuda]")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the kill matrix here; - for standard output.")
    ] = None,
) -> int:
    """Plant named bugs in the kernel and see which property convicts each."""
    _writable("--json", json)
    if jobs is not None and jobs < 1:
        raise typer.BadParameter(f"--jobs: {jobs}; allowed: at least 1")
    where = _device(device)
    from hyscale_verify import runner
    from hyscale_verify.mutants import harness
    from hyscale_verify.suite import MUTANTS, PROPERTIES

    _one_of("--profile", profile, runner.PROFILES)
    _each_of("--only", only or [], [mutant.name for mutant in MUTANTS])
    _each_of("--property", by or [], PROPERTIES)
    plan = runner.Plan("hytopk", where, profile, seed, shrink=False)
    tasks = harness.tasks_of(plan, only or [], by or [], matrix, math.inf if matrix else limit)
    if not tasks:
        raise typer.BadParameter("--property: belongs to another part of the suite than the bugs of --only")
    total, processes = len(tasks), _jobs(where, 2 * len(tasks))
    console, out = Console(stderr=True), _output(json)
    console.print(f"{total} planted bugs on {where}, profile {profile}, seed {seed}")
    fates: list[harness.Fate] = []
    interrupted = False
    try:
        with _progress(console, total) as advance:
            for fate in harness.run_mutants(tasks, jobs or processes):
                fates.append(fate)
                advance(fate.in_words())
    except KeyboardInterrupt:
        interrupted = True
    if json is not None:
        write_json(json, harness.as_record(fates, by or []))
    harness.print_fates(out, fates)
    if interrupted:
        out.print(f"interrupted after {len(fates)} of {total}")
        return EXIT_INTERRUPTED
    return EXIT_HOLDS if all(fate.killed for fate in fates) else EXIT_FAILED


def _doctor(
    json: Annotated[Path | None, typer.Option(help="Write the findings here; - for standard output.")] = None,
) -> int:
    """Show versions and devices, and what can run here and why not."""
    from hyscale_verify import doctor

    _writable("--json", json)
    found = doctor.examined()
    if json is not None:
        write_json(json, found)
    doctor.show(found, _output(json))
    return doctor.verdict(found)


def _device(name: str) -> str:
    if name not in DEVICES:
        raise typer.BadParameter(f"--device: {name!r}; allowed: {', '.join(DEVICES)}")
    return prepare(name)


def _one_of(option: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise typer.BadParameter(f"{option}: {value!r}; allowed: {', '.join(allowed)}")


def _each_of(option: str, values: Sequence[str], allowed: Any) -> None:
    for value in values:
        _one_of(option, value, allowed)


def _writable(option: str, path: Path | None) -> None:
    try:
        check_writable(path)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error


def _output(json: Path | None = None) -> Console:
    """Where tables go: to standard output, or beside it when that is for JSON alone."""
    beside = to_standard_output(json)
    stream = sys.stderr if beside else sys.stdout
    return Console(stderr=beside, width=None if stream.isatty() else WIDTH)


def _jobs(device: str, units: int) -> int:
    """Two processes on a CPU where there is work for both; a GPU is one device."""
    return 1 if device == "cuda" or units < 4 else 2


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, a line every tenth of the way elsewhere; messages stand above it."""
    if console.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=total)

            def advance(message: str) -> None:
                if message:
                    progress.console.print(message)
                progress.advance(task)

            yield advance
        return
    done, begun = 0, time.monotonic()

    def count(message: str) -> None:
        nonlocal done
        done += 1
        if message:
            console.print(message)
        if done * 10 // total != (done - 1) * 10 // total:
            console.print(f"{done} of {total} units, {time.monotonic() - begun:.0f} s", highlight=False)

    yield count

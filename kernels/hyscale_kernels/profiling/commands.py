"""``hyscale profile``: measure kernels on this machine's GPU; show, plot and compare what was measured."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hyscale_ref.command import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_USAGE
from hyscale_ref.output import to_standard_output, write_json
from hyscale_ref.profile import ProfileError, ProfilePoint, read_profile

from .environment import need_gpu, say, stop, writable
from .race_command import race_command
from .run_command import run_command

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("run")(run_command)
app.command("race")(race_command)

Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON; - for standard output.")]


@app.callback()
def _profile() -> None:
    """Measure kernels on this machine's GPU; show and compare profiles anywhere."""


@app.command("show")
def show_command(
    file: Annotated[Path, typer.Argument(help="A profile, or the records of a race with --context.")],
    op: Annotated[list[str] | None, typer.Option(help="Only these ops; may be repeated.")] = None,
    points: Annotated[bool, typer.Option("--points", help="A row a point instead of a row an op.")] = False,
    roofline: Annotated[Path | None, typer.Option(help="Draw the roofline plot: .png, .svg, .pdf.")] = None,
    context: Annotated[
        Path | None,
        typer.Option(help="Draw HyTopK and a rival (random scores) by context length: .png, .svg, .pdf."),
    ] = None,
    as_json: Json = None,
) -> None:
    """What a profile holds: a table, a roofline plot, times against context length.

    A bad line is named on standard error and the rest is shown; the exit code is then 1.
    """
    from . import report

    writable("--json", as_json)
    if context is not None:
        unread: list[str] = []
        with refusing():
            from . import length_plot

            try:
                gains = length_plot.plot(file, context, unread)
            finally:
                named(file, unread)
        for gain in gains:
            said = ", ".join(f"{ratio:.2f}x at {keys:,} keys" for keys, ratio in gain.places)
            Console(highlight=False, soft_wrap=True).print(
                f"{context}: HyTopK in {gain.dtype} is, against {gain.rival} on random scores, {said}"
            )
        if roofline is None and as_json is None and not points and op is None:
            raise typer.Exit(EXIT_FAILED if unread else 0)
    with refusing():
        found, faults = lenient(file)
    if op:
        known_ops(op, found, str(file))
        found = [point for point in found if point.op in op]
    if roofline is not None:
        with refusing():
            report.roofline(found, roofline)
    if as_json is not None:
        write_json(as_json, {"schema": 1, "faults": faults, "points": [point.to_json() for point in found]})
    if not to_standard_output(as_json):
        devices = sorted({f"{point.device} {point.serial}".strip() for point in found})
        title = f"{file.name}: {len(found)} points on {', '.join(devices) or 'no device'}"
        table = report.point_table(found, title) if points else report.summary_table(found, title)
        output().print(table)
    if faults:
        raise typer.Exit(EXIT_FAILED)


@app.command("compare")
def compare_command(
    first: Annotated[Path, typer.Argument(help="A profile.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    op: Annotated[list[str] | None, typer.Option(help="Only these ops; may be repeated.")] = None,
    any_implementation: Annotated[
        bool, typer.Option("--any-implementation", help="Match shapes whoever implements them.")
    ] = False,
    apart: Annotated[float, typer.Option(min=0.0, help="Percent of difference that is marked.")] = 15.0,
    most: Annotated[int, typer.Option(min=1, help="Rows of the table, the furthest apart first.")] = 40,
    max_median: Annotated[
        float | None, typer.Option(min=0.0, help="Exit 1 if the median difference exceeds this percentage.")
    ] = None,
    max_p95: Annotated[
        float | None, typer.Option(min=0.0, help="Exit 1 if the 95th percentile exceeds this percentage.")
    ] = None,
    as_json: Json = None,
) -> None:
    """The ratio of every shape that both profiles have, and whether it is within their noise.

    Devices and sources may differ: a public table compares with one's own points where shapes coincide.
    """
    from . import report
    from .compare import compare

    writable("--json", as_json)
    with refusing():
        here, faults = lenient(first, one_device=False)
        there, more = lenient(second, one_device=False)
    if op:
        known_ops(op, [*here, *there], f"{first} or {second}")
        here = [point for point in here if point.op in op]
        there = [point for point in there if point.op in op]
    found = compare(here, there, any_implementation=any_implementation)
    if not found.pairs:
        raise stop(EXIT_FAILED, f"{first} and {second} have no shape in common")
    limit = apart / 100
    record = report.comparison_record(found, limit)
    if as_json is not None:
        write_json(as_json, record)
    if not to_standard_output(as_json):
        title = f"{second.name} over {first.name}"
        output().print(report.comparison_table(found, title, limit, most))
        output().print(report.comparison_summary(found, title, limit))
        median, high = record["median_difference"], record["p95_difference"]
        Console(highlight=False, soft_wrap=True).print(
            f"{len(found.pairs)} shapes in common ({found.only_first} and {found.only_second} in one alone); "
            f"difference: median {median:.1%}, p95 {high:.1%}; {record['within_noise']} within noise, "
            f"{record['apart']} more than {apart:g}% apart"
        )
    exceeded = any(
        limit is not None and value > limit / 100
        for limit, value in ((max_median, record["median_difference"]), (max_p95, record["p95_difference"]))
    )
    if exceeded or faults or more:
        raise typer.Exit(EXIT_FAILED)


@app.command("trace")
def trace_command(
    op: Annotated[
        str, typer.Option(help="The op: name, or name/implementation/dtype as 'run --dry-run' lists it.")
    ],
    shape: Annotated[str | None, typer.Option(help="Such as rows=4096,keys=65536 [its first shape]")] = None,
    out: Annotated[Path, typer.Option(help="The trace: .json or .json.gz.")] = Path("trace.json"),
    as_json: Json = None,
) -> None:
    """A Chrome trace of one call through PyTorch's profiler; ui.perfetto.dev opens it."""
    from .op import Entry
    from .ops import ALL
    from .suites import names_of
    from .target import parse_shapes

    writable("--out", out)
    writable("--json", as_json)
    chosen = next((each for each in ALL if op in names_of(each)), None)
    if chosen is None:
        names = sorted({each.name for each in ALL})
        raise typer.BadParameter(f"no op {op!r}; there are: {', '.join(names)}", param_hint="--op")
    if chosen.family == "collectives":
        raise typer.BadParameter(f"{op!r} runs on several GPUs at once; a trace is of one", param_hint="--op")
    sizes = next(filter(None, chosen.shapes.values()))[0]
    if shape is not None:
        try:
            (sizes,) = parse_shapes([shape], names=sorted(sizes))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--shape") from None
    missing = chosen.missing()
    if missing is not None:
        raise stop(EXIT_ENVIRONMENT, f"{chosen.label} needs {missing!r}, which is not installed")
    need_gpu()
    import torch

    from .tracing import trace

    entry = Entry(chosen, sizes)
    kernels = trace(entry, torch.device("cuda", torch.cuda.current_device()), out)
    if as_json is not None:
        record = {"schema": 1, "op": entry.label, "trace": str(out), "kernels": dict(kernels)}
        write_json(as_json, record)
    if not to_standard_output(as_json):
        Console(highlight=False, soft_wrap=True).print(f"{out}: {entry.label}")
        for name, us in kernels[:12]:
            Console(highlight=False, soft_wrap=True).print(f"{us:12,.1f} us  {name[:100]}")


def known_ops(names: Sequence[str], points: Iterable[ProfilePoint], where: str) -> None:
    """A usage error for an op that no point has."""
    known = {point.op for point in points}
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"no op {name!r} in {where}; there are: {', '.join(sorted(known))}", param_hint="--op"
            )


def lenient(path: Path, *, one_device: bool = True) -> tuple[list[ProfilePoint], list[str]]:
    """The readable points of a file and its bad lines, which are named on standard error."""
    faults: list[str] = []
    points = read_profile(path, one_device=one_device, faults=faults)
    named(path, faults)
    return points, faults


def named(path: Path, faults: Sequence[str]) -> None:
    """The first bad lines of a file, on standard error."""
    for fault in faults[:5]:
        say(fault)
    if len(faults) > 5:
        say(f"{path}: {len(faults) - 5} more lines that cannot be read")


def output() -> Console:
    """Standard output: the terminal's width, or wide enough for every table where there is none."""
    return Console(width=None if sys.stdout.isatty() else 150)


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a file that cannot be used into one line and exit code 2."""
    try:
        yield
    except (ProfileError, ValueError) as error:
        raise stop(EXIT_USAGE, str(error)) from None


def profile(argv: list[str]) -> int:
    """Run ``hyscale profile`` with ``argv`` and return its exit code."""
    try:
        app(args=argv, prog_name="hyscale profile")
    except SystemExit as ended:
        return int(ended.code or 0)
    except OSError as error:
        say(str(error))
        return EXIT_ENVIRONMENT
    return 0

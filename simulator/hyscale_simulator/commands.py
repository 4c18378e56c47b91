"""The verbs ``hyscale simulate``, ``hyscale presets`` and ``hyscale validate``.

Exit codes: 0 done (validate: within its targets), 1 validate outside them, 2 usage or a bad description,
3 environment (a file that cannot be written).
"""

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hyscale_ref.command import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_HOLDS, EXIT_USAGE
from hyscale_ref.output import to_standard_output, write_json
from hyscale_ref.profile import ProfileError
from hyscale_simulator.descriptions import DescriptionError, find, schemas, shipped
from hyscale_simulator.durations import MissingProfileError
from hyscale_simulator.hardware import Cluster, Gpu
from hyscale_simulator.memory import GIB
from hyscale_simulator.model import Model
from hyscale_simulator.result import Result
from hyscale_simulator.scenario import Scenario, load

__all__ = ["Json", "output", "presets", "run_command", "setting", "simulate", "validate"]

Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON; - for standard output.")]


def run_command(command: Callable[..., int], argv: list[str], name: str) -> int:
    """Run a typer command on ``argv`` and turn every expected failure into one message and an exit code."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        code = app(args=argv, prog_name=f"hyscale {name}", standalone_mode=False)
    except (DescriptionError, ProfileError, MissingProfileError) as error:
        message = error.args[0] if error.args else str(error)
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(
            f"hyscale {name}: {message}"
        )
        return EXIT_USAGE
    except OSError as error:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"hyscale {name}: {error}")
        return EXIT_ENVIRONMENT
    except Exception as error:
        # Usage errors of the command line: typer may bring its own copy of click, so go by the attributes.
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):
            Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(
                f"hyscale {name}: {error.format_message()}"
            )
            return EXIT_USAGE
        raise
    return int(code or 0)


def output(json_: Path | None = None) -> Console:
    """Where tables go: standard output, or standard error where ``json_`` is - and has the other.

    The terminal's width, or wide enough for every table where there is none.
    """
    aside = to_standard_output(json_)
    terminal = (sys.stderr if aside else sys.stdout).isatty()
    return Console(stderr=aside, width=None if terminal else 140)


def setting(text: str) -> tuple[str, Any]:
    """``path=value`` as a path and a TOML value (a bare word is a string)."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise DescriptionError(f"--set {text!r}: key=value is wanted, such as layout.context_parallel=32")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return path.strip(), parsed


def simulate(argv: list[str]) -> int:
    """``hyscale simulate``."""

    def command(
        scenario: Annotated[str | None, typer.Argument(help="A scenario file (.toml).")] = None,
        preset: Annotated[str | None, typer.Option(help="A shipped scenario; see hyscale presets.")] = None,
        set_: Annotated[
            list[str] | None, typer.Option("--set", help="Change a field: layout.context_parallel=32.")
        ] = None,
        profiles: Annotated[
            list[Path] | None,
            typer.Option(help="Your measurements, ahead of the shipped ones; may be repeated."),
        ] = None,
        json_: Json = None,
        trace: Annotated[
            Path | None, typer.Option(help="Write a Chrome trace (.json or .json.gz) that Perfetto opens.")
        ] = None,
        layer: Annotated[
            int | None,
            typer.Option(help="With --trace: this layer's kernels instead of the step."),
        ] = None,
        coverage: Annotated[
            bool, typer.Option("--coverage", help="List what the price of every op rests on.")
        ] = False,
        engine: Annotated[str, typer.Option(help="auto, simpy or longest_path.")] = "auto",
    ) -> int:
        """Predict one training step: its time, where that goes, memory, and how sure we are."""
        from hyscale_simulator.evaluate import evaluator

        if (scenario is None) == (preset is None):
            raise DescriptionError("give a scenario file or --preset NAME, one of them")
        if scenario is not None and not scenario.endswith(".toml"):
            raise DescriptionError(f"{scenario}: a scenario file ends in .toml; for a shipped one, --preset")
        chosen = load(scenario or preset or "")
        changes = dict(setting(text) for text in set_ or [])
        if changes:
            chosen = chosen.with_(**changes)
        if engine not in ("auto", "simpy", "longest_path"):
            raise DescriptionError(f"--engine {engine!r}: allowed are auto, simpy, longest_path")
        if layer is not None and trace is None:
            raise DescriptionError("--layer: needs --trace FILE")
        if trace is not None and not trace.name.endswith((".json", ".json.gz")):
            raise DescriptionError(f"--trace {trace}: a file that ends in .json or .json.gz is wanted")
        # A GPU of the user's own may be what their profiles are of.
        gpu = chosen.gpu_description
        own = () if gpu in [find(Gpu, "gpus", name) for name in shipped("gpus")] else (gpu,)
        evaluate = evaluator(tuple(str(path) for path in profiles or []), own)
        result = evaluate(chosen, engine=engine)
        try:
            timeline = result.timeline if layer is None else evaluate.layer(chosen, layer)
        except ValueError as error:
            raise DescriptionError(f"--layer: {error}") from None
        show(result, output(json_))
        if coverage:
            show_coverage(result, output(json_))
        if json_ is not None:
            write_json(json_, result.to_json())
        if trace is not None:
            from hyscale_simulator.trace import write_trace

            write_trace(timeline, trace)
        return EXIT_HOLDS

    return run_command(command, argv, "simulate")


def show(result: Result, console: Console) -> None:
    """The result as a person reads it."""
    scenario = result.scenario
    low, high = result.uncertainty_s
    console.print(f"[bold]{scenario.name}[/bold]  {scenario.description}")
    console.print(
        f"step {result.step_time_s:.3f} s (90 %: {low:.3f} to {high:.3f})   "
        f"{result.tokens_per_s_per_gpu:,.1f} tokens/s/GPU   MFU {result.mfu:.1%}"
    )
    console.print(
        "[dim]MFU: model FLOPs (causal, selected keys only, no recomputation) over the bf16 peak[/dim]"
    )
    table = Table("", "forward", "recompute", "backward", "step", "seconds", "%", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    stages = len(result.stage_parts_ns)
    for name, seconds in result.breakdown:
        if seconds < 5e-4 * result.step_time_s:
            continue
        cells = [
            result.parts_ns.get(f"{phase}/{name}", 0) / stages / 1e9
            for phase in ("forward", "recompute", "backward", "step")
        ]
        shown = [f"{cell:.3f}" if cell else "" for cell in cells]
        table.add_row(name, *shown, f"{seconds:.3f}", f"{100 * seconds / result.step_time_s:.1f}")
    rest = sum(seconds for _, seconds in result.breakdown if seconds < 5e-4 * result.step_time_s)
    if rest:
        table.add_row(
            "everything else", "", "", "", "", f"{rest:.3f}", f"{100 * rest / result.step_time_s:.1f}"
        )
    table.add_row("[bold]step[/bold]", "", "", "", "", f"[bold]{result.step_time_s:.3f}[/bold]", "100.0")
    console.print(table)
    path = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.critical_path[:6])
    console.print(f"critical path (s): {path}")
    held = result.memory
    verdict = "[green]fits[/green]" if held.fits else "[red]does not fit[/red]"
    console.print(
        f"memory {held.peak_bytes / GIB:.1f} of {held.capacity_bytes / GIB:.1f} GiB on stage "
        f"{held.stage}: {verdict}  ({', '.join(f'{name} {size / GIB:.1f}' for name, size in held.items[:6])})"
    )
    if not held.fits:
        wanted = " and ".join(result.remedies) or "nothing tried suffices: use more GPUs"
        console.print(f"to fit: {wanted}")
    known = ", ".join(f"{how} {share:.0%}" for how, share in result.provenance.items() if share >= 0.005)
    console.print(f"kernel and communication time is: {known}")
    for warning in result.warnings:
        console.print(f"[yellow]warning:[/yellow] {warning}")
    console.print(f"[dim]scenario {scenario.hash}[/dim]")


def show_coverage(result: Result, console: Console) -> None:
    """What each op's price rests on."""
    table = Table("op", "dtype", "is", "% of time", "from", box=None, pad_edge=False)
    whole = sum(seconds for _, seconds in result.coverage)
    for (op, dtype, how, source), seconds in result.coverage:
        table.add_row(op, dtype, how, f"{100 * seconds / whole:.1f}", source)
    console.print(table)


def presets(argv: list[str]) -> int:
    """``hyscale presets``."""

    def command(
        schema: Annotated[
            bool, typer.Option("--schema", help="Print the JSON schemas of all description files.")
        ] = False,
        json_: Json = None,
    ) -> int:
        """List the shipped scenarios, models, clusters and GPUs."""
        if schema:
            print(json.dumps(schemas((Scenario, Model, Cluster, Gpu)), indent=2))
            return EXIT_HOLDS
        console = output(json_)
        scenarios = Table("scenario", "model", "cluster", "GPUs", "tokens", "what", box=None, pad_edge=False)
        for name in shipped("scenarios"):
            item = load(name)
            tokens = f"{item.batch.sequence_tokens:,}"
            where = (item.model_description.name, item.cluster_description.name, str(item.gpus))
            scenarios.add_row(name, *where, tokens, item.description)
        models = Table("model", "parameters", "active", "layers", "selects", box=None, pad_edge=False)
        for name in shipped("models"):
            model = find(Model, "models", name)
            selecting = sum(model.selects(layer) for layer in range(model.layers))
            models.add_row(
                name,
                f"{model.parameters:,}",
                f"{model.active_parameters:,}",
                str(model.layers),
                str(selecting),
            )
        gpus = Table("GPU", "bf16 TFLOPS", "fp8", "memory GB", "TB/s", box=None, pad_edge=False)
        for name in shipped("gpus"):
            gpu = find(Gpu, "gpus", name)
            rates = gpu.tensor_tflops
            gpus.add_row(
                name,
                f"{rates.bf16:g}",
                f"{rates.fp8 or 0:g}",
                f"{gpu.memory_gb:g}",
                f"{gpu.memory_tb_per_s:g}",
            )
        clusters = Table("cluster", "GPU", "nodes", "NICs a node", "Gbit/s", box=None, pad_edge=False)
        for name in shipped("clusters"):
            cluster = find(Cluster, "clusters", name)
            clusters.add_row(
                name,
                cluster.gpu_description().name,
                str(cluster.nodes),
                str(cluster.nics_per_node),
                f"{cluster.nic_gbit_per_s:g}",
            )
        for table in (scenarios, models, gpus, clusters):
            console.print(table)
            console.print()
        if json_ is not None:
            found = {folder: list(shipped(folder)) for folder in ("scenarios", "models", "gpus", "clusters")}
            write_json(json_, found)
        return EXIT_HOLDS

    return run_command(command, argv, "presets")


def validate(argv: list[str]) -> int:
    """``hyscale validate``."""

    def command(
        json_: Json = None,
        profiles: Annotated[
            list[Path] | None, typer.Option(help="Your measurements, ahead of the shipped.")
        ] = None,
        holdout: Annotated[
            bool, typer.Option("--holdout", help="Leave-one-shape-out error of every measured table instead.")
        ] = False,
        steps: Annotated[
            Path | None,
            typer.Option(help="Our measured steps: benchmarks/results/train_step.jsonl."),
        ] = None,
    ) -> int:
        """Hold the simulator against published step times, memory and kernels, and against measured steps."""
        files = tuple(str(path) for path in profiles or [])
        if holdout and steps is not None:
            raise DescriptionError("--holdout and --steps: one of them")
        return _holdout(files, json_) if holdout else _compare(files, json_, steps)

    return run_command(command, argv, "validate")


def _compare(profiles: tuple[str, ...], json_: Path | None, steps: Path | None) -> int:
    from hyscale_simulator import measured_text, validation, validation_text
    from hyscale_simulator.measured_steps import compare_measured, within

    console = output(json_)
    met, record = True, {}
    if steps is not None:  # read first: a bad file is an error before the work
        rows = compare_measured(steps, profiles)
        measured_text.show(rows, console)
        met, record = within(rows), {"measured": measured_text.record(rows)}
    found = validation.validate(profiles)
    met = validation_text.show(found, console) and met
    if json_ is not None:
        write_json(json_, validation_text.record(found) | record)
    return EXIT_HOLDS if met else EXIT_FAILED


def _holdout(profiles: tuple[str, ...], json_: Path | None) -> int:
    from hyscale_simulator.held_out import hold_out
    from hyscale_simulator.profiles import load_profiles
    from hyscale_simulator.validation_text import show_held_out

    found = hold_out(load_profiles(profiles).tables())
    met = show_held_out(found, output(json_))
    if json_ is not None:
        write_json(json_, {"tables": [row.to_json() for row in found]})
    return EXIT_HOLDS if met else EXIT_FAILED

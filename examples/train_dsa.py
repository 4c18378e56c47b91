"""Train a byte-level language model with sparse-attention layers on the sources of Python's own library.

    python examples/train_dsa.py --preset tiny --device cpu             # seconds, in Triton's interpreter
    python examples/train_dsa.py --preset small --save run.pt           # one GPU, minutes
    python examples/train_dsa.py --preset small --resume run.pt         # goes on, bit for bit
    torchrun --nproc-per-node 2 examples/train_dsa.py --preset glm --sequence 131072

Under torchrun the ranks share each sequence (context parallel). The log is JSON lines: a header with the
configuration, then one line a step. README.md beside this file says what is recorded.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from hyscale_kernels.profiling.environment import writable
from hyscale_ref.command import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_USAGE

if TYPE_CHECKING:
    from hyscale_kernels.training import RunConfig, StepResult, Trainer

Option = typer.Option


def one_of(*allowed: str) -> Callable[[str | None], str | None]:
    """A callback of an option: the value if it is allowed or None, else an error of usage."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{value!r}; allowed: {', '.join(allowed)}")
        return value

    return check


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    preset: Annotated[
        str,
        Option(
            help="tiny, small or glm: sizes of the model and of the run",
            callback=one_of("tiny", "small", "glm"),
        ),
    ] = "tiny",
    device: Annotated[
        str | None, Option(help="cuda, or cpu for tiny; default: a GPU", callback=one_of("cpu", "cuda"))
    ] = None,
    sequence: Annotated[int | None, Option(help="bytes a step, in every phase")] = None,
    layers: Annotated[int | None, Option(help="of the model; default: as the preset has")] = None,
    heads: Annotated[int | None, Option(help="query heads")] = None,
    indexer_heads: Annotated[int | None, Option(help="heads of the indexer")] = None,
    top_k: Annotated[int | None, Option(help="keys that a row selects")] = None,
    warmup_steps: Annotated[int | None, Option(help="of the warm-up stage")] = None,
    steps: Annotated[int | None, Option(help="of the last phase, the sparse stage")] = None,
    learning_rate: Annotated[float | None, Option(help="in every phase")] = None,
    selection: Annotated[
        str | None,
        Option(help="how keys are selected: hytopk, materialised, deepgemm+flashinfer or own-table"),
    ] = None,
    recompute: Annotated[
        str | None, Option(help="what the backward pass computes again: none, full or full+replay")
    ] = None,
    indexer_dtype: Annotated[str | None, Option(help="what the selection sees: 'as layer' or fp8")] = None,
    row_block: Annotated[
        int | None, Option(help="rows of a projection at a time: results then do not depend on the ranks")
    ] = None,
    context_parallel: Annotated[int | None, Option(help="ranks, as started by torchrun")] = None,
    split: Annotated[
        str,
        Option(
            help="of a sequence over ranks: contiguous or zigzag", callback=one_of("contiguous", "zigzag")
        ),
    ] = "zigzag",
    seed: Annotated[int | None, Option(help="of parameters and of the order of the text")] = None,
    deterministic: Annotated[bool, Option("--deterministic", help="the same bits on every run")] = False,
    recall_every: Annotated[int, Option(min=0, help="steps between two looks at the recall; 0: never")] = 0,
    jsonl: Annotated[Path | None, Option(help="log to add lines to; default: standard output")] = None,
    save: Annotated[Path | None, Option(help="checkpoint to write")] = None,
    save_every: Annotated[int, Option(min=0, help="steps between checkpoints; 0: at the end alone")] = 0,
    resume: Annotated[Path | None, Option(help="checkpoint to go on from")] = None,
) -> None:
    writable("--save", save)
    writable("--jsonl", jsonl)
    if save_every and save is None:
        raise typer.BadParameter("needs --save, which says where", param_hint="--save-every")
    device = _device(device, preset)
    _prepare(device)
    import torch

    from hyscale_kernels.training import PRESETS, CheckpointError, NotSavedError
    from hyscale_kernels.training.ranks import torchrun_group

    changes: dict[str, Any] = {
        "selection": selection, "recompute": recompute, "indexer_dtype": indexer_dtype, "seed": seed,
        "row_block": row_block, "deterministic": deterministic or None,
        "dtype": None if device == "cuda" else "float32",
    }  # fmt: skip
    if selection not in (None, "hytopk") and recompute is None:
        changes["recompute"] = "full"  # replay keeps HyTopK's selections alone
    try:
        config = _shaped(PRESETS[preset], layers, heads, indexer_heads, top_k)
        config = _phased(config, sequence, warmup_steps, steps, learning_rate)
        config = replace(config, **{name: value for name, value in changes.items() if value is not None})
        with torchrun_group(device, split, context_parallel) as (own, context):  # type: ignore[arg-type]
            _train(config, own, context, jsonl, save, save_every, resume, recall_every)
    except (ValueError, TypeError, RuntimeError, FloatingPointError, OSError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if isinstance(error, FloatingPointError):
            code = EXIT_FAILED  # it diverged
        elif isinstance(error, NotSavedError | OSError):
            code = EXIT_ENVIRONMENT
        elif isinstance(error, ValueError | CheckpointError) or "process group" in str(error):
            code = EXIT_USAGE
        else:
            raise
        print(f"train_dsa: {error}", file=sys.stderr)
        raise typer.Exit(code) from None


def _train(
    config: "RunConfig",
    device: Any,
    context: Any,
    log: Path | None,
    save: Path | None,
    save_every: int,
    resume: Path | None,
    recall_every: int,
) -> None:
    from hyscale_kernels import training
    from hyscale_kernels.provenance import environment

    text = training.library_text(config.text_bytes)
    trainer = training.Trainer(config, text, device, context)
    if resume is not None:
        training.load(trainer, resume)
    leads = context is None or context.rank == 0
    if trainer.done > config.steps:
        raise ValueError(
            f"{resume} is of step {trainer.done}, and the run ends at step {config.steps}: give more --steps"
        )
    if trainer.done == config.steps:
        if leads:
            print(
                f"train_dsa: nothing left to train: {resume} is of the last step, {trainer.done}",
                file=sys.stderr,
            )
        if save is not None:
            training.save(trainer, save)
        return
    with _opened(log, leads) as stream, _progress(leads) as progress:
        if leads:
            header = {"schema": 1, "kind": "run", **environment("training", "layer"), **trainer.identity()}
            _line(stream, {**header, "text_files": text.files, "text": text.source, "from": trainer.done})
        task = progress.add_task("", total=config.steps, completed=trainer.done, note="")
        while trainer.done < config.steps:
            result = trainer.step()
            last = trainer.done == config.steps
            record = {"kind": "step", **asdict(result)}
            if recall_every and (last or trainer.done % recall_every == 0):
                record["recall"] = _recall(trainer, config)
            if leads:
                _line(stream, record)
            progress.update(task, completed=trainer.done, note=_note(result))
            if save is not None and (last or (save_every and trainer.done % save_every == 0)):
                training.save(trainer, save)


def _recall(trainer: "Trainer", config: "RunConfig") -> dict[str, dict[str, float]]:
    found = trainer.recall(config.phases[-1])
    return {f"layer {layer}": each._asdict() for layer, each in found.items()}


def _shaped(
    config: "RunConfig", layers: int | None, heads: int | None, indexer_heads: int | None, top_k: int | None
) -> "RunConfig":
    from hyscale_kernels.training import PRESETS, first_layers, glm_layers

    shape = config.shape
    if layers is not None:
        shape = glm_layers(layers) if config == PRESETS["glm"] else first_layers(shape, layers)
    indexer = {"heads": indexer_heads, "top_k": top_k}
    given = {name: value for name, value in indexer.items() if value is not None}
    shape = replace(shape, indexer=replace(shape.indexer, **given))
    return replace(config, shape=shape if heads is None else replace(shape, heads=heads))


def _phased(
    config: "RunConfig",
    sequence: int | None,
    warmup_steps: int | None,
    steps: int | None,
    learning_rate: float | None,
) -> "RunConfig":
    phases = []
    for number, phase in enumerate(config.phases):
        changes: dict[str, Any] = {"sequence": sequence, "learning_rate": learning_rate}
        if phase.stage == "warmup":
            changes["steps"] = warmup_steps
        elif number == len(config.phases) - 1:
            changes["steps"] = steps
        phases.append(replace(phase, **{name: each for name, each in changes.items() if each is not None}))
    return replace(config, phases=tuple(phases))


def _note(result: "StepResult") -> str:
    tokens = result.sequence / result.step_ms * 1e3
    return (
        f"{result.stage} loss {result.loss:.4f} KL {sum(result.kl):.4f} "
        f"{result.step_ms:.0f} ms {tokens:,.0f} bytes/s {result.peak_bytes / 2**30:.1f} GiB"
    )


def _progress(leads: bool) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed}/{task.total} {task.fields[note]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not leads)


def _opened(log: Path | None, leads: bool) -> Any:
    if log is None or not leads:
        return nullcontext(sys.stdout)
    return log.open("a", encoding="utf-8")


def _line(stream: TextIO, record: dict[str, Any]) -> None:
    print(json.dumps(record), file=stream, flush=True)


def _device(wanted: str | None, preset: str) -> str:
    """The device to train on. Only tiny fits a CPU, which runs the kernels in Triton's interpreter: the
    others end here, exit code 3, where there is no GPU."""
    import torch

    fits = preset == "tiny"
    if wanted != "cpu" and torch.cuda.is_available():
        return "cuda"
    if fits and wanted != "cuda":
        return "cpu"
    needs = "--device cuda" if fits else f"--preset {preset}"
    found = "--device cpu is for tiny" if wanted == "cpu" else "PyTorch sees none on this machine"
    print(f"train_dsa: {needs} needs a GPU: {found}", file=sys.stderr)
    raise typer.Exit(EXIT_ENVIRONMENT)


def _prepare(device: str) -> None:
    """What must be set before the kernels are imported, or CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        from hyscale_verify.interpreter import quicken

        quicken()


if __name__ == "__main__":
    app()

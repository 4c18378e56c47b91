"""Measured training steps: a materialised selection against HyTopK, and against HyTopK with replay.

    python benchmarks/train_step.py --sequence 65536 --sequence 131072      # one GPU
    python benchmarks/train_step.py --largest                               # the longest that each mode fits
    python benchmarks/train_step.py --gpus 2 --sequence 262144              # context parallel
    python benchmarks/train_step.py --check                                 # 50 steps, bit for bit
    python benchmarks/train_step.py --preset tiny --device cpu --gpus 2     # a dry run, seconds

Each mode's record goes to benchmarks/results/train_step.jsonl once its steps are done; claims of --check, and
of the equality that is looked at before anything is timed, to train_step_checks.jsonl. The modes take turns
on the same parameters and text, at a learning rate of 0, so their losses can be compared. "materialised" is
the fastest of PyTorch and, where they are installed, DeepGEMM with FlashInfer, each with several sizes of the
table; what was tried is in the record.

Time, as measured for two layers of GLM-5.1 on an H200: a step of 64K tokens takes 1.9 s, one of 128K 3.8 to
4.0 s, in every mode, where DeepGEMM and FlashInfer are installed; one of 256K on two GPUs 4.1 to 4.8 s. So 2
+ 5 rounds of three modes at 128K take a minute and a half, after some 20 s in which ways to materialise are
tried, kernels compile and replay is held to equality. With PyTorch's table instead each of the step's four
selections takes 7 s. No round begins after --budget; a round at the lengths that --largest finds takes three
times as long.
"""

import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from devices import MODES, each_of, header, one_of, prepare, surroundings

if TYPE_CHECKING:
    from hyscale_kernels.training import RunConfig, Trainer
    from hyscale_kernels.training.measure import Baseline

RESULTS = Path(__file__).parent / "results"
Option = typer.Option
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do; the options of the command."""

    preset: str
    device: str
    gpus: int
    sequences: tuple[int, ...]
    largest: bool
    modes: tuple[str, ...]
    layers: int | None
    steps: int
    warmups: int
    baseline: str
    split: str
    check: bool
    check_steps: int
    out: Path
    commit: str
    deadline: float


@app.command(help=__doc__)
def main(
    preset: Annotated[
        str, Option(help="glm, small or tiny", callback=one_of("glm", "small", "tiny"))
    ] = "glm",
    device: Annotated[
        str | None, Option(help="cuda, or cpu for tiny; default: a GPU", callback=one_of("cpu", "cuda"))
    ] = None,
    gpus: Annotated[int, Option(min=1, help="ranks of the context-parallel group")] = 1,
    sequence: Annotated[list[int] | None, Option(help="tokens of a step; may be repeated")] = None,
    largest: Annotated[
        bool, Option("--largest", help="find the longest that fits, and measure there")
    ] = False,
    only: Annotated[
        list[str] | None,
        Option(help="mode to measure; may be repeated; default: all", callback=each_of(*MODES)),
    ] = None,
    layers: Annotated[int | None, Option(help="of the model; default: as the preset has")] = None,
    steps: Annotated[int, Option(min=1, help="timed steps of a mode")] = 5,
    warmups: Annotated[int, Option(min=0, help="steps before them")] = 2,
    baseline: Annotated[
        str,
        Option(
            help="what materialises the scores: best, torch or deepgemm+flashinfer",
            callback=one_of("best", "torch", "deepgemm+flashinfer"),
        ),
    ] = "best",
    split: Annotated[
        str,
        Option(
            help="of a sequence over ranks: zigzag or contiguous", callback=one_of("zigzag", "contiguous")
        ),
    ] = "zigzag",
    check: Annotated[bool, Option("--check", help="only show what must be equal, bit for bit")] = False,
    check_steps: Annotated[int, Option(min=2, help="of --check")] = 50,
    budget: Annotated[float, Option(help="seconds after which no round begins")] = 480.0,
    out: Annotated[Path, Option(help="folder of the records")] = RESULTS,
    commit: Annotated[str, Option(help="to record; default: as git says")] = "",
) -> None:
    device = prepare(device, needs="" if preset == "tiny" else f"--preset {preset}", gpus=gpus)
    plan = Plan(
        preset=preset, device=device, gpus=gpus, sequences=tuple(sequence or ()), largest=largest,
        modes=tuple(only or MODES), layers=layers, steps=steps, warmups=warmups, baseline=baseline,
        split=split, check=check, check_steps=check_steps, out=out, commit=commit,
        deadline=time.time() + budget,
    )  # fmt: skip
    if gpus == 1:
        import torch

        _run(plan, torch.device(device), None)
    else:
        from hyscale_kernels.training.ranks import start

        start(_rank, gpus, plan)


def _rank(rank: int, size: int, store: str, plan: Plan) -> None:
    prepare(plan.device)
    from hyscale_kernels.layer import ContextParallel
    from hyscale_kernels.training.ranks import group_of

    with group_of(rank, size, store, plan.device) as device:
        _run(plan, device, ContextParallel.over(split=plan.split))  # type: ignore[arg-type]


def _run(plan: Plan, device: Any, context: Any) -> None:
    from hyscale_kernels.training import PRESETS, Trainer, first_layers, glm_layers, library_text

    config = PRESETS[plan.preset]
    if plan.layers is not None:
        glm = plan.preset == "glm"
        config = replace(
            config, shape=glm_layers(plan.layers) if glm else first_layers(config.shape, plan.layers)
        )
    if plan.check:
        _check(plan, config, device, context)
        return
    config = replace(config, phases=(config.phases[-1],))
    sequences = plan.sequences or (() if plan.largest else (config.phases[0].sequence,))
    trainer = Trainer(config, library_text(config.text_bytes), device, context)
    for length in sequences:
        _measure(plan, trainer, length, {})
    if plan.largest:
        _largest(plan, trainer)


def _measure(plan: Plan, trainer: "Trainer", sequence: int, longest: dict[str, Any]) -> None:
    """Measure all modes at one length, and write each one's record."""
    from hyscale_kernels.training.measure import rank_0_says
    from hyscale_kernels.training.modes import measure_modes
    from hyscale_kernels.training.records import append, scenario, step_record

    phase = replace(trainer.config.phases[-1], sequence=sequence)
    baseline = _baseline(plan, trainer, sequence)
    _equal(plan, trainer, baseline)
    found = measure_modes(
        trainer, phase, plan.modes, baseline, warmups=plan.warmups, rounds=plan.steps,  # type: ignore[arg-type]
        go_on=lambda: rank_0_says(time.time() < plan.deadline, trainer.context),
    )  # fmt: skip
    if trainer.context is not None and trainer.context.rank:
        return
    for mode, summary in found.items():
        if isinstance(summary, str):
            print(f"train_step: {mode} at {sequence}: {summary}", file=sys.stderr)
            continue
        figures = asdict(summary)
        record = step_record(
            **header(plan.commit, plan.device), gpus=plan.gpus, sequence=sequence, mode=mode,
            **{name: figures.pop(name) for name in ("step_ms", "parts", "peak_bytes", "loss")},
            config={
                "scenario": scenario(
                    trainer.config, mode, sequence=sequence, gpus=plan.gpus, split=plan.split,  # type: ignore[arg-type]
                    baseline=baseline.selection, table_bytes=baseline.table_bytes,
                ),
                "run": trainer.identity(),
                "baseline": asdict(baseline) if mode == "materialised" else None,
                **figures,
                "longest": longest,
                **surroundings(),
            },
        )  # fmt: skip
        append(plan.out / "train_step.jsonl", record)
        print(
            f"{mode:14} {sequence:>8} {summary.step_ms:10.1f} ms {summary.peak_bytes / 2**30:6.1f} GiB",
            flush=True,
        )


def _baseline(plan: Plan, trainer: "Trainer", sequence: int) -> "Baseline":
    from hyscale_kernels.training.measure import Baseline, best_baseline, rank_0_says

    layer = trainer.config.decoder().layer
    if "materialised" not in plan.modes:
        return Baseline("materialised", layer.table_bytes, {})
    if plan.baseline == "deepgemm+flashinfer":
        return Baseline("deepgemm+flashinfer", layer.table_bytes, {})
    found = best_baseline(layer, sequence, trainer.device, rivals=plan.baseline == "best")
    chosen: Baseline = rank_0_says(found, trainer.context)
    return chosen


def _equal(plan: Plan, trainer: "Trainer", baseline: "Baseline") -> None:
    """Losses and gradients with and without replay, of one short step, bit for bit; RuntimeError if not."""
    import torch

    from hyscale_kernels.training.modes import gradients

    first = trainer.config.phases[-1]
    shares = plan.gpus * (2 if plan.split == "zigzag" else 1)
    short = (trainer.config.row_block or 8) * shares
    phase = replace(first, sequence=max(short, min(first.sequence, 8192) // short * short))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        once, twice = (gradients(trainer, phase, mode, baseline) for mode in ("hytopk+replay", "hytopk"))
    finally:
        torch.use_deterministic_algorithms(before)
    claim = "loss and gradients with replay equal those without, bit for bit"
    _claim(plan, trainer, claim, once == twice, {"sequence": phase.sequence, "loss": once[0]})
    if once != twice:
        raise RuntimeError(f"replay changes the result: {once} against {twice}; nothing is timed")


def _largest(plan: Plan, trainer: "Trainer") -> None:
    """The longest sequence that fits in each mode; then all modes at the longest that every one fits."""
    import torch

    from hyscale_kernels.training import retargeted
    from hyscale_kernels.training.measure import clear, longest, over_ranks
    from hyscale_kernels.training.records import layer_options

    block = (trainer.config.row_block or 8) * plan.gpus * 2
    start = 32768 * plan.gpus if plan.device == "cuda" else block
    share = 0.96 if plan.gpus == 1 else 0.92  # a rank that runs out alone would leave the others waiting
    if plan.device == "cuda":
        capacity = int(torch.cuda.get_device_properties(trainer.device).total_memory * share)
    else:
        capacity = 2**40
    baseline = _baseline(plan, trainer, 4 * start)
    own = trainer.model
    found: dict[str, dict[str, Any]] = {}
    for mode in plan.modes:
        options = layer_options(mode, baseline.selection, baseline.table_bytes)  # type: ignore[arg-type]
        trainer.model = retargeted(own, **options)

        def peak(length: int) -> int | None:
            phase = replace(trainer.config.phases[-1], sequence=length, learning_rate=0.0)
            clear(trainer.device)
            result = None
            with suppress(torch.OutOfMemoryError):
                result = trainer.step(phase).peak_bytes
            clear(trainer.device)
            peaks = over_ranks(result, trainer.context)
            return None if None in peaks else max(peaks)

        limit = 16 * start if plan.device == "cuda" else 2 * start
        length, tried = longest(peak, start=start, unit=block, capacity=capacity, limit=limit)
        found[mode] = {"tokens": length, "tried": tried}
        if trainer.context is None or trainer.context.rank == 0:
            print(f"{mode:14} longest {length} of {tried}", file=sys.stderr, flush=True)
    trainer.model = own
    shortest = min(each["tokens"] for each in found.values())
    if shortest:
        _measure(plan, trainer, shortest, found)


def _check(plan: Plan, config: "RunConfig", device: Any, context: Any) -> None:
    """What training promises of bits: replay, restart, and selections against a sorted score table.

    Exit status 1 if a promise is broken.
    """
    from hyscale_kernels.training import Trainer, library_text, load, save
    from hyscale_kernels.training.measure import clear

    text = library_text(config.text_bytes)
    sequence = min(config.phases[-1].sequence, 8192)
    phase = replace(config.phases[-1], sequence=sequence, document=None, steps=plan.check_steps)
    config = replace(config, phases=(phase,), deterministic=True)

    def train(
        until: int, recompute: Any, selection: Any = "hytopk", resume: Path | None = None
    ) -> tuple[Trainer, list[float]]:
        clear(device)
        trainer = Trainer(replace(config, recompute=recompute, selection=selection), text, device, context)
        if resume is not None:
            load(trainer, resume)
        losses = []
        while trainer.done < until:
            result = trainer.step()
            losses.append(result.loss + sum(result.kl))
        return trainer, losses

    half = plan.check_steps // 2
    trainer, plain = train(plan.check_steps, "full")
    facts = {"steps": plan.check_steps, "sequence": sequence, "first_loss": plain[0], "last_loss": plain[-1]}
    held = [_claim(plan, trainer, "the loss falls", plain[-1] < plain[0], {**facts, "losses": plain})]
    del trainer
    trainer, sorted_table = train(plan.check_steps, "full", "own-table")
    claim = "losses with HyTopK and with a sorted table of its scores are bit-equal"
    held.append(_claim(plan, trainer, claim, sorted_table == plain, facts))
    del trainer
    folder = Path(tempfile.mkdtemp()) if context is None or context.rank == 0 else Path()
    try:
        trainer, first = train(half, "full+replay")
        save(trainer, folder / "half.pt")
        more = [trainer.step() for _ in range(plan.check_steps - half)]
        replayed = first + [result.loss + sum(result.kl) for result in more]
        claim = "losses with and without replay are bit-equal"
        held.append(_claim(plan, trainer, claim, replayed == plain, facts))
        del trainer
        if context is None:
            trainer, rest = train(plan.check_steps, "full+replay", resume=folder / "half.pt")
            claim = "a restart gives the same losses, bit for bit"
            held.append(_claim(plan, trainer, claim, rest == replayed[half:], {**facts, "from": half}))
    finally:
        if folder != Path():
            shutil.rmtree(folder, ignore_errors=True)
    if not all(held):
        raise typer.Exit(1)


def _claim(plan: Plan, trainer: "Trainer", claim: str, holds: bool, facts: dict[str, Any]) -> bool:
    """Write the claim, and give back whether it holds."""
    from hyscale_kernels.training.records import append

    if trainer.context is not None and trainer.context.rank:
        return holds
    record = {
        "schema": 1, **header(plan.commit, plan.device), "gpus": plan.gpus, "claim": claim, "holds": holds,
        **facts, "config": {"run": trainer.identity(), **surroundings()},
    }  # fmt: skip
    append(plan.out / "train_step_checks.jsonl", record)
    print(f"{'holds' if holds else 'FAILS'}: {claim}", flush=True)
    return holds


if __name__ == "__main__":
    app()

"""Context parallelism measured: training steps on 1, 2, 4 and 8 GPUs of one machine, in three modes.

    python benchmarks/scaling.py --predict          # on a CPU, before: what the simulator says of each step
    python benchmarks/scaling.py                    # on the machine, one call of at most 10 minutes
    python benchmarks/scaling.py --tiny --device cpu --ranks 1 --ranks 8    # a dry run over gloo

Weak scaling (a fixed number of tokens a GPU) and strong scaling (a fixed sequence), zig-zag and contiguous,
the most telling first: no step begins after --budget, and what is left is listed. Under --out:

    scaling.jsonl              a line a mode, as benchmarks/train_step.py writes them
    scaling_checks.jsonl       selections on P ranks against one rank, by hash; losses
    scaling_nccl.jsonl         all-gather and reduce-scatter, 1 MiB to 2 GiB, as a profile
    scaling_predicted.jsonl    predictions, with the time at which they were made

NVLink multicast stays off.

Time, as measured for two layers of GLM-5.1 on H200: a step of 64K tokens a GPU takes 1.9 to 2.3 s on one and
on two GPUs, in every mode, where DeepGEMM and FlashInfer are installed; on eight the simulator predicts 2.6
s, contiguous 3.2. The 12 groups of three modes, 1 + 3 rounds, take 290 s of steps and some 5 s each besides,
the NCCL tables up to 40 s.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from devices import MODES, each_of, header, one_of, prepare, surroundings

if TYPE_CHECKING:
    from hyscale_kernels.training import RunConfig, Trainer
    from hyscale_kernels.training.measure import Baseline

RESULTS = Path(__file__).parent / "results"
BASELINES = ("materialised", "deepgemm+flashinfer")
TABLE_SIZES = tuple(2**power for power in (20, 22, 24, 26, 28, 30, 31))
NCCL_S = 40.0  # that the tables should take
Option = typer.Option
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Job(NamedTuple):
    """Steps of all modes that share ranks, a length and a split."""

    ranks: int
    sequence: int
    split: str
    kind: str  # of scaling: "weak", "strong", or "weak and strong"


def jobs(ranks: tuple[int, ...], weak: int, strong: int, splits: tuple[str, ...]) -> list[Job]:
    """What to measure, most telling first: weak zig-zag from the most ranks, strong, then contiguous.

    One rank has one split, and a length that both kinds of scaling ask for is measured once.
    """
    found: dict[tuple[int, int, str], Job] = {}
    most = sorted(ranks, reverse=True)
    wanted = [("weak", most[:1], "zigzag"), ("strong", most[:1], "zigzag"), ("weak", most[-1:], "zigzag")]
    wanted += [("weak", most[:1], "contiguous"), ("strong", most[-1:], "zigzag")]
    wanted += [("weak", most, "zigzag"), ("strong", most, "zigzag")]
    wanted += [("weak", most, "contiguous"), ("strong", most, "contiguous")]
    for kind, sizes, split in wanted:
        for size in sizes:
            if split not in splits or (size == 1 and split == "contiguous"):
                continue
            sequence = weak * size if kind == "weak" else strong
            key = (size, sequence, split)
            both = key in found and kind not in found[key].kind
            found[key] = Job(
                size, sequence, split, "weak and strong" if both else found.get(key, Job(*key, kind)).kind
            )
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of the command."""

    device: str
    tiny: bool
    ranks: tuple[int, ...]
    jobs: tuple[Job, ...]
    modes: tuple[str, ...]
    layers: int
    warmups: int
    rounds: int
    out: Path
    commit: str
    deadline: float

    def config(self) -> "RunConfig":
        """The model and how it trains; projections in blocks, so that ranks cannot change a result."""
        from hyscale_kernels.training import PRESETS, glm_layers

        if self.tiny:
            config = replace(PRESETS["tiny"], row_block=2)
            if self.device == "cuda":
                config = replace(config, dtype="bfloat16")
        else:
            config = replace(PRESETS["glm"], shape=glm_layers(self.layers))
        phase = replace(config.phases[-1], sequence=self.checked(config.row_block or 1))
        return replace(config, phases=(phase,))

    def checked(self, row_block: int) -> int:
        """The length at which selections are compared: the shortest that every number of ranks can cut."""
        return row_block * 2 * max(self.ranks)


@app.command(help=__doc__)
def main(
    predict: Annotated[bool, Option("--predict", help="only write what the simulator predicts")] = False,
    device: Annotated[
        str | None, Option(help="cuda, or cpu for tiny; default: a GPU", callback=one_of("cpu", "cuda"))
    ] = None,
    tiny: Annotated[bool, Option("--tiny", help="the model that fits Triton's interpreter")] = False,
    ranks: Annotated[
        list[int] | None, Option(help="GPUs; may be repeated; default: 1, 2, 4, 8, as many as there are")
    ] = None,
    weak: Annotated[int | None, Option(help="tokens a GPU; default: 65536")] = None,
    strong: Annotated[int | None, Option(help="tokens of strong scaling; default: 131072")] = None,
    split: Annotated[
        list[str] | None,
        Option(help="zigzag, contiguous; default: both", callback=each_of("zigzag", "contiguous")),
    ] = None,
    only: Annotated[
        list[str] | None,
        Option(help="mode; may be repeated; default: all three", callback=each_of(*MODES)),
    ] = None,
    layers: Annotated[int, Option(min=1, help="layers of GLM-5.1")] = 2,
    warmups: Annotated[int, Option(min=0, help="steps of each mode before those that are timed")] = 1,
    rounds: Annotated[int, Option(min=1, help="timed steps of each mode")] = 3,
    tables: Annotated[bool, Option(help="time NCCL's collectives as well")] = True,
    budget: Annotated[float, Option(help="seconds after which nothing begins")] = 510.0,
    out: Annotated[Path, Option(help="folder of the records")] = RESULTS,
    commit: Annotated[str, Option(help="to record; default: as git says")] = "",
) -> None:
    began = time.time()
    needs = "" if tiny or predict else "the model without --tiny"
    device = prepare("cpu" if predict else device, needs=needs, gpus=max(ranks or [1]))
    sizes = tuple(sorted(set(ranks or _sizes(device, predict))))
    planned = jobs(
        sizes, weak or (16 if tiny else 65536), strong or (32 if tiny else 131072),
        tuple(split or ("zigzag", "contiguous")),
    )  # fmt: skip
    plan = Plan(
        device=device, tiny=tiny, ranks=sizes, jobs=tuple(planned), modes=tuple(only or MODES), layers=layers,
        warmups=warmups, rounds=rounds, out=out, commit=commit, deadline=began + budget,
    )  # fmt: skip
    if predict:
        _predict(plan)
        return
    if device == "cuda" and tables and max(sizes) > 1:
        _tables(plan)
    from hyscale_kernels.training.ranks import start

    start(_rank, max(sizes), plan)


def _sizes(device: str, predict: bool) -> list[int]:
    """Powers of two, up to the GPUs that there are."""
    import torch

    present = 8 if predict else torch.cuda.device_count() if device == "cuda" else 2
    return [size for size in (1, 2, 4, 8) if size <= present]


def _rank(rank: int, size: int, store: str, plan: Plan) -> None:
    """One process. Those that a job does without wait, on the host, until it is done."""
    prepare(plan.device)
    from datetime import timedelta

    from torch import distributed

    from hyscale_kernels.training import library_text
    from hyscale_kernels.training.ranks import group_of

    with group_of(rank, size, store, plan.device) as device:
        meeting = distributed.new_group(backend="gloo", timeout=timedelta(minutes=10))
        groups = {
            ranks: distributed.new_group(list(range(ranks))) for ranks in plan.ranks if 1 < ranks < size
        }
        groups[size] = distributed.group.WORLD
        bench = Bench(plan, device, library_text(plan.config().text_bytes))
        for number, job in enumerate(plan.jobs):
            go = [time.time() < plan.deadline]
            distributed.broadcast_object_list(go, src=0, group=meeting)
            if not go[0]:
                left = ", ".join(
                    f"{each.ranks} x {each.sequence} {each.split}" for each in plan.jobs[number:]
                )
                if rank == 0:
                    print(f"scaling: no time for {left}", file=sys.stderr, flush=True)
                break
            if rank < job.ranks:
                bench.run(job, groups.get(job.ranks))
            distributed.barrier(meeting)
        bench.close()


class Bench:
    """What a process keeps from job to job."""

    def __init__(self, plan: Plan, device: Any, text: Any) -> None:
        self.plan, self.device, self.text, self.config = plan, device, text, plan.config()
        self.baseline: Baseline | None = None
        self.checks: dict[tuple[int, str], dict[str, Any]] = {}

    def run(self, job: Job, group: Any) -> None:
        """All modes of one job; rank 0 writes."""
        from hyscale_kernels.layer import ContextParallel
        from hyscale_kernels.training import Trainer
        from hyscale_kernels.training.measure import clear, rank_0_says
        from hyscale_kernels.training.modes import measure_modes

        clear(self.device)
        context = None if job.ranks == 1 else ContextParallel.over(group, split=job.split)  # type: ignore[arg-type]
        trainer = Trainer(self.config, self.text, self.device, context)
        self._check(trainer, job)
        baseline = self._baseline(trainer)
        phase = replace(self.config.phases[-1], sequence=job.sequence)
        found = measure_modes(
            trainer, phase, self.plan.modes, baseline,  # type: ignore[arg-type]
            warmups=self.plan.warmups, rounds=self.plan.rounds,
            go_on=lambda: rank_0_says(time.time() < self.plan.deadline, context),
        )  # fmt: skip
        if context is None or context.rank == 0:
            for mode, summary in found.items():
                self._write(trainer, job, mode, summary, baseline)

    def _write(self, trainer: "Trainer", job: Job, mode: str, summary: Any, baseline: "Baseline") -> None:
        from hyscale_kernels.training.records import append, step_record

        where = f"{job.ranks} x {job.sequence} {job.split} {mode}"
        if isinstance(summary, str):
            print(f"scaling: {where}: {summary}", file=sys.stderr, flush=True)
            return
        figures = asdict(summary)
        record = step_record(
            **header(self.plan.commit, self.plan.device), gpus=job.ranks, sequence=job.sequence, mode=mode,  # type: ignore[arg-type]
            **{name: figures.pop(name) for name in ("step_ms", "parts", "peak_bytes", "loss")},
            config={
                "scenario": described(trainer.config, job, mode, baseline.selection, baseline.table_bytes),
                "scaling": job.kind, "split": job.split, "run": trainer.identity(),
                "baseline": asdict(baseline) if mode == "materialised" else None, **figures, **surroundings(),
            },
        )  # fmt: skip
        append(self.plan.out / "scaling.jsonl", record)
        selection = summary.imbalance["selection.forward"]
        print(
            f"{where:44} {summary.step_ms:9.1f} ms, communication {min(summary.communication_ms):7.1f} to "
            f"{max(summary.communication_ms):7.1f} ms, selection {selection:.3f} of the mean, "
            f"{summary.peak_bytes / 2**30:5.1f} GiB",
            flush=True,
        )

    def _baseline(self, trainer: "Trainer") -> "Baseline":
        """Found once, at the length of strong scaling: the best size of a table hardly depends on it."""
        from hyscale_kernels.training.measure import Baseline, best_baseline, rank_0_says

        layer = self.config.decoder().layer
        if self.baseline is None and "materialised" not in self.plan.modes:
            self.baseline = Baseline("materialised", layer.table_bytes, {})
        if self.baseline is None:
            self.baseline = best_baseline(layer, 131072 if not self.plan.tiny else 32, self.device)
        chosen: Baseline = rank_0_says(self.baseline, trainer.context)
        return chosen

    def _check(self, trainer: "Trainer", job: Job) -> None:
        """Selections and losses before any step; every job begins with the same parameters."""
        from hyscale_kernels.training.modes import selection_hashes

        split = job.split if job.ranks > 1 else ""
        if (job.ranks, split) not in self.checks:
            phase = self.config.phases[-1]
            hashes, (loss, kl) = selection_hashes(trainer, phase), trainer.evaluate(phase)
            self.checks[job.ranks, split] = {
                "selections": {f"layer {layer}": value for layer, value in hashes.items()},
                "loss": loss, "kl": kl, "sequence": phase.sequence,
            }  # fmt: skip

    def close(self) -> None:
        """Write what was compared. Only rank 0 has seen one rank alone."""
        from hyscale_kernels.training.records import append

        alone = self.checks.pop((1, ""), None)
        if alone is None:
            return
        for (ranks, split), seen in self.checks.items():
            equal = seen["selections"] == alone["selections"]
            record = {
                "schema": 1, **header(self.plan.commit, self.plan.device), "gpus": ranks, "split": split,
                "claim": "selections of all layers equal those on one GPU, bit for bit", "holds": equal,
                "loss_difference": seen["loss"] - alone["loss"],
                "kl_difference": [a - b for a, b in zip(seen["kl"], alone["kl"], strict=True)],
                **seen, "config": {"run": self.config.as_json(), **surroundings()},
            }  # fmt: skip
            append(self.plan.out / "scaling_checks.jsonl", record)
            print(f"{'holds' if equal else 'FAILS'}: {ranks} ranks {split} select as one does", flush=True)


def described(config: "RunConfig", job: Job, mode: str, selection: Any, table_bytes: int) -> dict[str, Any]:
    """The step as a scenario of the simulator."""
    from hyscale_kernels.training.records import scenario

    return scenario(
        config, mode, sequence=job.sequence, gpus=job.ranks, split=job.split,  # type: ignore[arg-type]
        baseline=selection, table_bytes=table_bytes,
    )  # fmt: skip


def _tables(plan: Plan) -> None:
    """NCCL's all-gather and reduce-scatter, as a profile that the simulator reads."""
    from hyscale_kernels.profiling.machine import CudaMachine
    from hyscale_kernels.profiling.measure import shared
    from hyscale_kernels.profiling.op import Entry
    from hyscale_kernels.profiling.ops import ALL
    from hyscale_kernels.profiling.ranks import measure_collectives
    from hyscale_ref.profile import ProfileWriter

    machine = CudaMachine(plan.commit)
    ops = [op for op in ALL if op.name in ("all_gather", "reduce_scatter")]
    entries = [
        Entry(op, {"ranks": size, "bytes": whole})
        for size in plan.ranks if size > 1 for op in ops for whole in TABLE_SIZES
    ]  # fmt: skip
    plan.out.mkdir(parents=True, exist_ok=True)
    end = min(plan.deadline, time.time() + 3 * NCCL_S)
    with ProfileWriter(plan.out / "scaling_nccl.jsonl", shared(machine)) as sink:
        for point in measure_collectives(entries, machine, sink, time_left=lambda: end - time.time()):
            shape = dict(point.shape)
            rate = f"{(point.bytes_per_s or 0) / 1e9:6.1f} GB/s" if point.status == "ok" else point.error
            print(
                f"{point.op:15} {shape['ranks']} ranks {shape['bytes'] / 2**20:6.0f} MiB {rate}", flush=True
            )


def _predict(plan: Plan) -> None:
    """What the simulator says of every step, from kernel profiles alone; both ways to materialise."""
    from hyscale_kernels.profiling.machine import git_commit
    from hyscale_simulator.descriptions import parse
    from hyscale_simulator.evaluate import evaluate
    from hyscale_simulator.measured_steps import executed
    from hyscale_simulator.scenario import Scenario

    config, now = plan.config(), datetime.now(UTC).isoformat(timespec="seconds")
    lines = []
    for job, mode in product(plan.jobs, plan.modes):
        for selection in BASELINES if mode == "materialised" else ("",):
            fields = described(config, job, mode, selection or "materialised", config.table_bytes)
            scenario = executed(parse(Scenario, fields, f"{job}"), config.as_json())
            result = evaluate(scenario)
            record = {
                "schema": 1, "time_utc": now, "commit": plan.commit or git_commit(), "gpus": job.ranks,
                "sequence": job.sequence, "split": job.split, "scaling": job.kind, "mode": mode,
                "baseline": selection, "step_ms": result.step_time_s * 1e3,
                "breakdown_ms": {name: seconds * 1e3 for name, seconds in result.breakdown if seconds},
                "known": result.provenance, "scenario_hash": scenario.hash, "scenario": fields,
            }  # fmt: skip
            lines.append(record)
            where = f"{job.ranks} x {job.sequence:>7} {job.split:10} {mode:14} {selection:20}"
            print(f"{where} {record['step_ms']:9.1f} ms")
    plan.out.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (plan.out / "scaling_predicted.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    app()

"""Which layout?  Every legal way to cut a model over a cluster, priced; and why the others were refused.

Data parallelism is what the other sizes leave.  Refusals are counted by the rule they break, so that a reader
sees what to change to have more choice.

Steps of many microbatches are ranked first by a short step, of twice as many microbatches as the pipeline has
stages: each further one adds one pass through the slowest stage, so a step of m takes about
(m + p - 1) / (3p - 1) times as long.  The best of that ranking are then priced in full.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from hyscale_simulator.descriptions import DescriptionError
from hyscale_simulator.executors import Executor
from hyscale_simulator.layout import LayoutError, Plan, plan
from hyscale_simulator.memory import GIB, memory
from hyscale_simulator.scenario import Scenario
from hyscale_simulator.sweep import Journal, Objective, Point, Row, ranked, sweep

__all__ = ["Choice", "Outcome", "Refusal", "candidates", "search"]

RECOMPUTE = ("none", "selective", "full")
OFFLOAD = (0.0, 1.0)
FINALISTS = 3
"""Layouts priced in full, as a multiple of those shown."""


@dataclass(frozen=True)
class Choice:
    """A candidate that runs: what was chosen, the scenario, and its row of metrics."""

    scenario: Scenario
    cut: Plan
    changes: dict[str, object]
    host_gib: float = 0.0
    """Activations that each GPU keeps in host memory; whether there is room is not checked."""
    row: Row = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Short for a table: TP1 CP64 PP8 DP1 EP64, full recomputation."""
        cut, scenario = self.cut, self.scenario
        name = f"TP{cut.tensor} CP{cut.context} PP{cut.pipeline} DP{cut.data} EP{cut.expert}"
        if scenario.layout.stage_layers:
            name += f" stages {'-'.join(str(len(c)) for c in cut.pieces)}"
        extra = [f"{scenario.recompute.policy} recompute"]
        if scenario.offload.activations:
            extra.append(f"{self.host_gib:.0f} GiB a GPU on the host")
        return f"{name}, {', '.join(extra)}"


@dataclass
class Refusal:
    """A rule that candidates broke: how many, and the one of them in full that misses it least."""

    rule: str
    count: int
    example: str
    excess: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The search: what can run, best first, and what cannot and why."""

    best: tuple[Choice, ...]
    tried: int
    ran: int
    refusals: tuple[Refusal, ...]


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def _stages(scenario: Scenario) -> list[tuple[int, tuple[int, ...]]]:
    """(pipeline stages, layers of each): where a stage has to begin with a layer that selects, the cuts
    nearest to even that do."""
    model = scenario.model_description
    found: list[tuple[int, tuple[int, ...]]] = []
    starts = [layer for layer in range(model.layers) if model.selects(layer)]
    sharing = model.indexer is not None and 0 < len(starts) < model.layers and not model.indexer.dense_ratio
    for stages in _powers(min(scenario.gpus, model.layers)):
        if not sharing or stages == 1:
            found.append((stages, ()))
            continue
        cuts = sorted({min(starts, key=lambda s: abs(s - model.layers * i / stages)) for i in range(stages)})
        if len(cuts) == stages and cuts[0] == 0:
            ends = [*cuts[1:], model.layers]
            found.append((stages, tuple(end - cut for cut, end in zip(cuts, ends, strict=True))))
    return found


def candidates(scenario: Scenario) -> Iterator[dict[str, object]]:
    """Fields of every layout worth trying on the scenario's GPUs: powers of two, and each policy."""
    model, cluster = scenario.model_description, scenario.cluster_description
    experts = model.experts.experts if model.experts else 1
    for (stages, layers), tensor in product(_stages(scenario), _powers(cluster.gpus_per_node)):
        if scenario.gpus % (stages * tensor):
            continue
        rest = scenario.gpus // stages // tensor
        for context in _powers(rest):
            if scenario.gpus % (stages * tensor * context):
                continue
            for expert in _powers(min(experts, scenario.gpus // stages)):
                for policy, moved in product(RECOMPUTE, OFFLOAD):
                    yield {
                        "layout.tensor_parallel": tensor,
                        "layout.context_parallel": context,
                        "layout.pipeline_parallel": stages,
                        "layout.expert_parallel": expert,
                        "layout.stage_layers": layers,
                        "recompute.policy": policy,
                        "recompute.replay": scenario.recompute.replay and policy == "full",
                        "offload.activations": moved,
                    }


_NUMBERS = re.compile(r"\d[\d,.]*")


def search(
    scenario: Scenario,
    objective: Objective,
    run: Executor,
    journal: Journal,
    *,
    profiles: tuple[str, ...] = (),
    top: int = 10,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Try every candidate: the rules of layouts first, then memory, then the step of what is left.

    :class:`DescriptionError` if the scenario allows no candidate at all.
    """
    able: list[Choice] = []
    refusals: dict[str, Refusal] = {}
    tried = 0

    def refuse(message: str, example: str = "", excess: float = 0.0) -> None:
        message = message.removeprefix(f"scenario {scenario.name}: ")
        known = refusals.setdefault(_rule(message), Refusal(_rule(message), 0, example or message, excess))
        known.count += 1
        if excess < known.excess:
            known.example, known.excess = example, excess

    for changes in candidates(scenario):
        tried += 1
        changed = scenario.with_(**changes)
        try:
            cut = plan(changed)
        except LayoutError as error:
            refuse(str(error))
            continue
        held = memory(changed, cut)
        moved = 0.0
        if changed.offload.activations:
            here = memory(changed.with_(**{"offload.activations": 0.0}), cut)
            moved = (here.peak_bytes - held.peak_bytes) / GIB
        choice = Choice(changed, cut, changes, moved)
        if not held.fits:
            largest = ", ".join(f"{name} {size / GIB:.0f}" for name, size in held.items[:3])
            refuse(
                "does not fit into memory",
                f"{choice.label}: {held.peak_bytes / GIB:.0f} of {held.capacity_bytes / GIB:.0f} GiB "
                f"({largest} GiB)",
                held.peak_bytes - held.capacity_bytes,
            )
            continue
        able.append(choice)
    if not tried:
        raise DescriptionError(f"scenario {scenario.name}: gpus = {scenario.gpus}: no layout to try")

    def price(scenarios: Sequence[Scenario]) -> list[Row]:
        return sweep([Point((), item) for item in scenarios], run, journal, profiles, progress)

    short = price([_short(choice) for choice in able])
    promising: list[tuple[float, Choice]] = []
    for choice, row in zip(able, short, strict=True):
        if row["refused"]:
            refuse(row["refused"])
        else:
            promising.append((row["step_time_s"] * _longer(choice), choice))
    # Every objective follows the step: the GPUs, their price and the tokens of a step are the scenario's.
    promising.sort(key=lambda item: item[0])
    finalists = [choice for _, choice in promising[: FINALISTS * top]]
    rows = price([choice.scenario for choice in finalists])
    by_hash = {row["scenario_hash"]: row for row in rows}
    order = [row["scenario_hash"] for row in ranked(rows, objective, fits=True)]
    place = {name: at for at, name in enumerate(order)}
    finalists.sort(key=lambda choice: place[choice.scenario.hash])
    best = [replace(item, row=by_hash[item.scenario.hash]) for item in finalists]
    best = _distinct(best)
    ordered = sorted(refusals.values(), key=lambda item: -item.count)
    return Outcome(tuple(best[:top]), tried, len(promising), tuple(ordered))


def _distinct(choices: Sequence[Choice]) -> list[Choice]:
    """Without those that only name their policy differently: same cut, step and memory as a better one."""
    found: dict[tuple[object, ...], Choice] = {}
    for choice in choices:
        row, cut = choice.row, choice.cut
        key = (cut.tensor, cut.context, cut.pipeline, cut.expert, row["step_time_s"], row["peak_gib"])
        found.setdefault(key, choice)
    return list(found.values())


def _short(choice: Choice) -> Scenario:
    """The scenario with no more microbatches than two for each stage."""
    scenario, cut = choice.scenario, choice.cut
    each = cut.data * scenario.batch.sequences_per_microbatch
    return scenario.with_(**{"batch.sequences_per_step": _few(cut) * each})


def _few(cut: Plan) -> int:
    return min(cut.microbatches, 2 * cut.pipeline)


def _longer(choice: Choice) -> float:
    """How much longer the step is than the short one."""
    cut = choice.cut
    return (cut.microbatches + cut.pipeline - 1) / (_few(cut) + cut.pipeline - 1)


def _rule(message: str) -> str:
    """The rule without the numbers of the case."""
    return re.sub(r"\s+", " ", _NUMBERS.sub("…", message))

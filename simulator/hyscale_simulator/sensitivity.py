"""What the speed-up depends on: one condition varied at a time, baseline and improved alike."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hyscale_simulator.evaluate import Evaluator
from hyscale_simulator.layout import LayoutError
from hyscale_simulator.result import Result
from hyscale_simulator.scenario import Scenario, length_scenario, tokens_label

__all__ = ["AXES", "Axis", "Curve", "Point", "sensitivity"]


@dataclass(frozen=True)
class Point:
    """Both steps under one condition; ``held``: the condition the comparison started from.

    refused: the rule a layout breaks under this condition; the results are then None.
    """

    label: str
    x: float
    before: Result | None
    after: Result | None
    held: bool = False
    refused: str = ""

    @property
    def speedup(self) -> float | None:
        """Baseline step over improved step."""
        return self.before.step_ns / self.after.step_ns if self.before and self.after else None

    @property
    def fits(self) -> bool:
        """Whether both fit into memory."""
        return bool(self.before and self.after and self.before.memory.fits and self.after.memory.fits)


Vary = Callable[[Scenario], Iterator[tuple[str, float, Scenario]]]


@dataclass(frozen=True)
class Axis:
    """One condition: its name, what is on the x axis, whether that is a scale, and the scenarios along it."""

    name: str
    unit: str
    vary: Vary
    field: str
    """What ``hyscale sweep --vary`` calls it."""
    is_scale: bool = True
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """The speed-up along an axis."""

    axis: Axis
    points: tuple[Point, ...]


def _set(field: str, values: Sequence[Any], label: Callable[[Any], str] = str) -> Vary:
    def vary(scenario: Scenario) -> Iterator[tuple[str, float, Scenario]]:
        for at, value in enumerate(values):
            x = float(value) if isinstance(value, int | float) else float(at)
            yield label(value), x, scenario.with_(**{field: value})

    return vary


def _lengths(scenario: Scenario) -> Iterator[tuple[str, float, Scenario]]:
    for power in range(15, 23):
        yield tokens_label(2**power), float(2**power), length_scenario(scenario, 2**power)


def _gpus(scenario: Scenario) -> Iterator[tuple[str, float, Scenario]]:
    clusters = ("h20-64x8-8x400g", "h20-3e-64x8-8x400g", "h100-2048x8", "h200-64x8", "b200-64x8")
    for at, cluster in enumerate(clusters):
        changed = scenario.with_(cluster=cluster)
        yield changed.gpu_description.name.removesuffix(" SXM"), float(at), changed


def _sharing(scenario: Scenario) -> Iterator[tuple[str, float, Scenario]]:
    """Layers that select; a stage has to begin with one that does, so each point has its own stages."""
    layers = scenario.model_description.layers
    shared = (0, 1, 2, *range(6, layers, 4))  # GLM-5.2
    for label, selecting, stages in (
        ("all 78", (), ()),
        ("39: every 2nd", tuple(range(0, layers, 2)), (10,) * 7 + (8,)),
        ("21: GLM-5.2", shared, (10, 12, 8, 12, 8, 12, 8, 8)),
        ("13: every 6th", tuple(range(0, layers, 6)), (12, 12, 12, 12, 12, 6, 6, 6)),
    ):
        changes = {"model.indexer.computing_layers": selecting, "layout.stage_layers": stages}
        yield label, float(len(selecting) or layers), scenario.with_(**changes)


def _imbalance(scenario: Scenario) -> Iterator[tuple[str, float, Scenario]]:
    yield "balanced", 0.0, scenario.with_(**{"routing.distribution": "balanced"})
    for exponent in (0.25, 0.5, 0.75, 1.0):
        changes = {"routing.distribution": "power_law", "routing.exponent": exponent}
        yield f"{exponent:g}", exponent, scenario.with_(**changes)


def _recompute(scenario: Scenario) -> Iterator[tuple[str, float, Scenario]]:
    """Replay needs full recomputation, so elsewhere only the kernel is left of the improvement."""
    for at, policy in enumerate(("full", "selective", "none")):
        replay = scenario.recompute.replay and policy == "full"
        yield policy, float(at), scenario.with_(**{"recompute.policy": policy, "recompute.replay": replay})


def _tensor(scenario: Scenario) -> Iterator[tuple[str, float, Scenario]]:
    """Tensor ranks in place of context ranks: each of them repeats the selection (Megatron-LM, slime)."""
    ranks = scenario.layout.tensor_parallel * scenario.layout.context_parallel
    for tensor in (1, 2, 4, 8):
        changes = {"layout.tensor_parallel": tensor, "layout.context_parallel": ranks // tensor}
        yield str(tensor), float(tensor), scenario.with_(**changes)


AXES: tuple[Axis, ...] = (
    Axis("sequence length", "tokens", _lengths, "batch.sequence_tokens",
         note="The same tokens in a microbatch up to 1M; 2M and 4M keep the layout and one sequence."),
    Axis("GPU", "", _gpus, "cluster", is_scale=False),
    Axis("index sharing", "layers that select", _sharing, "model.indexer.computing_layers",
         note="Where layers share a selection there is less of it to save."),
    Axis("top-k", "keys", _set("model.indexer.top_k", (512, 1024, 2048, 4096)), "model.indexer.top_k"),
    Axis("index heads", "", _set("model.indexer.heads", (16, 32, 64)), "model.indexer.heads"),
    Axis("expert imbalance", "exponent of a power law", _imbalance, "routing.exponent",
         note="Load of the i-th busiest expert proportional to i^-exponent."),
    Axis("network", "Gbit/s a NIC",
         _set("cluster.nic_gbit_per_s", (100.0, 200.0, 400.0, 800.0), "{:g}".format),
         "cluster.nic_gbit_per_s"),
    Axis("tensor ranks", "", _tensor, "layout.tensor_parallel",
         note="In place of context ranks. Every tensor rank repeats the selection of its group."),
    Axis("context split", "", _set("layout.context_split", ("zigzag", "contiguous")), "layout.context_split",
         is_scale=False, note="Contiguous: the last rank scores twice the mean, and all wait for it."),
    Axis("layers recomputed", "",
         _set("recompute.layers_fraction", (1.0, 0.95, 0.9, 0.75, 0.5), "{:.0%}".format),
         "recompute.layers_fraction",
         note="Fewer recomputed layers need more memory; the table that is not written frees some."),
    Axis("recomputation", "", _recompute, "recompute.policy", is_scale=False,
         note="Without full recomputation selection runs once anyway: replay has nothing to save."),
)  # fmt: skip


def sensitivity(baseline: Scenario, improved: Scenario, evaluate: Evaluator) -> tuple[Curve, ...]:
    """The speed-up along every axis."""
    start = evaluate(baseline).step_ns, evaluate(improved).step_ns
    curves = []
    for axis in AXES:
        points = []
        for (label, x, old), (_, _, new) in zip(axis.vary(baseline), axis.vary(improved), strict=True):
            try:
                before, after = evaluate(old), evaluate(new)
            except LayoutError as error:
                points.append(Point(label, x, None, None, refused=str(error)))
                continue
            points.append(Point(label, x, before, after, held=(before.step_ns, after.step_ns) == start))
        curves.append(Curve(axis, tuple(points)))
    return tuple(curves)

"""Evaluating scenarios: pure and cached, so that thousands can be compared."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from hyscale_simulator.blocks import Pricing, Scale
from hyscale_simulator.durations import Prices
from hyscale_simulator.engine import simulate
from hyscale_simulator.fabric import Network
from hyscale_simulator.flops import model_flops
from hyscale_simulator.graph import Graph, Timeline
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.layout import LayoutError, Plan, plan
from hyscale_simulator.longest_path import longest_path
from hyscale_simulator.perturb import jitter, slow_streams
from hyscale_simulator.profiles import load_profiles
from hyscale_simulator.result import Result
from hyscale_simulator.scenario import Scenario
from hyscale_simulator.step import compose, step_items
from hyscale_simulator.work import Compute, Item, Rank, backward, forward, layer_kind

__all__ = ["Evaluator", "evaluate", "evaluator"]

KEPT_PRICINGS = 64
LONGEST_NS = 2**62
"""Time of all tasks of a step together that is sure to fit into 64 bits, perturbed or not."""


class Evaluator:
    """Evaluates scenarios on one set of profiles; prices and blocks are kept between evaluations."""

    def __init__(self, profiles: tuple[str, ...] = (), own: tuple[Gpu, ...] = ()) -> None:
        self.profiles = load_profiles(profiles, own)
        self._files = profiles
        self._prices: dict[str, Prices] = {}
        self._pricings: OrderedDict[object, Pricing] = OrderedDict()

    def __call__(
        self,
        scenario: Scenario,
        *,
        scale: Scale = (),
        perturb: Callable[[Graph], Graph] | None = None,
        engine: str = "auto",
    ) -> Result:
        """The predicted step.

        scale: factors on the durations of ops, kinds or collectives.  perturb: changes the step's graph
        (jitter, stragglers; see :mod:`hyscale_simulator.perturb`).  engine: "simpy", "longest_path", or
        "auto": the longest path, which is the same where nothing contends, as in a step's graph nothing does.
        """
        if engine not in ("auto", "simpy", "longest_path"):
            raise ValueError(f"engine = {engine!r}; allowed: auto, simpy, longest_path")
        cut = plan(scenario)
        pricing = self._pricing(scenario, cut, scale)
        try:
            step = compose(scenario, cut, pricing)
        except OverflowError:
            raise _too_long(scenario) from None
        if step.graph.duration_ns.sum(dtype=float) >= LONGEST_NS:
            raise _too_long(scenario)
        graph = _disturbed(step.graph, scenario)
        if perturb is not None:
            graph = perturb(graph)
        timeline: Timeline = simulate(graph) if engine == "simpy" else longest_path(graph)
        batch = scenario.batch
        flops = model_flops(
            scenario.model_description, batch.sequence_tokens, batch.sequences_per_step, scenario.mtp_layers
        )
        result = Result(scenario, step, timeline, flops)
        sources = {source for (_, _, _, source), _ in result.coverage}
        idle = [
            f"{path}: no price of this step rests on it (--coverage lists what does)"
            for path in self._files
            if path not in sources
        ]
        return replace(result, extra_warnings=(*self.profiles.notes, *idle))

    def layer(self, scenario: Scenario, layer: int) -> Timeline:
        """When each kernel and collective of one layer's forward and backward pass runs, on one rank.

        ValueError for a layer that the model does not have.
        """
        layers = scenario.model_description.layers + scenario.mtp_layers
        if not 0 <= layer < layers:
            raise ValueError(f"layer = {layer}; the model has 0 to {layers - 1}")
        cut = plan(scenario)
        rank = Rank(scenario, cut)
        kind = layer_kind(rank, layer)
        return self._pricing(scenario, cut, ()).timeline([*forward(rank, kind), *backward(rank, kind)])

    def items(self, scenario: Scenario) -> list[tuple[Item, int]]:
        """Every kernel and collective of one rank's step, with its nanoseconds alone, in order.

        For one microbatch without a pipeline; ValueError for another layout. Where nothing overlaps, they add
        up to the step.
        """
        cut = plan(scenario)
        if cut.pipeline > 1 or cut.microbatches > 1:
            raise ValueError(
                f"scenario {scenario.name}: {cut.microbatches} microbatches in {cut.pipeline} stages; one of "
                "each is wanted"
            )
        pricing = self._pricing(scenario, cut, ())
        return [
            (
                item,
                pricing.kernel_ns(item)[0] if isinstance(item, Compute) else pricing.communication_ns(item),
            )
            for item in step_items(scenario, cut, pricing)
        ]

    def _pricing(self, scenario: Scenario, cut: Plan, scale: Scale) -> Pricing:
        gpu = scenario.gpu_description
        measured = self.profiles.collectives(gpu)
        network = Network(scenario, cut, Rank(scenario, cut).imbalance, measured)
        sms = scenario.overlap.communication_sms
        key = (gpu, network.key, sms, scale)
        if key not in self._pricings:
            prices = self._prices.setdefault(gpu.model_dump_json(), Prices(self.profiles, gpu))
            self._pricings[key] = Pricing(prices, network, sms, scale)
            if len(self._pricings) > KEPT_PRICINGS:
                self._pricings.popitem(last=False)
        self._pricings.move_to_end(key)
        return self._pricings[key]


def _too_long(scenario: Scenario) -> LayoutError:
    batch = scenario.batch
    return LayoutError(
        f"scenario {scenario.name}: batch.sequence_tokens = {batch.sequence_tokens}, sequences_per_step = "
        f"{batch.sequences_per_step}: the work of a step must stay below {LONGEST_NS / 1e9 / 3.15e7:.0f} "
        "years, which whole nanoseconds can count"
    )


def _disturbed(graph: Graph, scenario: Scenario) -> Graph:
    """The step's graph with the scenario's straggler and jitter."""
    faults = scenario.faults
    if faults.slow_stage_factor > 1:
        stages = scenario.layout.pipeline_parallel
        if faults.slow_stage >= stages:
            raise LayoutError(
                f"scenario {scenario.name}: faults.slow_stage = {faults.slow_stage}: "
                f"there are 0 to {stages - 1}"
            )
        graph = slow_streams(graph, {f"stage{faults.slow_stage}/": faults.slow_stage_factor})
    if faults.jitter_fraction:
        graph = jitter(graph, faults.jitter_fraction, faults.seed)
    return graph


@lru_cache(maxsize=4)
def evaluator(profiles: tuple[str, ...] = (), own: tuple[Gpu, ...] = ()) -> Evaluator:
    """The evaluator of a set of user profiles (paths; the shipped ones follow) and GPU descriptions."""
    return Evaluator(profiles, own)


def evaluate(scenario: Scenario, *, profiles: tuple[str, ...] = (), scale: Scale = ()) -> Result:
    """The predicted step of one scenario."""
    return evaluator(profiles)(scenario, scale=scale)

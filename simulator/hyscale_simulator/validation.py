"""Held against published steps, memory and kernels, predicted without looking at them.

Nothing here or in ``data/validation`` changes a kernel's price.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from scipy.stats import spearmanr

from hyscale_simulator.blocks import Pricing
from hyscale_simulator.descriptions import find
from hyscale_simulator.durations import Prices
from hyscale_simulator.evaluate import evaluator
from hyscale_simulator.fabric import Network
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.kernels import kernel
from hyscale_simulator.layout import plan
from hyscale_simulator.memory import GIB, memory
from hyscale_simulator.published import published_seconds, sources
from hyscale_simulator.result import Result
from hyscale_simulator.work import Rank, backward, forward, layer_kind

__all__ = [
    "KERNEL_PCT",
    "MEMORY_PCT",
    "TARGETS",
    "Comparison",
    "KernelComparison",
    "MemoryComparison",
    "Summary",
    "Validation",
    "compare",
    "compare_chunk",
    "compare_kernels",
    "compare_memory",
    "summarise",
    "validate",
]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A predicted and a published step time."""

    name: str
    source: str
    compared: bool
    published_s: float
    predicted_s: float
    result: Result
    note: str = ""

    @property
    def error_pct(self) -> float:
        """Predicted over published, minus one, in per cent: positive is too slow."""
        return (self.predicted_s / self.published_s - 1) * 100


@dataclass(frozen=True, slots=True)
class MemoryComparison:
    """Predicted and published memory of one GPU."""

    name: str
    what: str
    published_gib: float
    predicted_gib: float

    @property
    def error_pct(self) -> float:
        """Predicted over published, minus one, in per cent."""
        return (self.predicted_gib / self.published_gib - 1) * 100


@dataclass(frozen=True, slots=True)
class Summary:
    """How good the predictions are: mean and worst absolute error, mean signed error, rank correlation.

    spearman: of throughput per GPU relative to its peak, over all compared rows.
    """

    mape_pct: float
    worst_pct: float
    bias_pct: float
    spearman: float


def compare(profiles: tuple[str, ...] = ()) -> list[Comparison]:
    """Every case that publishes a step."""
    evaluate = evaluator(profiles)
    found = []
    for source in sources():
        for case in source.cases:
            if case.published is None:
                continue
            scenario = source.scenario_of(case)
            result = evaluate(scenario)
            found.append(
                Comparison(
                    case.name,
                    source.source,
                    case.compared,
                    published_seconds(source, case, scenario),
                    result.step_time_s,
                    result,
                    case.note,
                )
            )
    return found


def compare_memory() -> list[MemoryComparison]:
    """Every case that publishes memory: activations alone, or all that the allocator handed out."""
    found = []
    for source in sources():
        for case in source.cases:
            scenario = source.scenario_of(case)
            if case.activations_gib is not None:
                predicted = memory(scenario).gib("activations")
                found.append(MemoryComparison(case.name, "activations", case.activations_gib, predicted))
            if case.peak_gib is not None:
                held = memory(scenario)
                predicted = held.peak_bytes / GIB - held.gib("context and libraries")
                found.append(MemoryComparison(case.name, "allocated", case.peak_gib, predicted))
    return found


@dataclass(frozen=True, slots=True)
class KernelComparison:
    """A published kernel figure of a GPU without a profile, and its projection from another GPU's.

    published: (low, high); equal where one figure is given.
    """

    name: str
    published: tuple[float, float]
    predicted: float
    unit: str

    @property
    def error_pct(self) -> float:
        """Predicted over the nearer end of what is published, minus one, in per cent; 0 within it."""
        low, high = self.published
        nearest = min(max(self.predicted, low), high)
        return (self.predicted / nearest - 1) * 100


def compare_kernels(profiles: tuple[str, ...] = ()) -> list[KernelComparison]:
    """The public H20 kernels, projected from H200 and H100 measurements and data sheets alone.

    Scoring and selection: vLLM RFC 53563 (64 heads, the last 4,096 queries of N keys; its own radix top-k,
    for which SGLang's stands, neither promising an order or a rule for ties).  Attention:
    flash-attention issue 1310.  GEMM: DeepGEMM issue 186 gives a range over unnamed shapes at M = 256, held
    against the median of the projections of six shapes of DeepSeek-V3's linear layers.
    """
    price = Prices(evaluator(profiles).profiles, find(Gpu, "gpus", "h20"))
    found = []
    for keys, published in ((16384, 4.280), (131072, 33.83)):
        seen = keys - 2048
        scores = price(kernel("index_scores", "fp8", rows=4096, keys=seen, heads=64, dim=128))
        chosen = price(
            kernel("index_select", "fp32", "sglang", "untrained", rows=4096, keys=seen, top_k=2048)
        )
        name = f"H20 scoring + selection, {keys // 1024}K"
        found.append(KernelComparison(name, (published, published), (scores.us + chosen.us) / 1e3, "ms"))
    for regime, keys, published in (("full", 2048, 126.0), ("causal", 1024, 108.0)):
        shape = {
            "batch": 2,
            "heads": 16,
            "kv_heads": 16,
            "queries": 2048,
            "keys": keys,
            "qk_dim": 128,
            "v_dim": 128,
        }
        call = kernel("attention", "bf16", "flash-attention-3", regime, **shape)
        rate = call.cost.tensor_flops / price(call).us / 1e6
        found.append(
            KernelComparison(f"H20 FlashAttention-3, {regime}, 2K", (published, published), rate, "TFLOPS")
        )
    for dtype, range_ in (("bf16", (99.0, 112.0)), ("fp8", (181.0, 198.0))):
        rates = []
        for n, k in ((7168, 2048), (4096, 7168), (24576, 1536), (7168, 16384), (32768, 512), (2112, 7168)):
            call = kernel("gemm", dtype, m=256, n=n, k=k)
            rates.append(call.cost.tensor_flops / price(call).us / 1e6)
        found.append(
            KernelComparison(f"H20 GEMM, M 256, {dtype}", range_, statistics.median(rates), "TFLOPS")
        )
    return found


def compare_chunk(profiles: tuple[str, ...] = ()) -> KernelComparison:
    """Kernels of a published chunk of DualPipe: a forward beside a backward pass of four layers with experts.

    DeepSeek's trace (github.com/deepseek-ai/profile-data): a span of 128.5 ms, 124.3 of them kernels, 4.2 an
    exposed exchange.  The exchange holds its SMs throughout, as in a step.
    """
    (scenario,) = (
        source.scenario_of(case)
        for source in sources()
        for case in source.cases
        if source.scenario.get("layout", {}).get("schedule") == "dualpipe"
    )
    cut = plan(scenario)
    rank = Rank(scenario, cut)
    kind = layer_kind(rank, scenario.model_description.layers // 2)
    sms, gpu = scenario.overlap.communication_sms, scenario.gpu_description
    pricing = Pricing(
        Prices(evaluator(profiles).profiles, gpu),
        Network(scenario, cut, rank.imbalance),
        communication_sms=sms,
    )
    passes = (pricing.block(items) for items in (forward(rank, kind), backward(rank, kind)))
    ms = 4 * sum(block.compute_ns for block in passes) / (1 - pricing.sm_share) / 1e6
    return KernelComparison("H800 DeepSeek-V3, kernels of an overlapped chunk", (124.3, 124.3), ms, "ms")


def summarise(comparisons: Sequence[Comparison]) -> Summary:
    """Over the compared rows."""
    rows = [row for row in comparisons if row.compared]
    errors = [row.error_pct for row in rows]
    predicted = [_utilisation(row, row.predicted_s) for row in rows]
    published = [_utilisation(row, row.published_s) for row in rows]
    return Summary(
        mape_pct=statistics.fmean(abs(error) for error in errors),
        worst_pct=max(errors, key=abs),
        bias_pct=statistics.fmean(errors),
        spearman=float(spearmanr(predicted, published).statistic),
    )


def _utilisation(row: Comparison, seconds: float) -> float:
    """Model FLOPs per second and GPU: comparable across sizes, where step time would rank itself."""
    return row.result.model_flops / seconds / row.result.scenario.gpus


TARGETS = Summary(mape_pct=10.0, worst_pct=25.0, bias_pct=5.0, spearman=0.95)
"""What is demanded of steps: mean, worst and signed error at most, rank correlation at least."""
MEMORY_PCT, KERNEL_PCT = 10.0, 15.0
"""What is demanded of each figure of memory, and of each kernel, at most."""


@dataclass(frozen=True)
class Validation:
    """All published figures beside their predictions."""

    steps: Sequence[Comparison]
    memory: Sequence[MemoryComparison]
    kernels: Sequence[KernelComparison]

    @cached_property
    def summary(self) -> Summary:
        """Of the steps."""
        return summarise(self.steps)

    @property
    def steps_met(self) -> bool:
        """Whether the steps are within their targets."""
        return (
            self.summary.mape_pct <= TARGETS.mape_pct
            and abs(self.summary.worst_pct) <= TARGETS.worst_pct
            and abs(self.summary.bias_pct) <= TARGETS.bias_pct
            and self.summary.spearman >= TARGETS.spearman
        )

    @property
    def worst_memory_pct(self) -> float:
        """Largest error of a figure of memory, signed."""
        return max((item.error_pct for item in self.memory), key=abs)

    @property
    def memory_met(self) -> bool:
        """Whether memory is within its target."""
        return abs(self.worst_memory_pct) <= MEMORY_PCT

    @property
    def worst_kernel_pct(self) -> float:
        """Largest error of a kernel, signed."""
        return max((figure.error_pct for figure in self.kernels), key=abs)

    @property
    def kernels_met(self) -> bool:
        """Whether the kernels are within their target."""
        return abs(self.worst_kernel_pct) <= KERNEL_PCT


def validate(profiles: tuple[str, ...] = ()) -> Validation:
    """Everything that is published: steps, memory, kernels."""
    kernels = [*compare_kernels(profiles), compare_chunk(profiles)]
    return Validation(compare(profiles), compare_memory(), kernels)

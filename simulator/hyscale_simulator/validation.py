"""Held against published steps: every case of ``data/validation``, predicted without looking at it.

A file is one source.  Its shared scenario holds what the source leaves open, set once for all its cases; a
case sets only what its row states.  Nothing here or there changes a kernel's price.
"""

import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import Field
from scipy.stats import spearmanr

from hyscale_simulator.descriptions import DATA, Description, Rate, Several, find, parse
from hyscale_simulator.durations import Prices
from hyscale_simulator.evaluate import evaluator
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.kernels import kernel
from hyscale_simulator.memory import GIB, memory
from hyscale_simulator.model import Model
from hyscale_simulator.result import Result
from hyscale_simulator.scenario import Scenario

__all__ = [
    "Comparison",
    "KernelComparison",
    "MemoryComparison",
    "Summary",
    "compare",
    "compare_kernels",
    "compare_memory",
    "sources",
    "summarise",
]

Unit = Literal["s", "TFLOPS per GPU", "tokens/s/GPU"]


class Case(Description):
    """One published row."""

    name: str
    published: Rate | None = None
    compared: bool = True
    """Whether it counts in the summary."""
    activations_gib: Rate | None = None
    peak_gib: Rate | None = None
    set: dict[str, Any] = Field(default_factory=dict)


class Source(Description):
    """One publication."""

    source: str
    url: str
    left_open: str
    """What it does not say, and what is assumed for all its rows."""
    unit: Unit
    formula: Literal["", "megatron-2021", "causal", "nemo"] = ""
    """How it counts the FLOPs of a step, for TFLOPS rows."""
    scenario: dict[str, Any]
    cases: Several[Case]

    def scenario_of(self, case: Case) -> Scenario:
        """The case as a scenario."""
        shared = parse(Scenario, {"name": case.name, "source": self.source, **self.scenario}, self.source)
        return shared.with_(**case.set)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A predicted and a published step time."""

    name: str
    source: str
    compared: bool
    published_s: float
    predicted_s: float
    result: Result

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


@cache
def sources() -> tuple[Source, ...]:
    """All shipped sources."""
    files = sorted((DATA / "validation").iterdir(), key=lambda item: item.name)
    return tuple(
        parse(Source, tomllib.loads(item.read_text(encoding="utf-8")), f"data/validation/{item.name}")
        for item in files
        if item.name.endswith(".toml")
    )


def _megatron(model: Model, length: int, sequences: int) -> float:
    """96 B s l h^2 (1 + s/6h + V/16lh): forward, backward, full recomputation (Narayanan et al., eq. 3)."""
    layers, hidden = model.layers, model.hidden
    factor = 1 + length / (6 * hidden) + model.vocabulary / (16 * layers * hidden)
    return 96.0 * sequences * length * layers * hidden**2 * factor


def _linear(model: Model) -> float:
    return 6.0 * (model.parameters - model.embedding_parameters)


def _causal(model: Model, length: int, sequences: int) -> float:
    """6 N + 6 l h s for each token: attention counted for its causal half."""
    return (_linear(model) + 6.0 * model.layers * model.hidden * length) * length * sequences


def _nemo(model: Model, length: int, sequences: int) -> float:
    """NeMo's llama2 formula (nemo/utils/flops_formulas.py): attention counted in full."""
    return (_linear(model) + 12.0 * model.layers * model.hidden * length) * length * sequences


FORMULAS: dict[str, Callable[[Model, int, int], float]] = {
    "megatron-2021": _megatron,
    "causal": _causal,
    "nemo": _nemo,
}


def published_seconds(source: Source, case: Case, scenario: Scenario) -> float:
    """The published figure as the time of one step."""
    assert case.published is not None
    batch = scenario.batch
    if source.unit == "s":
        return case.published
    if source.unit == "tokens/s/GPU":
        return batch.sequence_tokens * batch.sequences_per_step / case.published / scenario.gpus
    flops = FORMULAS[source.formula](
        scenario.model_description, batch.sequence_tokens, batch.sequences_per_step
    )
    return flops / (case.published * 1e12 * scenario.gpus)


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

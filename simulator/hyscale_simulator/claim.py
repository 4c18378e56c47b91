"""Where does 2.07x come from?  The published figure held against every baseline it may have been taken from.

The publication (HyScale, arXiv 2610.32057: GLM-5.1, 1M tokens, 512 H20) does not name its baseline, the
precision of its linear layers, or its kernel's gain in public.  So all are tried: five baselines, two
precisions, and a kernel gain from 1 to 4.

The *kernel gain* f is the time of a materialised selection in the same precision (baseline C for bf16, E for
fp8) over HyTopK's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import brentq

from hyscale_simulator.blocks import Scale
from hyscale_simulator.descriptions import find
from hyscale_simulator.durations import Prices
from hyscale_simulator.evaluate import Evaluator
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.kernels import kernel
from hyscale_simulator.result import Result
from hyscale_simulator.scenario import Scenario, length_scenario
from hyscale_simulator.switches import BASELINES, Baseline
from hyscale_simulator.uncertainty import COLLECTIVES

__all__ = [
    "CLAIMED",
    "GAINS",
    "PRECISIONS",
    "PUBLISHED_GAINS",
    "TOLERANCE",
    "BaselineCase",
    "Cell",
    "Crossover",
    "PublicKernel",
    "baseline_case",
    "closed_form",
    "crossover",
    "public_kernels",
    "required_share",
]

CLAIMED = 2.07
TOLERANCE = 0.05
PUBLISHED_GAINS = (1.2, 3.3)
"""Of a whole prefill's selection: 1.2 to 2.0 on untrained indexers, 1.7 to 3.3 on trained ones
(FlashTopK)."""
PRECISIONS = ("bf16", "fp8")
GAINS = (1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0, 3.3, 4.0)
"""Kernel gains of the map."""

LENGTHS = tuple(2**power for power in range(13, 21))


def closed_form(other: float, selection: float, improved_selection: float) -> float:
    """(T + 2S) / (T + S'): the speed-up when two selections become one, all else equal and nothing hidden.

    other: seconds outside selection, T.  selection: of one pass, S.  improved_selection: of HyTopK, S'.
    """
    return (other + 2 * selection) / (other + improved_selection)


def required_share(speedup: float, gain: float) -> float:
    """Share of two equal selections in the baseline that gives ``speedup`` with replay and a kernel ``gain``
    times faster: from 1/speedup = 1 - share (1 - 1/(2 gain)).  Above 1: no share does."""
    return (1 - 1 / speedup) / (1 - 1 / (2 * gain))


@dataclass(frozen=True)
class Cell:
    """One point of the map."""

    kernel_gain: float
    speedup: float

    @property
    def consistent(self) -> bool:
        """Whether the claimed speed-up is met within its tolerance."""
        return abs(self.speedup / CLAIMED - 1) <= TOLERANCE


@dataclass(frozen=True)
class BaselineCase:
    """One baseline with linear layers in one precision, and what replaces it.

    selection_s, improved_selection_s: seconds of one selection pass, mean of the stages.
    reference_s: of a materialised pass in the precision HyTopK scores in; the kernel gain is counted from it.
    other_s: seconds of kernels outside selection in the baseline.
    gain_low, gain_claimed, gain_high: kernel gain for the claimed speed-up less and plus its tolerance, and
    for the claim itself; None where even a kernel that takes no time does not reach it.
    """

    baseline: Baseline
    precision: str
    before: Result
    after: Result
    selection_s: float
    improved_selection_s: float
    reference_s: float
    other_s: float
    stripped_speedup: float
    replay_only: float
    kernel_only: float
    free_kernel: float
    cells: tuple[Cell, ...]
    gain_low: float | None
    gain_claimed: float | None
    gain_high: float | None

    @property
    def speedup(self) -> float:
        """Predicted, with HyTopK as profiled."""
        return self.before.step_ns / self.after.step_ns

    @property
    def gain(self) -> float:
        """HyTopK's gain as profiled."""
        return self.reference_s / self.improved_selection_s

    @property
    def share(self) -> float:
        """Of two selections in the baseline's kernels."""
        return 2 * self.selection_s / (self.other_s + 2 * self.selection_s)

    @cached_property
    def closed_form(self) -> float:
        """(T + 2S) / (T + S') of the simulator's own durations."""
        return closed_form(self.other_s, self.selection_s, self.improved_selection_s)

    @property
    def possible(self) -> bool:
        """Whether a published kernel gain meets the claim within its tolerance."""
        low, high = PUBLISHED_GAINS
        most = math.inf if self.gain_high is None else self.gain_high
        return self.gain_low is not None and self.gain_low <= high and most >= low

    @property
    def closed_form_error(self) -> float:
        """Closed form over the simulated speed-up without bubble and communication, minus one."""
        return self.closed_form / self.stripped_speedup - 1


def selection_pass_s(result: Result) -> float:
    """Seconds of the forward pass's selection, mean of the stages."""
    return result.parts_ns.get("forward/selection", 0) / len(result.stage_parts_ns) / 1e9


def _is_wait(kind: str) -> bool:
    return kind == "step/bubble" or kind.split("/", 1)[1] in COLLECTIVES


def kernel_s(result: Result) -> float:
    """Seconds of kernels, mean of the stages: without bubble and exposed communication."""
    busy = sum(ns for kind, ns in result.parts_ns.items() if not _is_wait(kind))
    return busy / len(result.stage_parts_ns) / 1e9


def _without_communication(scenario: Scenario, evaluate: Evaluator) -> float:
    """The step's kernels with collectives that take no time (so that they slow no kernel either)."""
    scale: Scale = tuple((kind, 0.0) for kind in COLLECTIVES)
    return kernel_s(evaluate(scenario, scale=scale))


def baseline_case(baseline: Baseline, precision: str, evaluate: Evaluator) -> BaselineCase:
    """Evaluate one baseline and its map."""
    linear = {"precision.linear": precision}
    old, new = baseline.scenario().with_(**linear), baseline.improved().with_(**linear)
    before, after = evaluate(old), evaluate(new)
    twin = next(b for b in BASELINES if b.letter == ("E" if new.selection.scoring_dtype == "fp8" else "C"))
    reference = selection_pass_s(evaluate(twin.scenario().with_(**linear)))
    own = selection_pass_s(after)

    def step_s(gain_inverse: float) -> float:
        """With a kernel gain of 1 / gain_inverse (0: a kernel that takes no time)."""
        factor = gain_inverse * reference / own
        return evaluate(new, scale=(("selection", factor),)).step_time_s

    inverses = [0.0, *sorted(1 / gain for gain in GAINS)]
    steps = [step_s(inverse) for inverse in inverses]

    def needed(wanted: float) -> float | None:
        """Between two points of the map the step is a line in 1 / gain, but for knees."""
        aim = before.step_time_s / wanted
        if steps[0] > aim:
            return None
        if steps[-1] >= aim:
            return 1 / max(float(np.interp(aim, steps, inverses)), 1e-9)
        slow = 2 * inverses[-1]
        while step_s(slow) < aim:  # a kernel slower than any of the map suffices
            slow *= 2
        return 1 / float(brentq(lambda x: step_s(x) - aim, inverses[-1], slow, xtol=1e-3))

    lowest = 1 - TOLERANCE, 1.0, 1 + TOLERANCE
    return BaselineCase(
        baseline,
        precision,
        before,
        after,
        selection_s=selection_pass_s(before),
        improved_selection_s=own,
        reference_s=reference,
        other_s=kernel_s(before) - 2 * selection_pass_s(before),
        stripped_speedup=_without_communication(old, evaluate) / _without_communication(new, evaluate),
        replay_only=before.step_ns / evaluate(old.with_(**{"recompute.replay": True})).step_ns,
        kernel_only=before.step_ns / evaluate(new.with_(**{"recompute.replay": False})).step_ns,
        free_kernel=before.step_time_s / steps[0],
        cells=tuple(
            Cell(1 / inverse, before.step_time_s / step)
            for inverse, step in zip(reversed(inverses[1:]), reversed(steps[1:]), strict=True)
        ),
        **dict(
            zip(
                ("gain_low", "gain_claimed", "gain_high"),
                (needed(CLAIMED * factor) for factor in lowest),
                strict=True,
            )
        ),
    )


@dataclass(frozen=True)
class Crossover:
    """Above which context length HyTopK pays against a baseline's materialised selection, kernel for kernel.

    ratios: (tokens, materialised pass over HyTopK's) at each length tried.
    """

    baseline: Baseline
    ratios: tuple[tuple[int, float], ...]

    @cached_property
    def tokens(self) -> int | None:
        """The shortest length from which it pays at every longer one tried, interpolated; None if it does not
        at the longest."""
        at: int | None = None
        previous: tuple[int, float] | None = None
        for tokens, ratio in reversed(self.ratios):
            if ratio < 1:
                if previous is None:
                    return None
                weight = (1 - ratio) / (previous[1] - ratio)
                return round(math.exp(math.log(tokens) + weight * math.log(previous[0] / tokens)))
            at, previous = tokens, (tokens, ratio)
        return at

    @property
    def always(self) -> bool:
        """Whether it pays at every length tried."""
        return all(ratio >= 1 for _, ratio in self.ratios)


def crossover(baseline: Baseline, evaluate: Evaluator, lengths: Sequence[int] = LENGTHS) -> Crossover:
    """Compare one selection pass at each length."""
    ratios = []
    for tokens in lengths:
        before = selection_pass_s(evaluate(length_scenario(baseline.scenario(), tokens)))
        after = selection_pass_s(evaluate(length_scenario(baseline.improved(), tokens)))
        ratios.append((tokens, before / after))
    return Crossover(baseline, tuple(ratios))


@dataclass(frozen=True)
class PublicKernel:
    """The only public selection times on an H20: vLLM RFC 53563, fp8, 64 heads of 128, 2,048 of N keys for
    the last 4,096 queries; DeepGEMM and a selector, against one fused kernel.

    predicted_ms, predicted_fused_ms: what the simulator's prices say of the same calls.
    """

    tokens: int
    published_ms: float
    published_fused_ms: float
    predicted_ms: float
    predicted_fused_ms: float


def public_kernels(evaluate: Evaluator) -> tuple[PublicKernel, ...]:
    """Both published lengths, priced on an H20."""
    prices = Prices(evaluate.profiles, find(Gpu, "gpus", "h20"))
    found = []
    for tokens, separate, fused in ((16 * 1024, 4.280, 3.883), (128 * 1024, 33.83, 32.54)):
        shape = {"rows": 4096, "keys": tokens - 2048}  # the mean of the last 4,096 causal rows
        scored = {"heads": 64, "dim": 128}
        scores = prices(kernel("index_scores", "fp8", "deepgemm", **shape, **scored))
        top = prices(kernel("index_select", "fp32", "sglang", "untrained", **shape, top_k=2048))
        whole = prices(kernel("hytopk", "fp8", "", "untrained", **shape, **scored, top_k=2048))
        found.append(PublicKernel(tokens, separate, fused, (scores.us + top.us) / 1e3, whole.us / 1e3))
    return tuple(found)

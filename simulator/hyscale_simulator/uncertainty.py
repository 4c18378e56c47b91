"""How sure is a comparison?  The durations' stated errors, carried through both steps together.

Each op's duration is off by one unknown factor, the same wherever the op runs and in both scenarios, and
independent of other ops' factors: ``exp(sigma z)`` with ``sigma`` the op's stated relative error and ``z``
standard normal.  All collectives share one factor.  What two scenarios have in common therefore cancels
where it should.  Points are a scrambled Sobol sequence, which covers the errors evenly; the seed is fixed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, qmc

from hyscale_simulator.blocks import NETWORK_UNCERTAINTY, Scale
from hyscale_simulator.evaluate import Evaluator
from hyscale_simulator.result import Result

__all__ = ["Band", "relative_errors", "speedup_band"]

COLLECTIVES = (
    "context comm", "expert comm", "tensor comm", "pipeline comm", "gradient comm", "parameter comm",
    "host copies",
)  # fmt: skip
LEVEL = 0.90
MATERIAL = 1e-3
"""Ops that take less of both steps than this are left at their price."""


@dataclass(frozen=True)
class Band:
    """A 90 % band, and what it comes from.

    speedups: one for each sample, in sample order.  errors: relative standard error by op, as used.
    """

    low: float
    median: float
    high: float
    speedups: tuple[float, ...]
    errors: tuple[tuple[str, float], ...]
    seed: int


def relative_errors(*results: Result) -> dict[str, float]:
    """Relative standard error of each op that matters to one of the results; ``network`` for collectives."""
    spent: dict[str, float] = {}
    error: dict[str, float] = {}
    material: set[str] = set()
    for result in results:
        busy = result.step_ns * len(result.stage_parts_ns)
        here: dict[str, float] = {}
        for block, count in result.step.totals:
            for op, ns in block.ops:
                here[op] = here.get(op, 0.0) + ns * count
            for op, sigma in block.sigma:
                error[op] = error.get(op, 0.0) + sigma * count
        for op, total in here.items():
            spent[op] = spent.get(op, 0.0) + total
            if total >= MATERIAL * busy:
                material.add(op)
    found = {op: error[op] / spent[op] for op in sorted(material) if error.get(op)}
    return {**found, "network": NETWORK_UNCERTAINTY}


def speedup_band(
    baseline: Result, improved: Result, evaluate: Evaluator, *, samples: int = 64, seed: int = 0
) -> Band:
    """The 90 % band of ``baseline / improved`` over ``samples`` (a power of two) draws of the errors."""
    if samples < 2 or samples & (samples - 1):
        raise ValueError(
            f"samples = {samples}; a power of two is wanted (Sobol points are balanced only then)"
        )
    errors = relative_errors(baseline, improved)
    points = qmc.Sobol(len(errors), scramble=True, rng=np.random.default_rng(seed)).random(samples)
    # Scrambled points lie inside (0, 1); clip what rounding puts on the edge.
    normal = norm.ppf(np.clip(points, 1e-6, 1 - 1e-6))
    speedups = []
    for row in normal:
        scale = _scale(
            {op: float(np.exp(sigma * z)) for (op, sigma), z in zip(errors.items(), row, strict=True)}
        )
        before = evaluate(baseline.scenario, scale=scale).step_ns
        after = evaluate(improved.scenario, scale=scale).step_ns
        speedups.append(before / after)
    tail = (1 - LEVEL) / 2
    low, median, high = np.quantile(speedups, [tail, 0.5, 1 - tail]).tolist()
    return Band(low, median, high, tuple(speedups), tuple(errors.items()), seed)


def _scale(factors: Mapping[str, float]) -> Scale:
    network = factors["network"]
    kernels = tuple((op, factor) for op, factor in factors.items() if op != "network")
    return (*kernels, *((kind, network) for kind in COLLECTIVES))

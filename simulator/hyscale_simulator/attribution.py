"""What made it faster?  A difference between two numbers, shared among the switches that lead from one to
the other.

The mathematics: a *game* gives the value (here ln or seconds of a step) of every subset of ``n`` players, as
a sequence of length 2^n indexed by bit mask, player ``i`` being bit ``i``.  Formulas and sources are in
simulator/METHODS.md.  :func:`attribute` plays it on two scenarios.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hyscale_simulator.evaluate import Evaluator
from hyscale_simulator.result import Result
from hyscale_simulator.scenario import Scenario
from hyscale_simulator.switches import Switch, SwitchError, apply, between

__all__ = [
    "MAX_PLAYERS",
    "Attribution",
    "CausalPoint",
    "attribute",
    "causal_curve",
    "elasticity",
    "interactions",
    "knee",
    "leave_one_out",
    "one_at_a_time",
    "play",
    "shapley",
    "waterfall",
]

MAX_PLAYERS = 10
"""Exact values need 2^n runs."""

FACTORS = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)
"""What a class of work takes of its time, along a causal curve."""

KNEE = 0.02
"""Share of the step by which a curve leaves its first slope at a knee."""


def play(num_players: int, value: Callable[[int], float]) -> list[float]:
    """The value of each of the 2^n subsets; ValueError above :data:`MAX_PLAYERS`."""
    if not 0 <= num_players <= MAX_PLAYERS:
        raise ValueError(
            f"num_players = {num_players}; 0 to {MAX_PLAYERS}: exact Shapley values take 2^n runs, "
            "so join some switches"
        )
    return [value(subset) for subset in range(1 << num_players)]


def _players(game: Sequence[float]) -> int:
    n = len(game).bit_length() - 1
    if len(game) != 1 << n:
        raise ValueError(f"game: {len(game)} values; a power of two is wanted")
    return n


def shapley(game: Sequence[float]) -> list[float]:
    """Each player's Shapley value: its marginal contribution, averaged over all orders of joining.

    They add up to ``game[-1] - game[0]`` (efficiency), are equal for players that contribute equally
    (symmetry), 0 for one that never changes the value (dummy), and add over games (additivity).
    """
    n = _players(game)
    weight = [math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n) for size in range(n)]
    values = []
    for player in range(n):
        bit = 1 << player
        values.append(
            math.fsum(
                weight[subset.bit_count()] * (game[subset | bit] - game[subset])
                for subset in range(len(game))
                if not subset & bit
            )
        )
    return values


def interactions(game: Sequence[float]) -> dict[tuple[int, int], float]:
    """Shapley interaction index of each pair: how much one adds more (or less) with the other present,
    averaged over the rest.  0 where the two simply add."""
    n = _players(game)
    found = {}
    for first in range(n):
        for second in range(first + 1, n):
            one, two = 1 << first, 1 << second
            found[first, second] = math.fsum(
                math.factorial(subset.bit_count()) * math.factorial(n - subset.bit_count() - 2)
                / math.factorial(n - 1)
                * (game[subset | one | two] - game[subset | one] - game[subset | two] + game[subset])
                for subset in range(len(game))
                if not subset & (one | two)
            )  # fmt: skip
    return found


def waterfall(game: Sequence[float]) -> list[float]:
    """What each player adds when they join in order; adds up to ``game[-1] - game[0]``."""
    n = _players(game)
    return [game[(1 << (i + 1)) - 1] - game[(1 << i) - 1] for i in range(n)]


def one_at_a_time(game: Sequence[float]) -> list[float]:
    """What each player adds alone."""
    return [game[1 << i] - game[0] for i in range(_players(game))]


def leave_one_out(game: Sequence[float]) -> list[float]:
    """What each player adds as the last to join."""
    full = len(game) - 1
    return [game[full] - game[full & ~(1 << i)] for i in range(_players(game))]


@dataclass(frozen=True)
class CausalPoint:
    """The step when one class of work takes ``factor`` of its time."""

    factor: float
    seconds: float


def elasticity(curve: Sequence[CausalPoint]) -> float:
    """Relative change of the step per relative change of the class, at its full time (Coz's virtual speedup,
    to first order): its share of the critical path."""
    ordered = sorted(curve, key=lambda point: -point.factor)
    (whole, near) = ordered[:2]
    return (whole.seconds - near.seconds) / whole.seconds / (whole.factor - near.factor) * whole.factor


def knee(curve: Sequence[CausalPoint]) -> float | None:
    """The factor below which speeding the class up no longer helps as at first; None if it always does.

    Where a straight line from the first two points is missed by more than :data:`KNEE` of the step, another
    path has taken over.
    """
    ordered = sorted(curve, key=lambda point: -point.factor)
    whole, near = ordered[:2]
    slope = (whole.seconds - near.seconds) / (whole.factor - near.factor)
    for point in ordered[2:]:
        line = whole.seconds - slope * (whole.factor - point.factor)
        if abs(point.seconds - line) > KNEE * whole.seconds:
            return point.factor
    return None


def causal_curve(scenario: Scenario, name: str, evaluate: Evaluator) -> tuple[CausalPoint, ...]:
    """The step with every duration of an op, kind or collective ``name`` multiplied by each of FACTORS."""
    return tuple(
        CausalPoint(factor, evaluate(scenario, scale=((name, factor),) if factor != 1 else ()).step_time_s)
        for factor in FACTORS
    )


@dataclass(frozen=True)
class Attribution:
    """Two scenarios, the switches between them, and the step of every subset of those switches.

    step_ns[mask]: the step with the switches of ``mask`` on (bit i is switches[i]); whole nanoseconds.
    fits[mask]: whether that subset fits into memory.  One that does not is priced all the same.
    """

    baseline: Result
    improved: Result
    switches: tuple[Switch, ...]
    step_ns: tuple[int, ...]
    fits: tuple[bool, ...]

    @property
    def speedup(self) -> float:
        """Baseline step over improved step."""
        return self.baseline.step_ns / self.improved.step_ns

    @cached_property
    def _log(self) -> list[float]:
        """ln of the speed-up of each subset over the baseline."""
        return [math.log(self.step_ns[0] / ns) for ns in self.step_ns]

    @cached_property
    def _saved(self) -> list[float]:
        """Seconds each subset saves."""
        return [(self.step_ns[0] - ns) / 1e9 for ns in self.step_ns]

    @cached_property
    def log_values(self) -> tuple[float, ...]:
        """Shapley value of each switch on ln(speed-up); they add up to ln(speed-up)."""
        return tuple(shapley(self._log))

    @cached_property
    def log_shares(self) -> tuple[float, ...]:
        """Share of each switch in ln(speed-up); they add up to 1.  NaN where the speed-up is exactly 1."""
        total = self._log[-1]
        return tuple(value / total if total else math.nan for value in self.log_values)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Shapley value of each switch on seconds saved; they add up to the difference of the steps."""
        return tuple(shapley(self._saved))

    @cached_property
    def waterfall(self) -> tuple[float, ...]:
        """Seconds each switch saves when they are made in order."""
        return tuple(waterfall(self._saved))

    @cached_property
    def alone(self) -> tuple[float, ...]:
        """Seconds each switch saves as the only one."""
        return tuple(one_at_a_time(self._saved))

    @cached_property
    def last(self) -> tuple[float, ...]:
        """Seconds each switch saves as the last one."""
        return tuple(leave_one_out(self._saved))

    @cached_property
    def pairs(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Interaction of each pair: on ln(speed-up), and in seconds."""
        logs, seconds = interactions(self._log), interactions(self._saved)
        return {pair: (logs[pair], seconds[pair]) for pair in logs}


def attribute(baseline: Scenario, improved: Scenario, evaluate: Evaluator) -> Attribution:
    """Share the difference of two steps among the switches that lead from one to the other.

    Every subset of switches is evaluated.  Subsets that are no step of their own are settled by two rules:
    a switch whose ``needs`` are off does nothing (the game is restricted to what can be built); and a subset
    that does not fit into memory is priced all the same, and marked.  :class:`SwitchError` names switches
    that contradict each other in a way neither rule covers, and more than :data:`MAX_PLAYERS` switches.
    """
    switches = between(baseline, improved)
    if len(switches) > MAX_PLAYERS:
        raise SwitchError(
            f"{len(switches)} switches ({', '.join(switch.name for switch in switches)}): at most "
            f"{MAX_PLAYERS}; compare scenarios that differ in less"
        )
    if apply(baseline, switches, [switch.name for switch in switches]).hash != improved.hash:
        raise SwitchError(f"switches do not lead from {baseline.name} to {improved.name}")
    found: dict[Scenario, Result] = {}

    def result(subset: int) -> Result:
        on = [switch.name for i, switch in enumerate(switches) if subset >> i & 1]
        scenario = apply(baseline, switches, on) if subset + 1 < 1 << len(switches) else improved
        if scenario not in found:
            found[scenario] = evaluate(scenario)
        return found[scenario]

    results = [result(subset) for subset in range(1 << len(switches))]
    return Attribution(
        results[0],
        results[-1],
        switches,
        tuple(item.step_ns for item in results),
        tuple(item.memory.fits for item in results),
    )

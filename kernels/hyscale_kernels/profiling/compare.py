"""Two profiles held against each other: the ratio of every shape both have, and whether it is noise.

A ratio is noise when the p20-p80 intervals of the two medians overlap; a point without a recorded spread is
an interval of no width.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hyscale_ref.profile import ProfilePoint, Shape

APART = 0.15  # relative difference worth an explanation

Key = tuple[str, str, str, str, Shape]


@dataclass(frozen=True)
class Pair:
    """One shape measured twice. ratio: the second's median over the first's."""

    first: ProfilePoint
    second: ProfilePoint

    @property
    def ratio(self) -> float:
        assert self.first.median_us is not None
        assert self.second.median_us is not None
        return self.second.median_us / self.first.median_us

    @property
    def noise(self) -> bool:
        low, high = interval(self.first)
        other_low, other_high = interval(self.second)
        return low <= other_high and other_low <= high

    def verdict(self, apart: float = APART) -> str:
        """``within noise``, ``apart`` (by more than ``apart``), or ``differs``."""
        if self.noise:
            return "within noise"
        return "apart" if abs(self.ratio - 1) > apart else "differs"


@dataclass(frozen=True)
class Comparison:
    """All shared shapes, and how many points each side has alone."""

    pairs: tuple[Pair, ...]
    only_first: int
    only_second: int

    @property
    def differences(self) -> list[float]:
        """|ratio - 1| of every pair."""
        return [abs(pair.ratio - 1) for pair in self.pairs]

    def quantile(self, share: float) -> float | None:
        """That quantile of the differences; None without pairs."""
        return float(np.quantile(self.differences, share)) if self.pairs else None

    def by_op(self) -> dict[str, list[Pair]]:
        grouped: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            grouped.setdefault(f"{pair.first.op} {pair.first.dtype}", []).append(pair)
        return grouped


def interval(point: ProfilePoint) -> tuple[float, float]:
    """p20 and p80, or the median twice."""
    assert point.median_us is not None
    low = point.median_us if point.p20_us is None else point.p20_us
    return low, point.median_us if point.p80_us is None else point.p80_us


def compare(
    first: Iterable[ProfilePoint], second: Iterable[ProfilePoint], *, any_implementation: bool = False
) -> Comparison:
    """Pairs of the same op, dtype, regime and shape, whatever their source and device; of the same
    implementation too, unless ``any_implementation``. The first point of a shape counts."""
    here, there = _chosen(first, any_implementation), _chosen(second, any_implementation)
    pairs = tuple(Pair(point, there[key]) for key, point in here.items() if key in there)
    return Comparison(pairs, len(here) - len(pairs), len(there) - len(pairs))


def _chosen(points: Iterable[ProfilePoint], any_implementation: bool) -> Mapping[Key, ProfilePoint]:
    chosen: dict[Key, ProfilePoint] = {}
    for point in points:
        if point.status == "ok":
            who = "" if any_implementation else point.implementation
            chosen.setdefault((point.op, who, point.dtype, point.regime, point.shape), point)
    return chosen

"""Where a regime takes its numbers from: hypothesis (small, shrinks) or a seeded generator (large, fast).

A regime is written once against :class:`Source`. Hypothesis draws every element of a small case, so that a
failure shrinks to a few keys; a case too large for its choice budget is a function of one drawn seed.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

Shape = tuple[int, ...]
T_co = TypeVar("T_co", covariant=True)


class Draw(Protocol):
    """The ``draw`` argument of ``hypothesis.strategies.composite``."""

    def __call__(self, strategy: st.SearchStrategy[T_co], label: object = None) -> T_co: ...


class Source(Protocol):
    """Random arrays of float64 values."""

    def integers(self, shape: Shape, low: int, high: int) -> NDArray[np.float64]:
        """Integers in [low, high]."""

    def choice(self, options: Sequence[float], shape: Shape) -> NDArray[np.float64]:
        """Members of ``options``, each equally likely."""

    def normal(self, shape: Shape) -> NDArray[np.float64]:
        """Numbers of ordinary size with many significant bits."""


class DrawnSource:
    """Every element is a choice of hypothesis; 0 and the first option are the simplest."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def integers(self, shape: Shape, low: int, high: int) -> NDArray[np.float64]:
        drawn = self._draw(arrays(np.int16, shape, elements=st.integers(low, high)))
        return drawn.astype(np.float64)

    def choice(self, options: Sequence[float], shape: Shape) -> NDArray[np.float64]:
        picked = self._draw(arrays(np.int16, shape, elements=st.integers(0, len(options) - 1)))
        values: NDArray[np.float64] = np.asarray(options, np.float64)[picked]
        return values

    def normal(self, shape: Shape) -> NDArray[np.float64]:
        elements = st.floats(-4, 4, width=32, allow_subnormal=False)
        return self._draw(arrays(np.float32, shape, elements=elements)).astype(np.float64)


class SeededSource:
    """A NumPy generator: full entropy, does not shrink."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def integers(self, shape: Shape, low: int, high: int) -> NDArray[np.float64]:
        return self._rng.integers(low, high, shape, endpoint=True).astype(np.float64)

    def choice(self, options: Sequence[float], shape: Shape) -> NDArray[np.float64]:
        return self._rng.choice(np.asarray(options, np.float64), shape)

    def normal(self, shape: Shape) -> NDArray[np.float64]:
        return self._rng.standard_normal(shape)

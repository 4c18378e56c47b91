"""Draws that depend on the seed alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis.internal.conjecture import providers


@contextmanager
def draws_of_the_seed_alone() -> Iterator[None]:
    """Keep hypothesis from drawing constants that it finds in the source of imported local modules.

    Which modules are local and imported depends on how the package is installed and on what ran before in
    the process; a run is promised to depend on neither. Hypothesis has no public switch for this (and before
    6.131 no such constants).
    """
    inside: Any = providers
    original = getattr(inside, "_get_local_constants", None)
    if original is None:
        yield
        return
    nothing = inside.Constants()
    inside.CONSTANTS_CACHE.cache.clear()
    inside._get_local_constants = lambda: nothing
    try:
        yield
    finally:
        inside._get_local_constants = original
        inside.CONSTANTS_CACHE.cache.clear()

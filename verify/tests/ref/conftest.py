"""Gradients by finite differences, for the tests of every analytic gradient."""

from collections.abc import Callable

import numpy as np
import pytest

from hyscale_ref.arrays import Float64


def by_central_differences(f: Callable[[Float64], float], x: Float64, step: float = 1e-6) -> Float64:
    """The gradient of f at x, element by element.

    Off by about step**2 times a third derivative plus 1e-16 * |f| / step. Meaningless within ``step`` of a
    kink, such as relu's.
    """
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        gradient[i] = (f(up) - f(down)) / (2 * step)
    return gradient


@pytest.fixture(scope="session")
def numeric_gradient() -> Callable[..., Float64]:
    """The function above: `numeric_gradient(f, x)`."""
    return by_central_differences

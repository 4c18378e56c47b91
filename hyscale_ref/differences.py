"""Gradients by finite differences: the check of every analytic gradient in this package."""

from collections.abc import Callable

import numpy as np

from hyscale_ref.arrays import Float64


def numeric_gradient(f: Callable[[Float64], float], x: Float64, step: float = 1e-6) -> Float64:
    """The gradient of f at x, element by element, by central differences.

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

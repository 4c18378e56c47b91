"""Checks of array arguments: each names the argument, what came and what is allowed."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

INT32_MAX = 2**31 - 1

CHUNK_BYTES = 32 * 2**20


def as_float64(name: str, value: ArrayLike, shape: Sequence[int | str]) -> Float64:
    """``value`` as float64 (exact: float16, float32 and float64 only), of the given shape.

    ``shape`` gives an axis by its size or, where any size will do, by its letter. Integers are refused on
    purpose: they are usually the stored bits of a narrow format (see :mod:`hyscale_ref.formats`).
    """
    array = np.asarray(value)
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(f"{name}: dtype {array.dtype}; allowed: float16, float32, float64")
    _check_shape(name, array, shape)
    return array.astype(np.float64, copy=False)


def as_int32(name: str, value: ArrayLike, shape: Sequence[int | str]) -> Int32:
    """``value`` as int32 of the given shape; TypeError unless integers, ValueError if one does not fit."""
    array = np.asarray(value)
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(np.int32)  # an empty list has no dtype of its own
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name}: dtype {array.dtype}; allowed: integers")
    _check_shape(name, array, shape)
    info = np.iinfo(np.int32)
    if array.size and (int(array.min()) < info.min or int(array.max()) > info.max):
        raise ValueError(
            f"{name}: values up to {int(array.max())} and down to {int(array.min())} exceed int32"
        )
    return array.astype(np.int32, copy=False)


def as_count(name: str, value: SupportsIndex, minimum: int = 0, maximum: int = INT32_MAX) -> int:
    """``value`` as an int in [minimum, maximum]; TypeError unless it is an integer (a bool is not)."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: {value!r} is a bool; allowed: an integer")
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r} is a {type(value).__name__}; allowed: an integer") from None
    if not minimum <= count <= maximum:
        raise ValueError(f"{name}: {count}; allowed: {minimum} to {maximum}")
    return count


def as_scale(value: ArrayLike | None, num_keys: int) -> Float64:
    """Key scales as float64 [S], ones if None; ValueError unless they are positive and finite."""
    if value is None:
        return np.ones(num_keys)
    scale = as_float64("k_scale", value, [num_keys])
    bad = ~((scale > 0) & np.isfinite(scale))
    if bad.any():
        key = int(np.flatnonzero(bad)[0])
        raise ValueError(f"k_scale[{key}]: {scale[key]}; allowed: positive and finite")
    return scale


def chunks(num_rows: int, num_keys: int) -> Iterator[tuple[slice, slice]]:
    """Row and key slices that cover a [rows, keys] table in pieces of at most CHUNK_BYTES of float64."""
    keys = max(1, min(num_keys, CHUNK_BYTES // 8 // 64))
    rows = max(1, CHUNK_BYTES // 8 // keys)
    for r in range(0, num_rows, rows):
        for c in range(0, num_keys, keys):
            yield slice(r, r + rows), slice(c, c + keys)


def _check_shape(name: str, array: NDArray[Any], shape: Sequence[int | str]) -> None:
    fits = array.ndim == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        allowed = ", ".join(str(axis) for axis in shape)
        raise ValueError(f"{name}: shape {tuple(array.shape)}; allowed: [{allowed}]")

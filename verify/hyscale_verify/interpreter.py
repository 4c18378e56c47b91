"""Triton's CPU interpreter, made quick enough for property-based tests and careful about memory.

``quicken`` leaves out work that changes nothing, and decodes fp8's NaN. ``checked_memory`` ends a launch at
the first load or store outside the memory that its tensor arguments span; the plain interpreter reads and
writes whatever address a kernel forms.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

Addresses = NDArray[np.uint64]


class _Outermost:
    """Stands in for ``interpreter._patch_lang``: patches on the outermost call alone."""

    def __init__(self, patch_lang: Any) -> None:
        self._patch_lang = patch_lang
        self._open = False

    def __call__(self, fn: Any) -> Any:
        if self._open:
            return interpreter._LangPatchScope()
        self._open = True
        scope = self._patch_lang(_Visible)
        restore = scope.restore

        def close() -> None:
            self._open = False
            restore()

        scope.restore = close
        return scope


class _Visible:
    """Looks to ``_patch_lang`` like a kernel that sees both language modules."""

    __globals__: ClassVar[dict[str, Any]] = {"tl": tl, "core": tl.core}


def quicken() -> None:
    """Patch the interpreter once; later calls do nothing. RuntimeError when Triton has changed inside.

    Two to three times faster, with the same values computed. The interpreter replaces the members of
    ``triton.language`` anew for every helper a kernel calls, ``tl.sum`` included, some 0.25 ms thousands of
    times a launch: once is enough. It computes 64-bit shadows of integer arithmetic for an overflow assertion
    that is off. It copies tensors to and from the host, where they are.

    One value does change: the interpreter widens e4m3's NaN to 480, a GPU to NaN.
    """
    patch_lang = getattr(interpreter, "_patch_lang", None)
    if isinstance(patch_lang, _Outermost):
        return
    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    known = (
        patch_lang is not None
        and hasattr(interpreter, "_LangPatchScope")
        and hasattr(builder.options, "sanitize_overflow")
        and hasattr(executor, "_init_args_hst")
        and hasattr(executor, "_restore_args_dev")
        and hasattr(interpreter, "_convert_float")
    )
    if not known:
        raise RuntimeError(
            "this Triton's interpreter is organised differently; "
            "the versions in constraints.txt are known to work"
        )
    interpreter._patch_lang = _Outermost(patch_lang)
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    executor._init_args_hst = _as_they_are
    executor._restore_args_dev = _nothing
    interpreter._convert_float = _with_nan(interpreter._convert_float)


def _as_they_are(self: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def _nothing(self: Any, *rest: Any) -> None:
    return None


def _with_nan(convert: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's conversion of floats, as bits, with e4m3's two NaN patterns staying NaN."""
    quiet: dict[Any, Any] = {tl.float32: np.uint32(0x7FC00000), tl.float16: np.uint16(0x7E00)}

    def converted(source: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        bits = convert(source, from_type, to_type, rounding)
        if from_type == tl.float8e4nv and to_type in quiet:
            bits = np.where(source & 0x7F == 0x7F, quiet[to_type], bits)
        return bits

    return converted


class MemoryAccessError(Exception):
    """A kernel touched memory that none of its tensor arguments spans."""


def access_error_in(error: BaseException | None) -> MemoryAccessError | None:
    """The forbidden access that caused ``error``, if one did (the interpreter wraps what a kernel raises)."""
    while error is not None:
        if isinstance(error, MemoryAccessError):
            return error
        error = error.__cause__
    return None


class _Extents:
    """The byte ranges of one launch's tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        ranges = sorted(_extent(tensor) for tensor in tensors if tensor.numel())
        self._begin = np.array([begin for begin, _ in ranges], np.uint64)
        # Ranges may overlap or nest (views of one tensor): keep the furthest end seen so far.
        self._end = np.maximum.accumulate(np.array([end for _, end in ranges], np.uint64))

    def check(self, kind: str, pointers: Addresses, mask: NDArray[np.bool_] | None, size: int) -> None:
        touched = pointers.reshape(-1) if mask is None else pointers[np.broadcast_to(mask, pointers.shape)]
        if touched.size == 0:
            return
        place = np.searchsorted(self._begin, touched, side="right").astype(np.int64) - 1
        outside = place < 0
        if len(self._end):
            outside |= touched + np.uint64(size) > self._end[np.maximum(place, 0)]
        else:
            outside[:] = True
        if outside.any():
            raise MemoryAccessError(
                f"{kind} of {int(outside.sum())} elements outside every tensor of the launch"
                f"{self._nearest(int(touched[outside][0]))}"
            )

    def _nearest(self, address: int) -> str:
        if not len(self._begin):
            return ""
        gaps = [(abs(address - int(end)), address - int(end)) for end in self._end]
        gaps += [(abs(address - int(begin)), address - int(begin)) for begin in self._begin]
        return f", the first {min(gaps)[1]:+d} bytes from the nearest edge"


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


@contextmanager
def checked_memory() -> Iterator[None]:
    """Check all interpreted launches inside; Triton wraps the ``MemoryAccessError`` that they raise."""
    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    current: list[_Extents] = []
    call, load, store = executor.__call__, builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        current.append(_Extents([*_tensors(args), *_tensors(kwargs.values())]))
        try:
            return call(self, *args, **kwargs)
        finally:
            current.pop()

    def checked(kind: str, pointers: Any, mask: Any) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        current[-1].check(kind, pointers.data, None if mask is None else mask.data, size)

    def masked_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
        checked("load", ptrs, mask)
        return load(ptrs, mask, *rest)

    def masked_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        checked("store", ptrs, mask)
        return store(ptrs, value, mask, *rest)

    def atomic_rmw(operation: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        checked("atomic", ptr, mask)
        return rmw(operation, ptr, value, mask, *rest)

    def atomic_cas(ptr: Any, *rest: Any) -> Any:
        checked("atomic", ptr, None)
        return cas(ptr, *rest)

    replaced: list[tuple[object, str, Callable[..., Any]]] = [
        (executor, "__call__", launch),
        (builder, "create_masked_load", masked_load),
        (builder, "create_masked_store", masked_store),
        (builder, "create_atomic_rmw", atomic_rmw),
        (builder, "create_atomic_cas", atomic_cas),
    ]
    with ExitStack() as stack:
        for holder, name, replacement in replaced:
            stack.enter_context(patch.object(holder, name, replacement))
        yield

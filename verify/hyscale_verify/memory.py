"""Memory that makes hidden faults visible: poisoned and counted allocations, tensors with far-apart rows."""

import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

MAP_NORESERVE = 0x4000
"""Linux's flag for address space without a promise of memory; the mmap module has it from Python 3.13."""

PATTERNS = (0x7F, 0xFF, 0x00, 0x80)
"""Bytes to fill with: NaN and huge, NaN and -1, zero, -0 and the smallest integer."""


@dataclass
class Allocations:
    """Bytes of the tensors made by ``torch.empty`` and its kin while it watched."""

    live: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def drop(self, size: int) -> None:
        self.live -= size


@contextmanager
def watched_allocations(pattern: int | None = None) -> Iterator[Allocations]:
    """Count what ``torch.empty``, ``empty_like``, ``empty_strided`` and ``new_empty`` allocate.

    With ``pattern`` every byte of it starts as that. Caching allocators and a fresh process hand out zeros or
    the last call's right answer, so an unwritten output looks written until it is poisoned.
    """
    seen = Allocations()

    def wrapped(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            size = tensor.untyped_storage().nbytes()
            seen.add(size)
            weakref.finalize(tensor, seen.drop, size)
            if pattern is not None and size:
                tensor.untyped_storage().fill_(pattern)  # type: ignore[attr-defined]
            return tensor

        return allocate

    with ExitStack() as stack:
        for holder, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            stack.enter_context(patch.object(holder, name, wrapped(getattr(holder, name))))
        yield seen


def spread_rows(tensor: torch.Tensor, reach: int) -> torch.Tensor:
    """A CPU copy whose first-axis stride makes the last row start beyond ``reach`` elements.

    Axis 0 must have at least two rows. The values, shape and other strides are those of ``tensor``; the
    memory between rows is address space, of which only the pages touched are backed. Raises OSError where
    the system refuses the address space.
    """
    rows = tensor.shape[0]
    stride = reach // (rows - 1) + 1
    span = (rows - 1) * stride + tensor[0].numel()
    space = mmap.mmap(
        -1,
        span * tensor.element_size(),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE,
    )
    flat = torch.frombuffer(space, dtype=torch.uint8).view(tensor.dtype)
    spread = flat.as_strided(tensor.shape, (stride, *tensor[0].contiguous().stride()))
    spread.copy_(tensor)
    return spread

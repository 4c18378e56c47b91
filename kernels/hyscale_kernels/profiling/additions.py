# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""The atomic additions of the indexer's dk by themselves: the floor of its scatter (indexer/README.md).

Shape letters: T rows, S keys, D head size, K places of a row, C chunks of keys, N places of one step.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..indexer import IndexerPlan
from ..indexer.scatter import launch_spans


@triton.jit(do_not_specialize=["K", "C", "zero"])
def _ones_kernel(
    index_ptr, span_ptr, table_ptr, K, C, zero, D: tl.constexpr, N: tl.constexpr, SINGLE: tl.constexpr
):
    """Adds 1 to every column of the keys of row program_id(0) in chunk program_id(1).

    SINGLE: one column a lane, as scatter.py adds integers; else as many as the hardware takes at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(span_ptr + row * (C + 1) + tl.program_id(1))
    last = tl.load(span_ptr + row * (C + 1) + tl.program_id(1) + 1)
    for i in tl.range(first, last, N):
        place = i + tl.arange(0, N)
        index = tl.load(index_ptr + row * K + place, mask=place < last, other=-1).to(tl.int64)
        target = table_ptr + index[:, None] * D + tl.arange(0, D)[None, :]
        if SINGLE:
            target += zero
        ones = tl.full((N, D), 1, table_ptr.dtype.element_ty)
        tl.atomic_add(target, ones, mask=(index >= 0)[:, None], sem="relaxed")


def add_ones(indices: torch.Tensor, S: int, D: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A call that adds 1 to row j of a table [S, D] for every j in ``indices`` int32 [T, K], and returns it.

    ``dtype`` is float32 or int32: the table's, and so the way of adding; D is a power of two. Addresses and
    their order are those of the scatter, whose plan is IndexerPlan.default for 32 heads.
    """
    T, K = indices.shape
    plan = IndexerPlan.default(S, 32, D, indices.device)
    spans, chunks = launch_spans(indices, S, 0, T, plan), plan.chunks(S)
    table = torch.zeros(S, D, dtype=dtype, device=indices.device)

    def call() -> torch.Tensor:
        _ones_kernel[(T, chunks)](
            indices, spans, table, K, chunks, 0, D=D, N=plan.scatter_keys, SINGLE=dtype == torch.int32
        )
        return table

    return call

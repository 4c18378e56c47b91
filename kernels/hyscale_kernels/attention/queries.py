"""Backward, third: the gradient of the queries, dq[t, h] = sum_j da[t, h, j] k[j].

A program takes one row, a block of heads and a block of columns, so that what it gathers of a key is not
gathered by another. The columns of one row run next to each other: they share its weights in the cache.

Shape letters: T queries, S keys, K places of a row, Hq query heads, D key size; N keys of one step, R rows of
a chunk.
"""

import torch
import triton
import triton.language as tl

from ..hytopk.plan import ceil_div
from ..hytopk.score import operand
from .plan import AttentionPlan
from .tiles import Call, add_dot, load_places, row_end


@triton.jit
def load_weights(ptr, r, place, heads, live, K, HQ: tl.constexpr):
    """p or da of a chunk's row ``r`` at ``place`` [N] as [N, HEADS]; zero past K and for heads not live."""
    pointers = ptr + (r * K + place)[:, None] * HQ + heads[None, :]
    return operand(tl.load(pointers, mask=(place < K)[:, None] & live[None, :], other=0.0))


@triton.jit
def load_columns(ptr, rows, stride, live, columns, limit):
    """``columns`` below ``limit`` of ``rows`` [N] (int64) as a tile; zero beyond, and where not live."""
    pointers = ptr + rows[:, None] * stride + columns[None, :]
    return operand(tl.load(pointers, mask=live[:, None] & (columns < limit)[None, :], other=0.0))


@triton.jit(do_not_specialize=["K", "S", "row0"])
def _queries_kernel(
    latent_ptr,
    index_ptr,
    da_ptr,
    dq_ptr,
    K,
    S,
    stride,
    row0,
    HQ: tl.constexpr,
    D: tl.constexpr,
    SEARCH: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq of one row of the chunk, HEADS heads, COLUMNS columns; columns fastest, then heads, then rows."""
    BLOCKS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    SLICES: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0).to(tl.int64) // SLICES
    r = program // BLOCKS
    row = row0 + r
    heads = program % BLOCKS * HEADS + tl.arange(0, HEADS)
    live = heads < HQ
    columns = tl.program_id(0) % SLICES * COLUMNS + tl.arange(0, COLUMNS)
    p_index = index_ptr + row * K
    acc = tl.zeros((HEADS, COLUMNS), tl.float32)
    for i in tl.range(0, row_end(p_index, K, SEARCH), N, num_stages=STAGES):
        place = i + tl.arange(0, N)
        keys, used, _ = load_places(p_index, place, K, S)
        b_k = load_columns(latent_ptr, keys, stride, used, columns, D)
        b_da = load_weights(da_ptr, r, place, heads, live, K, HQ)
        acc = add_dot(acc, tl.trans(b_da), b_k)
    p_dq = dq_ptr + (row * HQ + heads)[:, None] * D + columns[None, :]
    tl.store(p_dq, acc, mask=live[:, None] & (columns < D)[None, :])


def launch_queries(
    call: Call, da: torch.Tensor, dq: torch.Tensor, row0: int, rows: int, plan: AttentionPlan
) -> None:
    """Write rows row0 .. row0 + rows - 1 of dq [T, Hq, D] from da [R, K, Hq] of these rows."""
    _, Hq, D = call.q.shape
    K, S, _, _, _, stride = call.numbers()
    _queries_kernel[(rows * call.programs(plan.heads) * ceil_div(D, plan.dq_columns),)](
        call.latent,
        call.indices,
        da,
        dq,
        K,
        S,
        stride,
        row0,
        HQ=Hq,
        D=D,
        SEARCH=call.constants()["SEARCH"],
        HEADS=plan.heads,
        COLUMNS=plan.dq_columns,
        N=plan.dq_keys,
        STAGES=plan.dq_stages,
        num_warps=plan.dq_warps,
    )

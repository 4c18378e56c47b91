"""Backward, second: probabilities and the gradients of logits, for a chunk of rows.

    p = exp(a - total)      dp[h, j] = grad[h] . v[j]      da = scale p (dp - delta)

Both are rounded to the operands' dtype and written once, [rows, K, Hq]: the products that follow read them,
and nothing is computed twice. Nothing here feeds a further product, which leaves registers and warps free.

In fixed point a pass over all rows comes first, which writes nothing but, for every key, the largest bound of
what a row adds to it, sum_h (|da| max|q[h]| + p max|grad[h]|), and how many add; see ``keys.py``.

Shape letters: T queries, S keys, K places of a row, Hq query heads, D key size, Dv value size; N keys of one
step, R rows of a chunk.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..hytopk.score import dot
from .plan import AttentionPlan
from .prepare import Prepared
from .tiles import LOG2_E, Call, load_places, load_tile, narrowed, row_end


class Weights(NamedTuple):
    """p and da [R, K, Hq] of a chunk of rows, in the operands' dtype; past a row's end they are unwritten."""

    p: torch.Tensor
    da: torch.Tensor


@triton.jit(do_not_specialize=["K", "S", "scale", "row0", "peak_stride"])
def _recompute_kernel(
    q_ptr,
    latent_ptr,
    index_ptr,
    grad_ptr,
    total_ptr,
    delta_ptr,
    peak_ptr,
    p_ptr,
    da_ptr,
    bound_ptr,
    hit_ptr,
    K,
    S,
    scale,
    q_stride_t,
    q_stride_h,
    stride,
    row0,
    peak_stride,
    HQ: tl.constexpr,
    VALUE: tl.constexpr,
    REST: tl.constexpr,
    V_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    SEARCH: tl.constexpr,
    BOUNDS: tl.constexpr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
):
    """Row row0 + program_id(0) // BLOCKS, HEADS heads: weights, or (BOUNDS) what it announces to its keys."""
    BLOCKS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    program = tl.program_id(0).to(tl.int64)
    r = program // BLOCKS
    row = row0 + r
    heads = program % BLOCKS * HEADS + tl.arange(0, HEADS)
    live = heads < HQ
    at = row * HQ + heads
    p_index = index_ptr + row * K
    p_q = q_ptr + row * q_stride_t
    b_q = load_tile(p_q, heads, q_stride_h, live, 0, VALUE, V_PAD)
    b_grad = load_tile(grad_ptr, at, VALUE, live, 0, VALUE, V_PAD)
    if REST:
        b_q_rest = load_tile(p_q, heads, q_stride_h, live, VALUE, REST, R_PAD)
    total = tl.load(total_ptr + at, mask=live, other=0.0)
    delta = tl.load(delta_ptr + at, mask=live, other=0.0)
    if BOUNDS:
        peak_q = tl.load(peak_ptr + at, mask=live, other=0.0)
        peak_grad = tl.load(peak_ptr + peak_stride + at, mask=live, other=0.0)
    place = tl.arange(0, N)
    keys, used, _ = load_places(p_index, place, K, S)
    b_v = load_tile(latent_ptr, keys, stride, used, 0, VALUE, V_PAD)
    if REST:
        b_rest = load_tile(latent_ptr, keys, stride, used, VALUE, REST, R_PAD)
    for _ in tl.range(0, row_end(p_index, K, SEARCH), N, num_stages=1):
        # The next keys come in while this step's are multiplied.
        next_keys, next_used, _ = load_places(p_index, place + N, K, S)
        next_v = load_tile(latent_ptr, next_keys, stride, next_used, 0, VALUE, V_PAD)
        if REST:
            next_rest = load_tile(latent_ptr, next_keys, stride, next_used, VALUE, REST, R_PAD)
        # The two products are scaled apart, or the compiler would chain them: every warp group computes the
        # whole of a product that feeds another one.
        a = dot(b_v, tl.trans(b_q)) * (scale * LOG2_E) - total[None, :]
        if REST:
            a += dot(b_rest, tl.trans(b_q_rest)) * (scale * LOG2_E)
        dp = dot(b_v, tl.trans(b_grad))
        p = tl.exp2(tl.where(used[:, None], a, float("-inf")))
        b_p = narrowed(p, latent_ptr)
        b_da = narrowed(scale * p * (dp - delta[None, :]), latent_ptr)
        if BOUNDS:
            size = tl.abs(b_da.to(tl.float32)) * peak_q[None, :] + b_p.to(tl.float32) * peak_grad[None, :]
            bound = tl.sum(size, axis=1)
            adds = used & (bound != 0.0)
            bits = bound.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            tl.atomic_max(bound_ptr + keys, bits, mask=adds, sem="relaxed")
            tl.atomic_add(hit_ptr + keys, tl.full((N,), 1, tl.int32), mask=adds, sem="relaxed")
        else:
            offsets = (r * K + place)[:, None] * HQ + heads[None, :]
            mask = (place < K)[:, None] & live[None, :]
            tl.store(p_ptr + offsets, b_p, mask=mask)
            tl.store(da_ptr + offsets, b_da, mask=mask)
        place += N
        keys = next_keys
        used = next_used
        b_v = next_v
        if REST:
            b_rest = next_rest


def _launch(
    call: Call,
    grad: torch.Tensor,
    prepared: Prepared,
    weights: Weights | None,
    announced: tuple[torch.Tensor, torch.Tensor] | None,
    row0: int,
    rows: int,
    plan: AttentionPlan,
) -> None:
    unused = prepared.delta
    constants = call.constants()
    del constants["HAS_SINK"]
    q, latent, indices, _ = call.tensors()
    _recompute_kernel[(rows * call.programs(plan.heads),)](
        q,
        latent,
        indices,
        grad,
        prepared.total,
        prepared.delta,
        unused if prepared.peaks is None else prepared.peaks,
        *((unused, unused) if weights is None else weights),
        *((unused, unused) if announced is None else announced),
        *call.numbers(),
        row0,
        prepared.delta.numel(),
        **constants,
        BOUNDS=announced is not None,
        HEADS=plan.heads,
        N=plan.weight_keys,
        num_warps=plan.weight_warps,
    )


def launch_weights(
    call: Call,
    grad: torch.Tensor,
    prepared: Prepared,
    weights: Weights,
    row0: int,
    rows: int,
    plan: AttentionPlan,
) -> None:
    """Write the weights of ``rows`` rows from row0 on, for ``grad`` [T, Hq, Dv], contiguous."""
    _launch(call, grad, prepared, weights, None, row0, rows, plan)


def launch_bounds(
    call: Call, grad: torch.Tensor, prepared: Prepared, row0: int, rows: int, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """For ``rows`` rows from row0 on: the bits of the largest bound of an addition to each key, int32 [S],
    and the number of additions, int32 [S]."""
    bounds = torch.zeros((call.latent.shape[0],), dtype=torch.int32, device=call.q.device)
    announced = bounds, torch.zeros_like(bounds)
    _launch(call, grad, prepared, None, announced, row0, rows, plan)
    return announced

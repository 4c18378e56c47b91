"""Backward, first: what each row and head contributes to every one of its keys.

    delta[t, h] = grad[t, h] . out[t, h]          log2 of softmax's denominator, the sink included

and, for the fixed-point gradient, the largest elements of scale q and of grad, which bound what a head can
add to a key. The sink's own gradient needs nothing else: -sum_t exp(sink - total) delta.

Shape letters: T queries, Hq query heads, D key size, Dv value size.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .tiles import LOG2_E, Call, load_tile, log2_total


@dataclass(frozen=True, slots=True)
class Prepared:
    """float32 [T, Hq] each; ``peaks`` [2, T, Hq] (of q and of grad) in fixed point only, ``dsink`` [Hq] with
    a sink only."""

    total: torch.Tensor
    delta: torch.Tensor
    peaks: torch.Tensor | None
    dsink: torch.Tensor | None


@triton.jit(do_not_specialize=["peak_stride"])
def _prepare_kernel(
    q_ptr,
    sink_ptr,
    out_ptr,
    grad_ptr,
    lse_ptr,
    total_ptr,
    delta_ptr,
    peak_ptr,
    q_stride_t,
    q_stride_h,
    peak_stride,
    HAS_SINK: tl.constexpr,
    PEAKS: tl.constexpr,
    HQ: tl.constexpr,
    VALUE: tl.constexpr,
    REST: tl.constexpr,
    V_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Row program_id(0), HEADS heads from program_id(1) * HEADS."""
    row = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    live = heads < HQ
    at = row * HQ + heads
    b_grad = load_tile(grad_ptr, at, VALUE, live, 0, VALUE, V_PAD).to(tl.float32)
    b_out = load_tile(out_ptr, at, VALUE, live, 0, VALUE, V_PAD).to(tl.float32)
    tl.store(delta_ptr + at, tl.sum(b_grad * b_out, axis=1), mask=live)
    tl.store(total_ptr + at, log2_total(lse_ptr, sink_ptr, at, heads, live, HAS_SINK), mask=live)
    if PEAKS:
        p_q = q_ptr + row * q_stride_t
        b_q = load_tile(p_q, heads, q_stride_h, live, 0, VALUE, V_PAD).to(tl.float32)
        peak = tl.max(tl.abs(b_q), axis=1)
        if REST:
            b_rest = load_tile(p_q, heads, q_stride_h, live, VALUE, REST, R_PAD).to(tl.float32)
            peak = tl.maximum(peak, tl.max(tl.abs(b_rest), axis=1))
        tl.store(peak_ptr + at, peak, mask=live)
        tl.store(peak_ptr + peak_stride + at, tl.max(tl.abs(b_grad), axis=1), mask=live)


def launch_prepare(
    call: Call, out: torch.Tensor, log_sum_exp: torch.Tensor, grad: torch.Tensor, peaks: bool
) -> Prepared:
    """For ``out`` and ``grad`` [T, Hq, Dv], contiguous, and log_sum_exp [T, Hq]; the call is not empty."""
    T, Hq, _ = call.q.shape
    total, delta = torch.empty_like(log_sum_exp), torch.empty_like(log_sum_exp)
    bounds = log_sum_exp.new_empty((2, T, Hq)) if peaks else None
    constants = call.constants()
    del constants["SEARCH"]
    heads = 16
    _prepare_kernel[(T, call.programs(heads))](
        call.q,
        call.tensors()[3],
        out,
        grad,
        log_sum_exp,
        total,
        delta,
        delta if bounds is None else bounds,
        call.q.stride(0),
        call.q.stride(1),
        T * Hq,
        PEAKS=peaks,
        **constants,
        HEADS=heads,
    )
    dsink = None
    if call.sink is not None:
        share = (call.sink * LOG2_E.value).sub(total).exp2_().mul_(delta)
        dsink = share.sum(dim=0).neg_()
    return Prepared(total, delta, bounds, dsink)

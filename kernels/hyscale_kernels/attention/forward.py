"""Forward: one row and one block of heads a program, keys in steps, softmax as it goes.

Shape letters: T queries, S keys, K places of a row, Hq query heads, D key size, Dv value size; N keys of one
step.
"""

import torch
import triton
import triton.language as tl

from ..hytopk.score import dot
from .plan import AttentionPlan
from .tiles import LN_2, LOG2_E, Call, add_dot, keys_of, load_index, load_tile, narrowed, row_end


@triton.jit(do_not_specialize=["K", "S", "scale", "always"])
def _forward_kernel(
    q_ptr,
    latent_ptr,
    index_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    K,
    S,
    scale,
    q_stride_t,
    q_stride_h,
    stride,
    always,
    HAS_SINK: tl.constexpr,
    HQ: tl.constexpr,
    VALUE: tl.constexpr,
    REST: tl.constexpr,
    V_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    SEARCH: tl.constexpr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out and log-sum-exp of row program_id(0) // BLOCKS, HEADS heads."""
    BLOCKS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    FEW: tl.constexpr = HEADS < 64  # no warp-group products: plain code
    program = tl.program_id(0).to(tl.int64)
    row = program // BLOCKS
    heads = program % BLOCKS * HEADS + tl.arange(0, HEADS)
    live = heads < HQ
    p_index = index_ptr + row * K
    p_q = q_ptr + row * q_stride_t
    b_q = load_tile(p_q, heads, q_stride_h, live, 0, VALUE, V_PAD)
    if REST:
        b_q_rest = load_tile(p_q, heads, q_stride_h, live, VALUE, REST, R_PAD)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, V_PAD), tl.float32)
    # Indices are read a step before they are needed, once for the copies and once for the mask (README.md,
    # "Indices ahead").
    o = tl.arange(0, N)
    ahead = load_index(p_index, o, K)
    index = load_index(p_index, o, K)
    for i in tl.range(0, row_end(p_index, K, SEARCH), N, num_stages=STAGES):
        keys, held = keys_of(ahead, S)
        ahead = load_index(p_index, i + N + o, K)
        b_v = load_tile(latent_ptr, keys, stride, held, 0, VALUE, V_PAD)
        if REST:
            b_rest = load_tile(latent_ptr, keys, stride, held, VALUE, REST, R_PAD)
            a_rest = dot(b_q_rest, tl.trans(b_rest)) * (scale * LOG2_E)
        # Both conditions always hold. README.md, "Two branches", says what they do to the schedule.
        if FEW or i < K:
            b_p = narrowed(tl.full((HEADS, N), scale, tl.float32), latent_ptr)  # never seen
            shrink = tl.full((HEADS,), 1.0, tl.float32)
            if FEW or i < always:
                used = (index >= 0) & (index < S)
                absent = tl.where(index >= S, float("nan"), float("-inf"))
                index = load_index(p_index, i + N + o, K)
                a = dot(b_q, tl.trans(b_v)) * (scale * LOG2_E)
                if REST:
                    a += a_rest
                a = tl.where(used[None, :], a, absent[None, :])
                higher = tl.maximum(top, tl.max(a, axis=1))
                base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far
                p = tl.exp2(a - base[:, None])
                shrink = tl.exp2(top - base)
                total = total * shrink + tl.sum(p, axis=1)
                top = higher
                b_p = narrowed(p, latent_ptr)
            acc = add_dot(acc * shrink[:, None], b_p, b_v)
    whole = total
    if HAS_SINK:
        sink = tl.load(sink_ptr + heads, mask=live, other=0.0) * LOG2_E
        whole += tl.exp2(sink - tl.where(top == float("-inf"), 0.0, top))
    out = acc / tl.where(total == 0.0, 1.0, whole)[:, None]
    o_v = tl.arange(0, V_PAD)
    p_out = out_ptr + (row * HQ + heads)[:, None] * VALUE + o_v[None, :]
    tl.store(p_out, out, mask=live[:, None] & (o_v < VALUE)[None, :])
    lse = (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN_2
    tl.store(lse_ptr + row * HQ + heads, lse, mask=live)


def launch_forward(call: Call, plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hq, Dv] in q's dtype and log-sum-exp float32 [T, Hq]."""
    T, Hq, _ = call.q.shape
    out = call.q.new_empty((T, Hq, call.value_dim), dtype=call.stored())
    log_sum_exp = call.q.new_empty((T, Hq), dtype=torch.float32)
    if call.empty:
        return out.zero_().to(call.q.dtype), log_sum_exp.fill_(float("-inf"))
    _forward_kernel[(T * call.programs(plan.heads),)](
        *call.tensors(),
        out,
        log_sum_exp,
        *call.numbers(),
        2**31 - 1,
        **call.constants(),
        HEADS=plan.heads,
        N=plan.keys,
        STAGES=plan.stages,
        num_warps=plan.warps,
    )
    return out.to(call.q.dtype), log_sum_exp

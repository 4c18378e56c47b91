"""Attention probabilities at the selected places, summed over heads: the target of the indexer's loss.

One program a row, all heads at once and keys on the M side: the sum over heads needs no other program, so the
result is repeatable bit for bit.

Shape letters: T queries, S keys, K places of a row, Hq query heads, D key size; N keys of one step.
"""

import torch
import triton
import triton.language as tl

from ..hytopk.plan import next_power_of_2
from ..hytopk.score import dot
from .plan import AttentionPlan
from .tiles import LEAST_SIDE, LOG2_E, Call, keys_of, load_index, load_places, load_tile, log2_total


@triton.jit(do_not_specialize=["K", "S", "scale", "always"])
def _mass_kernel(
    q_ptr,
    latent_ptr,
    index_ptr,
    sink_ptr,
    lse_ptr,
    mass_ptr,
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
    HEADS: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """mass of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    live = heads < HQ
    p_index = index_ptr + row * K
    p_q = q_ptr + row * q_stride_t
    b_q = load_tile(p_q, heads.to(tl.int64), q_stride_h, live, 0, VALUE, V_PAD)
    if REST:
        b_q_rest = load_tile(p_q, heads.to(tl.int64), q_stride_h, live, VALUE, REST, R_PAD)
    total = log2_total(lse_ptr, sink_ptr, row * HQ + heads, heads, live, HAS_SINK)
    o = tl.arange(0, N)
    ahead = load_index(p_index, o, K)
    for i in tl.range(0, K, N, num_stages=STAGES):
        keys, held = keys_of(ahead, S)
        ahead = load_index(p_index, i + N + o, K)
        b_v = load_tile(latent_ptr, keys, stride, held, 0, VALUE, V_PAD)
        if REST:
            b_rest = load_tile(latent_ptr, keys, stride, held, VALUE, REST, R_PAD)
        # Always holds: the work is a branch, so that the next copies come before it (README.md).
        if i < always:
            place = i + o
            _, used, beyond = load_places(p_index, place, K, S)
            # Scaled apart, as in recompute.py: a product that feeds another one is computed twice.
            a = dot(b_v, tl.trans(b_q)) * (scale * LOG2_E) - total[None, :]
            if REST:
                a += dot(b_rest, tl.trans(b_q_rest)) * (scale * LOG2_E)
            p = tl.exp2(tl.where(used[:, None] & live[None, :], a, float("-inf")))
            mass = tl.where(beyond, float("nan"), tl.sum(p, axis=1))
            tl.store(mass_ptr + row * K + place, mass, mask=place < K)


def launch_mass(call: Call, log_sum_exp: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """float32 [T, K] for log_sum_exp [T, Hq]."""
    mass = torch.empty(call.indices.shape, dtype=torch.float32, device=call.q.device)
    if call.empty:
        return mass.zero_()
    constants = call.constants()
    del constants["SEARCH"]
    _mass_kernel[(call.q.shape[0],)](
        *call.tensors(),
        log_sum_exp,
        mass,
        *call.numbers(),
        2**31 - 1,
        **constants,
        HEADS=max(LEAST_SIDE, next_power_of_2(call.q.shape[1])),
        N=plan.mass_keys,
        STAGES=plan.mass_stages,
        num_warps=plan.mass_warps,
    )
    return mass

"""Stage 4, rescoring: the canonical scores of the candidates, and of nothing else.

One program gathers the candidate keys of one row. About 1.3 to 2 K keys a row are scored again: 1/20 of
the scan's work at 64K keys, 1/300 at a million.
"""

import torch
import triton
import triton.language as tl

from .plan import Plan
from .problem import Problem
from .score import key_scale, load_keys, load_query, load_weights, ordered, row_scores


@triton.jit(do_not_specialize=["row0", "capacity"])
def _rescore_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    k_scale_ptr,
    candidate_ptr,
    filled_ptr,
    key_ptr,
    row0,
    capacity,
    q_stride_t,
    q_stride_h,
    k_stride,
    w_stride_t,
    HAS_SCALE: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Ordered scores of the candidates of row program_id(0); rows bound for repair are left alone."""
    r = tl.program_id(0)
    filled = tl.load(filled_ptr + r)
    if filled <= capacity:
        row = (row0 + r).to(tl.int64)
        b_q = load_query(q_ptr, q_stride_t, q_stride_h, row, H, H_PAD, D, D_PAD)
        b_w = load_weights(w_ptr, w_stride_t, row, H, H_PAD, N)
        p_key = candidate_ptr + r.to(tl.int64) * capacity
        p_out = key_ptr + r.to(tl.int64) * capacity
        for c in tl.range(0, filled, N, num_stages=STAGES):
            o_c = c + tl.arange(0, N)
            mask = o_c < filled
            keys = tl.load(p_key + o_c, mask=mask, other=0).to(tl.int64)
            b_k = load_keys(k_ptr, k_stride, keys, D, D_PAD)
            score = row_scores(b_q, b_w, b_k, H, H_PAD, N)
            if HAS_SCALE:
                score = score * key_scale(k_scale_ptr, keys)
            tl.store(p_out + o_c, ordered(score), mask=mask)


def launch_rescore(
    problem: Problem, candidates: torch.Tensor, filled: torch.Tensor, row0: int, plan: Plan
) -> torch.Tensor:
    """Ordered canonical scores int32 [R, capacity] of the candidates of rows row0 .. row0+R-1."""
    keys = torch.empty_like(candidates)
    _rescore_kernel[(filled.shape[0],)](
        *problem.pointers(),
        candidates,
        filled,
        keys,
        row0,
        plan.capacity,
        *problem.strides(),
        **problem.constants(),
        H_PAD=problem.padded_heads(),
        N=plan.gather,
        STAGES=3,
        num_warps=4,
    )
    return keys

"""Scores at the selected keys: the canonical routine on the keys of each row, as HyTopK returned them.

Shape letters: T queries, S keys, H heads, D head size, K places of a row, N keys of one step.
"""

import torch
import triton
import triton.language as tl

from ..hytopk.problem import Problem
from ..hytopk.score import key_scale, load_keys, load_query, load_weights, row_scores
from .plan import IndexerPlan


@triton.jit
def load_index(p_index, place, last):
    """What ``place`` [N] of a row holds; -1 from ``last`` on."""
    return tl.load(p_index + place, mask=place < last, other=-1)


@triton.jit
def keys_of(index, S):
    """(keys int64, used) of ``index`` [N]: ``used`` is a key of [0, S), the rest yields key 0."""
    used = (index >= 0) & (index < S)
    return tl.where(used, index, 0).to(tl.int64), used


@triton.jit
def selected_tile(
    b_q,
    b_w,
    k_ptr,
    k_scale_ptr,
    p_index,
    place,
    K,
    S,
    k_stride,
    HAS_SCALE: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    N: tl.constexpr,
):
    """Canonical scores [N] at ``place``: +0 for -0, -inf at -1, NaN where a place is not sound.

    A sound place holds -1, or a key of [0, S) that ascends from the place before it.
    """
    index = load_index(p_index, place, K)
    left = tl.load(p_index + place - 1, mask=(place < K) & (place > 0), other=-1)
    keys, used = keys_of(index, S)
    sound = (used & (index > left) & ((place == 0) | (left >= 0))) | (index == -1)
    b_k = load_keys(k_ptr, k_stride, keys, D, D_PAD)
    score = row_scores(b_q, b_w, b_k, H, H_PAD, N)
    if HAS_SCALE:
        score = score * key_scale(k_scale_ptr, keys)
    score = tl.where(score == 0.0, 0.0, score)
    return tl.where(sound, tl.where(used, score, float("-inf")), float("nan"))


@triton.jit(do_not_specialize=["K", "S"])
def _selected_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    k_scale_ptr,
    index_ptr,
    score_ptr,
    K,
    S,
    q_stride_t,
    q_stride_h,
    k_stride,
    w_stride_t,
    HAS_SCALE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    H_PAD: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    p_index = index_ptr + row * K
    b_q = load_query(q_ptr, q_stride_t, q_stride_h, row, H, H_PAD, D, D_PAD)
    b_w = load_weights(w_ptr, w_stride_t, row, H, H_PAD, N)
    for i in tl.range(0, K, N, num_stages=STAGES):
        place = i + tl.arange(0, N)
        score = selected_tile(
            b_q, b_w, k_ptr, k_scale_ptr, p_index, place, K, S, k_stride,
            HAS_SCALE, H, H_PAD, D, D_PAD, N,
        )  # fmt: skip
        tl.store(score_ptr + row * K + place, score, mask=place < K)


def launch_selected(problem: Problem, indices: torch.Tensor, plan: IndexerPlan) -> torch.Tensor:
    """Scores float32 [T, K] at ``indices`` int32 [T, K], contiguous."""
    T, K = indices.shape
    scores = torch.empty((T, K), dtype=torch.float32, device=problem.device)
    if problem.num_keys == 0:
        return scores.fill_(float("-inf"))
    if T and K:
        _selected_kernel[(T,)](
            *problem.pointers(),
            indices,
            scores,
            K,
            problem.num_keys,
            *problem.strides(),
            **problem.constants(),
            H_PAD=problem.padded_heads(),
            N=plan.keys,
            STAGES=plan.stages,
            num_warps=plan.warps,
        )
    return scores

"""The indexer's loss over the selected keys, and its gradient in the scores, one row a program.

    loss[t] = coefficient * sum_j p[t, j] (log p[t, j] - log softmax(s[t] / temperature)[j])
    grad[t, j] = coefficient / temperature * (P[t] softmax(s[t] / temperature)[j] - p[t, j])

with P[t] = sum_j p[t, j]. Scores are computed canonically, stored where the gradient will be, and read again:
no second gathering of keys, and no memory beside the gradient's.

Shape letters: T queries, S keys, H heads, D head size, K places of a row, N places of one step.
"""

import torch
import triton
import triton.language as tl

from ..hytopk.problem import Problem
from ..hytopk.score import load_query, load_weights
from .plan import IndexerPlan
from .selected import selected_tile


@triton.jit(do_not_specialize=["K", "S", "coefficient", "temperature"])
def _loss_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    k_scale_ptr,
    index_ptr,
    target_ptr,
    loss_ptr,
    grad_ptr,
    K,
    S,
    coefficient,
    temperature,
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
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Loss and score gradients of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    p_index = index_ptr + row * K
    p_target = target_ptr + row * K
    p_grad = grad_ptr + row * K
    b_q = load_query(q_ptr, q_stride_t, q_stride_h, row, H, H_PAD, D, D_PAD)
    b_w = load_weights(w_ptr, w_stride_t, row, H, H_PAD, N)
    for i in tl.range(0, K, N, num_stages=STAGES):
        place = i + tl.arange(0, N)
        score = selected_tile(
            b_q, b_w, k_ptr, k_scale_ptr, p_index, place, K, S, k_stride,
            HAS_SCALE, H, H_PAD, D, D_PAD, N,
        )  # fmt: skip
        tl.store(p_grad + place, score, mask=place < K)
    # The same addresses are read below by other threads.
    tl.debug_barrier()

    o_b = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for i in tl.range(0, K, BLOCK, num_stages=1):
        score = tl.load(p_grad + i + o_b, mask=i + o_b < K, other=float("-inf")) / temperature
        top = tl.maximum(top, score, propagate_nan=tl.PropagateNan.ALL)
    highest = tl.max(tl.where(top == top, top, float("-inf")), axis=0)  # NaN comes back in the total
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros((BLOCK,), tl.float32)
    share = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(0, K, BLOCK, num_stages=1):
        inside = i + o_b < K
        score = tl.load(p_grad + i + o_b, mask=inside, other=float("-inf")) / temperature
        used = tl.load(p_index + i + o_b, mask=inside, other=-1) >= 0
        total += tl.exp(score - highest)
        share += tl.load(p_target + i + o_b, mask=inside & used, other=0.0)
    whole = tl.sum(total, axis=0)
    whole = tl.where(whole == 0.0, 1.0, whole)  # no key
    mass = tl.sum(share, axis=0)
    log_whole = tl.log(whole)
    loss = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(0, K, BLOCK, num_stages=1):
        inside = i + o_b < K
        score = tl.load(p_grad + i + o_b, mask=inside, other=float("-inf")) / temperature - highest
        used = tl.load(p_index + i + o_b, mask=inside, other=-1) >= 0
        target = tl.load(p_target + i + o_b, mask=inside & used, other=0.0)
        ratio = tl.log(tl.where(target > 0.0, target, 1.0)) - (score - log_whole)
        loss += target * tl.where(target > 0.0, ratio, 0.0)
        grad = coefficient / temperature * (tl.exp(score) / whole * mass - target)  # 0 without a target
        tl.store(p_grad + i + o_b, tl.where(used, grad, 0.0), mask=inside)
    row_loss = coefficient * tl.sum(loss, axis=0)
    # A row without a target gives 0; a target that is NaN, or a row that is not a selection, NaN.
    row_loss = tl.where(mass + whole == mass + whole, row_loss, float("nan"))
    tl.store(loss_ptr + row, tl.where(mass == 0.0, 0.0, row_loss))


def launch_loss(
    problem: Problem,
    indices: torch.Tensor,
    target: torch.Tensor,
    coefficient: float,
    temperature: float,
    plan: IndexerPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss float32 [T], its gradient in the scores float32 [T, K]) for ``target`` float32 [T, K]."""
    T, K = indices.shape
    loss = torch.empty((T,), dtype=torch.float32, device=problem.device)
    grad = torch.empty((T, K), dtype=torch.float32, device=problem.device)
    if problem.num_keys == 0 or K == 0:
        return loss.zero_(), grad.zero_()
    if T:
        _loss_kernel[(T,)](
            *problem.pointers(),
            indices,
            target,
            loss,
            grad,
            K,
            problem.num_keys,
            coefficient,
            temperature,
            *problem.strides(),
            **problem.constants(),
            H_PAD=problem.padded_heads(),
            N=plan.keys,
            BLOCK=plan.keys * 4,
            STAGES=plan.stages,
            num_warps=plan.warps,
        )
    return loss, grad

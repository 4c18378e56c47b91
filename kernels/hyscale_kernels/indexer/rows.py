"""Backward, by rows: dq and dw of each query, and what the scatter of dk needs.

With x[t, h, j] = q[t, h] . k[j], its sign m = [x > 0] and c[t, j] = grad[t, j] * k_scale[j]:

    dw[t, h] = sum_j c[t, j] relu(x[t, h, j])
    dq[t, h] = w[t, h] sum_j m[t, h, j] c[t, j] k[j]

x comes from the canonical dot product again, so the signs are the forward's. They are kept as bits, which
makes the scatter a product of exact zeros and ones with w q: no key is gathered twice.

dq multiplies k, exact in bfloat16 (float16 takes two terms), by m c, which is split in two bfloat16 terms:
the tensor cores then lose less than 2**-15 of each product, and sums are float32. Both terms lie in one
operand, the heads of the second below those of the first: one product for fp8 keys, which have to be widened,
and the full 64 rows of a tensor core from 32 heads on. A row's dq and dw depend on that row's inputs alone,
in a fixed order.

Shape letters: T queries, S keys, H heads, D head size, K places of a row, N keys of one step, B sign words.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..hytopk.problem import Problem
from ..hytopk.score import INTERPRET, dot, key_scale, load_keys, operand
from .plan import IndexerPlan
from .selected import keys_of, load_index


@dataclass(frozen=True, slots=True)
class Contributions:
    """What the R rows of one pass add to dk, as the row pass leaves it.

    signs  int32 [R, K, B], bit h % 32 of word h // 32: whether head h of the query meets the key above zero
    peak   int32 [S], bits of the largest bound of one row's contribution to a key (fixed point only)
    hits   int32 [S], how many rows contribute to a key (fixed point only)

    Empty or None where dk is not wanted.
    """

    signs: torch.Tensor
    peak: torch.Tensor | None
    hits: torch.Tensor | None


@triton.jit
def upper(x):
    """float32 cut to the bits that bfloat16 has, as float32: what is left over has the sign of x."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def narrow(x):
    """float32 as an operand of ``dot``: the nearest bfloat16 (the interpreter, which would cut, keeps x)."""
    if INTERPRET:
        return x
    else:
        return x.to(tl.bfloat16)


@triton.jit
def add_product(acc, x, exact, WIDE: tl.constexpr):
    """acc [2 L, M] plus x [N, L] float32, transposed, times exact [N, M]; the two terms of x lie one
    below the other.

    The numbers of ``exact`` have 8 significant bits, or 11 if WIDE: then it takes two terms as well.
    """
    N: tl.constexpr = x.shape[0]
    L: tl.constexpr = x.shape[1]
    x_high = upper(x)
    both = narrow(tl.reshape(tl.permute(tl.join(x_high, x - x_high), (2, 1, 0)), (2 * L, N)))
    if WIDE:
        high = upper(exact.to(tl.float32))
        acc = dot(both, narrow(exact.to(tl.float32) - high)) + acc
        return dot(both, narrow(high)) + acc
    else:
        return dot(both, narrow(exact.to(tl.float32))) + acc


@triton.jit
def load_heads(
    q_ptr,
    q_stride_t,
    q_stride_h,
    row,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """The heads of query ``row`` (int64) as a tile [D_PAD, H_PAD] in order, zero beyond D and H."""
    o_d = tl.arange(0, D_PAD)
    o_h = tl.arange(0, H_PAD)
    mask = (o_h < H)[None, :] & (o_d < D)[:, None]
    return operand(
        tl.load(q_ptr + row * q_stride_t + o_h[None, :] * q_stride_h + o_d[:, None], mask=mask, other=0.0)
    )


@triton.jit
def coefficients(p_grad, k_scale_ptr, keys, place, used, HAS_SCALE: tl.constexpr):
    """c [N]: the gradient of a place's score times the scale of its key; 0 where unused."""
    c = tl.load(p_grad + place, mask=used, other=0.0)
    if HAS_SCALE:
        c = tl.where(used, c * key_scale(k_scale_ptr, keys), 0.0)
    return c


@triton.jit(do_not_specialize=["row0", "K", "S"])
def _rows_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    k_scale_ptr,
    index_ptr,
    grad_ptr,
    dq_ptr,
    dw_ptr,
    sign_ptr,
    peak_ptr,
    hit_ptr,
    row0,
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
    WIDE: tl.constexpr,
    WANT_DK: tl.constexpr,
    FIXED: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq, dw, signs and bounds of row row0 + program_id(0)."""
    r = tl.program_id(0).to(tl.int64)
    row = row0 + r
    p_index = index_ptr + row * K
    p_grad = grad_ptr + row * K
    o_h = tl.arange(0, H_PAD)
    o_d = tl.arange(0, D_PAD)
    LANES: tl.constexpr = 32 if H_PAD > 32 else H_PAD
    B: tl.constexpr = H_PAD // LANES
    b_q = load_heads(q_ptr, q_stride_t, q_stride_h, row, H, H_PAD, D, D_PAD)
    weight = tl.load(w_ptr + row * w_stride_t + o_h, mask=o_h < H, other=0.0)
    if FIXED:
        largest = tl.max(tl.sum(tl.abs(b_q.to(tl.float32)) * tl.abs(weight)[None, :], axis=1), axis=0)
    acc_q = tl.zeros((2 * H_PAD, D_PAD), tl.float32)
    acc_w = tl.zeros((N, H_PAD), tl.float32)  # added up over keys once, at the end
    for i in tl.range(0, K, N, num_stages=STAGES):
        place = i + tl.arange(0, N)
        keys, used = keys_of(load_index(p_index, place, K), S)
        c = coefficients(p_grad, k_scale_ptr, keys, place, used, HAS_SCALE)
        b_k = load_keys(k_ptr, k_stride, keys, D, D_PAD)
        x = dot(b_k, b_q)
        positive = (x > 0.0) & used[:, None]
        acc_w += tl.where(positive, x * c[:, None], 0.0)
        acc_q = add_product(acc_q, tl.where(positive, c[:, None], 0.0), b_k, WIDE)
        if WANT_DK:
            bits = tl.reshape(tl.where(positive, 1 << (o_h % 32)[None, :], 0), (N, B, LANES))
            o_b = tl.arange(0, B)
            p_sign = sign_ptr + (r * K + place)[:, None] * B + o_b[None, :]
            tl.store(p_sign, tl.sum(bits, axis=2), mask=(place < K)[:, None])
            if FIXED:
                adds = used & (c != 0.0)
                bound = (tl.abs(c) * largest).to(tl.int32, bitcast=True) & 0x7FFFFFFF
                tl.atomic_max(peak_ptr + keys, bound, mask=adds, sem="relaxed")
                tl.atomic_add(hit_ptr + keys, tl.full((N,), 1, tl.int32), mask=adds, sem="relaxed")
    b_dq = tl.sum(tl.reshape(acc_q, (2, H_PAD, D_PAD)), axis=0) * weight[:, None]
    p_dq = dq_ptr + (row * H + o_h[:, None]) * D + o_d[None, :]
    tl.store(p_dq, b_dq, mask=(o_h < H)[:, None] & (o_d < D)[None, :])
    tl.store(dw_ptr + row * H + o_h, tl.sum(acc_w, axis=0), mask=o_h < H)


def launch_rows(
    problem: Problem,
    indices: torch.Tensor,
    grad: torch.Tensor,
    dq: torch.Tensor,
    dw: torch.Tensor,
    row0: int,
    R: int,
    want_dk: bool,
    fixed: bool,
    plan: IndexerPlan,
) -> Contributions:
    """Write rows row0 .. row0+R-1 of dq [T, H, D] and dw [T, H] float32, for ``grad`` float32 [T, K]."""
    S, K = problem.num_keys, indices.shape[1]
    H_PAD = problem.padded_heads()

    def made(make: Callable[..., torch.Tensor], *shape: int) -> torch.Tensor:
        return make(shape, dtype=torch.int32, device=problem.device)

    signs = made(torch.empty, R if want_dk else 0, K, max(1, H_PAD // 32))
    peak = made(torch.zeros, S) if want_dk and fixed else None
    hits = made(torch.zeros, S) if want_dk and fixed else None
    _rows_kernel[(R,)](
        *problem.pointers(),
        indices,
        grad,
        dq,
        dw,
        signs,
        *(indices if each is None else each for each in (peak, hits)),
        row0,
        K,
        S,
        *problem.strides(),
        **problem.constants(),
        H_PAD=H_PAD,
        WIDE=problem.q.dtype in (torch.float16, torch.float32),
        WANT_DK=want_dk,
        FIXED=fixed and want_dk,
        N=plan.backward_keys,
        STAGES=plan.stages,
        num_warps=plan.warps,
        maxnreg=plan.registers or None,
    )
    return Contributions(signs, peak, hits)

"""The canonical score routine: the one definition, bit for bit, of what HyTopK ranks.

    s[t, j] = k_scale[j] * sum_h w[t, h] * relu(q[t, h] . k[j])                        float32

Every stage that looks at a score (sampling, scan, rescoring, repair, the dense pass) calls one of the
two helpers below, and both give the same bits; hopper.py writes the first of them again, for its own
layouts, and is held against it bit by bit:

* one tensor-core dot product over the whole of D (operands as they are, float32 accumulation, the
  warp-group instruction: the tile's M side is at least 64, because fp8's narrow form rounds otherwise);
* relu that propagates NaN;
* heads in ascending order, one explicit fused multiply-add each, starting from +0;
* one multiplication by k_scale; a scale that is not positive and finite makes the score NaN.

``tile_scores`` keeps queries on the M side and loops over heads: the fast form for many keys.
``row_scores`` keeps keys on the M side and has the heads of one query on the N side: the form for keys
gathered for one query. It takes the heads apart again by halving, which moves values and never adds.

Measured on an H200 (bf16, fp16, fp8; D 32 to 256; five tile shapes): the two forms agreed on every bit.

Interpreter branches: operands are upcast to float32 right after the load, because Triton's interpreter
is wrong for bf16, and ``dot`` sums D in a fixed order, because the interpreter's own is not bit-stable.
Nothing else in HyTopK knows about the interpreter.

Shape letters: T queries, S keys, H heads, D head size; BT, BS tile sizes, N gathered keys.
"""

import torch
import triton
import triton.language as tl

from .plan import Plan, ceil_div
from .problem import Problem

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))

# The ordered key of a score that can never be selected (NaN, or no score at all).
NEVER = tl.constexpr(-(2**31))


@triton.jit
def operand(x):
    """A loaded tile as an operand of ``dot``."""
    if INTERPRET:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def dot(a, b):
    """a [M, D] times b [D, N] in float32."""
    if INTERPRET:
        return tl.sum(a[:, :, None] * b[None, :, :], axis=1)
    else:
        return tl.dot(a, b)


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def key_scale(k_scale_ptr, keys):
    """float32 scale of each key; NaN where it is not positive and finite."""
    scale = tl.load(k_scale_ptr + keys)
    return tl.where((scale > 0.0) & (scale < float("inf")), scale, float("nan"))


@triton.jit
def load_keys(k_ptr, k_stride, keys, D: tl.constexpr, D_PAD: tl.constexpr):
    """Keys [N] (int64, in range) as a tile [N, D_PAD], zero beyond D."""
    o_d = tl.arange(0, D_PAD)
    pointers = k_ptr + keys[:, None] * k_stride + o_d[None, :]
    if D_PAD == D:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(o_d < D)[None, :], other=0.0)
    return operand(tile)


@triton.jit
def load_keys_transposed(k_ptr, k_stride, keys, D: tl.constexpr, D_PAD: tl.constexpr):
    """Keys [N] (int64, in range) as a tile [D_PAD, N], zero beyond D."""
    o_d = tl.arange(0, D_PAD)
    pointers = k_ptr + keys[None, :] * k_stride + o_d[:, None]
    if D_PAD == D:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(o_d < D)[:, None], other=0.0)
    return operand(tile)


@triton.jit
def tile_scores(
    q_ptr,
    q_stride_t,
    q_stride_h,
    w_ptr,
    w_stride_t,
    rows,
    b_k,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores [BT, BS], before k_scale, of query ``rows`` [BT] (int64) against b_k [D_PAD, BS]."""
    o_d = tl.arange(0, D_PAD)
    p_q = q_ptr + rows[:, None] * q_stride_t + o_d[None, :]
    p_w = w_ptr + rows * w_stride_t
    acc = tl.zeros((BT, BS), tl.float32)
    for h in tl.range(0, H, num_stages=STAGES):
        if D_PAD == D:
            b_q = operand(tl.load(p_q + h * q_stride_h))
        else:
            b_q = operand(tl.load(p_q + h * q_stride_h, mask=(o_d < D)[None, :], other=0.0))
        b_w = tl.load(p_w + h)
        acc = tl.fma(tl.broadcast_to(b_w[:, None], (BT, BS)), relu(dot(b_q, b_k)), acc)
    return acc


@triton.jit
def _halves(x, HEADS: tl.constexpr, N: tl.constexpr):
    """The first and the last HEADS / 2 columns of x [N, HEADS]."""
    return tl.split(tl.permute(tl.reshape(x, (N, 2, HEADS // 2)), (0, 2, 1)))


@triton.jit
def _heads_in_order(
    x, weight, acc, FIRST: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, N: tl.constexpr
):
    """acc [N] plus weight times x, both [N, HEADS], heads FIRST .. FIRST+HEADS-1 in ascending order.

    Halves the head axis until single columns are left; heads at or beyond H are padding and skipped.
    """
    if FIRST < H:
        if HEADS == 1:
            acc = tl.fma(tl.reshape(weight, (N,)), tl.reshape(x, (N,)), acc)
        else:
            x_lower, x_upper = _halves(x, HEADS, N)
            w_lower, w_upper = _halves(weight, HEADS, N)
            acc = _heads_in_order(x_lower, w_lower, acc, FIRST, HEADS // 2, H, N)
            acc = _heads_in_order(x_upper, w_upper, acc, FIRST + HEADS // 2, HEADS // 2, H, N)
    return acc


@triton.jit
def load_query(
    q_ptr,
    q_stride_t,
    q_stride_h,
    row,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """The heads of query ``row`` (int64) as a tile [D_PAD, H_PAD] for ``row_scores``, zero beyond D and H.

    Column 8 j + 2 g + e holds head (H_PAD / 4) g + 2 j + e (g < 4, e < 2). A tensor core hands columns
    2 g and 2 g + 1 of every eight to one lane, so each lane gets a run of consecutive heads.
    """
    o_d = tl.arange(0, D_PAD)
    column = tl.arange(0, H_PAD)
    o_h = (column // 2 % 4) * (H_PAD // 4) + (column // 8) * 2 + column % 2
    pointers = q_ptr + row * q_stride_t + o_h[None, :] * q_stride_h + o_d[:, None]
    if (D_PAD == D) and (H_PAD == H):
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(o_h < H)[None, :] & (o_d < D)[:, None], other=0.0)
    return operand(tile)


@triton.jit
def load_weights(w_ptr, w_stride_t, row, H: tl.constexpr, H_PAD: tl.constexpr, N: tl.constexpr):
    """The head weights of query ``row`` (int64) for ``row_scores``: [N, H_PAD], every row the same."""
    o_h = tl.zeros((N, 1), tl.int32) + tl.arange(0, H_PAD)[None, :]
    return tl.load(w_ptr + row * w_stride_t + o_h, mask=o_h < H, other=0.0)


@triton.jit
def row_scores(b_q, b_w, b_k, H: tl.constexpr, H_PAD: tl.constexpr, N: tl.constexpr):
    """Scores [N], before k_scale, of one query (b_q, b_w: its loaders) against b_k [N, D_PAD]."""
    x = tl.reshape(relu(dot(b_k, b_q)), (N, H_PAD // 8, 4, 2))
    x = tl.reshape(tl.permute(x, (0, 2, 1, 3)), (N, H_PAD))  # heads in order
    return _heads_in_order(x, b_w, tl.zeros((N,), tl.float32), 0, H_PAD, H, N)


@triton.jit
def ordered(score):
    """float32 scores as int32 that compare the same way; -0 equals +0, NaN becomes NEVER."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score == score, key, NEVER)


@triton.jit
def unordered(key):
    """The float32 score of an ordered key other than NEVER."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def tile_window(lo, hi):
    """Smallest [first, last) that covers the non-empty windows of a tile; first >= last when none is."""
    some = hi > lo
    return tl.min(tl.where(some, lo, 2**31 - 1)), tl.max(tl.where(some, hi, 0))


@triton.jit(do_not_specialize=["row0", "R", "S", "columns", "segment"])
def _dense_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    k_scale_ptr,
    lo_ptr,
    hi_ptr,
    out_ptr,
    row0,
    R,
    S,
    columns,
    segment,
    q_stride_t,
    q_stride_h,
    k_stride,
    w_stride_t,
    HAS_SCALE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    STAGES: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Scores [R, columns] of key segment program_id(0), row tile program_id(1).

    Outside the window: -inf, and with ORDERED nothing that may be read: tiles that no window meets are
    skipped.
    """
    o_r = tl.program_id(1) * BT + tl.arange(0, BT)
    live = o_r < R
    o_r = tl.minimum(o_r, R - 1)
    rows = (row0 + o_r).to(tl.int64)
    lo = tl.load(lo_ptr + rows)
    hi = tl.load(hi_ptr + rows)
    begin = tl.program_id(0) * segment
    finish = tl.minimum(begin + segment, S)
    if ORDERED:
        columns = columns // BS * BS  # it is whole tiles; the compiler now knows, and stores are wide
        first, last = tile_window(lo, hi)
        begin = tl.maximum(begin, first)
        finish = tl.minimum(finish, last)
    for tile in range(begin // BS, (finish + BS - 1) // BS):
        o_s = tile * BS + tl.arange(0, BS)
        keys = tl.minimum(o_s, S - 1).to(tl.int64)
        b_k = load_keys_transposed(k_ptr, k_stride, keys, D, D_PAD)
        score = tile_scores(
            q_ptr, q_stride_t, q_stride_h, w_ptr, w_stride_t, rows, b_k, H, D, D_PAD, BT, BS, STAGES
        )
        if HAS_SCALE:
            score = score * key_scale(k_scale_ptr, keys)[None, :]
        pointers = out_ptr + o_r.to(tl.int64)[:, None] * columns + o_s[None, :]
        if ORDERED:
            tl.store(pointers, ordered(score), mask=live[:, None])
        else:
            inside = (o_s[None, :] >= lo[:, None]) & (o_s[None, :] < hi[:, None])
            score = tl.where(inside, tl.where(score == 0.0, 0.0, score), float("-inf"))
            tl.store(pointers, score, mask=live[:, None] & (o_s < S)[None, :])


def launch_dense(
    problem: Problem, row0: int, R: int, plan: Plan, *, as_ordered: bool = False
) -> torch.Tensor:
    """Canonical scores float32 [R, S] of rows row0 .. row0+R-1; -inf outside the windows.

    ``as_ordered`` gives their ordered form, int32 [R, plan.table_columns(S)], and promises nothing outside
    the windows.
    """
    S = problem.num_keys
    columns = plan.table_columns(S) if as_ordered else S
    dtype = torch.int32 if as_ordered else torch.float32
    out = torch.empty((R, columns), dtype=dtype, device=problem.device)
    if R == 0 or S == 0:
        return out
    segment = plan.segment_keys(R, S)
    _dense_kernel[(ceil_div(S, segment), ceil_div(R, plan.tile_rows))](
        *problem.pointers(),
        problem.lo,
        problem.hi,
        out,
        row0,
        R,
        S,
        columns,
        segment,
        *problem.strides(),
        **problem.constants(),
        BT=plan.tile_rows,
        BS=plan.tile_keys,
        STAGES=plan.stages,
        ORDERED=as_ordered,
        **plan.scan_options(),
    )
    return out

"""Pruning: key tiles whose scores certainly stay below the thresholds of a row tile are left out of the scan.

The keys of a block lie in a ball with centre c and radius r, so that

    score <= sum over heads with w > 0 of w relu(q . c + |q| r)

and a block may be skipped where no row of the tile that sees it reaches its threshold by that bound. A
skipped tile's bits are 0, as the scan would have left them: pruning decides speed and nothing else.

A row tile's bound for a block costs what one key costs. Of a group of blocks, one in EVERY is bounded
first, and the others only where more than one in LEAST of those can go, which needs neighbouring keys that
are much alike (README.md says where it pays). The blocks that remain become a list, and the scan walks it.

Rounding is covered by slack in the radius, a share of |q| (|c| + r). A centre is rounded to at least 8 bits.
A fp8 product on Hopper drops from each of its D terms what lies more than 13 bits below the largest: D 2**-13
of it at most, for which twice as much is added (``_slack``). Where something is NaN, infinite or so large
that products may be, the bound is infinite or NaN, and nothing is skipped.

Shape letters: BT queries of a row tile, BS keys of a block, D head size; blocks are counted from the chunk's
first key.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .plan import Plan, ceil_div
from .problem import Problem
from .score import dot, key_scale, load_keys, operand, relu, tile_window

GROUP = 256  # blocks that are decided on together
EVERY = tl.constexpr(16)
LEAST = tl.constexpr(10)
# Weights below zero only lower a score; what their terms may round up by is this share of the slack.
NEGATIVE = tl.constexpr(2.0**-8)
# Added to norms and bounds, since squares and products of smaller numbers may vanish.
SMALL = tl.constexpr(1e-17)
# Norms and weights beyond this may overflow in products.
LARGE = tl.constexpr(1e15)


@triton.jit
def _norm(x, axis: tl.constexpr):
    """A little more than the Euclidean norm of float32 x; infinite where that is NaN or LARGE."""
    norm = tl.sqrt(tl.sum(x * x, axis=axis)) * 1.001 + SMALL
    return tl.where(norm <= LARGE, norm, float("inf"))


@triton.jit
def _keys(
    k_ptr, k_scale_ptr, k_stride, keys, S, HAS_SCALE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """Scaled ``keys`` [N] as float32 [N, D_PAD]; those beyond S are key S-1."""
    keys = tl.minimum(keys, S - 1).to(tl.int64)
    k = load_keys(k_ptr, k_stride, keys, D, D_PAD).to(tl.float32)
    if HAS_SCALE:
        k = k * key_scale(k_scale_ptr, keys)[:, None]
    return k


@triton.jit(do_not_specialize=["S", "key0"])
def _ball_kernel(
    k_ptr,
    k_scale_ptr,
    centre_ptr,
    radius_ptr,
    S,
    key0,
    k_stride,
    HAS_SCALE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BS: tl.constexpr,
    SLACK: tl.constexpr,
):
    """Centre [D_PAD] and radius, slack included, of the keys of block program_id(0).

    Any centre will do: the mean of 16 keys is nearly as good as the mean of all.
    """
    block = tl.program_id(0)
    o_k = tl.arange(0, 16) * (BS // 16)
    k = _keys(k_ptr, k_scale_ptr, k_stride, key0 + block * BS + o_k, S, HAS_SCALE, D, D_PAD)
    centre = (tl.sum(k, axis=0) / 16).to(centre_ptr.dtype.element_ty)
    tl.store(centre_ptr + block.to(tl.int64) * D_PAD + tl.arange(0, D_PAD), centre)
    centre = centre.to(tl.float32)
    farthest = tl.zeros((BS // 2,), tl.float32)
    for i in tl.static_range(0, BS, BS // 2):
        o_k = i + tl.arange(0, BS // 2)
        k = _keys(k_ptr, k_scale_ptr, k_stride, key0 + block * BS + o_k, S, HAS_SCALE, D, D_PAD)
        farthest = tl.maximum(farthest, _norm(k - centre[None, :], 1))
    radius = tl.max(farthest, axis=0)
    tl.store(radius_ptr + block, radius + SLACK * (radius + _norm(centre, 0)))


@triton.jit
def _add_heads(bound, b_c, radius, p_q, q_stride_h, p_w, begin, end, D: tl.constexpr, D_PAD: tl.constexpr):
    """bound [BT, N] with the terms of heads begin .. end-1; centres b_c [D_PAD, N], radius [1, N]."""
    o_d = tl.arange(0, D_PAD)[None, :]
    for h in tl.range(begin, end, num_stages=2):
        b_q = operand(tl.load(p_q + h * q_stride_h, mask=o_d < D, other=0.0)).to(b_c.dtype)
        w = tl.load(p_w + h)
        norm = _norm(b_q.to(tl.float32), 1)
        lowers = w < 0.0
        b_q = tl.where(lowers[:, None], 0.0, b_q)
        norm = tl.where(lowers, norm * NEGATIVE, norm)
        weight = tl.where(tl.abs(w) <= LARGE, tl.abs(w), float("nan"))
        bound += weight[:, None] * relu(dot(b_q, b_c) + norm[:, None] * radius)
    return bound


@triton.jit
def _needed(sees, bound, threshold):
    """Blocks [N] that some row sees and may need. Not less, rather than greater or equal: a NaN keeps its."""
    return tl.max((sees & ~(bound < threshold)).to(tl.int32), axis=0) != 0


@triton.jit
def _seen_and_needed(
    q_ptr,
    q_stride_t,
    q_stride_h,
    w_ptr,
    w_stride_t,
    centre_ptr,
    radius_ptr,
    lo_ptr,
    scan_hi_ptr,
    threshold_ptr,
    row0,
    R,
    key0,
    last_block,
    o_b,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    N: tl.constexpr,
    LOOK: tl.constexpr,
):
    """(seen, needed) of blocks o_b [N] for row tile program_id(0): whether some row sees it, and may need it.

    More heads only raise a bound: every LOOK heads it is seen whether all blocks are needed already.
    """
    o_r = tl.minimum(tl.program_id(0) * BT + tl.arange(0, BT), R - 1)
    rows = (row0 + o_r).to(tl.int64)
    lo = tl.load(lo_ptr + rows)[:, None]
    hi = tl.load(scan_hi_ptr + o_r)[:, None]
    threshold = tl.load(threshold_ptr + o_r)[:, None]
    first = (key0 + o_b * BS)[None, :]
    sees = (first < hi) & (lo - first < BS) & (o_b <= last_block)[None, :]
    seen = tl.max(sees.to(tl.int32), axis=0) != 0
    o_d = tl.arange(0, D_PAD)
    blocks = tl.minimum(o_b, last_block)
    b_c = operand(tl.load(centre_ptr + blocks[None, :].to(tl.int64) * D_PAD + o_d[:, None]))
    radius = tl.load(radius_ptr + blocks)[None, :]
    p_q = q_ptr + rows[:, None] * q_stride_t + o_d[None, :]
    p_w = w_ptr + rows * w_stride_t
    bound = tl.zeros((BT, N), tl.float32) + SMALL
    if LOOK == H:
        bound = _add_heads(bound, b_c, radius, p_q, q_stride_h, p_w, 0, H, D, D_PAD)
        needed = _needed(sees, bound, threshold)
    else:
        needed = seen & (o_b < 0)
        h = 0
        while (h < H) & (tl.max((seen & ~needed).to(tl.int32)) > 0):
            stop = tl.minimum(h + LOOK, H)
            bound = _add_heads(bound, b_c, radius, p_q, q_stride_h, p_w, h, stop, D, D_PAD)
            needed = _needed(sees, bound, threshold)
            h = stop
    return seen, needed


@triton.jit(do_not_specialize=["row0", "R", "key0", "blocks"])
def _ask_kernel(
    q_ptr,
    w_ptr,
    centre_ptr,
    radius_ptr,
    lo_ptr,
    scan_hi_ptr,
    threshold_ptr,
    pays_ptr,
    row0,
    R,
    key0,
    blocks,
    q_stride_t,
    q_stride_h,
    w_stride_t,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    N: tl.constexpr,
):
    """pays[row tile, group]: whether bounding the N * EVERY blocks of group program_id(1) will."""
    o_b = (tl.program_id(1) * N + tl.arange(0, N)) * EVERY
    seen, needed = _seen_and_needed(
        q_ptr, q_stride_t, q_stride_h, w_ptr, w_stride_t, centre_ptr, radius_ptr, lo_ptr, scan_hi_ptr,
        threshold_ptr, row0, R, key0, blocks - 1, o_b, H, D, D_PAD, BT, BS, N, 4,
    )  # fmt: skip
    seen = seen.to(tl.int32)
    spared = tl.sum(tl.where(needed, 0, seen))
    pays = (spared * LEAST > tl.sum(seen)).to(tl.int8)
    tl.store(pays_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), pays)


@triton.jit(do_not_specialize=["row0", "R", "key0", "words", "blocks", "groups"])
def _bound_kernel(
    q_ptr,
    w_ptr,
    centre_ptr,
    radius_ptr,
    lo_ptr,
    scan_hi_ptr,
    threshold_ptr,
    pays_ptr,
    needed_ptr,
    bitmap_ptr,
    row0,
    R,
    key0,
    words,
    blocks,
    groups,
    q_stride_t,
    q_stride_h,
    w_stride_t,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
):
    """needed[row tile, block] of blocks program_id(1) * N on, and their bitmap words 0, where it pays."""
    tile = tl.program_id(0)
    if tl.load(pays_ptr + tile * groups + tl.program_id(1) * N // GROUP) != 0:
        o_b = tl.program_id(1) * N + tl.arange(0, N)
        _, needed = _seen_and_needed(
            q_ptr, q_stride_t, q_stride_h, w_ptr, w_stride_t, centre_ptr, radius_ptr, lo_ptr, scan_hi_ptr,
            threshold_ptr, row0, R, key0, blocks - 1, o_b, H, D, D_PAD, BT, BS, N, H,
        )  # fmt: skip
        tl.store(needed_ptr + tile.to(tl.int64) * blocks + o_b, needed.to(tl.int8), mask=o_b < blocks)
        o_w = tl.program_id(1) * (N * BS // 32) + tl.arange(0, N * BS // 32)
        p_word = bitmap_ptr + (tile * BT).to(tl.int64) * words + o_w
        for _ in range(tl.minimum(BT, R - tile * BT)):
            tl.store(p_word, 0, mask=o_w < words)
            p_word += words


@triton.jit(do_not_specialize=["row0", "R", "key0", "blocks", "groups"])
def _left_kernel(
    lo_ptr,
    scan_hi_ptr,
    pays_ptr,
    needed_ptr,
    list_ptr,
    length_ptr,
    row0,
    R,
    key0,
    blocks,
    groups,
    BT: tl.constexpr,
    BS: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
):
    """The blocks of row tile program_id(0) that are left, ascending, and how many they are."""
    tile = tl.program_id(0)
    o_r = tl.minimum(tile * BT + tl.arange(0, BT), R - 1)
    first, last = tile_window(tl.load(lo_ptr + row0 + o_r), tl.load(scan_hi_ptr + o_r))
    p_needed = needed_ptr + tile.to(tl.int64) * blocks
    p_list = list_ptr + tile.to(tl.int64) * blocks
    length = 0
    for i in range(0, blocks, N):
        o_b = i + tl.arange(0, N)
        inside = (o_b < blocks) & (key0 + o_b * BS < last) & (first - (key0 + o_b * BS) < BS)
        bounded = inside & (tl.load(pays_ptr + tile * groups + o_b // GROUP, mask=inside, other=0) != 0)
        left = tl.where(bounded, tl.load(p_needed + o_b, mask=bounded, other=0) != 0, inside).to(tl.int32)
        tl.store(p_list + length + tl.cumsum(left, axis=0) - 1, o_b, mask=left != 0)
        length += tl.sum(left)
    tl.store(length_ptr + tile, length)


def _slack(D_PAD: int, one_byte: bool) -> float:
    """Share of |q| |k| by which a computed q . k may exceed what a ball allows, and more."""
    return max(2.0**-6, D_PAD * 2.0**-12 if one_byte else 0.0)


class TileList(NamedTuple):
    """The key blocks that are left of a chunk: of row tile i, blocks[i, :length[i]], ascending, int32."""

    blocks: torch.Tensor
    length: torch.Tensor


def launch_prune(
    problem: Problem,
    scan_hi: torch.Tensor,
    threshold: torch.Tensor,
    bitmap: torch.Tensor,
    row0: int,
    key0: int,
    key1: int,
    plan: Plan,
) -> TileList:
    """What the scan of rows row0 .. row0+R-1 over keys [key0, key1) may not leave out.

    Row tiles and blocks are the scan's tiles. Clears the bitmap [R, words] where something is left out.
    """
    (R, words), device = bitmap.shape, problem.device
    BT, BS = plan.scan_tile()
    tiles, blocks = ceil_div(R, BT), ceil_div(key1 - key0, BS)
    q_stride_t, q_stride_h, k_stride, w_stride_t = problem.strides()
    sizes = problem.constants()
    has_scale = sizes.pop("HAS_SCALE")
    one_byte = problem.q.dtype.itemsize == 1
    centre = torch.empty(
        (blocks, sizes["D_PAD"]), dtype=torch.bfloat16 if one_byte else problem.q.dtype, device=device
    )
    radius = torch.empty(blocks, dtype=torch.float32, device=device)
    needed = torch.empty((tiles, blocks), dtype=torch.int8, device=device)
    left = TileList(
        torch.empty((tiles, blocks), dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
    )
    pays = torch.empty((tiles, ceil_div(blocks, GROUP)), dtype=torch.int8, device=device)
    q, k, w, k_scale = problem.pointers()
    _ball_kernel[(blocks,)](
        k,
        k_scale,
        centre,
        radius,
        problem.num_keys,
        key0,
        k_stride,
        HAS_SCALE=has_scale,
        D=sizes["D"],
        D_PAD=sizes["D_PAD"],
        BS=BS,
        SLACK=_slack(sizes["D_PAD"], one_byte),
        num_warps=4,
    )
    bounding = (q, w, centre, radius, problem.lo, scan_hi, threshold, pays)
    strides = (q_stride_t, q_stride_h, w_stride_t)
    sizes |= {"BT": BT, "BS": BS}
    groups, half = pays.shape[1], GROUP // 2
    _ask_kernel[(tiles, groups)](
        *bounding, row0, R, key0, blocks, *strides, **sizes, N=GROUP // EVERY.value, num_warps=4
    )
    _bound_kernel[(tiles, ceil_div(blocks, half))](
        *bounding,
        needed,
        bitmap,
        row0,
        R,
        key0,
        words,
        blocks,
        groups,
        *strides,
        **sizes,
        GROUP=GROUP,
        N=half,
        num_warps=8,
    )
    _left_kernel[(tiles,)](
        problem.lo,
        scan_hi,
        pays,
        needed,
        *left,
        row0,
        R,
        key0,
        blocks,
        groups,
        BT=BT,
        BS=BS,
        GROUP=GROUP,
        N=1024,
        num_warps=4,
    )
    return left

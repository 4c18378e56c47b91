"""The scan for Hopper GPUs (sm_90), in Gluon: same bits as scan.py's, from tensor cores that do not wait.

In the plain scan a warp group issues its products, waits, adds them up, and meets its neighbours at a barrier
for the next head's queries: the tensor cores stand still for half of the time. Here one warp fetches, with
the copy engine, the queries of two heads at a time into a ring that several consumers read. Each consumer
is a warp group with keys of its own and a register file's share for one product and one sum; while one adds,
the others' products run. Nothing but two barriers a pair of heads ties them together.

A multiprocessor holds one program, which takes an even share of all rounds (a key tile for each consumer),
row tile after row tile; its pipeline never drains in between. A small kernel counts the rounds first.

    q_full, q_empty   [STAGES]              a slot of the ring holds two heads; all consumers have read it
    k_full, k_empty   [CONSUMERS * SIDES]   a consumer's key tile has arrived; its last product is done

A ring's phase flips each time it comes round. A wait for the phase before the first passes at once, so the
fetching warp starts with empty slots.

The arithmetic is score.py's (one product over all of D, relu, heads in ascending order with one fused
multiply-add each, one multiplication by the scale); the instruction is the same warp-group product with
queries on its M side. Gluon cannot be interpreted, so the plain scan stays, is what the interpreter runs,
and is compared with this one bit by bit on the GPU.

Shape letters: BT queries of a program, BS keys of a consumer's tile.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .plan import HOPPER_TILE, Plan, ceil_div
from .problem import Problem
from .prune import TileList

BT = gl.constexpr(HOPPER_TILE[0])
BS = gl.constexpr(HOPPER_TILE[1])
STAGES = gl.constexpr(4)
CONSUMERS = 3  # by default
REGISTERS = {2: 240, 3: 160}  # of a thread of a consumer, by their number
ELEMENTS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}

# Triton 3.6 calls it async_copy_global_to_shared.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
ALL = gl.constexpr(tl.PropagateNan.ALL)


@gluon.constexpr_function
def _product(columns, bits):
    """Layout of a warp group's product of 64 rows by ``columns``, operands of ``bits``."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // bits]
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _window_bits(lo, hi, first):
    """As scan.window_bits, int32."""
    below = gl.minimum(gl.maximum(lo - first, 0), 32).to(gl.uint64)
    above = gl.minimum(gl.maximum(hi - first, 0), 32).to(gl.uint64)
    one = gl.full(below.shape, 1, gl.uint64, layout=below.type.layout)
    bits = gl.where(hi > lo, ((one << above) - 1) & ~((one << below) - 1), 0)
    return bits.to(gl.uint32).to(gl.int32, bitcast=True)


@gluon.jit
def _stretch(tile, round_ptr, first, last):
    """(from, to, base) of row tile ``tile`` in rounds counted from ``first``, the program's first.

    ``base`` is the tile's own first round, which another program may have.
    """
    base = gl.load(round_ptr + tile) - first
    end = gl.load(round_ptr + tile + 1) - first
    return gl.maximum(base, 0), gl.minimum(end, last - first), base


@gluon.jit
def _first_key(i, tile, lists, LISTED: gl.constexpr):
    """First key of the ``i``-th key tile of row tile ``tile``; beyond a list's end, of its last."""
    start_ptr, count_ptr, block_ptr, blocks = lists
    start = gl.load(start_ptr + tile)
    if LISTED:
        i = gl.minimum(i, gl.load(count_ptr + tile) - 1)
        i = gl.load(block_ptr + tile.to(gl.int64) * blocks + i)
    return start + i * BS


@gluon.jit
def _consume(
    which: gl.constexpr,
    shared,
    pointers,
    sizes,
    HAS_SCALE: gl.constexpr,
    LISTED: gl.constexpr,
    H: gl.constexpr,
    SIDES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Bitmap words of the key tiles which, which + CONSUMERS, ... of the program's row tiles."""
    memory, barriers, work, lists = shared
    q_smem, k_smem = memory
    q_full, q_empty, k_full, k_empty = barriers
    round_ptr, first, last, tile0, tile1 = work
    w_ptr, k_scale_ptr, lo_ptr, scan_hi_ptr, threshold_ptr, bitmap_ptr = pointers
    row0, R, S, key0, words, w_stride_t = sizes
    BITS: gl.constexpr = q_smem.dtype.primitive_bitwidth
    PRODUCT: gl.constexpr = _product(BS, BITS)
    none = gl.zeros([BT, BS], gl.float32, layout=PRODUCT)
    for tile in range(tile0, tile1):
        o_r = tile * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, PRODUCT))
        o_r = gl.minimum(o_r, R - 1)
        p_w = w_ptr + (row0 + o_r).to(gl.int64) * w_stride_t
        begin, end, base = _stretch(tile, round_ptr, first, last)
        for t in range(begin, end):
            side = which * SIDES + t % SIDES
            mbarrier.wait(k_full.index(side), (t // SIDES) & 1)
            b_k = k_smem.index(side).permute([1, 0])
            score = none
            for pair in range(H // 2):
                turn = t * (H // 2) + pair
                slot = turn % STAGES
                mbarrier.wait(q_full.index(slot), (turn // STAGES) & 1)
                for e in gl.static_range(2):
                    weight = gl.load(p_w + 2 * pair + e)
                    x = warpgroup_mma(q_smem.index(2 * slot + e), b_k, none, use_acc=False, is_async=True)
                    x = warpgroup_mma_wait(0, [x])
                    if e == 1:
                        mbarrier.arrive(q_empty.index(slot), count=1)
                    score = gl.fma(gl.expand_dims(weight, 1), gl.maximum(x, 0.0, propagate_nan=ALL), score)
            mbarrier.arrive(k_empty.index(side), count=1)

            key = _first_key((t - base) * CONSUMERS + which, tile, lists, LISTED)
            o_s = gl.arange(0, BS, layout=gl.SliceLayout(0, PRODUCT))
            if HAS_SCALE:
                scale = gl.load(k_scale_ptr + gl.minimum(key + o_s, S - 1))
                scale = gl.where((scale > 0.0) & (scale < float("inf")), scale, float("nan"))
                score = score * gl.expand_dims(scale, 0)
            threshold = gl.load(threshold_ptr + o_r)
            kept = gl.where(score < gl.expand_dims(threshold, 1), 0, 1) << gl.expand_dims(o_s % 32, 0)
            word = gl.reduce(gl.reshape(kept, [BT, BS // 32, 32]), 2, _add)
            WORD: gl.constexpr = word.type.layout
            o_t = tile * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, WORD))
            live = o_t < R
            o_t = gl.minimum(o_t, R - 1)
            lo = gl.expand_dims(gl.load(lo_ptr + row0 + o_t), 1)
            hi = gl.expand_dims(gl.load(scan_hi_ptr + o_t), 1)
            o_w = gl.expand_dims(gl.arange(0, BS // 32, layout=gl.SliceLayout(0, WORD)), 0)
            word = word & _window_bits(lo, hi, key + 32 * o_w)
            o_word = (key - key0) // 32 + o_w
            p_word = bitmap_ptr + gl.expand_dims(o_t.to(gl.int64) * words, 1) + o_word
            gl.store(p_word, word, mask=gl.expand_dims(live, 1) & (o_word < words))


@gluon.jit
def _fetch(
    q_rows,
    k_rows,
    row0,
    shared,
    LISTED: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    SIDES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Key tiles and, for each round of them, all heads of the queries, in the order they are consumed."""
    memory, barriers, work, lists = shared
    q_smem, k_smem = memory
    q_full, q_empty, k_full, k_empty = barriers
    round_ptr, first, last, tile0, tile1 = work
    for tile in range(tile0, tile1):
        begin, end, base = _stretch(tile, round_ptr, first, last)
        for t in range(begin, end):
            for which in gl.static_range(CONSUMERS):
                side = which * SIDES + t % SIDES
                key = _first_key((t - base) * CONSUMERS + which, tile, lists, LISTED)
                mbarrier.wait(k_empty.index(side), ((t // SIDES) & 1) ^ 1)
                mbarrier.expect(k_full.index(side), k_rows.block_type.nbytes)
                async_load(k_rows, [key, 0], k_full.index(side), k_smem.index(side))
            for pair in range(H // 2):
                turn = t * (H // 2) + pair
                slot = turn % STAGES
                mbarrier.wait(q_empty.index(slot), ((turn // STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(slot), 2 * q_rows.block_type.nbytes)
                for e in gl.static_range(2):
                    where = [row0 + tile * BT, (2 * pair + e) * D]
                    async_load(q_rows, where, q_full.index(slot), q_smem.index(2 * slot + e))


@gluon.jit(do_not_specialize=["row0", "R", "S", "key0", "words", "blocks"])
def _hopper_kernel(
    q_rows,
    k_rows,
    w_ptr,
    k_scale_ptr,
    lo_ptr,
    scan_hi_ptr,
    threshold_ptr,
    bitmap_ptr,
    round_ptr,
    start_ptr,
    count_ptr,
    block_ptr,
    row0,
    R,
    S,
    key0,
    words,
    blocks,
    w_stride_t,
    HAS_SCALE: gl.constexpr,
    LISTED: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    SIDES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """As scan._scan_kernel, one program of many rounds: its even share of all there are (``_share_kernel``).

    q_rows, k_rows: descriptors of q as [T, H * D] and of k, blocks [BT, D], [BS, D].
    """
    tiles = (R + BT - 1) // BT
    share = (gl.load(round_ptr + tiles) + gl.num_programs(0) - 1) // gl.num_programs(0)
    first = gl.program_id(0) * share
    last = gl.minimum(first + share, gl.load(round_ptr + tiles))
    if first < last:
        # The row tiles of the first and the last round: so many end no later.
        tile0, tile1 = 0, 1
        for i in range(0, tiles, 128):
            o_i = i + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
            end = gl.load(round_ptr + 1 + o_i, mask=o_i < tiles, other=2**31 - 1)
            tile0 += gl.reduce((end <= first).to(gl.int32), 0, _add)
            tile1 += gl.reduce((end < last).to(gl.int32), 0, _add)
        q_smem = gl.allocate_shared_memory(q_rows.dtype, [2 * STAGES, BT, D], q_rows.layout)
        k_smem = gl.allocate_shared_memory(k_rows.dtype, [SIDES * CONSUMERS, BS, D], k_rows.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_full = gl.allocate_shared_memory(gl.int64, [SIDES * CONSUMERS, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [SIDES * CONSUMERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=CONSUMERS)
        for i in gl.static_range(SIDES * CONSUMERS):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=1)
        work = (round_ptr, first, last, tile0, tile1)
        lists = (start_ptr, count_ptr, block_ptr, blocks)
        shared = ((q_smem, k_smem), (q_full, q_empty, k_full, k_empty), work, lists)
        pointers = (w_ptr, k_scale_ptr, lo_ptr, scan_hi_ptr, threshold_ptr, bitmap_ptr)
        sizes = (row0, R, S, key0, words, w_stride_t)
        # fmt: off
        if CONSUMERS == 2:
            gl.warp_specialize([
                (_consume, (0, shared, pointers, sizes, HAS_SCALE, LISTED, H, SIDES, CONSUMERS)),
                (_consume, (1, shared, pointers, sizes, HAS_SCALE, LISTED, H, SIDES, CONSUMERS)),
                (_fetch, (q_rows, k_rows, row0, shared, LISTED, H, D, SIDES, CONSUMERS)),
            ], [4, 1], [REGISTERS, 24])
        else:
            gl.warp_specialize([
                (_consume, (0, shared, pointers, sizes, HAS_SCALE, LISTED, H, SIDES, CONSUMERS)),
                (_consume, (1, shared, pointers, sizes, HAS_SCALE, LISTED, H, SIDES, CONSUMERS)),
                (_consume, (2, shared, pointers, sizes, HAS_SCALE, LISTED, H, SIDES, CONSUMERS)),
                (_fetch, (q_rows, k_rows, row0, shared, LISTED, H, D, SIDES, CONSUMERS)),
            ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
        # fmt: on


@triton.jit(do_not_specialize=["row0", "R", "key0", "key1"])
def _share_kernel(
    lo_ptr,
    scan_hi_ptr,
    length_ptr,
    round_ptr,
    start_ptr,
    count_ptr,
    row0,
    R,
    key0,
    key1,
    LISTED: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    CONSUMERS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Of each row tile: its first key, its key tiles, and the rounds of all row tiles before it. One program.

    A round is CONSUMERS key tiles. With LISTED the key tiles are those of a list of ``length`` (prune.py).
    """
    rounds = 0
    for i in range(0, (R + BT - 1) // BT, TILES):
        o_i = i + tl.arange(0, TILES)
        there = o_i * BT < R
        if LISTED:
            start = tl.zeros((TILES,), tl.int32) + key0
            count = tl.load(length_ptr + o_i, mask=there, other=0)
        else:
            o_r = tl.minimum(o_i[:, None] * BT + tl.arange(0, BT)[None, :], R - 1)
            lo = tl.load(lo_ptr + row0 + o_r)
            hi = tl.load(scan_hi_ptr + o_r)
            some = hi > lo
            first = tl.min(tl.where(some, lo, 2**31 - 1), axis=1)
            last = tl.max(tl.where(some, hi, 0), axis=1)
            start = tl.maximum(key0 + (first - key0) // BS * BS, key0)
            count = (tl.minimum(last, key1) - start + BS - 1) // BS
            count = tl.where(there, tl.maximum(count, 0), 0)
        share = (count + CONSUMERS - 1) // CONSUMERS
        tl.store(round_ptr + o_i, rounds + tl.cumsum(share, axis=0) - share, mask=there)
        tl.store(start_ptr + o_i, start, mask=there)
        tl.store(count_ptr + o_i, count, mask=there)
        rounds += tl.sum(share)
    tl.store(round_ptr + (R + BT - 1) // BT, rounds)


def consumers(q: torch.Tensor, k: torch.Tensor) -> int:
    """``Plan.consumers`` by default: this scan wherever it can run."""
    return 0 if obstacle(q, k) else CONSUMERS


def obstacle(q: torch.Tensor, k: torch.Tensor) -> str | None:
    """Why this scan cannot take q [T, H, D] and k [S, D]; None when it can."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"it needs a GPU of compute capability 9.0, and q is on {q.device}"
    (_, H, D), bytes_ = q.shape, q.element_size()
    if H % 2:
        return f"it takes heads in pairs, and q has {H}"
    if D * bytes_ not in (64, 128, 256):
        return f"a head of q has {D} elements of {bytes_} bytes; it takes heads of 64, 128 or 256 bytes"
    if q.stride(1) != D:
        return f"the heads of a row of q must lie side by side, and q has strides {list(q.stride())}"
    for name, tensor, row in (("q", q, H * D), ("k", k, D)):
        if tensor.shape[0] > 1 and tensor.stride(0) < row:
            return f"rows of {name} must not overlap; its strides are {list(tensor.stride())}"
        if tensor.data_ptr() % 16 or tensor.stride(0) * bytes_ % 16:
            return (
                f"rows of {name} must start at multiples of 16 bytes; its strides are {list(tensor.stride())}"
            )
    return None


def launch_hopper_scan(
    problem: Problem,
    scan_hi: torch.Tensor,
    threshold: torch.Tensor,
    bitmap: torch.Tensor,
    row0: int,
    key0: int,
    key1: int,
    plan: Plan,
    left: TileList | None = None,
) -> None:
    """As scan.launch_scan; ``obstacle`` says when it can run."""
    R, words = bitmap.shape
    (T, H, D), S = problem.q.shape, problem.num_keys
    tiles, keys = ceil_div(R, BT.value), key1 - key0
    programs: int = torch.cuda.get_device_properties(problem.device).multi_processor_count
    if plan.segment:
        programs = tiles * ceil_div(keys, plan.segment)
    rounds, start, count = (
        torch.empty(size, dtype=torch.int32, device=problem.device) for size in (tiles + 1, tiles, tiles)
    )
    _share_kernel[(1,)](
        problem.lo,
        scan_hi,
        count if left is None else left.length,
        rounds,
        start,
        count,
        row0,
        R,
        key0,
        key1,
        LISTED=left is not None,
        BT=BT.value,
        BS=BS.value,
        CONSUMERS=plan.consumers,
        TILES=64,
        num_warps=8,
    )
    _hopper_kernel[(programs,)](
        _rows(problem.q, [T, H * D], [BT.value, D]),
        _rows(problem.k, [S, D], [BS.value, D]),
        *problem.pointers()[2:],
        problem.lo,
        scan_hi,
        threshold,
        bitmap,
        rounds,
        start,
        count,
        count if left is None else left.blocks,
        row0,
        R,
        S,
        key0,
        words,
        0 if left is None else left.blocks.shape[1],
        problem.w.stride(0),
        HAS_SCALE=problem.k_scale is not None,
        LISTED=left is not None,
        H=H,
        D=D,
        SIDES=1 if D * problem.q.element_size() == 256 else 2,
        CONSUMERS=plan.consumers,
        REGISTERS=REGISTERS[plan.consumers],
        num_warps=4,
    )


def _rows(tensor: torch.Tensor, shape: list[int], block: list[int]) -> TensorDescriptor:
    """``tensor`` as a matrix that the copy engine fetches in blocks; rows and columns beyond it are zero."""
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[tensor.dtype])
    return TensorDescriptor(tensor, shape, [tensor.stride(0), 1], block, layout)

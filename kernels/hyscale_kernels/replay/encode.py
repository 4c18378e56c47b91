"""Encoding: ascending index rows into packed words, by the format that hyscale_ref.codec defines.

Every output word is computed whole by one lane from the values that reach into it, and stored once: no
atomics, no cleared buffer, the same bytes on every run. A low word covers at most ceil(31 / l) + 1 values.
The first value of a high word is found by bisection, because the positions (v >> l) + i ascend strictly.

Shape letters: T rows, K = top_k, M places of a row (codec.RowLayout.places), l low bits.
"""

import torch
import triton
import triton.language as tl

from hyscale_ref.codec import RowLayout

from ..hytopk.plan import ceil_div, next_power_of_2
from .tiling import Tiling


@triton.jit
def _values(p_index, start, place, mask):
    """Values index - start at ``place``; 0 where masked off."""
    return tl.where(mask, tl.load(p_index + place, mask=mask, other=0) - start, 0)


@triton.jit(do_not_specialize=["T", "K", "M", "low_words", "high_words"])
def _encode_kernel(
    index_ptr,
    count_ptr,
    start_ptr,
    word_ptr,
    T,
    K,
    M,
    low_words,
    high_words,
    HAS_START: tl.constexpr,
    LOW_BITS: tl.constexpr,
    SEARCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Packed words of ROWS rows a program; SEARCH is the number of bits of M."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = rows < T
    rows = tl.minimum(rows, T - 1)
    count = tl.load(count_ptr + rows)
    start = tl.zeros((ROWS, 1), tl.int32)
    if HAS_START:
        start = tl.load(start_ptr + rows)
    p_index = index_ptr + rows * K
    p_word = word_ptr + rows * (2 + low_words + high_words)

    checksum = tl.zeros((ROWS,), tl.int32)
    for i in range(0, M, BLOCK):
        place = i + tl.arange(0, BLOCK)[None, :]
        checksum += tl.sum(_values(p_index, start, place, place < count), axis=1)
    tl.store(p_word, count, mask=live)
    tl.store(p_word + 1, checksum[:, None], mask=live)

    if LOW_BITS > 0:
        for i in range(0, low_words, BLOCK):
            o_w = i + tl.arange(0, BLOCK)[None, :]
            first = (o_w.to(tl.int64) * 32 // LOW_BITS).to(tl.int32)
            word = tl.zeros((ROWS, BLOCK), tl.int32)
            for j in tl.static_range((31 + LOW_BITS - 1) // LOW_BITS + 1):
                place = first + j
                value = _values(p_index, start, place, place < count) & ((1 << LOW_BITS) - 1)
                shift = (place.to(tl.int64) * LOW_BITS - o_w.to(tl.int64) * 32).to(tl.int32)
                left = value << tl.minimum(tl.maximum(shift, 0), 31)
                right = value >> tl.minimum(tl.maximum(-shift, 0), 31)
                word = word | tl.where(shift >= 32, 0, tl.where(shift >= 0, left, right))
            tl.store(p_word + 2 + o_w, word, mask=live & (o_w < low_words))

    for i in range(0, high_words, BLOCK):
        o_w = i + tl.arange(0, BLOCK)[None, :]
        # The first place whose position reaches the word: bisection between 0 and count.
        below = tl.zeros((ROWS, BLOCK), tl.int32)
        above = below + count
        for _ in tl.static_range(SEARCH):
            middle = (below + above) // 2
            searching = below < above
            value = _values(p_index, start, middle, searching)
            short = searching & ((value >> LOW_BITS) + middle < o_w * 32)
            below = tl.where(short, middle + 1, below)
            above = tl.where(searching & ~short, middle, above)
        word = tl.zeros((ROWS, BLOCK), tl.int32)
        place = below
        value = _values(p_index, start, place, place < count)
        bit = (value >> LOW_BITS) + place - o_w * 32
        inside = (place < count) & (bit < 32)
        while tl.max(inside.to(tl.int32)) > 0:
            word = word | tl.where(inside, 1 << tl.where(inside, bit, 0), 0)
            place += 1
            value = _values(p_index, start, place, inside & (place < count))
            bit = (value >> LOW_BITS) + place - o_w * 32
            inside = inside & (place < count) & (bit < 32)
        tl.store(p_word + 2 + low_words + o_w, word, mask=live & (o_w < high_words))


@triton.jit(do_not_specialize=["T", "K", "M"])
def _encode_raw_kernel(
    index_ptr,
    count_ptr,
    start_ptr,
    word_ptr,
    T,
    K,
    M,
    HAS_START: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raw words of ROWS rows a program: the count, the values, then all ones."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = rows < T
    rows = tl.minimum(rows, T - 1)
    count = tl.load(count_ptr + rows)
    start = tl.zeros((ROWS, 1), tl.int32)
    if HAS_START:
        start = tl.load(start_ptr + rows)
    p_word = word_ptr + rows * (M + 1)
    tl.store(p_word, count, mask=live)
    for i in range(0, M, BLOCK):
        place = i + tl.arange(0, BLOCK)[None, :]
        used = place < count
        value = tl.where(used, _values(index_ptr + rows * K, start, place, used), -1)
        tl.store(p_word + 1 + place, value, mask=live & (place < M))


def launch_encode(
    indices: torch.Tensor, count: torch.Tensor, start: torch.Tensor | None, num_keys: int, tiling: Tiling
) -> torch.Tensor:
    """Packed rows int32 [T, words] of indices int32 [T, K] (ascending, then -1) with ``count`` int32 [T].

    The rows must be a selection: this is not checked here.
    """
    T, K = indices.shape
    layout = RowLayout(num_keys, K)
    words = torch.empty((T, layout.words), dtype=torch.int32, device=indices.device)
    if T == 0:
        return words
    M = layout.places
    tensors = (indices, count, count if start is None else start, words)
    grid = (ceil_div(T, tiling.rows),)
    if layout.raw:
        _encode_raw_kernel[grid](
            *tensors,
            T,
            K,
            M,
            HAS_START=start is not None,
            ROWS=tiling.rows,
            BLOCK=tiling.block(M),
            num_warps=tiling.warps,
        )
        return words
    _encode_kernel[grid](
        *tensors,
        T,
        K,
        M,
        layout.low_words,
        layout.high_words,
        HAS_START=start is not None,
        LOW_BITS=layout.low_bits,
        SEARCH=next_power_of_2(M).bit_length(),
        ROWS=tiling.rows,
        BLOCK=tiling.block(max(layout.low_words, layout.high_words)),
        num_warps=tiling.warps,
    )
    return words

"""Decoding: packed words back into ascending index rows, refusing words that no selection packs to.

The place of a value is the rank of its bit among the row's high bits. The running count of high bits is kept
in a small scratch; a place finds its word by bisection over it and its bit by halving the word, so that every
place is computed by itself and stored in order.

A corrupt row decodes to no key at all (-1 everywhere, count 0) and sets its status:

    1   count out of range, or not the number of values
    2   a bit that must be 0 is set
    4   an index at or beyond the end of its window
    8   indices that do not ascend
    16  the checksum differs
    32  the windows are not those of the record, by their fingerprints: every row is then refused
    64  the inputs are not those of the record, likewise

Shape letters: T rows, K = top_k, M places of a row (codec.RowLayout.places), l low bits.
"""

import torch
import triton
import triton.language as tl

from hyscale_ref.codec import RowLayout

from ..hytopk.compact import popcount
from ..hytopk.plan import ceil_div, next_power_of_2
from .tiling import Tiling

FAULTS = {
    1: "the count is out of range, or is not the number of values",
    2: "a bit that must be 0 is set",
    4: "an index lies beyond the row's window",
    8: "indices do not ascend",
    16: "the checksum differs",
    32: "windows differ from those of the record",
    64: "dtype, heads, head size or top_k differ from those of the record",
}
OTHER_CALL = 32 | 64


@triton.jit
def _nth_bit(word, n):
    """The place of the set bit of uint32 ``word`` that has ``n`` set bits below it."""
    place = tl.zeros_like(n)
    for level in tl.static_range(5):
        half = 16 >> level
        lower = popcount(word & ((1 << half) - 1))
        up = n >= lower
        n = tl.where(up, n - lower, n)
        place += tl.where(up, half, 0)
        word = tl.where(up, word >> half, word)
    return place


@triton.jit
def _low_part(p_low, place, mask, LOW_BITS: tl.constexpr):
    """The LOW_BITS stored bits of each place, int32; 0 where masked off."""
    position = place.to(tl.int64) * LOW_BITS
    word = (position >> 5).to(tl.int32)
    shift = (position & 31).to(tl.int32)
    first = tl.load(p_low + word, mask=mask, other=0).to(tl.uint32, bitcast=True)
    more = mask & (shift + LOW_BITS > 32)
    second = tl.load(p_low + word + 1, mask=more, other=0).to(tl.uint32, bitcast=True)
    # Shifting by 32 is undefined: the second word is shifted in two steps.
    both = (first >> shift.to(tl.uint32)) | ((second << 1) << (31 - shift).to(tl.uint32))
    return (both & ((1 << LOW_BITS) - 1)).to(tl.int32)


@triton.jit
def _other_call(mark_ptr, seen_ptr, HAS_MARK: tl.constexpr):
    """32 if two fingerprints differ in their windows, plus 64 if in their inputs, where both know them."""
    differ = 0
    if HAS_MARK:
        differ = tl.where(tl.load(mark_ptr) != tl.load(seen_ptr), 32, 0)
        then = tl.load(mark_ptr + 1)
        now = tl.load(seen_ptr + 1)
        differ += tl.where((then != now) & (then != 0) & (now != 0), 64, 0)
    return differ


@triton.jit
def _finish(p_index, status, count, live, K, M, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """-1 in the places from M on, and in every place of a corrupt row; the count that results."""
    corrupt = (status != 0)[:, None]
    if tl.max(status) != 0:
        tl.debug_barrier()
        for i in range(0, M, BLOCK):
            place = i + tl.arange(0, BLOCK)[None, :]
            tl.store(p_index + place, tl.full((ROWS, BLOCK), -1, tl.int32), mask=live & corrupt & (place < M))
    for i in range(M, K, BLOCK):
        place = i + tl.arange(0, BLOCK)[None, :]
        tl.store(p_index + place, tl.full((ROWS, BLOCK), -1, tl.int32), mask=live & (place < K))
    return tl.where(corrupt, 0, count)


@triton.jit(do_not_specialize=["T", "num_keys", "K", "M", "low_words", "high_words"])
def _decode_kernel(
    word_ptr,
    start_ptr,
    end_ptr,
    mark_ptr,
    seen_ptr,
    index_ptr,
    count_ptr,
    status_ptr,
    upto_ptr,
    T,
    num_keys,
    K,
    M,
    low_words,
    high_words,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    HAS_MARK: tl.constexpr,
    LOW_BITS: tl.constexpr,
    SEARCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Indices, count and status of ROWS rows a program; 2**SEARCH >= high_words."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = rows < T
    rows = tl.minimum(rows, T - 1)
    start = tl.zeros((ROWS, 1), tl.int64)
    if HAS_START:
        start = tl.load(start_ptr + rows).to(tl.int64)
    limit = tl.zeros((ROWS, 1), tl.int64) + num_keys
    if HAS_END:
        limit = tl.minimum(limit, tl.load(end_ptr + rows).to(tl.int64))
    p_word = word_ptr + rows * (2 + low_words + high_words)
    p_low = p_word + 2
    p_high = p_low + low_words
    p_index = index_ptr + rows * K
    count = tl.load(p_word)
    checksum = tl.load(p_word + 1)

    # upto: set bits in the words of the row up to and including each; the last is their number.
    p_upto = upto_ptr + rows * high_words
    total = tl.zeros((ROWS, 1), tl.int32)
    for i in range(0, high_words, BLOCK):
        o_w = i + tl.arange(0, BLOCK)[None, :]
        word = tl.load(p_high + o_w, mask=o_w < high_words, other=0).to(tl.uint32, bitcast=True)
        bits = popcount(word)
        tl.store(p_upto + o_w, total + tl.cumsum(bits, axis=1), mask=live & (o_w < high_words))
        total += tl.sum(bits, axis=1)[:, None]
    # Other threads read the scratch below.
    tl.debug_barrier()
    status = tl.where((count < 0) | (count > M) | (count != total), 1, 0)
    status = tl.max(status, axis=1)
    count = tl.where(status[:, None] == 0, count, 0)
    spare = low_words * 32 - M * LOW_BITS
    if spare > 0:
        last = tl.load(p_low + (low_words - 1)).to(tl.uint32, bitcast=True)
        status = status | tl.max(tl.where((last >> (32 - spare).to(tl.uint32)) != 0, 2, 0), axis=1)

    summed = tl.zeros((ROWS,), tl.int64)
    for i in tl.range(0, M, BLOCK, num_stages=1):
        place = i + tl.arange(0, BLOCK)[None, :] + tl.zeros((ROWS, 1), tl.int32)
        used = place < count
        # The word that holds the place's bit: the first with more than ``place`` bits up to its end.
        word = tl.zeros((ROWS, BLOCK), tl.int32)
        for step in tl.static_range(SEARCH):
            probe = word + ((1 << SEARCH) >> (step + 1))
            known = used & (probe <= high_words)
            word = tl.where(tl.load(p_upto + probe - 1, mask=known, other=2**30) <= place, probe, word)
        word = tl.where(used, word, 0)
        before = tl.load(p_upto + word - 1, mask=used & (word > 0), other=0)
        bits = tl.load(p_high + word, mask=used, other=0).to(tl.uint32, bitcast=True)
        position = word * 32 + _nth_bit(bits, place - before)
        value = (position - place).to(tl.int64)
        # A set bit just before means the same high part as the place on the left: low parts must ascend.
        near = used & (position > 0)
        last = tl.where(near, position - 1, 0)
        beside = tl.load(p_high + (last >> 5), mask=near, other=0).to(tl.uint32, bitcast=True)
        tied = near & (((beside >> (last & 31).to(tl.uint32)) & 1) != 0)
        if LOW_BITS > 0:
            low = _low_part(p_low, place, place < M, LOW_BITS)
            left = _low_part(p_low, place - 1, tied, LOW_BITS)
            status = status | tl.max(tl.where(~used & (low != 0), 2, 0), axis=1)
            status = status | tl.max(tl.where(tied & (low <= left), 8, 0), axis=1)
            value = (value << LOW_BITS) | low.to(tl.int64)
        else:
            status = status | tl.max(tl.where(tied, 8, 0), axis=1)
        value = tl.where(used, value, 0)
        status = status | tl.max(tl.where(used & (value + start >= limit), 4, 0), axis=1)
        summed += tl.sum(value, axis=1)
        index = tl.where(used, (value + start).to(tl.int32), -1)
        tl.store(p_index + place, index, mask=live & (place < M))
    difference = summed.to(tl.int32)[:, None] != checksum
    status = status | tl.max(tl.where(difference & (status == 0)[:, None], 16, 0), axis=1)
    status = status | _other_call(mark_ptr, seen_ptr, HAS_MARK)
    count = _finish(p_index, status, count, live, K, M, ROWS, BLOCK)
    tl.store(count_ptr + rows, count, mask=live)
    tl.store(status_ptr + rows, status[:, None], mask=live)


@triton.jit(do_not_specialize=["T", "num_keys", "K", "M"])
def _decode_raw_kernel(
    word_ptr,
    start_ptr,
    end_ptr,
    mark_ptr,
    seen_ptr,
    index_ptr,
    count_ptr,
    status_ptr,
    T,
    num_keys,
    K,
    M,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    HAS_MARK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As _decode_kernel, for raw rows."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = rows < T
    rows = tl.minimum(rows, T - 1)
    start = tl.zeros((ROWS, 1), tl.int64)
    if HAS_START:
        start = tl.load(start_ptr + rows).to(tl.int64)
    limit = tl.zeros((ROWS, 1), tl.int64) + num_keys
    if HAS_END:
        limit = tl.minimum(limit, tl.load(end_ptr + rows).to(tl.int64))
    p_word = word_ptr + rows * (M + 1)
    p_index = index_ptr + rows * K
    count = tl.load(p_word)
    status = tl.max(tl.where((count < 0) | (count > M), 1, 0), axis=1)
    count = tl.where(status[:, None] == 0, count, 0)
    for i in range(0, M, BLOCK):
        place = i + tl.arange(0, BLOCK)[None, :]
        used = place < count
        value = tl.load(p_word + 1 + place, mask=place < M, other=-1)
        left = tl.load(p_word + place, mask=used & (place > 0), other=-1)
        status = status | tl.max(tl.where(used != (value >= 0), 1, 0), axis=1)
        status = status | tl.max(tl.where(~used & (value != -1), 2, 0), axis=1)
        status = status | tl.max(tl.where(used & (value <= left), 8, 0), axis=1)
        index = value.to(tl.int64) + start
        status = status | tl.max(tl.where(used & (index >= limit), 4, 0), axis=1)
        tl.store(p_index + place, tl.where(used, index.to(tl.int32), -1), mask=live & (place < M))
    status = status | _other_call(mark_ptr, seen_ptr, HAS_MARK)
    count = _finish(p_index, status, count, live, K, M, ROWS, BLOCK)
    tl.store(count_ptr + rows, count, mask=live)
    tl.store(status_ptr + rows, status[:, None], mask=live)


def launch_decode(
    words: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    fingerprints: tuple[torch.Tensor, torch.Tensor] | None,
    num_keys: int,
    top_k: int,
    tiling: Tiling,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indices int32 [T, K], count int32 [T], status int32 [T]) of packed rows ``words`` int32 [T, words].

    ``start`` must be the windows' starts that the rows were packed with. With ``end``, an index at or beyond
    its row's end is corrupt as well. ``fingerprints`` are those then and now, int64 [2] each.
    """
    T = words.shape[0]
    layout = RowLayout(num_keys, top_k)
    indices = words.new_empty((T, top_k))
    count, status = words.new_empty((T,)), words.new_empty((T,))
    if T == 0:
        return indices, count, status
    M = layout.places
    marks = fingerprints or (words, words)
    windows = [words if each is None else each for each in (start, end)]
    tensors = (words, *windows, *marks, indices, count, status)
    grid = (ceil_div(T, tiling.rows),)
    given = {
        "HAS_START": start is not None,
        "HAS_END": end is not None,
        "HAS_MARK": fingerprints is not None,
    }
    block = tiling.block(max(M, 1))
    if layout.raw:
        _decode_raw_kernel[grid](
            *tensors,
            T,
            num_keys,
            top_k,
            M,
            **given,
            ROWS=tiling.rows,
            BLOCK=block,
            num_warps=tiling.warps,
        )
        return indices, count, status
    upto = words.new_empty((T, layout.high_words))
    _decode_kernel[grid](
        *tensors,
        upto,
        T,
        num_keys,
        top_k,
        M,
        layout.low_words,
        layout.high_words,
        **given,
        LOW_BITS=layout.low_bits,
        SEARCH=next_power_of_2(layout.high_words).bit_length() - 1,
        ROWS=tiling.rows,
        BLOCK=block,
        num_warps=tiling.warps,
    )
    return indices, count, status

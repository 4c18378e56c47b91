"""Packed selections: Elias-Fano coding of ascending index rows, which defines the bytes that replay keeps.

Each row is coded alone and in the same number of 32-bit words, so any rows can be decoded by themselves. A
row of M = min(K, N) places for N keys holds values v = index - start of its window, 0 <= v < N, ascending.
With l = max(floor(log2(N / M)), 0), a packed row is

    word 0           count
    word 1           the sum of the values, mod 2**32, as a checksum
    low words        the l low bits of value i at bits [i l, (i + 1) l)
    high words       bit (v >> l) + i is set for value i: M + ceil(N / 2**l) bits

with bit b of a section in word b // 32 at place b % 32, and unused bits 0. That is l + 1 + ceil(N / 2**l) / M
bits an index (11.0 for N = 2**20, K = 2048, against an information bound of 10.4 for random sets and 32 for
int32), and two words a row. Where this would not be smaller, rows are *raw*: the count, then the values, then
0xFFFFFFFF; so a record never exceeds int32 indices and counts. Which of the two depends on (N, K) alone.

Source: Elias (1974) and Fano (1971); Vigna, "Quasi-succinct indices" (WSDM 2013), section 4.
Shape letters: T rows, S = N keys, K = top_k.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyscale_ref.arrays import Int32, as_count, as_int32

Words = NDArray[np.uint32]

UNUSED = 0xFFFFFFFF  # a raw row's places beyond its count


class CorruptRecordError(ValueError):
    """Packed words that no selection encodes to; the message names the first such row and what is wrong."""


@dataclass(frozen=True)
class RowLayout:
    """Where the parts of a row lie, for ``num_keys`` keys and ``top_k`` places."""

    num_keys: int
    top_k: int

    def __post_init__(self) -> None:
        as_count("num_keys", self.num_keys)
        as_count("top_k", self.top_k, minimum=1)

    @property
    def places(self) -> int:
        """M, the most indices that a row can hold."""
        return min(self.top_k, self.num_keys)

    @property
    def low_bits(self) -> int:
        """l, the bits of a value that are stored as they are."""
        return (self.num_keys // self.places).bit_length() - 1 if self.places else 0

    @property
    def low_words(self) -> int:
        return -(-self.places * self.low_bits // 32)

    @property
    def high_words(self) -> int:
        return -(-(self.places + -(-self.num_keys >> self.low_bits)) // 32)

    @property
    def raw(self) -> bool:
        """Whether rows are stored as plain values because packing would not make them smaller."""
        return 2 + self.low_words + self.high_words >= 1 + self.places

    @property
    def words(self) -> int:
        """32-bit words of one row."""
        return 1 + self.places if self.raw else 2 + self.low_words + self.high_words


def row_words(num_keys: int, top_k: int) -> int:
    """32-bit words of one row's record, count included."""
    return RowLayout(num_keys, top_k).words


def packed_bits_per_index(num_keys: int, top_k: int) -> float:
    """Stored bits of a row over K, with the count, the checksum and the padding to whole words."""
    return 32 * row_words(num_keys, top_k) / top_k


def encode(indices: ArrayLike, count: ArrayLike, start: ArrayLike | None, num_keys: int) -> Words:
    """Records uint32 [T, row_words] of ``indices`` [T, K]: ascending, then -1; ``count`` [T] of them.

    ``start`` [T] (0 if None) is the first key of each row's window; indices lie in [start, num_keys). Raises
    ValueError, naming the row, for a selection that is not of this form.
    """
    indices = as_int32("indices", indices, ["T", "K"])
    T, K = indices.shape
    layout = RowLayout(num_keys, K)
    count = as_int32("count", count, [T])
    start = np.zeros(T, np.int32) if start is None else as_int32("start", start, [T])
    used = np.arange(K) < count[:, None]
    wrong = {
        "start is negative": start < 0,
        f"count is not in 0 to {layout.places}": (count < 0) | (count > layout.places),
        "-1 is not exactly the tail beyond count": ((indices == -1) == used).any(axis=1),
        f"an index is not in [start, {num_keys})": (
            used & ((indices < start[:, None]) | (indices >= num_keys))
        ).any(axis=1),
        "indices do not ascend": ((np.diff(indices.astype(np.int64)) <= 0) & used[:, 1:]).any(axis=1),
    }
    for what, at in wrong.items():
        if at.any():
            row = int(np.flatnonzero(at)[0])
            raise ValueError(f"indices: row {row} (start {start[row]}, count {count[row]}): {what}")

    M = layout.places
    value = np.where(used, indices - start[:, None].astype(np.int64), 0)[:, :M]
    used = used[:, :M]
    if layout.raw:
        body = np.where(used, value, UNUSED)
        return np.concatenate([count[:, None], body], axis=1).astype(np.uint32)
    low = np.zeros((T, 32 * layout.low_words), np.uint8)
    bits = (value[:, :, None] >> np.arange(layout.low_bits)) & 1
    low[:, : M * layout.low_bits] = bits.reshape(T, M * layout.low_bits)
    high = np.zeros((T, 32 * layout.high_words), np.uint8)
    rows, place = np.nonzero(used)
    high[rows, (value[rows, place] >> layout.low_bits) + place] = 1
    header = np.stack([count.astype(np.int64), value.sum(axis=1) % 2**32], axis=1).astype(np.uint32)
    return np.concatenate([header, _words(low), _words(high)], axis=1)


def decode(words: ArrayLike, start: ArrayLike | None, num_keys: int, top_k: int) -> tuple[Int32, Int32]:
    """(indices int32 [T, K], count int32 [T]) of records ``words`` uint32 or int32 [T, row_words].

    ``start``, ``num_keys`` and ``top_k`` are those given to :func:`encode`. Raises CorruptRecordError for
    words that :func:`encode` cannot have made; of a changed word this misses only a change that keeps the
    row ascending, inside the window and, when packed, of the same sum.
    """
    layout = RowLayout(num_keys, top_k)
    record = np.asarray(words)
    if record.dtype not in (np.uint32, np.int32):
        raise TypeError(f"words: dtype {record.dtype}; allowed: uint32, int32")
    if record.ndim != 2 or record.shape[1] != layout.words:
        raise ValueError(f"words: shape {record.shape}; allowed: [T, {layout.words}]")
    record = np.ascontiguousarray(record).view(np.uint32)
    T, M = len(record), layout.places
    start = np.zeros(T, np.int32) if start is None else as_int32("start", start, [T])
    count = record[:, 0].astype(np.int64)
    _refuse(count > M, f"the count is not in 0 to {M}")
    used = np.arange(M) < count[:, None]
    if layout.raw:
        value = record[:, 1:].astype(np.int64)
        _refuse(((value == UNUSED) == used).any(axis=1), "the count differs from the number of values")
    else:
        value = _unpack(record, count, layout)
    index = value + start[:, None]
    _refuse((used & (index >= num_keys)).any(axis=1), f"an index is not below {num_keys}")
    _refuse(((np.diff(value) <= 0) & used[:, 1:]).any(axis=1), "indices do not ascend")
    indices = np.full((T, top_k), -1, np.int32)
    indices[:, :M] = np.where(used, index, -1)
    return indices, count.astype(np.int32)


def _unpack(record: Words, count: NDArray[np.int64], layout: RowLayout) -> NDArray[np.int64]:
    """Values int64 [T, M] of packed rows, 0 beyond the count."""
    T, M, l = len(record), layout.places, layout.low_bits  # noqa: E741
    low = _bits(record[:, 2 : 2 + layout.low_words])
    high = _bits(record[:, 2 + layout.low_words :])
    _refuse(high.sum(axis=1) != count, "the count differs from the number of high bits")
    used = np.arange(M) < count[:, None]
    low_part = (low[:, : M * l].reshape(T, M, l).astype(np.int64) << np.arange(l)).sum(axis=2)
    _refuse((low[:, M * l :] != 0).any(axis=1), "unused low bits are set")
    _refuse((~used & (low_part != 0)).any(axis=1), "low bits beyond the count are set")
    value = np.zeros((T, M), np.int64)
    row, position = np.nonzero(high)
    place = (np.cumsum(high, axis=1, dtype=np.int64) - 1)[row, position]
    value[row, place] = ((position - place) << l) + low_part[row, place]
    _refuse(value.sum(axis=1) % 2**32 != record[:, 1], "the checksum differs")
    return value


def _words(bits: NDArray[np.uint8]) -> Words:
    packed = np.packbits(bits, axis=1, bitorder="little")
    return packed.view("<u4").astype(np.uint32)


def _bits(words: Words) -> NDArray[np.uint8]:
    octets = np.ascontiguousarray(words.astype("<u4")).view(np.uint8)
    return np.unpackbits(octets.reshape(len(words), 4 * words.shape[1]), axis=1, bitorder="little")


def _refuse(rows: ArrayLike, what: str) -> None:
    if np.any(rows):
        raise CorruptRecordError(f"words: row {int(np.flatnonzero(rows)[0])} is corrupt: {what}")

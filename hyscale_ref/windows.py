"""Windows: which keys a query may select, as half-open ranges [start, end).

A builder describes the rows of a whole sequence; :meth:`Windows.rows` then takes those that one rank holds,
so every combination (zig-zag rows of packed documents, say) is a composition:

    packed([0, 700, 1024]).rows(zigzag_rows(1024, num_ranks=4, rank=1))

Shape letters: T queries, S keys. All arrays are int32 [T]. :mod:`hyscale_kernels.windows` builds the same in
torch.
"""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from hyscale_ref.arrays import INT32_MAX, Bool, Int32, as_count, as_int32


class Windows(NamedTuple):
    """Row t may select the keys j with start[t] <= j < end[t]; equal ends make an empty row."""

    start: Int32
    end: Int32

    def rows(self, positions: ArrayLike) -> Self:
        """The windows of the rows at ``positions`` (integers in [0, T), any order, repeats allowed)."""
        positions = as_int32("positions", positions, ["rows"])
        outside = (positions < 0) | (positions >= len(self.start))
        if outside.any():
            bad = int(positions[outside][0])
            raise ValueError(f"positions: {bad}; allowed: 0 to {len(self.start) - 1}")
        return type(self)(self.start[positions], self.end[positions])

    def batched(self, num_sequences: int, num_keys: int) -> Self:
        """The same windows for each of ``num_sequences`` sequences, rows and keys flattened.

        Row b * T + t sees the keys of row t shifted by b * num_keys.
        """
        num_sequences = as_count("num_sequences", num_sequences)
        num_keys = as_count("num_keys", num_keys, maximum=INT32_MAX // max(num_sequences, 1))
        shift = np.repeat(np.arange(num_sequences, dtype=np.int32) * np.int32(num_keys), len(self.start))
        return type(self)(
            np.tile(self.start, num_sequences) + shift, np.tile(self.end, num_sequences) + shift
        )


def full(num_queries: int, num_keys: int) -> Windows:
    """Every row sees every key."""
    T = as_count("num_queries", num_queries)
    S = as_count("num_keys", num_keys)
    return Windows(np.zeros(T, np.int32), np.full(T, S, np.int32))


def causal(num_queries: int, num_positions: int | None = None, *, ratio: int = 1) -> Windows:
    """Rows are the last T of ``num_positions`` positions (default T), and see no later position.

    With ``ratio`` r the keys are compressed, one for each r whole positions: the row at position p sees the
    first floor((p + 1) / r) of floor(num_positions / r) keys.
    """
    T = as_count("num_queries", num_queries)
    total = T if num_positions is None else as_count("num_positions", num_positions, minimum=T)
    ratio = as_count("ratio", ratio, minimum=1)
    position = np.arange(total - T, total, dtype=np.int64)
    return Windows(np.zeros(T, np.int32), ((position + 1) // ratio).astype(np.int32))


def packed(cu_seqlens: ArrayLike, num_positions: int | None = None, *, ratio: int = 1) -> Windows:
    """Causal inside each document; document d holds positions [cu_seqlens[d], cu_seqlens[d + 1]).

    ``cu_seqlens`` [documents + 1] starts at 0 and never falls (an empty document is allowed). T is
    ``num_positions``, by default the last entry; rows beyond it (padding) are empty. With ``ratio`` r each
    document is compressed alone: of length n, it owns floor(n / r) keys, documents one after the other, and
    its row p sees the first floor((p + 1) / r) of them.
    """
    cu_seqlens = as_int32("cu_seqlens", cu_seqlens, ["documents + 1"]).astype(np.int64)
    ratio = as_count("ratio", ratio, minimum=1)
    if len(cu_seqlens) == 0 or cu_seqlens[0] != 0:
        raise ValueError(f"cu_seqlens: {cu_seqlens.tolist()[:3]}...; allowed: a first entry of 0")
    lengths = np.diff(cu_seqlens)
    if (lengths < 0).any():
        d = int(np.flatnonzero(lengths < 0)[0])
        raise ValueError(
            f"cu_seqlens[{d + 1}]: {cu_seqlens[d + 1]} after {cu_seqlens[d]}; allowed: never falling"
        )
    total = int(cu_seqlens[-1])
    T = total if num_positions is None else as_count("num_positions", num_positions, minimum=total)
    first_key = np.concatenate([[0], np.cumsum(lengths // ratio)])
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(total) - cu_seqlens[document]
    start, end = np.zeros((2, T), np.int32)
    start[:total] = first_key[document]
    end[:total] = start[:total] + (position + 1) // ratio
    return Windows(start, end)


def sliding(num_queries: int, width: int, *, causal: bool = True) -> Windows:
    """Row t sees the ``width`` latest positions up to its own; if not ``causal``, all within width - 1 of it.

    T == S: the windows are cut at both ends of the sequence.
    """
    T = as_count("num_queries", num_queries)
    width = as_count("width", width, minimum=1)
    position = np.arange(T, dtype=np.int64)
    start = np.maximum(position - width + 1, 0)
    end = position + 1 if causal else np.minimum(position + width, T)
    return Windows(start.astype(np.int32), end.astype(np.int32))


def contiguous_rows(num_positions: int, num_ranks: int, rank: int) -> Int32:
    """The positions that context-parallel rank ``rank`` holds, int32 ascending: the rank-th of equal shares.

    Share c of n holds the positions floor(c S / n) up to floor((c + 1) S / n), so any S can be split.
    """
    S, num_ranks, rank = _check_rank(num_positions, num_ranks, rank)
    return _share(S, num_ranks, rank)


def zigzag_rows(num_positions: int, num_ranks: int, rank: int) -> Int32:
    """As :func:`contiguous_rows`, but shares ``rank`` and 2n - 1 - ``rank`` of 2n, in that order.

    Under a causal window each rank then has the same number of visible keys, if 2n divides S.
    """
    S, num_ranks, rank = _check_rank(num_positions, num_ranks, rank)
    first = _share(S, 2 * num_ranks, rank)
    last = _share(S, 2 * num_ranks, 2 * num_ranks - 1 - rank)
    return np.concatenate([first, last])


def resolve(
    start: ArrayLike | None, end: ArrayLike | None, num_queries: int, num_keys: int
) -> tuple[Windows, Bool]:
    """Windows given by a caller, completed and checked: (windows, bad rows bool [T]).

    With neither given the windows are causal, which needs T == S; a single missing one is 0 or S. A row is
    bad if start < 0, end > S or start > end; its window comes back empty.
    """
    T, S = num_queries, num_keys
    if start is None and end is None and T != S:
        raise ValueError(
            f"start, end: None with {T} queries and {S} keys; allowed: None where those are equal"
        )
    default = causal(T) if start is None and end is None else full(T, S)
    low = default.start if start is None else as_int32("start", start, [T])
    high = default.end if end is None else as_int32("end", end, [T])
    bad = (low < 0) | (high > S) | (low > high)
    zero = np.int32(0)
    return Windows(np.where(bad, zero, low), np.where(bad, zero, high)), bad


def _check_rank(num_positions: int, num_ranks: int, rank: int) -> tuple[int, int, int]:
    num_ranks = as_count("num_ranks", num_ranks, minimum=1)
    return (
        as_count("num_positions", num_positions),
        num_ranks,
        as_count("rank", rank, maximum=num_ranks - 1),
    )


def _share(num_positions: int, num_shares: int, share: int) -> Int32:
    low = share * num_positions // num_shares
    high = (share + 1) * num_positions // num_shares
    return np.arange(low, high, dtype=np.int32)

"""Windows in torch: which keys a query may select, as half-open ranges [start, end), int32 [T].

The same builders as :mod:`hyscale_ref.windows`, on any device, without waiting for it. A builder describes
the rows of a whole sequence; :meth:`Windows.rows` then takes those that one rank holds:

    packed(cu_seqlens, 1024).rows(zigzag_rows(1024, num_ranks=4, rank=1))

Sizes are Python integers and are checked at the call. *Values* of tensors (``cu_seqlens``, ``positions``) are
checked at the call on the CPU only; elsewhere, and inside torch.compile, a wrong value makes the windows that
depend on it invalid (start = -1), so that HyTopK selects nothing there and reports the row.

Shape letters: T queries, S keys.
"""

from typing import NamedTuple, Self

import torch

from hyscale_ref.arrays import INT32_MAX, as_count

Device = torch.device | str | None


class Windows(NamedTuple):
    """Row t may select the keys j with start[t] <= j < end[t]; equal ends make an empty row."""

    start: torch.Tensor
    end: torch.Tensor

    def rows(self, positions: torch.Tensor) -> Self:
        """The windows of the rows at ``positions`` (int32 or int64 in [0, T), any order, repeats allowed)."""
        _check_integers("positions", positions, self.start.device)
        T = self.start.shape[0]
        outside = (positions < 0) | (positions >= T)
        if _can_look(positions) and outside.any():
            raise ValueError(f"positions: {int(positions[outside][0])}; allowed: 0 to {T - 1}")
        if T == 0:
            empty = torch.zeros_like(positions, dtype=torch.int32)
            return type(self)(empty - 1, empty)
        inside = positions.clamp(0, T - 1)
        return type(self)(self.start[inside].masked_fill(outside, -1), self.end[inside])

    def batched(self, num_sequences: int, num_keys: int) -> Self:
        """The same windows for each of ``num_sequences`` sequences, rows and keys flattened.

        Row b * T + t sees the keys of row t shifted by b * num_keys.
        """
        num_sequences = as_count("num_sequences", num_sequences)
        num_keys = as_count("num_keys", num_keys, maximum=INT32_MAX // max(num_sequences, 1))
        sequence = torch.arange(num_sequences, dtype=torch.int32, device=self.start.device)
        shift = (sequence * num_keys)[:, None]
        return type(self)((self.start + shift).flatten(), (self.end + shift).flatten())


def full(num_queries: int, num_keys: int, *, device: Device = None) -> Windows:
    """Every row sees every key."""
    T = as_count("num_queries", num_queries)
    S = as_count("num_keys", num_keys)
    start = torch.zeros(T, dtype=torch.int32, device=device)
    return Windows(start, torch.full_like(start, S))


def causal(
    num_queries: int, num_positions: int | None = None, *, ratio: int = 1, device: Device = None
) -> Windows:
    """Rows are the last T of ``num_positions`` positions (default T), and see no later position.

    With ``ratio`` r the keys are compressed, one for each r whole positions: the row at position p sees the
    first floor((p + 1) / r) of floor(num_positions / r) keys.
    """
    T = as_count("num_queries", num_queries)
    total = T if num_positions is None else as_count("num_positions", num_positions, minimum=T)
    ratio = as_count("ratio", ratio, minimum=1)
    position = torch.arange(total - T, total, dtype=torch.int32, device=device)
    return Windows(torch.zeros_like(position), (position + 1) // ratio)


def packed(cu_seqlens: torch.Tensor, num_positions: int, *, ratio: int = 1) -> Windows:
    """Causal inside each document; document d holds positions [cu_seqlens[d], cu_seqlens[d + 1]).

    ``cu_seqlens`` [documents + 1], int32 or int64 on any device, starts at 0 and never falls (an empty
    document is allowed); its device is the windows' device. T is ``num_positions``; rows beyond the last
    entry (padding) are empty. With ``ratio`` r each document is compressed alone: of length n, it owns
    floor(n / r) keys, documents one after the other, and its row p sees the first floor((p + 1) / r) of them.
    """
    _check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens: shape [0]; allowed: [documents + 1]")
    T = as_count("num_positions", num_positions)
    ratio = as_count("ratio", ratio, minimum=1)
    lengths = cu_seqlens.diff()
    wrong = (cu_seqlens[0] != 0) | (cu_seqlens[-1] > T) | (lengths < 0).any()
    if _can_look(cu_seqlens) and wrong:
        values = str(cu_seqlens.tolist()) if len(cu_seqlens) <= 8 else f"{cu_seqlens.tolist()[:8]}..."
        raise ValueError(f"cu_seqlens: {values}; allowed: from 0, never falling, to at most {T}")
    position = torch.arange(T, dtype=torch.int32, device=cu_seqlens.device)
    if len(lengths) == 0:  # no document: every row is padding
        start = torch.zeros_like(position).masked_fill(wrong, -1)
        return Windows(start, torch.zeros_like(position))
    padding = position >= cu_seqlens[-1]
    document = torch.searchsorted(cu_seqlens, position.to(cu_seqlens.dtype), right=True) - 1
    document = document.clamp(0, len(lengths) - 1)
    keys = lengths // ratio
    start = (keys.cumsum(0) - keys)[document].to(torch.int32).masked_fill(padding, 0)
    place = (position - cu_seqlens[document]).to(torch.int32)
    end = torch.where(padding, 0, start + (place + 1) // ratio)
    return Windows(start.masked_fill(wrong, -1), end)


def sliding(num_queries: int, width: int, *, causal: bool = True, device: Device = None) -> Windows:
    """Row t sees the ``width`` latest positions up to its own; if not ``causal``, all within width - 1 of it.

    T == S: the windows are cut at both ends of the sequence.
    """
    T = as_count("num_queries", num_queries)
    width = min(as_count("width", width, minimum=1), max(T, 1))  # wider changes nothing, and cannot overflow
    position = torch.arange(T, dtype=torch.int32, device=device)
    start = (position - (width - 1)).clamp(min=0)
    if causal:
        return Windows(start, position + 1)
    return Windows(start, T - (T - width - position).clamp(min=0))


def contiguous_rows(num_positions: int, num_ranks: int, rank: int, *, device: Device = None) -> torch.Tensor:
    """The positions that context-parallel rank ``rank`` holds, int32 ascending: the rank-th of equal shares.

    Share c of n holds the positions floor(c S / n) up to floor((c + 1) S / n), so any S can be split.
    """
    S, num_ranks, rank = _check_rank(num_positions, num_ranks, rank)
    return _share(S, num_ranks, rank, device)


def zigzag_rows(num_positions: int, num_ranks: int, rank: int, *, device: Device = None) -> torch.Tensor:
    """As :func:`contiguous_rows`, but shares ``rank`` and 2n - 1 - ``rank`` of 2n, in that order.

    Under a causal window each rank then has the same number of visible keys, if 2n divides S.
    """
    S, num_ranks, rank = _check_rank(num_positions, num_ranks, rank)
    low = _share(S, 2 * num_ranks, rank, device)
    high = _share(S, 2 * num_ranks, 2 * num_ranks - 1 - rank, device)
    return torch.cat([low, high])


def _share(num_positions: int, num_shares: int, share: int, device: Device) -> torch.Tensor:
    low = share * num_positions // num_shares
    high = (share + 1) * num_positions // num_shares
    return torch.arange(low, high, dtype=torch.int32, device=device)


def _check_rank(num_positions: int, num_ranks: int, rank: int) -> tuple[int, int, int]:
    num_ranks = as_count("num_ranks", num_ranks, minimum=1)
    return (
        as_count("num_positions", num_positions),
        num_ranks,
        as_count("rank", rank, maximum=num_ranks - 1),
    )


def _check_integers(name: str, value: torch.Tensor, device: torch.device | None = None) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {type(value).__name__}; allowed: torch.Tensor")
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: dtype {value.dtype}; allowed: int32, int64")
    if value.dim() != 1:
        raise ValueError(f"{name}: shape {list(value.shape)}; allowed: one axis")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: on {value.device}; allowed: {device}, where the windows are")


def _can_look(value: torch.Tensor) -> bool:
    """Whether values may be read here: on the CPU, and not while a graph is being traced."""
    return value.device.type == "cpu" and not torch.compiler.is_compiling()

"""The rows of a sequence that one rank holds: where they are, and which keys they see.

A sequence of S positions is cut into equal shares, one a rank ("contiguous") or two a rank, the r-th and the
r-th from the end ("zigzag", which balances causal work). Keys are numbered in the order of the whole
sequence on every rank, so that a row's window does not depend on the split.

Shape letters: S positions of the sequence, T rows here.
"""

from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch

from hyscale_ref.arrays import INT32_MAX, as_count

from .. import windows
from ..windows import Windows

Split = Literal["contiguous", "zigzag"]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of one rank; make them with :meth:`of`.

    positions      int32 [T], where they are in the sequence; ascending within each span
    rotary         int32 [T], where they are in their document
    windows        the keys they see, numbered over the whole sequence
    packed         whether windows start at documents; if not, all start at key 0
    spans          the runs of neighbouring positions that make up the rows, in order, on the host
    num_positions  S
    ratio          positions for one (compressed) key
    num_ranks, rank, split    how the sequence was split
    """

    positions: torch.Tensor
    rotary: torch.Tensor
    windows: Windows
    packed: bool
    spans: tuple[range, ...]
    num_positions: int
    ratio: int
    num_ranks: int
    rank: int
    split: Split

    @classmethod
    def of(
        cls,
        num_positions: int,
        *,
        cu_seqlens: torch.Tensor | None = None,
        ratio: int = 1,
        num_ranks: int = 1,
        rank: int = 0,
        split: Split = "contiguous",
        device: torch.device | str | None = None,
    ) -> Self:
        """Causal rows; inside documents if ``cu_seqlens`` (see ``windows.packed``) is given.

        Raises ValueError if the sequence does not split evenly (a share must also hold whole compressed
        keys), for a rank out of range, or for documents with compressed keys.
        """
        ratio = as_count("ratio", ratio, minimum=1)
        num_ranks = as_count("num_ranks", num_ranks, minimum=1)
        rank = as_count("rank", rank, maximum=num_ranks - 1)
        if split not in get_args(Split):
            raise ValueError(f"split: {split!r}; allowed: {', '.join(map(repr, get_args(Split)))}")
        shares = num_ranks * (2 if split == "zigzag" else 1)
        S = as_count("num_positions", num_positions, minimum=1, maximum=INT32_MAX)
        if S % (shares * ratio):
            keys = "" if ratio == 1 else f" of whole keys ({ratio} positions each)"
            raise ValueError(
                f"num_positions: {S}; allowed for {num_ranks} rank(s), {split}: a multiple of "
                f"{shares * ratio}, which makes {shares} equal share(s){keys}"
            )
        if cu_seqlens is not None and ratio != 1:
            raise ValueError(f"cu_seqlens: given with ratio {ratio}; allowed: with ratio 1")
        share = S // shares
        mine = (rank, shares - 1 - rank) if split == "zigzag" else (rank,)
        spans = tuple(range(share * i, share * (i + 1)) for i in mine)
        take = windows.zigzag_rows if split == "zigzag" else windows.contiguous_rows
        positions = take(S, num_ranks, rank, device=device)
        if cu_seqlens is None:
            visible = windows.causal(S, ratio=ratio, device=device).rows(positions)
            rotary = positions
        else:
            visible = windows.packed(cu_seqlens.to(positions.device), S).rows(positions)
            rotary = (positions - visible.start).clamp(min=0)
        packed = cu_seqlens is not None
        return cls(positions, rotary, visible, packed, spans, S, ratio, num_ranks, rank, split)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.positions.shape[0]

    @property
    def num_keys(self) -> int:
        """Keys of the whole sequence."""
        return self.num_positions // self.ratio

    @property
    def bounds(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``start`` and ``end`` for ``hytopk`` and replay.

        (None, None), their causal default, where that is what the rows see: the host then knows how many
        keys the first rows see.
        """
        causal = self.num_ranks == 1 and self.ratio == 1 and not self.packed
        return (None, None) if causal else (self.windows.start, self.windows.end)

    def of_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """The part of ``values`` [S, ...], which belong to the whole sequence, that belongs to these rows."""
        if values.shape[0] != self.num_positions:
            raise ValueError(f"values: shape {list(values.shape)}; allowed: [{self.num_positions}, ...]")
        return torch.cat([values[span.start : span.stop] for span in self.spans])

    def blocks(self, most: int) -> list[tuple[slice, int]]:
        """(rows, keys) of blocks of at most ``most`` rows: none of these rows sees a key from ``keys`` on.

        Blocks do not straddle spans; what they see is known without asking the device.
        """
        found, row = [], 0
        for span in self.spans:
            for low in range(span.start, span.stop, most):
                high = min(low + most, span.stop)
                found.append((slice(row, row + high - low), high // self.ratio))
                row += high - low
        return found

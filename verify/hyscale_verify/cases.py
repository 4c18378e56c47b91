"""One call of a selection kernel, as plain arrays that print, shrink and travel between processes.

Shape letters: T queries, S keys, H indexer heads, D indexer head size, K = top_k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from hyscale_ref.scores import indexer_scores

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}

LAYOUTS = ("contiguous", "padded rows", "offset storage", "heads outermost")

SHOWN_KEYS = 12
"""A counterexample with at most this many keys is printed whole."""


def rounded(values: NDArray[np.floating], dtype: str) -> Float32:
    """``values`` rounded to ``dtype`` (nearest, ties to even) and widened to float32 again."""
    result: Float32 = torch.from_numpy(np.asarray(values, np.float32)).to(DTYPES[dtype]).float().numpy()
    return result


@dataclass(frozen=True)
class InternalSizes:
    """Tiles, chunks and buffers that ``hytopk`` is asked to use; they must never change the result.

    As the fields of its Plan, but chunks and segments are counted in tiles, the candidate buffer is
    ``slack`` times the smallest power of two that the Plan accepts, top_k + gather, and ``consumers`` holds
    where Hopper's scan can run.
    """

    tile_rows: int
    tile_keys: int
    gather: int
    slack: int
    row_group: int
    samples: int
    segment_tiles: int
    row_tiles: int
    key_tiles: int
    repair_splits: int
    table_keys: int = 0
    consumers: int = 0
    prune_keys: int = 0

    def capacity(self, top_k: int) -> int:
        return self.slack << (top_k + self.gather - 1).bit_length()

    def in_words(self, top_k: int) -> str:
        return (
            f"tile {self.tile_rows} rows x {self.tile_keys} keys, segment {self.segment_tiles} tiles, "
            f"chunk {self.row_tiles} x {self.key_tiles} tiles, {self.samples} samples, "
            f"room for {self.capacity(top_k)} candidates, gather {self.gather}, row group {self.row_group}, "
            f"repair splits {self.repair_splits}, tables of {self.table_keys} keys, "
            f"{self.consumers} consumers, tiles left out from {self.prune_keys} keys on (0: never)"
        )


@dataclass(frozen=True)
class Tensors:
    """A case on a device, as the arguments of ``hytopk``."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    top_k: int
    start: torch.Tensor
    end: torch.Tensor
    k_scale: torch.Tensor | None

    @property
    def windows(self) -> dict[str, torch.Tensor]:
        return {"start": self.start, "end": self.end}

    @property
    def keywords(self) -> dict[str, torch.Tensor | None]:
        return {"start": self.start, "end": self.end, "k_scale": self.k_scale}


@dataclass(frozen=True)
class Case:
    """Inputs of one selection.

    regime    which family of inputs this was drawn from
    dtype     the kernel's operand type, a name in ``DTYPES``; q and k hold values that it represents exactly
    q, k, w   float32 [T, H, D], [S, D], [T, H]
    top_k     K >= 1
    start, end  int32 [T], row t may select keys start[t] <= j < end[t]
    k_scale   float32 [S] > 0 for fp8, else None
    exact     every product and every partial sum of a score is exact in float32, whatever the order
    layout    how q and k lie in memory, one of ``LAYOUTS``
    sizes     internal sizes to ask of ``hytopk``; None leaves them to it
    """

    regime: str
    dtype: str
    q: Float32
    k: Float32
    w: Float32
    top_k: int
    start: Int32
    end: Int32
    k_scale: Float32 | None = None
    exact: bool = False
    layout: str = "contiguous"
    sizes: InternalSizes | None = None

    @property
    def num_queries(self) -> int:
        return int(self.q.shape[0])

    @property
    def num_keys(self) -> int:
        return int(self.k.shape[0])

    @property
    def lengths(self) -> Int32:
        return self.end - self.start

    def with_(self, **changes: object) -> Self:
        """A copy with some fields changed (``dataclasses.replace``)."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def rows(self, chosen: Sequence[int] | slice | NDArray[np.integer] | NDArray[np.bool_]) -> Self:
        """The same keys with only the ``chosen`` rows, in that order."""
        return self.with_(q=self.q[chosen], w=self.w[chosen], start=self.start[chosen], end=self.end[chosen])

    def keys(self, chosen: Sequence[int] | slice | NDArray[np.integer]) -> Self:
        """The same rows with only the ``chosen`` keys, in that order; windows stay as they are."""
        return self.with_(k=self.k[chosen], k_scale=None if self.k_scale is None else self.k_scale[chosen])

    def scores(self) -> Float64:
        """Scores by the oracle, float64 [T, S]."""
        return indexer_scores(self.q, self.k, self.w, self.k_scale)

    def tensors(self, device: str) -> Tensors:
        """The arguments on ``device``, in the case's dtype and memory layout."""
        dtype = DTYPES[self.dtype]
        return Tensors(
            q=_laid_out(torch.from_numpy(self.q).to(dtype), self.layout).to(device),
            k=_laid_out(torch.from_numpy(self.k).to(dtype), self.layout).to(device),
            w=torch.from_numpy(self.w.copy()).to(device),
            top_k=self.top_k,
            start=torch.from_numpy(self.start.astype(np.int32)).to(device),
            end=torch.from_numpy(self.end.astype(np.int32)).to(device),
            k_scale=None if self.k_scale is None else torch.from_numpy(self.k_scale.copy()).to(device),
        )

    def in_words(self, rows: Sequence[int] = (), keys: Sequence[int] = ()) -> str:
        """The case in a few lines: sizes, windows and the scores that matter (oracle, float64).

        ``rows`` and ``keys`` are those that a failed property accuses; with few keys all are shown.
        """
        T, H, D = self.q.shape
        storage = "" if self.layout == "contiguous" else f", {self.layout}"
        lines = [
            f"{_count(T, 'query', 'queries')}, {_count(self.num_keys, 'key', 'keys')}, K={self.top_k}, "
            f"H={H}, D={D}, {self.dtype}{storage}, inputs: {self.regime}"
        ]
        if self.sizes is not None:
            lines.append(f"internal sizes: {self.sizes.in_words(self.top_k)}")
        accused = [t for t in (rows or range(min(T, 2))) if 0 <= t < T]
        table = self.scores()
        for t in accused[:3]:
            low, high = int(self.start[t]), int(self.end[t])
            lines.append(f"row {t} may select keys [{low}, {high}); scores {self._some(table[t], keys)}")
        return "\n".join(lines)

    def _some(self, row: Float64, keys: Sequence[int]) -> str:
        S = len(row)
        if S <= SHOWN_KEYS:
            shown = list(range(S))
        else:
            near = sorted({key + step for key in keys[:4] for step in (-1, 0, 1)})
            shown = [key for key in near if 0 <= key < S] or list(range(SHOWN_KEYS))
        listed = ", ".join(f"{key}: {_figure(row[key])}" for key in shown)
        return listed if len(shown) == S else f"{listed}, ... ({S} keys)"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _figure(value: float) -> str:
    """Short where that is exact, all 17 digits where neighbours must be told apart."""
    short = f"{value:.6g}"
    return short if float(short) == value or np.isnan(value) else f"{value:.17g}"


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, in other memory; the last axis stays contiguous and gaps hold NaN-like bytes."""
    if layout == "contiguous" or tensor.numel() == 0:
        return tensor.contiguous()
    if layout == "heads outermost":
        return (
            tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.ndim == 3 else tensor.contiguous()
        )
    *outer, D = tensor.shape
    bytes_each = tensor.element_size()
    if layout == "padded rows":
        room = torch.full((*outer, (D + 3) * bytes_each), 0x7F, dtype=torch.uint8)
        view = room.view(tensor.dtype)[..., :D]
    elif layout == "offset storage":
        room = torch.full(((tensor.numel() + 3) * bytes_each,), 0x7F, dtype=torch.uint8)
        view = room.view(tensor.dtype)[3:].view(tensor.shape)
    else:
        raise ValueError(f"layout: {layout!r}; allowed: {', '.join(LAYOUTS)}")
    view.copy_(tensor)
    return view

"""Records: packed selections with what is needed to decode them, made by us or imported from elsewhere.

Shape letters: T rows, S keys, K = top_k.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from hyscale_ref.codec import CorruptRecordError, RowLayout

from .decode import FAULTS, OTHER_CALL, launch_decode
from .encode import launch_encode
from .errors import ReplayError
from .fingerprint import launch_fingerprint
from .tiling import Tiling

Optional = torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedSelection:
    """The selection of T rows as packed words (the format is hyscale_ref.codec's).

    words        int32 [T, row_words(num_keys, top_k)]
    fingerprint  int64 [2], of the windows and of the inputs it was made with (fingerprint.py)
    num_keys     S
    top_k        K

    Rows are independent: ``words[a:b]`` are the packed rows a to b.
    """

    words: torch.Tensor
    fingerprint: torch.Tensor
    num_keys: int
    top_k: int

    def __post_init__(self) -> None:
        wanted = RowLayout(self.num_keys, self.top_k).words
        _check("words", self.words, torch.int32, 2)
        _check("fingerprint", self.fingerprint, torch.int64, 1)
        if self.words.shape[1] != wanted:
            raise ValueError(
                f"words has shape {list(self.words.shape)}; for {self.num_keys} keys and top_k {self.top_k} "
                f"it must be [T, {wanted}]"
            )
        if self.fingerprint.shape[0] != 2:
            raise ValueError(f"fingerprint has shape {list(self.fingerprint.shape)}; it must be [2]")

    @property
    def num_rows(self) -> int:
        return self.words.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.words.nbytes + self.fingerprint.nbytes

    def to(self, device: torch.device | str) -> "PackedSelection":
        return replace(self, words=self.words.to(device), fingerprint=self.fingerprint.to(device))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers alone, fit for ``torch.save`` and ``torch.load(weights_only=True)``."""
        return {
            "words": self.words,
            "fingerprint": self.fingerprint,
            "num_keys": self.num_keys,
            "top_k": self.top_k,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "PackedSelection":
        """The record that ``state_dict`` described; ValueError if an entry is missing or unknown."""
        wanted = {"words", "fingerprint", "num_keys", "top_k"}
        if set(state) != wanted:
            raise ValueError(f"state has the entries {sorted(state)}; it must have {sorted(wanted)}")
        return cls(**state)


def import_selection(
    indices: torch.Tensor,
    num_keys: int,
    *,
    start: Optional = None,
    end: Optional = None,
    local: bool = False,
) -> PackedSelection:
    """A record of indices that were selected elsewhere: at rollout for reinforcement learning, for example.

    Args:
        indices: int32 or int64 [T, K], in any order; -1 where a place is unused.
        num_keys: S.
        start, end: int32 [T], the rows' windows, as for ``hytopk``.
        local: indices count from their row's start instead of from key 0.

    Waits for the device. Raises ValueError, naming row and index, for an index outside its row's window, a
    repeated one, or a negative one other than -1. (Indices of a paged cache, of another rank or of another
    sequence of the batch end up here.)
    """
    if not isinstance(indices, torch.Tensor):
        raise TypeError(f"indices must be a torch.Tensor [T, K], got {type(indices).__name__}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices is {indices.dtype}; allowed: torch.int32, torch.int64")
    if indices.dim() != 2 or indices.shape[1] == 0:
        raise ValueError(f"indices has shape {list(indices.shape)}; it must be [T, K] with K >= 1")
    T, K = indices.shape
    RowLayout(num_keys, K)  # raises for sizes beyond the format
    check_bounds(start, end, T, num_keys, indices.device)
    row = torch.arange(T, device=indices.device)
    low = torch.zeros_like(row) if start is None else start.long()
    high = (row + 1 if start is None else torch.full_like(row, num_keys)) if end is None else end.long()
    keys = indices.long()
    used = keys != -1
    if local:
        keys = torch.where(used & (keys >= 0), keys + low[:, None], keys)
    ordered = torch.where(used, keys, torch.iinfo(torch.int64).max).sort(dim=1).values
    count = used.sum(dim=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (torch.arange(1, K, device=row.device) < count[:, None])
    outside = used & ((keys < low[:, None]) | (keys >= high[:, None]) | (keys >= num_keys) | (keys < 0))
    _refuse(outside, indices, lambda r: f"lies outside the row's window [{int(low[r])}, {int(high[r])})")
    _refuse(twice, ordered[:, 1:], lambda r: "appears twice")
    rows = torch.where(ordered < num_keys, ordered, -1).to(torch.int32)
    with torch.cuda.device_of(indices):
        words = launch_encode(rows, count.to(torch.int32), start, num_keys, Tiling.default(indices.device))
        fingerprint = launch_fingerprint(start, end, T, num_keys, indices.device)
    return PackedSelection(words, fingerprint, num_keys, K)


def check_bounds(start: Optional, end: Optional, T: int, num_keys: int, device: torch.device) -> None:
    """Raise TypeError or ValueError unless ``start``, ``end`` can be the windows of T rows on ``device``."""
    for name, value in (("start", start), ("end", end)):
        if value is not None:
            _check(name, value, torch.int32, 1)
            if value.shape[0] != T or value.device != device:
                raise ValueError(
                    f"{name} has shape {list(value.shape)} on {value.device}; it must be [{T}] on {device}"
                )
    if start is None and end is None and num_keys != T:
        raise ValueError(
            "start and end are missing; the causal default needs as many rows as keys, "
            f"got T = {T}, num_keys = {num_keys}"
        )


def unpack(
    words: torch.Tensor,
    fingerprint: torch.Tensor,
    start: Optional,
    end: Optional,
    num_keys: int,
    top_k: int,
    inputs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indices, count, status) of packed words, decoded under the windows given, for ``inputs``
    (``fingerprint.describe``; 0: any); see ``launch_decode``."""
    with torch.cuda.device_of(words):
        seen = launch_fingerprint(start, end, words.shape[0], num_keys, words.device, inputs)
        return launch_decode(
            words, start, end, (fingerprint, seen), num_keys, top_k, Tiling.default(words.device)
        )


def raise_faults(status: torch.Tensor) -> None:
    """Wait for the device and raise for the first row whose decoding status int32 [T] is not 0.

    ReplayError if windows or inputs are not those of the record, CorruptRecordError (a ValueError) otherwise.
    """
    bad = status.nonzero()
    if bad.numel() == 0:
        return
    row = int(bad[0])
    found = int(status[row])
    what = "; ".join(text for bit, text in FAULTS.items() if found & bit)
    if found & OTHER_CALL:
        different = " and ".join(FAULTS[bit] for bit in (32, 64) if found & bit)
        raise ReplayError(
            f"{different}: recompute with the arguments of the forward pass (were they written to in "
            "between, or do they belong to another microbatch?)"
        )
    raise CorruptRecordError(f"packed row {row} is corrupt: {what}; {bad.shape[0]} row(s) are")


def _refuse(bad: torch.Tensor, values: torch.Tensor, what: Any) -> None:
    found = bad.nonzero()
    if found.numel():
        row, place = (int(each) for each in found[0])
        raise ValueError(f"indices: row {row}: index {int(values[row, place])} {what(row)}")


def _check(name: str, value: Any, dtype: torch.dtype, rank: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != dtype:
        raise TypeError(f"{name} is {value.dtype}; allowed: {dtype}")
    if value.dim() != rank:
        raise ValueError(f"{name} has shape {list(value.shape)}; it must have {rank} axes")
    if not value.is_contiguous():
        raise ValueError(f"{name} has strides {list(value.stride())}; it must be contiguous")

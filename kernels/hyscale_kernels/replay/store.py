"""Where a tape keeps its records: on the device, or in pinned host memory, copied on a stream of its own.

Shape letters: none; a record is a block of bytes here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .record import PackedSelection


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of records held now: on their device, and in host memory."""

    device: int
    host: int

    @property
    def total(self) -> int:
        return self.device + self.host


class Slot:
    """One record in a store, from ``put`` to ``drop``. It comes near, on its device."""

    def __init__(self, store: "Store", record: PackedSelection) -> None:
        self._store = store
        self._near: PackedSelection | None = record
        self._far: PackedSelection | None = None
        self._written = event_after(record.words)
        self._arrived: torch.cuda.Event | None = None
        self._device = record.words.device
        store._count(self, near=1)

    @property
    def held(self) -> Held:
        near = 0 if self._near is None else self._near.nbytes
        far = 0 if self._far is None else self._far.nbytes
        return Held(near, far)

    def prefetch(self) -> None:
        """Start to bring the record back to its device; does nothing where it is there already."""
        if self._near is not None:
            return
        assert self._far is not None
        side = self._store.side(self._device)
        if side is None:
            self._near = _copy(self._far, lambda words: words.clone())
        else:
            with torch.cuda.stream(side):
                self._near = _copy(self._far, lambda words: words.to(self._device, non_blocking=True))
                self._arrived = torch.cuda.Event()
                self._arrived.record(side)
        self._store._count(self, near=1)

    def take(self) -> PackedSelection:
        """The record on its device, ready for the current stream. It stays in the store."""
        self.prefetch()
        record = self._near
        assert record is not None
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            for event in (self._written, self._arrived):
                if event is not None:
                    current.wait_event(event)
            for words in (record.words, record.fingerprint):
                words.record_stream(current)
        return record

    def drop(self) -> None:
        """Give the record up."""
        self._store._count(self, near=-(self._near is not None), far=-(self._far is not None))
        self._near = self._far = None

    def leave(self) -> None:
        """The forward pass is done with the record: with offload, send it to the host."""
        record = self._near
        if not self._store.offload or record is None:
            return
        side = self._store.side(self._device)
        if side is None:
            self._far = _copy(record, lambda words: words.clone())
        else:
            assert self._written is not None
            side.wait_event(self._written)
            with torch.cuda.stream(side):
                self._far = _copy(record, _to_pinned)
            for words in (record.words, record.fingerprint):
                words.record_stream(side)
        self._store._count(self, near=-1, far=1)
        self._near = None


class Store:
    """Puts records away and counts their bytes exactly.

    offload: keep records in host memory (pinned where they come from a GPU) until they are fetched.
    """

    def __init__(self, offload: bool) -> None:
        self.offload = offload
        self.held = Held(0, 0)
        self.peak = Held(0, 0)
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def put(self, record: PackedSelection) -> Slot:
        return Slot(self, record)

    def side(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream that copies to and from ``device``; None on a CPU."""
        if device.type != "cuda":
            return None
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)
        return self._sides[device]

    def _count(self, slot: Slot, near: int = 0, far: int = 0) -> None:
        held = slot.held
        device = self.held.device + near * held.device
        host = self.held.host + far * held.host
        self.held = Held(device, host)
        self.peak = Held(max(self.peak.device, device), max(self.peak.host, host))


def _copy(record: PackedSelection, copy: Callable[[torch.Tensor], torch.Tensor]) -> PackedSelection:
    return replace(record, words=copy(record.words), fingerprint=copy(record.fingerprint))


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def event_after(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """An event on the stream that has just written ``tensor``; None on a CPU."""
    if tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event

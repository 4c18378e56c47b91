"""Replay for frameworks that bring their own checkpoint functions, and for pipeline schedules.

A ``SelectionTape`` belongs to the training loop, and a ``Frame`` of it to one microbatch. The model is handed
the frame; nothing is kept in a module, so microbatches in flight cannot see each other. The life of a record:

    recorded  once, by ``frame.select`` in a recording run (or by ``frame.load``, from elsewhere)
    read      once in the recording run by each other consumer that was declared with it (``frame.reuse``)
    replayed  once by each consumer, in the replaying run of its region; then it is gone

and every departure from it raises ReplayError, which names microbatch, layer and consumer. A run that ends in
an exception leaves the frame as it was before it.

    tape = SelectionTape()
    frame = tape.frame(microbatch=0)
    x = checkpoint(frame.region(lambda x: layer(x, frame)), x, use_reentrant=True)   # twice: records, replays
    ...
    tape.finish()                                                                     # after the last
    backward

Shape letters: T queries, S keys, H heads, D head size, K = top_k.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import _StopRecomputationError

from hyscale_ref.codec import CorruptRecordError

from ..hytopk import Plan
from .api import ReplayedSelection, decode_record, record_selection
from .errors import ReplayError
from .record import PackedSelection
from .store import Held, Slot, Store

P = ParamSpec("P")
R = TypeVar("R")
Name = int | str
Optional = torch.Tensor | None


class Run(Enum):
    """What a region's function is being run for.

    RECORD   the forward pass
    PREVIEW  the recomputation of a region around it: its own recomputation is still to come
    REPLAY   its own recomputation, for the backward pass
    """

    RECORD = "record"
    PREVIEW = "preview"
    REPLAY = "replay"


@dataclass(slots=True)
class Consumer:
    """How far a declared consumer of a record has come."""

    read: bool = False
    replayed: bool = False


@dataclass(slots=True)
class Entry:
    """A record of a frame; ``slot`` is None once every consumer has replayed it."""

    slot: Slot | None
    num_rows: int
    num_keys: int
    top_k: int
    device: torch.device
    consumers: dict[Name, Consumer]

    def sizes(self) -> tuple[int, int, int, torch.device]:
        return self.num_rows, self.num_keys, self.top_k, self.device


@dataclass(slots=True)
class _Open:
    """A run in progress: what it has recorded, which (source, consumer) pairs it has touched, runs inside
    it."""

    kind: Run
    recorded: list[Name] = field(default_factory=list)
    touched: list[tuple[Name, Name]] = field(default_factory=list)
    inner: list["_Open"] = field(default_factory=list)
    stopped: bool = False


class SelectionTape:
    """Records of all microbatches of a training step.

    offload   keep records in host memory between the passes (pinned, on a stream of its own, from a GPU)
    prefetch  with offload, how many earlier records to fetch ahead of each replay
    """

    def __init__(self, *, offload: bool = False, prefetch: int = 1) -> None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch is {prefetch!r}; it must be an integer, 0 or more")
        self._store = Store(offload)
        self._prefetch = prefetch
        self._frames: dict[Name, Frame] = {}
        self._findings: list[tuple[Name, Name, torch.Tensor]] = []

    @property
    def held(self) -> Held:
        """Bytes of the records held now."""
        return self._store.held

    @property
    def peak(self) -> Held:
        """The most bytes held at a time, on devices and on the host."""
        return self._store.peak

    def frame(self, microbatch: Name) -> "Frame":
        """A fresh frame for ``microbatch``; ReplayError if one of that name still holds records."""
        known = self._frames.get(microbatch)
        if known is not None and known.pending():
            raise ReplayError(
                f"microbatch {microbatch!r} has a frame whose records are not all replayed: "
                f"{known.describe()}. Run its backward pass, or discard({microbatch!r})"
            )
        frame = self._frames[microbatch] = Frame(self, microbatch)
        return frame

    def discard(self, microbatch: Name) -> None:
        """Drop what is left of a microbatch whose pass failed or is not wanted. KeyError if there is none."""
        self._frames.pop(microbatch).clear()

    def finish(self) -> None:
        """End the step: ReplayError if a record is left, or if a decoded record was refused on the device.

        Waits for the device once. The tape is empty afterwards, whatever happened.
        """
        frames, self._frames = self._frames, {}
        findings, self._findings = self._findings, []
        left = [
            f"microbatch {name!r}: {frame.describe()}" for name, frame in frames.items() if frame.pending()
        ]
        for frame in frames.values():
            frame.clear()
        if left:
            raise ReplayError(
                f"records are left at the end of the step ({'; '.join(left)}): their backward pass did not "
                f"run, "
                "or did not recompute those layers. discard(microbatch) drops them on purpose"
            )
        if findings:
            for (microbatch, layer, _), bits in zip(
                findings, torch.stack([each for _, _, each in findings]).tolist(), strict=True
            ):
                if bits:
                    raise ReplayError(
                        f"microbatch {microbatch!r}, layer {layer!r}: the record was refused on the device "
                        f"(status {bits}, see decode.FAULTS): it was corrupt, or the windows had changed "
                        "since the forward pass. The gradients of this step are wrong"
                    )


class Frame:
    """The records of one microbatch; made by ``SelectionTape.frame``."""

    def __init__(self, tape: SelectionTape, microbatch: Name) -> None:
        self.microbatch = microbatch
        self._tape = tape
        self._entries: dict[Name, Entry] = {}
        self._runs: list[_Open] = []

    # Regions

    def region(self, function: Callable[P, R]) -> Callable[P, R]:
        """``function`` as a region to hand to a checkpoint function, which will call it twice.

        The first call records, the second replays; a third raises ReplayError. Inside the recomputation of
        a region around it, it reads its records without using them up.
        """
        return _Region(self, function)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A recording run, for loops that call forward and recomputation themselves."""
        with self._run(Run.RECORD):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """A replaying run."""
        with self._run(Run.REPLAY):
            yield

    # Layers

    def select(
        self,
        layer: Name,
        q: torch.Tensor,
        k: torch.Tensor,
        w: torch.Tensor,
        top_k: int,
        *,
        start: Optional = None,
        end: Optional = None,
        k_scale: Optional = None,
        consumers: Sequence[Name] = (),
        plan: Plan | None = None,
    ) -> ReplayedSelection:
        """The selection of ``layer``: selected and recorded, or replayed, as the run demands.

        ``consumers`` are the other layers that reuse it (``reuse``); all must be named here. The rest is as
        for ``replay.select``.
        """
        run = self._current(layer)
        if run.kind is Run.RECORD:
            entry = self._entries.get(layer)
            if entry is None:
                record = record_selection(q, k, w, top_k, start=start, end=end, k_scale=k_scale, plan=plan)
                self._put(layer, record, consumers)
                run.recorded.append(layer)
            elif entry.consumers[layer].read:
                raise self._error(
                    layer, layer, "is recorded already: one frame records a layer once. Give each microbatch "
                    "its own frame, and each selection of a layer its own name"
                )  # fmt: skip
        sizes = (q.shape[0], k.shape[0], top_k, q.device)
        return self._read(layer, layer, run, sizes, start, end)

    def reuse(
        self,
        layer: Name,
        source: Name,
        *,
        num_rows: int,
        num_keys: int,
        top_k: int,
        start: Optional = None,
        end: Optional = None,
    ) -> ReplayedSelection:
        """The selection that layer ``source`` recorded and declared ``layer`` a consumer of.

        ``num_rows``, ``num_keys`` and ``top_k`` say what ``layer`` expects.
        """
        run = self._current(layer)
        known = self._entries.get(source)
        device = torch.device("cpu") if known is None else known.device
        return self._read(source, layer, run, (num_rows, num_keys, top_k, device), start, end)

    def load(self, layer: Name, record: PackedSelection, *, consumers: Sequence[Name] = ()) -> None:
        """Give ``layer`` a record from elsewhere; its ``select`` will read it and run no selection."""
        if not isinstance(record, PackedSelection):
            raise TypeError(f"record must be a PackedSelection, got {type(record).__name__}")
        if layer in self._entries:
            raise self._error(layer, layer, "has a record already")
        self._put(layer, record, consumers)

    def export(self, layer: Name) -> PackedSelection:
        """The record of ``layer``, to serialise or hand on; it stays on the tape."""
        entry = self._entries.get(layer)
        if entry is None or entry.slot is None:
            raise self._error(layer, layer, "has no record to export")
        return entry.slot.take()

    def prefetch(self, layer: Name) -> None:
        """With offload, start to bring the record of ``layer`` back: say, when its backward is about to
        begin."""
        entry = self._entries.get(layer)
        if entry is None or entry.slot is None:
            raise self._error(layer, layer, "has no record to fetch")
        entry.slot.prefetch()

    # State

    def pending(self) -> bool:
        """Whether records are held."""
        return any(entry.slot is not None for entry in self._entries.values())

    def describe(self) -> str:
        """The records held and who has still to replay them."""
        waiting = []
        for layer, entry in self._entries.items():
            if entry.slot is not None:
                names = ", ".join(repr(name) for name, each in entry.consumers.items() if not each.replayed)
                waiting.append(f"layer {layer!r} awaits replay by {names}")
        return "; ".join(waiting) or "nothing held"

    def clear(self) -> None:
        """Drop all records."""
        for entry in self._entries.values():
            if entry.slot is not None:
                entry.slot.drop()
        self._entries.clear()

    # Inside

    @contextmanager
    def _run(self, kind: Run) -> Iterator[_Open]:
        run = _Open(kind)
        self._runs.append(run)
        try:
            yield run
        except _StopRecomputationError:
            # PyTorch ends a recomputation so, once it has all that it needs.
            run.stopped = True
            self._commit(run)
            raise
        except BaseException:
            self._undo(run)
            raise
        else:
            self._commit(run)
        finally:
            self._runs.remove(run)

    def _commit(self, run: _Open) -> None:
        if len(self._runs) > 1:
            self._runs[-2].inner.append(run)
        if run.kind is not Run.REPLAY:
            return
        for source, _ in run.touched:
            self._release(source)

    def _undo(self, run: _Open) -> None:
        for each in run.inner:
            self._undo(each)
        for source, consumer in run.touched:
            entry = self._entries[source]
            if run.kind is Run.RECORD:
                entry.consumers[consumer].read = False
            elif run.kind is Run.REPLAY:
                entry.consumers[consumer].replayed = False
        for layer in run.recorded:
            entry = self._entries.pop(layer)
            if entry.slot is not None:
                entry.slot.drop()

    def _release(self, source: Name) -> None:
        entry = self._entries[source]
        if entry.slot is not None and all(each.replayed for each in entry.consumers.values()):
            entry.slot.drop()
            entry.slot = None

    def _skip(self, pairs: Sequence[tuple[Name, Name]]) -> None:
        """Count ``pairs`` as replayed: the recomputation stopped before it needed them."""
        for source, consumer in pairs:
            self._entries[source].consumers[consumer].replayed = True
            self._release(source)

    def _put(self, layer: Name, record: PackedSelection, consumers: Sequence[Name]) -> None:
        names = dict.fromkeys((layer, *consumers))
        self._entries[layer] = Entry(
            self._tape._store.put(record),
            record.num_rows,
            record.num_keys,
            record.top_k,
            record.words.device,
            {name: Consumer() for name in names},
        )

    def _read(
        self,
        source: Name,
        consumer: Name,
        run: _Open,
        sizes: tuple[int, int, int, torch.device],
        start: Optional,
        end: Optional,
    ) -> ReplayedSelection:
        entry = self._entries.get(source)
        if entry is None:
            recorded = ", ".join(repr(name) for name in self._entries) or "none"
            raise self._error(
                source, consumer, f"has no record (recorded: {recorded}). Its forward pass ran outside a "
                "recording run, failed, or belongs to another frame"
            )  # fmt: skip
        state = entry.consumers.get(consumer)
        if state is None:
            declared = ", ".join(repr(name) for name in entry.consumers)
            raise self._error(source, consumer, f"was not declared for it (declared: {declared})")
        if run.kind is Run.RECORD and state.read:
            raise self._error(source, consumer, "has read it already in this forward pass")
        if run.kind is not Run.RECORD:
            if state.replayed or entry.slot is None:
                raise self._error(
                    source, consumer, "has replayed it already: a record serves one backward pass. For a "
                    "second "
                    "one, run the forward pass again"
                )  # fmt: skip
            if not state.read:
                raise self._error(source, consumer, "replays it without having read it in the forward pass")
        if sizes != entry.sizes():
            names = ("rows", "keys", "top_k", "device")
            changed = [
                f"{name} {then} then, {now} now"
                for name, then, now in zip(names, entry.sizes(), sizes, strict=True)
                if then != now
            ]
            raise self._error(
                source, consumer, f"asks for other sizes than were recorded: {', '.join(changed)}"
            )
        assert entry.slot is not None
        selection = self._decode(source, consumer, entry.slot, start, end)
        run.touched.append((source, consumer))
        if run.kind is Run.RECORD:
            state.read = True
            if all(each.read for each in entry.consumers.values()):
                entry.slot.leave()
        elif run.kind is Run.REPLAY:
            state.replayed = True
            self._fetch_ahead(source)
        return selection

    def _decode(
        self, source: Name, consumer: Name, slot: Slot, start: Optional, end: Optional
    ) -> ReplayedSelection:
        try:
            selection = decode_record(slot.take(), start=start, end=end, hold=False)
        except (CorruptRecordError, ReplayError) as error:
            raise self._error(source, consumer, f"got no selection from it: {error}") from error
        if selection.status.device.type != "cpu" and selection.status.numel():
            self._tape._findings.append((self.microbatch, consumer, selection.status.amax()))
        return selection

    def _fetch_ahead(self, source: Name) -> None:
        """Start to fetch the records made just before ``source``: a backward pass wants them next."""
        names = list(self._entries)
        place = names.index(source)
        for name in names[max(0, place - self._tape._prefetch) : place]:
            slot = self._entries[name].slot
            if slot is not None:
                slot.prefetch()

    def _current(self, layer: Name) -> _Open:
        if not self._runs:
            raise self._error(
                layer, layer, "was reached outside a run: wrap the checkpointed function in frame.region, or "
                "the "
                "passes in frame.recording() and frame.replaying(). To select without a tape: replay.select"
            )  # fmt: skip
        return self._runs[-1]

    def _error(self, source: Name, consumer: Name, what: str) -> ReplayError:
        of = "" if consumer == source else f", record of layer {source!r}"
        return ReplayError(f"microbatch {self.microbatch!r}, layer {consumer!r}{of}: {what}")


class _Region:
    """A checkpointed function and how often it has run."""

    def __init__(self, frame: Frame, function: Callable[..., Any]) -> None:
        self._frame = frame
        self._function = function
        self._seen: list[tuple[Name, Name]] | None = None
        self._replayed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = self._frame
        around = frame._runs[-1].kind if frame._runs else None
        if around in (Run.REPLAY, Run.PREVIEW):
            kind = Run.PREVIEW
        elif around is Run.RECORD or self._seen is None:
            kind = Run.RECORD
        else:
            kind = Run.REPLAY
        if self._replayed and kind is Run.REPLAY:
            raise ReplayError(
                f"microbatch {frame.microbatch!r}: a region is replayed a second time (records: "
                f"{self._named()}). A record serves one backward pass: run the forward pass again"
            )
        try:
            with frame._run(kind) as run:
                result = self._function(*args, **kwargs)
                if kind is Run.REPLAY:
                    self._require(run)
        except BaseException:
            if run.stopped and kind is Run.REPLAY:
                self._replayed = True
                frame._skip(self._missing(run))
            raise
        self._replayed = kind is Run.REPLAY
        if kind is not Run.REPLAY:
            self._seen = run.touched
        return result

    def _missing(self, run: _Open) -> list[tuple[Name, Name]]:
        return [pair for pair in self._seen or () if pair not in run.touched]

    def _require(self, run: _Open) -> None:
        missing = self._missing(run)
        if missing:
            source, consumer = missing[0]
            raise self._frame._error(
                source, consumer, "was recorded by this region, and its recomputation did not ask for it"
            )

    def _named(self) -> str:
        return ", ".join(repr(source) for source, _ in self._seen or ()) or "none"

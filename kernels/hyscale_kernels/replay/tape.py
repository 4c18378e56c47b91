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
    tape.finish()  # after the last backward pass

Shape letters: T queries, S keys, H heads, D head size, K = top_k.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import _StopRecomputationError

from hyscale_ref.codec import CorruptRecordError

from ..hytopk import Plan
from ..hytopk.api import check_call, check_top_k
from .api import ReplayedSelection, decode_record, record_selection
from .errors import ReplayError
from .record import PackedSelection
from .store import Held, Slot, Store, event_after

P = ParamSpec("P")
R = TypeVar("R")
Name = int | str
Facts = dict[str, Any]
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
    """A record of a frame; ``slot`` is None once every consumer has replayed it.

    ``facts`` are what is known of the selection by name: "rows", "keys", "top_k", "device" and, unless the
    record was loaded, "dtype", "heads" and "head size". A replay must not differ in one of them.
    """

    slot: Slot | None
    facts: Facts
    consumers: dict[Name, Consumer]


@dataclass(frozen=True, slots=True)
class _Finding:
    """What a decoding found on its device (0: nothing to object to), and when that will be known."""

    microbatch: Name
    layer: Name
    bits: torch.Tensor
    known: torch.cuda.Event | None


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
        self._findings: list[_Finding] = []

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

        Waits until every record that was read on a device has been decoded, on whatever stream. The tape is
        empty afterwards, whatever happened.
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
                "run, or did not recompute those layers. discard(microbatch) drops them on purpose"
            )
        for finding in findings:
            if finding.known is not None:
                finding.known.synchronize()
            bits = int(finding.bits)
            if bits:
                raise ReplayError(
                    f"microbatch {finding.microbatch!r}, layer {finding.layer!r}: the record was refused on "
                    f"the device (status {bits}, see decode.FAULTS): it was corrupt, or the windows had "
                    "changed since the forward pass. The gradients of this step are wrong: drop them "
                    "(zero_grad)"
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

        ``consumers`` are the other layers that reuse it (``reuse``); all must be named here, or in ``load``.
        The rest is as for ``replay.select``, errors in arguments included: a note says where they happened.
        """
        run = self._current(layer)
        try:
            check_call(q, k, w, start, end, k_scale)
            check_top_k(top_k)
        except (TypeError, ValueError) as error:
            error.add_note(f"in microbatch {self.microbatch!r}, layer {layer!r}")
            raise
        T, H, D = q.shape
        facts: Facts = {"rows": T, "keys": k.shape[0], "top_k": top_k, "device": q.device}
        facts |= {"dtype": q.dtype, "heads": H, "head size": D}
        entry = self._entries.get(layer)
        if entry is not None and not entry.consumers.keys() >= set(consumers):
            raise self._error(
                layer, layer, f"names the consumers {_listed(consumers)}, but was recorded for "
                f"{_listed(entry.consumers)}. Name them where it is recorded, or in load"
            )  # fmt: skip
        if run.kind is Run.RECORD:
            if entry is None:
                record = record_selection(q, k, w, top_k, start=start, end=end, k_scale=k_scale, plan=plan)
                self._put(layer, record, facts, consumers)
                run.recorded.append(layer)
            elif entry.consumers[layer].read:
                raise self._error(
                    layer, layer, "is recorded already: one frame records a layer once. Give each microbatch "
                    "its own frame, and each selection of a layer its own name"
                )  # fmt: skip
        return self._read(layer, layer, run, facts, start, end)

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
        facts = {"rows": num_rows, "keys": num_keys, "top_k": top_k}
        return self._read(source, layer, run, facts, start, end)

    def load(self, layer: Name, record: PackedSelection, *, consumers: Sequence[Name] = ()) -> None:
        """Give ``layer`` a record from elsewhere; its ``select`` will read it and run no selection."""
        if not isinstance(record, PackedSelection):
            raise TypeError(f"record must be a PackedSelection, got {type(record).__name__}")
        if layer in self._entries:
            raise self._error(
                layer, layer, "has a record already: load before the forward pass, into a frame of its own"
            )
        facts = {"rows": record.num_rows, "keys": record.num_keys, "top_k": record.top_k}
        self._put(layer, record, facts | {"device": record.words.device}, consumers)

    def export(self, layer: Name) -> PackedSelection:
        """The record of ``layer``, to serialise or hand on; it stays on the tape."""
        entry = self._entries.get(layer)
        if entry is None or entry.slot is None:
            raise self._error(layer, layer, "has no record to export: none was made, or all have replayed it")
        return entry.slot.take()

    def prefetch(self, layer: Name) -> None:
        """With offload, start to bring the record of ``layer`` back: say, when its backward is about to
        begin."""
        entry = self._entries.get(layer)
        if entry is None or entry.slot is None:
            raise self._error(layer, layer, "has no record to fetch: none was made, or all have replayed it")
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
                names = [name for name, each in entry.consumers.items() if not each.replayed]
                waiting.append(f"layer {layer!r} awaits replay by {_listed(names)}")
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

    def _put(self, layer: Name, record: PackedSelection, facts: Facts, consumers: Sequence[Name]) -> None:
        names = dict.fromkeys((layer, *consumers))
        self._entries[layer] = Entry(
            self._tape._store.put(record), facts, {name: Consumer() for name in names}
        )

    def _read(
        self,
        source: Name,
        consumer: Name,
        run: _Open,
        facts: Facts,
        start: Optional,
        end: Optional,
    ) -> ReplayedSelection:
        entry = self._entries.get(source)
        if entry is None:
            raise self._error(
                source, consumer, f"has no record (recorded: {_listed(self._entries)}). Its forward pass ran "
                "outside a recording run, failed, or belongs to another frame: run it again under this one"
            )  # fmt: skip
        state = entry.consumers.get(consumer)
        if state is None:
            raise self._error(
                source, consumer, f"was not declared for it (declared: {_listed(entry.consumers)}). Name it "
                "among the consumers where the selection is recorded"
            )  # fmt: skip
        if run.kind is Run.RECORD and state.read:
            raise self._error(
                source,
                consumer,
                "has read it already in this forward pass: give each reader a name of its own",
            )
        if run.kind is not Run.RECORD:
            if state.replayed or entry.slot is None:
                raise self._error(
                    source, consumer, "has replayed it already: a record serves one backward pass. For a "
                    "second one, run the forward pass again"
                )  # fmt: skip
            if not state.read:
                raise self._error(
                    source, consumer, "replays it without having read it in the forward pass: call reuse "
                    "there as well"
                )  # fmt: skip
        changed = [
            f"{name} {entry.facts[name]} then, {now} now"
            for name, now in facts.items()
            if name in entry.facts and entry.facts[name] != now
        ]
        if changed:
            raise self._error(
                source, consumer, f"asks for something else than was recorded: {', '.join(changed)}. "
                "Recompute with what the forward pass had; or is this another microbatch's frame?"
            )  # fmt: skip
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
        except (TypeError, ValueError) as error:
            error.add_note(f"in microbatch {self.microbatch!r}, layer {consumer!r}")
            raise
        if selection.status.device.type != "cpu" and selection.status.numel():
            bits = selection.status.amax()
            self._tape._findings.append(_Finding(self.microbatch, consumer, bits, event_after(bits)))
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
                "the passes in frame.recording() and frame.replaying(). Without a tape: replay.select"
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
                source, consumer, "was recorded by this region, and its recomputation did not ask for it: "
                "both runs must go through the same layers"
            )  # fmt: skip

    def _named(self) -> str:
        return _listed(source for source, _ in self._seen or ())


def _listed(names: Iterable[Name]) -> str:
    return ", ".join(repr(name) for name in names) or "none"

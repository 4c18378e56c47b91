"""The task graph: what has to happen in a training step, on which streams, after what.

A *task* is one kernel, message or collective. It occupies zero or more *streams* for its whole duration:
none for a pure dependency (a milestone), one for a kernel, several for a collective (one shared event: it
starts when every member stream has reached it, and ends on all of them together).

Streams are in-order, like CUDA streams: each runs its tasks in the order in which they were added. The order
is part of the graph, never chosen by the engine, because list scheduling may get *slower* when a task gets
faster (Graham's anomaly, 1969); with a fixed order and no contention the makespan is monotone in every
duration.

Graphs are columns of arrays: building one costs about a microsecond a task, repricing one (`with_durations`)
nothing. A graph is also a *block*: `GraphBuilder.include` replays it under other stream names, so one
layer priced once is placed for every stage and microbatch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["PPM", "Graph", "GraphBuilder", "Ints", "Task", "Timeline", "Transfer", "rows", "transfer_ns"]

Ints = NDArray[np.int64]

PPM = 1_000_000
"""SM shares are kept as whole parts per million, so that the engine's arithmetic is exact in integers."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that a task moves across shared links once its own duration (the latency) has elapsed.

    The flow crosses all of `links` at one rate, the max-min fair share of the flows present. A transfer of
    zero bytes costs the latency alone.
    """

    links: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Task:
    """One task read back from a graph; `Graph` holds the columns, this is for people and tests."""

    id: int
    name: str
    kind: str
    """Category in every breakdown, such as "attention" or "p2p"."""
    streams: tuple[str, ...]
    duration_ns: int
    after: tuple[int, ...]
    """Explicit predecessors; the order of the streams adds its own."""
    transfer: Transfer | None
    sm_taken: tuple[tuple[str, float], ...]
    """(compute stream, fraction of its SMs) held while this task runs: a communication kernel's appetite."""
    sm_sensitivity: float
    """How much of a lost SM fraction this task feels: 1 compute bound, 0 not at all."""
    op: int
    """Row of the caller's table of priced ops, or -1: `graph.with_durations(price_ns[graph.op])` reprices."""


@dataclass(frozen=True, eq=False)
class Graph:
    """Tasks 0..n-1 as columns. Made by `GraphBuilder.build`, which validates; treat the arrays as read-only.

    Ragged columns are CSR: task i has streams `stream_idx[stream_ptr[i]:stream_ptr[i+1]]`, and likewise
    explicit predecessors. Times are int64 nanoseconds, rates whole bytes per second.
    """

    names: tuple[str, ...]
    labels: tuple[str, ...]
    label: Ints
    kinds: tuple[str, ...]
    kind: Ints
    streams: tuple[str, ...]
    stream_ptr: Ints
    stream_idx: Ints
    pred_ptr: Ints
    pred_idx: Ints
    duration_ns: Ints
    op: Ints
    transfers: Mapping[int, Transfer]
    links: Mapping[str, int]
    """Capacity of each link in bytes per second, in one direction."""
    sm_taken_ppm: Mapping[int, tuple[tuple[int, int], ...]]
    """Task -> ((stream number, parts per million of its SMs), ...)."""
    sm_sensitivity_ppm: Mapping[int, int]
    """Tasks whose sensitivity is not 1."""

    def __len__(self) -> int:
        return len(self.duration_ns)

    def name(self, task: int) -> str:
        """Full name: the label of the block it was placed with, a slash, its own name."""
        label = self.labels[self.label[task]]
        return f"{label}/{self.names[task]}" if label else self.names[task]

    def task(self, task: int) -> Task:
        """Task number `task` as a record. IndexError outside 0..n-1."""
        if not 0 <= task < len(self):
            raise IndexError(f"task: {task} is outside 0..{len(self) - 1}")
        return Task(
            id=task,
            name=self.name(task),
            kind=self.kinds[self.kind[task]],
            streams=tuple(self.streams[s] for s in self.stream_idx[_row(self.stream_ptr, task)]),
            duration_ns=int(self.duration_ns[task]),
            after=tuple(int(p) for p in self.pred_idx[_row(self.pred_ptr, task)]),
            transfer=self.transfers.get(task),
            sm_taken=tuple((self.streams[s], ppm / PPM) for s, ppm in self.sm_taken_ppm.get(task, ())),
            sm_sensitivity=self.sm_sensitivity_ppm.get(task, PPM) / PPM,
            op=int(self.op[task]),
        )

    def with_durations(self, duration_ns: NDArray[np.integer]) -> Graph:
        """The same structure at other durations (int, ns, [n], each >= 0); nothing derived is recomputed."""
        _check_durations(duration_ns, self)
        return self._share_structure(replace(self, duration_ns=duration_ns.astype(np.int64)))

    def with_links(self, links: Mapping[str, int]) -> Graph:
        """The same graph over links of other capacity (bytes per second); the rest stay as they are."""
        for name, capacity in links.items():
            if name not in self.links:
                raise ValueError(f"links: no link {name!r}; the graph has {sorted(self.links)}")
            _check_capacity(name, capacity)
        return self._share_structure(replace(self, links={**self.links, **links}))

    def _share_structure(self, other: Graph) -> Graph:
        # `other` has the same structure, so what was already derived from that stays valid.
        for derived in ("edges", "order", "entries", "exits"):
            if derived in self.__dict__:
                other.__dict__[derived] = self.__dict__[derived]
        return other

    @cached_property
    def alone_ns(self) -> Ints:
        """Duration of each task with nothing else running: its own, then its transfer alone."""
        alone = self.duration_ns.copy()
        for task, transfer in self.transfers.items():
            alone[task] += transfer_ns(transfer.num_bytes, min(self.links[name] for name in transfer.links))
        return alone

    @cached_property
    def edges(self) -> tuple[Ints, Ints]:
        """All predecessors as CSR (ptr, idx): the explicit ones, then the previous task of each stream."""
        n = len(self)
        occupant = rows(self.stream_ptr)
        by_stream = np.argsort(self.stream_idx, kind="stable")
        same = self.stream_idx[by_stream][1:] == self.stream_idx[by_stream][:-1]
        before, after = occupant[by_stream][:-1][same], occupant[by_stream][1:][same]
        target = np.concatenate([rows(self.pred_ptr), after])
        source = np.concatenate([self.pred_idx, before])
        grouped = np.argsort(target, kind="stable")
        ptr = np.zeros(n + 1, np.int64)
        np.cumsum(np.bincount(target, minlength=n), out=ptr[1:])
        return ptr, source[grouped]

    @cached_property
    def order(self) -> Ints:
        """A topological order of the tasks over `edges`. ValueError naming a cycle if there is none."""
        ptr, idx = self.edges
        if np.all(idx < rows(ptr)):
            return np.arange(len(self))
        return _topological_order(self, ptr, idx)

    @cached_property
    def entries(self) -> Ints:
        """Tasks that wait for nothing: no explicit predecessor, and first on each of their streams."""
        return np.flatnonzero(np.diff(self.edges[0]) == 0)

    @cached_property
    def exits(self) -> Ints:
        """Tasks that nothing waits for."""
        return np.flatnonzero(np.bincount(self.edges[1], minlength=len(self)) == 0)


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each task of a graph ran. Made by the engine, or by the longest-path pass."""

    graph: Graph
    start_ns: Ints
    end_ns: Ints
    released_by: Ints
    """The predecessor (explicit or of the stream) whose end let the task start, the lowest number among
    equals; -1 for a task that had none. `start_ns[i] == end_ns[released_by[i]]` always, so the critical path
    has no gaps."""

    @property
    def makespan_ns(self) -> int:
        """End of the last task."""
        return int(self.end_ns.max())


def rows(ptr: Ints) -> Ints:
    """The row that each entry of a CSR column belongs to: for `stream_ptr`, the task of each of
    `stream_idx`."""
    return np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))


def transfer_ns(num_bytes: int, bytes_per_s: int) -> int:
    """Whole nanoseconds, rounded up, that `num_bytes` take at a constant rate."""
    return -(-num_bytes * 1_000_000_000 // bytes_per_s)


class GraphBuilder:
    """Collects tasks, then builds a `Graph`. A stream runs its tasks in the order in which they are added."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._labels = {"": 0}
        self._kinds: dict[str, int] = {}
        self._streams: dict[str, int] = {}
        self._links: dict[str, int] = {}
        self._label, self._kind, self._duration, self._op = array("q"), array("q"), array("q"), array("q")
        self._stream_count, self._stream_idx = array("q"), array("q")
        self._pred_count, self._pred_idx = array("q"), array("q")
        self._transfers: dict[int, Transfer] = {}
        self._sm_taken: dict[int, tuple[tuple[int, int], ...]] = {}
        self._sm_sensitivity: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def link(self, name: str, bytes_per_s: int) -> None:
        """Declare a shared link of that capacity. ValueError if it exists with another capacity."""
        _check_capacity(name, bytes_per_s)
        if self._links.setdefault(name, bytes_per_s) != bytes_per_s:
            raise ValueError(
                f"link {name!r}: declared with {self._links[name]} and {bytes_per_s} bytes per second"
            )

    def add(
        self,
        name: str,
        kind: str,
        stream: str | Sequence[str],
        duration_ns: int,
        after: Iterable[int] = (),
        *,
        transfer: Transfer | None = None,
        sm_taken: Mapping[str, float] | None = None,
        sm_sensitivity: float = 1.0,
        op: int = -1,
    ) -> int:
        """Add one task and return its number.

        `stream` is one name, several (a collective) or none. `after` may name tasks that are added later.
        `sm_taken` maps compute streams to the fraction of SMs that this task holds there, each in (0, 1).
        """
        streams = (stream,) if isinstance(stream, str) else tuple(stream)
        if not isinstance(duration_ns, int | np.integer):
            raise TypeError(f"task {name!r}: duration_ns is {duration_ns!r}; whole nanoseconds are wanted")
        if duration_ns < 0:
            raise ValueError(f"task {name!r}: duration_ns is {duration_ns}; at least 0 is wanted")
        if len(set(streams)) != len(streams):
            raise ValueError(f"task {name!r}: names a stream twice: {streams}")
        if not 0.0 <= sm_sensitivity <= 1.0:
            raise ValueError(f"task {name!r}: sm_sensitivity is {sm_sensitivity}; 0 to 1 is wanted")
        if transfer is not None and not isinstance(transfer.num_bytes, int | np.integer):
            raise TypeError(f"task {name!r}: {transfer} has to have whole bytes")
        if transfer is not None and (transfer.num_bytes < 0 or not transfer.links):
            raise ValueError(f"task {name!r}: {transfer} needs num_bytes >= 0 and at least one link")
        for taken_from, fraction in (sm_taken or {}).items():
            if taken_from in streams:
                raise ValueError(f"task {name!r}: takes SMs of its own stream {taken_from!r}")
            if not 0.0 < fraction < 1.0:
                raise ValueError(
                    f"task {name!r}: takes {fraction} of the SMs of {taken_from!r}; (0, 1) is wanted"
                )
        task = len(self._names)
        if transfer is not None:
            self._transfers[task] = transfer
        if sm_taken:
            self._sm_taken[task] = tuple((self._stream(s), round(f * PPM)) for s, f in sm_taken.items())
        if sm_sensitivity != 1.0:
            self._sm_sensitivity[task] = round(sm_sensitivity * PPM)
        self._names.append(name)
        self._label.append(0)
        self._kind.append(self._kinds.setdefault(kind, len(self._kinds)))
        self._duration.append(duration_ns)
        self._op.append(op)
        self._stream_count.append(len(streams))
        self._stream_idx.extend(self._stream(s) for s in streams)
        before = len(self._pred_idx)
        self._pred_idx.extend(after)
        self._pred_count.append(len(self._pred_idx) - before)
        return task

    def include(
        self,
        block: Graph,
        *,
        label: str = "",
        rename: Mapping[str, str] | None = None,
        after: Sequence[int] = (),
    ) -> int:
        """Add a copy of every task of `block`, in its order, and return the number of the first.

        Task i of the block becomes task `returned + i`. `rename` maps the block's stream and link names to
        those here (others are kept); `label` is put before the names. The block's `entries` come after all of
        `after`, its other tasks therefore too. ValueError if two streams of the block would become one.
        """
        rename = rename or {}
        first = len(self._names)
        labels = [_join(label, inner) for inner in block.labels]
        label_of = np.array([self._labels.setdefault(text, len(self._labels)) for text in labels], np.int64)
        kind_of = np.array([self._kinds.setdefault(k, len(self._kinds)) for k in block.kinds], np.int64)
        stream_of = np.array([self._stream(rename.get(s, s)) for s in block.streams], np.int64)
        if len(np.unique(stream_of)) != len(stream_of):
            raise ValueError(f"rename: two streams of {block.streams} would become one: {dict(rename)}")
        self._names.extend(block.names)
        _extend(self._label, label_of[block.label])
        _extend(self._kind, kind_of[block.kind])
        _extend(self._duration, block.duration_ns)
        _extend(self._op, block.op)
        _extend(self._stream_count, np.diff(block.stream_ptr))
        _extend(self._stream_idx, stream_of[block.stream_idx])
        count, preds = np.diff(block.pred_ptr), block.pred_idx + first
        if len(after):
            where = np.repeat(block.pred_ptr[block.entries], len(after))
            preds = np.insert(preds, where, np.tile(after, len(block.entries)))
            count[block.entries] = len(after)
        _extend(self._pred_count, count)
        _extend(self._pred_idx, preds)
        for name, capacity in block.links.items():
            self.link(rename.get(name, name), capacity)
        for task, transfer in block.transfers.items():
            links = tuple(rename.get(name, name) for name in transfer.links)
            self._transfers[first + task] = Transfer(links, transfer.num_bytes)
        for task, taken in block.sm_taken_ppm.items():
            self._sm_taken[first + task] = tuple((int(stream_of[s]), ppm) for s, ppm in taken)
        for task, ppm in block.sm_sensitivity_ppm.items():
            self._sm_sensitivity[first + task] = ppm
        return first

    def build(self) -> Graph:
        """The validated graph. ValueError: no tasks; or, naming the task, an unknown predecessor or link, a
        cycle."""
        if not self._names:
            raise ValueError("graph: 0 tasks; at least one is wanted")
        graph = Graph(
            names=tuple(self._names),
            labels=tuple(self._labels),
            label=_column(self._label),
            kinds=tuple(self._kinds),
            kind=_column(self._kind),
            streams=tuple(self._streams),
            stream_ptr=_offsets(self._stream_count),
            stream_idx=_column(self._stream_idx),
            pred_ptr=_offsets(self._pred_count),
            pred_idx=_column(self._pred_idx),
            duration_ns=_column(self._duration),
            op=_column(self._op),
            transfers=dict(self._transfers),
            links=dict(self._links),
            sm_taken_ppm=dict(self._sm_taken),
            sm_sensitivity_ppm=dict(self._sm_sensitivity),
        )
        unknown = np.flatnonzero((graph.pred_idx < 0) | (graph.pred_idx >= len(graph)))
        if len(unknown):
            task = int(np.searchsorted(graph.pred_ptr, unknown[0], side="right")) - 1
            raise ValueError(
                f"task {graph.name(task)!r}: comes after task {graph.pred_idx[unknown[0]]}, "
                f"but the graph has tasks 0..{len(graph) - 1}"
            )
        for task, transfer in graph.transfers.items():
            for name in transfer.links:
                if name not in graph.links:
                    raise ValueError(
                        f"task {graph.name(task)!r}: link {name!r} was not declared; known: {[*graph.links]}"
                    )
        _ = graph.order
        return graph

    def _stream(self, name: str) -> int:
        return self._streams.setdefault(name, len(self._streams))


def _row(ptr: Ints, task: int) -> slice:
    return slice(int(ptr[task]), int(ptr[task + 1]))


def _join(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


def _extend(column: array[int], values: Ints) -> None:
    column.frombytes(np.ascontiguousarray(values, np.int64).tobytes())


def _column(values: array[int]) -> Ints:
    return np.array(values, np.int64)


def _offsets(counts: array[int]) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(_column(counts))])


def _check_capacity(name: str, bytes_per_s: int) -> None:
    if not isinstance(bytes_per_s, int | np.integer) or bytes_per_s <= 0:
        raise ValueError(
            f"link {name!r}: capacity is {bytes_per_s!r}; whole bytes per second above 0 are wanted"
        )


def _check_durations(duration_ns: NDArray[np.integer], graph: Graph) -> None:
    if duration_ns.shape != (len(graph),) or not np.issubdtype(duration_ns.dtype, np.integer):
        raise ValueError(
            f"duration_ns: {duration_ns.dtype} {duration_ns.shape}; integers of ({len(graph)},) are wanted"
        )
    if duration_ns.min() < 0:
        task = int(duration_ns.argmin())
        raise ValueError(
            f"task {graph.name(task)!r}: duration_ns is {duration_ns[task]}; at least 0 is wanted"
        )


def _topological_order(graph: Graph, ptr: Ints, idx: Ints) -> Ints:
    """Kahn's algorithm, for graphs whose tasks were not added in a topological order."""
    n = len(graph)
    successors: list[list[int]] = [[] for _ in range(n)]
    for task, pred in zip(rows(ptr).tolist(), idx.tolist(), strict=True):
        successors[pred].append(task)
    waiting = np.diff(ptr).tolist()
    order = [task for task in range(n) if not waiting[task]]
    for task in order:  # grows while it is walked
        for successor in successors[task]:
            waiting[successor] -= 1
            if not waiting[successor]:
                order.append(successor)
    if len(order) == n:
        return np.array(order, np.int64)
    # Every task left waits for another one left: walking backwards must come round.
    task, walk = next(t for t in range(n) if waiting[t]), list[int]()
    while task not in walk:
        walk.append(task)
        task = next(int(p) for p in idx[ptr[task] : ptr[task + 1]] if waiting[p])
    cycle = [*walk[walk.index(task) :], task][::-1]
    raise ValueError(
        "cycle of dependencies and stream order: "
        + " -> ".join(f"{graph.name(t)!r} (task {t})" for t in cycle)
    )

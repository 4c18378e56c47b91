"""What a timeline is made of: its critical path, the slack off it, and how each stream spent its time.

Every figure is exact, in whole nanoseconds, and sums: the path's tasks to the makespan, a stream's busy and
idle time to the makespan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyscale_simulator.graph import Ints, Timeline, rows

__all__ = ["StreamUse", "critical_path", "slack_ns", "stream_use", "time_on_path", "waiting_for"]


@dataclass(frozen=True)
class StreamUse:
    """How one stream spent the makespan: `busy_ns + idle_ns` is the makespan."""

    stream: str
    busy_ns: int
    idle_ns: int
    by_kind: dict[str, int]
    """Busy time of each kind of task, in ns; sums to `busy_ns`."""


def critical_path(timeline: Timeline) -> list[int]:
    """Tasks, first to last, that end to start fill the makespan without a gap.

    It ends at the task that ends last (the lowest number among equals) and follows `released_by` back to one
    that waited for nothing. A path of equal length may exist beside it: see `slack_ns`.
    """
    task = int(timeline.end_ns.argmax())
    path = []
    while task >= 0:
        path.append(task)
        task = int(timeline.released_by[task])
    return path[::-1]


def time_on_path(timeline: Timeline) -> dict[str, int]:
    """Nanoseconds of the critical path by kind, largest first; they sum to the makespan exactly.

    What contention added to a task (its time beyond what it takes alone) is listed apart, as
    "KIND (contention)".
    """
    graph = timeline.graph
    total: dict[str, int] = {}
    for task in critical_path(timeline):
        kind, alone = graph.kinds[graph.kind[task]], int(graph.alone_ns[task])
        total[kind] = total.get(kind, 0) + alone
        stretch = int(timeline.end_ns[task] - timeline.start_ns[task]) - alone
        if stretch:
            contention = f"{kind} (contention)"
            total[contention] = total.get(contention, 0) + stretch
    return {kind: ns for kind, ns in sorted(total.items(), key=lambda item: (-item[1], item[0])) if ns}


def slack_ns(timeline: Timeline) -> Ints:
    """How much later each task could end before the makespan grows, durations being as they ran; int64 [n].

    0 on every critical path; `np.flatnonzero(slack <= 0.01 * makespan)` are the near-critical tasks. Exact
    where nothing contends; elsewhere moving a task may also change how it contends.
    """
    graph = timeline.graph
    latest = [timeline.makespan_ns] * len(graph)
    duration = (timeline.end_ns - timeline.start_ns).tolist()
    ptr, preds = graph.edges[0].tolist(), graph.edges[1].tolist()
    for task in reversed(graph.order.tolist()):
        latest_start = latest[task] - duration[task]
        for pred in preds[ptr[task] : ptr[task + 1]]:
            if latest_start < latest[pred]:
                latest[pred] = latest_start
    return np.array(latest, np.int64) - timeline.end_ns


def stream_use(timeline: Timeline) -> list[StreamUse]:
    """Busy and idle time of every stream, in the order of `graph.streams`."""
    graph = timeline.graph
    num_kinds = len(graph.kinds)
    occupant = rows(graph.stream_ptr)
    ran = (timeline.end_ns - timeline.start_ns)[occupant]
    cell = graph.stream_idx * num_kinds + graph.kind[occupant]
    busy = np.zeros(len(graph.streams) * num_kinds, np.int64)
    np.add.at(busy, cell, ran)
    uses = []
    for name, row in zip(graph.streams, busy.reshape(len(graph.streams), num_kinds), strict=True):
        by_kind = {kind: int(ns) for kind, ns in zip(graph.kinds, row, strict=True) if ns}
        total = sum(by_kind.values())
        uses.append(StreamUse(name, total, timeline.makespan_ns - total, by_kind))
    return uses


def waiting_for(timeline: Timeline, stream: str) -> dict[str, int]:
    """What a stream's idle time waited for: nanoseconds by kind of task, largest first; sums to `idle_ns`.

    Each gap is followed back from the task that closed it, through what released that one, until the whole
    gap is covered: a stage that waits for its neighbour's forward pass and then for the message shows both.
    Time after the stream's last task is followed back from the end of the step. Contention counts as its
    kind. ValueError if the graph has no such stream.
    """
    graph = timeline.graph
    if stream not in graph.streams:
        raise ValueError(f"stream: no {stream!r}; the graph has {list(graph.streams)}")
    occupant = rows(graph.stream_ptr)
    tasks = occupant[graph.stream_idx == graph.streams.index(stream)]
    starts = np.append(timeline.start_ns[tasks], timeline.makespan_ns)
    idle_from = np.append(0, timeline.end_ns[tasks])
    last = int(timeline.end_ns.argmax())
    closers = np.append(timeline.released_by[tasks], last)
    total: dict[str, int] = {}
    for gap in np.flatnonzero(starts > idle_from):
        cause, until = int(closers[gap]), int(starts[gap])
        while until > idle_from[gap]:
            since = max(int(timeline.start_ns[cause]), int(idle_from[gap]))
            kind = graph.kinds[graph.kind[cause]]
            total[kind] = total.get(kind, 0) + until - since
            cause, until = int(timeline.released_by[cause]), since
    return {kind: ns for kind, ns in sorted(total.items(), key=lambda item: (-item[1], item[0])) if ns}

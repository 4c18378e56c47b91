"""A timeline as a trace that Perfetto and chrome://tracing open: the Chrome JSON format.

A stream "stage3/compute" becomes thread "compute" of process "stage3". Streams are exclusive, so spans of a
track never overlap; tasks on no stream do, and get as many tracks of their own as they need. Arrows join a
task to those of other processes that wait for it. One more process shows the critical path end to end.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (the format's description)
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyscale_simulator.critical_path import critical_path
from hyscale_simulator.graph import Timeline, rows

__all__ = ["chrome_trace", "write_trace"]

Event = dict[str, Any]
_UNBOUND = "no stream"
_CRITICAL = "critical path"


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write `chrome_trace` to a .json or .json.gz file. OSError if that cannot be written."""
    text = json.dumps(chrome_trace(timeline), separators=(",", ":"))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)


def chrome_trace(
    timeline: Timeline, counters: Mapping[str, Sequence[tuple[int, float]]] | None = None
) -> dict[str, Any]:
    """The trace as JSON-ready data; times in µs with the nanoseconds as decimals.

    `counters` adds tracks of (time in ns, value), such as memory, in a process of their own.
    """
    graph = timeline.graph
    tracks = _Tracks()
    critical = critical_path(timeline)
    on_path = set(critical)
    where: list[list[tuple[int, int]]] = [[] for _ in range(len(graph))]
    for task, stream in zip(
        rows(graph.stream_ptr).tolist(),
        graph.stream_idx.tolist(),
        strict=True,
    ):
        process, _, thread = graph.streams[stream].rpartition("/")
        where[task].append(tracks.number(process or thread, thread))
    for task, lane in _lanes(timeline, [task for task, places in enumerate(where) if not places]):
        where[task].append(tracks.number(_UNBOUND, f"lane {lane}"))
    path_track = tracks.number(_CRITICAL, "tasks")

    spans = []
    for task, places in enumerate(where):
        for place in places:
            span = _span(timeline, task, graph.name(task), place)
            span["args"]["critical"] = task in on_path
            spans.append(span)
    spans += [_span(timeline, task, graph.kinds[graph.kind[task]], path_track) for task in critical]
    samples = []
    for name, points in (counters or {}).items():
        pid, _ = tracks.number("counters", name)
        samples += [_sample(pid, name, ns, value) for ns, value in points]
    events = tracks.names() + spans + list(_arrows(timeline, where)) + samples
    return {"traceEvents": events, "displayTimeUnit": "ns"}


class _Tracks:
    """Numbers for processes and threads, in order of first use."""

    def __init__(self) -> None:
        self._processes: dict[str, dict[str, int]] = {}
        self._pids: dict[str, int] = {}

    def number(self, process: str, thread: str) -> tuple[int, int]:
        threads = self._processes.setdefault(process, {})
        pid = self._pids.setdefault(process, len(self._pids) + 1)
        return pid, threads.setdefault(thread, len(threads) + 1)

    def names(self) -> list[Event]:
        events: list[Event] = []
        for process, threads in self._processes.items():
            pid = self._pids[process]
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
            for thread, tid in threads.items():
                place = {"pid": pid, "tid": tid}
                events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": thread}})
                events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}})
        return events


def _span(timeline: Timeline, task: int, name: str, place: tuple[int, int]) -> Event:
    graph = timeline.graph
    start, end = int(timeline.start_ns[task]), int(timeline.end_ns[task])
    args: dict[str, Any] = {"task": task, "name": graph.name(task)}
    if (by := int(timeline.released_by[task])) >= 0:
        args["released_by"] = graph.name(by)
    if (stretch := end - start - int(graph.alone_ns[task])) > 0:
        args["contention_ns"] = stretch
    return {
        "ph": "X",
        "name": name,
        "cat": graph.kinds[graph.kind[task]],
        "pid": place[0],
        "tid": place[1],
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": args,
    }


def _sample(pid: int, name: str, ns: int, value: float) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": ns / 1000, "args": {"value": value}}


def _lanes(timeline: Timeline, tasks: list[int]) -> Iterator[tuple[int, int]]:
    """(task, lane) such that tasks of a lane do not overlap: the lowest lane that is free."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for task in sorted(tasks, key=lambda task: (timeline.start_ns[task], timeline.end_ns[task], task)):
        while busy and busy[0][0] <= timeline.start_ns[task]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (int(timeline.end_ns[task]), lane))
        yield task, lane


def _arrows(timeline: Timeline, where: list[list[tuple[int, int]]]) -> Iterator[Event]:
    graph = timeline.graph
    owner = rows(graph.pred_ptr).tolist()
    for number, (task, pred) in enumerate(zip(owner, graph.pred_idx.tolist(), strict=True)):
        source, target = where[pred][0], where[task][0]
        if source[0] == target[0]:
            continue
        # An arrow sticks to the span around its time, so it leaves within the last nanosecond of its task.
        leave = max(int(timeline.start_ns[pred]), int(timeline.end_ns[pred]) - 1)
        common = {"name": "waits for", "cat": "dependency", "id": number}
        yield {"ph": "s", **common, "pid": source[0], "tid": source[1], "ts": leave / 1000}
        arrive = int(timeline.start_ns[task]) / 1000
        yield {"ph": "f", "bp": "e", **common, "pid": target[0], "tid": target[1], "ts": arrive}

"""The same timeline without events: a longest-path pass over the graph's arrays.

Independent of the engine, and the reason that what-if questions are cheap. Most tasks of a stream merely
follow the one before; such *chains* are summed by NumPy, and only their heads (tasks that wait for
something else too) are visited one by one. A graph keeps its chains while its durations change: make
`LongestPath(graph)` once, then `run` it for each `graph.with_durations(...)`.

It answers only where nothing contends; otherwise it says what does, and the engine has to run.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hyscale_simulator.graph import PPM, Graph, Ints, Timeline, rows

__all__ = ["ContentionError", "LongestPath", "longest_path"]


class ContentionError(ValueError):
    """Tasks of the graph slow each other down, so that their durations alone do not give the timeline."""


def longest_path(graph: Graph) -> Timeline:
    """Timeline of a graph in which nothing contends; `ContentionError` naming two tasks that do."""
    return LongestPath(graph).run(graph)


class LongestPath:
    """The chains of one graph structure, ready to be evaluated at many durations."""

    def __init__(self, graph: Graph) -> None:
        n = len(graph)
        self._graph = graph
        self._ptr, self._preds = graph.edges
        self._owner = rows(self._ptr)
        num_streams = np.diff(graph.stream_ptr)

        # Occupancies (a task on a stream), stream by stream in their order, and each one's predecessor there.
        by_stream = np.argsort(graph.stream_idx, kind="stable")
        occupant = rows(graph.stream_ptr)[by_stream]
        opens_stream = np.diff(graph.stream_idx[by_stream], prepend=-1) != 0
        stream_pred = np.full(n, -1)
        stream_pred[occupant] = np.where(opens_stream, -1, np.roll(occupant, 1))

        # A task continues a chain if it is on one stream and waits for nothing but the task before it there.
        others = np.bincount(self._owner, self._preds != stream_pred[self._owner], minlength=n)
        chained = (num_streams == 1) & (stream_pred >= 0) & (others == 0)
        here = chained[occupant]
        # The occupancy before a chain is its head's, which may be a collective's: on several streams.
        segment = np.maximum.accumulate(np.where(here, 0, np.arange(len(here))))
        self._occupant = occupant
        self._chained = occupant[here]
        self._chained_at = np.flatnonzero(here)
        self._segment_at = segment[here]
        self._head = np.arange(n)
        self._head[self._chained] = occupant[self._segment_at]
        self._plan(graph.order[~chained[graph.order]])

    def _plan(self, heads: Ints) -> None:
        """Lay the heads out as nodes of two inputs: time = max(time[a] + weight[edge_a], time[b] + ...).

        A head with more predecessors takes a comb of nodes. Node 0 is time zero; the edge number past the
        last weighs nothing.
        """
        none = len(self._preds)
        begin, end = self._ptr[heads].tolist(), self._ptr[heads + 1].tolist()
        source = self._head[self._preds].tolist()
        node = [0] * len(self._head)
        inputs: list[tuple[int, int, int, int]] = []
        for head, lo, hi in zip(heads.tolist(), begin, end, strict=True):
            a, edge_a = (node[source[lo]], lo) if hi > lo else (0, none)
            for edge in range(lo + 1, hi - 1):
                inputs.append((a, edge_a, node[source[edge]], edge))
                a, edge_a = len(inputs), none
            b, edge_b = (node[source[hi - 1]], hi - 1) if hi > lo + 1 else (0, none)
            inputs.append((a, edge_a, b, edge_b))
            node[head] = len(inputs)
        columns = np.array(inputs, np.int64).reshape(-1, 4)
        self._a, self._b = columns[:, 0].tolist(), columns[:, 2].tolist()
        self._edge_a, self._edge_b = columns[:, 1], columns[:, 3]
        self._node_of_head = np.array(node, np.int64)[self._head]

    def run(self, graph: Graph) -> Timeline:
        """Timeline of a graph of this structure (the one given at first, or `with_durations` of it).

        ValueError for another structure, `ContentionError` where tasks contend.
        """
        if graph.pred_idx is not self._graph.pred_idx or graph.stream_idx is not self._graph.stream_idx:
            raise ValueError("graph: not of the structure that this LongestPath was made for")
        duration = graph.alone_ns
        # Time from the start of a chain's head to the start of each of its tasks.
        before = np.cumsum(duration[self._occupant]) - duration[self._occupant]
        offset = np.zeros(len(graph), np.int64)
        offset[self._chained] = before[self._chained_at] - before[self._segment_at]

        weight = np.append((offset + duration)[self._preds], 0)
        times = [0]
        weights = weight[self._edge_a].tolist(), weight[self._edge_b].tolist()
        for a, weight_a, b, weight_b in zip(self._a, weights[0], self._b, weights[1], strict=True):
            via_a, via_b = times[a] + weight_a, times[b] + weight_b
            times.append(via_a if via_a > via_b else via_b)
        start = np.array(times, np.int64)[self._node_of_head] + offset

        end = start + duration
        timeline = Timeline(graph, start, end, self._released_by(start, end))
        _refuse_contention(timeline)
        return timeline

    def _released_by(self, start: Ints, end: Ints) -> Ints:
        released_by = np.full(len(start), -1)
        waits = np.flatnonzero(np.diff(self._ptr))
        if len(waits):
            releases = end[self._preds] == start[self._owner]
            candidates = np.where(releases, self._preds, len(start))
            released_by[waits] = np.minimum.reduceat(candidates, self._ptr[waits])
        return released_by


def _refuse_contention(timeline: Timeline) -> None:
    """If no two claims on a link or on SMs overlap, the engine would have seen none either: it is exact."""
    graph = timeline.graph
    flows: dict[str, list[int]] = {}
    for task, transfer in graph.transfers.items():
        if transfer.num_bytes:
            for link in transfer.links:
                flows.setdefault(link, []).append(task)
    for link, tasks in flows.items():
        ids = np.array(tasks)
        begins = timeline.start_ns[ids] + graph.duration_ns[ids]
        order = np.argsort(begins, kind="stable")
        ids, begins, ends = ids[order], begins[order], timeline.end_ns[ids[order]]
        clash = np.flatnonzero(begins[1:] < ends[:-1])
        if len(clash):
            raise ContentionError(_clash(graph, f"share link {link!r}", ids[clash[0] : clash[0] + 2]))

    takers: dict[int, list[int]] = {}
    for task, taken in graph.sm_taken_ppm.items():
        for stream, _ in taken:
            takers.setdefault(stream, []).append(task)
    for stream, tasks in takers.items():
        ids = np.array(tasks)
        slowable = np.array(
            [
                task
                for task in _tasks_of(graph, stream)
                if graph.sm_sensitivity_ppm.get(task, PPM) and graph.duration_ns[task]
            ],
            np.int64,
        )
        # A stream's kernels follow one another, so their starts and their ends ascend alike.
        begins, ends = timeline.start_ns[slowable], timeline.start_ns[slowable] + graph.duration_ns[slowable]
        after = np.searchsorted(ends, timeline.start_ns[ids], side="right")
        until = np.searchsorted(begins, timeline.end_ns[ids], side="left")
        clash = np.flatnonzero(until > after)
        if len(clash):
            pair = (ids[clash[0]], slowable[after[clash[0]]])
            raise ContentionError(_clash(graph, f"share the SMs of stream {graph.streams[stream]!r}", pair))


def _tasks_of(graph: Graph, stream: int) -> list[int]:
    tasks: list[int] = rows(graph.stream_ptr)[graph.stream_idx == stream].tolist()
    return tasks


def _clash(graph: Graph, how: str, tasks: Iterable[int]) -> str:
    one, other = (f"{graph.name(int(task))!r} (task {task})" for task in tasks)
    return f"tasks {one} and {other} {how} at the same time; durations alone do not give the timeline"

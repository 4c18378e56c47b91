"""The discrete-event engine: runs a task graph on SimPy, in whole nanoseconds.

One SimPy process per stream walks that stream's tasks in their fixed order. A task starts when all its
streams have reached it and all its predecessors are done: one counter per task, decremented by each
arrival, so a collective over n streams is one shared event and costs n, not n squared.

Two things contend, both as fluids whose rates change only when something starts or ends:

- *Links.* The flows present on a link share it max-min fairly.
- *SMs.* While communication kernels hold a fraction f of a stream's SMs (their sum), the kernel running there
  advances at the rate 1 - sensitivity · f.

All of it is integer arithmetic (SM shares in parts per million, link shares in whole bytes per second, ends
rounded up to the next nanosecond), so equal graphs give equal timelines on every machine, and a graph in
which nothing contends gives what `longest_path` gives, to the nanosecond.

Where nothing contends, every end is monotone in every duration, because the order of a stream never depends
on time. Where something does, it is not: a task that gets faster may bring two flows to overlap that did
not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np
import simpy

from hyscale_simulator.graph import PPM, Graph, Timeline, rows

__all__ = ["simulate"]

_NS_PER_S = 1_000_000_000


def simulate(graph: Graph) -> Timeline:
    """Run the graph and return when each task ran.

    ValueError naming the tasks if communication kernels take all the SMs of a stream at once.
    """
    return _Run(graph).timeline()


def _now_ns(env: simpy.Environment) -> int:
    return int(env.now)  # every delay here is a whole number


class _Completion(simpy.Event):
    """The end of a task: an event that others may wait for before its delay is known."""

    def __init__(self, env: simpy.Environment, task: int, finish: Callable[[simpy.Event], None]) -> None:
        super().__init__(env)
        self.task = task
        self.callbacks.append(finish)

    def complete_after(self, delay_ns: int) -> None:
        self._ok = True
        self._value = None
        self.env.schedule(self, delay=delay_ns)


class _Job:
    """Work under way: `remaining` units at `rate` units per nanosecond; calls `then` when nothing remains."""

    def __init__(self, env: simpy.Environment, task: int, units: int, then: Callable[[int], None]) -> None:
        self.env, self.task, self.remaining, self.then = env, task, units, then
        self.rate, self.since_ns = 0, _now_ns(env)
        self.version = 0  # an end foreseen before the last change of rate is void

    def set_rate(self, rate: int) -> None:
        if rate == self.rate:
            return
        now = _now_ns(self.env)
        self.remaining -= self.rate * (now - self.since_ns)
        self.rate, self.since_ns = rate, now
        self.version += 1
        end = self.env.timeout(max(0, -(-self.remaining // rate)), value=self.version)
        end.callbacks.append(self._ended)

    def _ended(self, event: simpy.Event) -> None:
        if event.value == self.version:
            self.then(self.task)


class _Run:
    def __init__(self, graph: Graph) -> None:
        n = len(graph)
        self.graph = graph
        self.env = simpy.Environment(initial_time=0)
        self.duration: list[int] = graph.duration_ns.tolist()
        self.successors: list[list[int]] = [[] for _ in range(n)]
        for task, pred in zip(rows(graph.pred_ptr).tolist(), graph.pred_idx.tolist(), strict=True):
            self.successors[pred].append(task)
        self.programs: list[list[int]] = [[] for _ in graph.streams]
        for task, stream in zip(rows(graph.stream_ptr).tolist(), graph.stream_idx.tolist(), strict=True):
            self.programs[stream].append(task)
        self.missing: list[int] = (np.diff(graph.pred_ptr) + np.diff(graph.stream_ptr)).tolist()
        self.done = [_Completion(self.env, task, self._finish) for task in range(n)]
        self.start, self.end = [-1] * n, [-1] * n
        self.released_by, self.released_at = [-1] * n, [-1] * n

        self.flows: dict[int, _Job] = {}  # by task, in order of arrival
        self.takers: dict[int, list[int]] = {}  # by stream that loses SMs: tasks that hold some now
        for taken in graph.sm_taken_ppm.values():
            self.takers.update((stream, []) for stream, _ in taken)
        self.slowable: dict[int, list[int]] = {}  # by task: those of its streams that lose SMs at times
        for stream in self.takers:
            for task in self.programs[stream]:
                self.slowable.setdefault(task, []).append(stream)
        self.kernels: dict[int, _Job] = {}  # by stream that loses SMs: what runs on it now

    def timeline(self) -> Timeline:
        for program in self.programs:
            self.env.process(self._stream(program))
        for task, missing in enumerate(self.missing):
            if not missing:  # waits for neither stream nor predecessor
                self._begin(task)
        self.env.run()
        assert -1 not in self.end, "an acyclic graph runs to its end"
        columns = (np.array(column, np.int64) for column in (self.start, self.end, self.released_by))
        return Timeline(self.graph, *columns)

    def _stream(self, program: list[int]) -> Generator[simpy.Event, None, None]:
        previous = -1
        for task in program:
            self._arrive(task, previous)
            yield self.done[task]
            previous = task

    def _arrive(self, task: int, by: int) -> None:
        """One thing that `task` waits for is there: the end of task `by`, or a stream not yet used (-1)."""
        if by >= 0:
            now = _now_ns(self.env)
            if now > self.released_at[task] or by < self.released_by[task]:
                self.released_at[task], self.released_by[task] = now, by
        self.missing[task] -= 1
        if not self.missing[task]:
            self._begin(task)

    def _begin(self, task: int) -> None:
        self.start[task] = _now_ns(self.env)
        if task in self.graph.sm_taken_ppm:
            self._hold_sms(task)
        if task in self.slowable:
            kernel = _Job(self.env, task, self.duration[task] * PPM, self._send)
            for stream in self.slowable[task]:
                self.kernels[stream] = kernel
            kernel.set_rate(self._kernel_rate(task))
        elif task in self.graph.transfers:
            self.env.timeout(self.duration[task]).callbacks.append(lambda _: self._send(task))
        else:
            self.done[task].complete_after(self.duration[task])

    def _send(self, task: int) -> None:
        """The duration of `task` is over; its transfer, if it has one, begins."""
        for stream in self.slowable.get(task, ()):
            del self.kernels[stream]
        transfer = self.graph.transfers.get(task)
        if transfer is None or transfer.num_bytes == 0:
            self.done[task].complete_after(0)
        else:
            self.flows[task] = _Job(self.env, task, transfer.num_bytes * _NS_PER_S, self._received)
            self._share_links()

    def _received(self, task: int) -> None:
        del self.flows[task]
        self._share_links()
        self.done[task].complete_after(0)

    def _finish(self, event: simpy.Event) -> None:
        assert isinstance(event, _Completion)
        task = event.task
        self.end[task] = _now_ns(self.env)
        if task in self.graph.sm_taken_ppm:
            self._release_sms(task)
        for successor in self.successors[task]:
            self._arrive(successor, task)

    def _share_links(self) -> None:
        """Max-min fair rates by progressive filling: the tightest link's flows get equal shares, and so
        on."""
        waiting: dict[str, list[int]] = {}
        for task in self.flows:
            for link in self.graph.transfers[task].links:
                waiting.setdefault(link, []).append(task)
        left = {link: self.graph.links[link] for link in waiting}
        settled: dict[int, int] = {}
        while waiting:
            tightest = min(waiting, key=lambda link: left[link] // len(waiting[link]))
            share = max(1, left[tightest] // len(waiting[tightest]))
            for task in waiting.pop(tightest):
                settled[task] = share
                for link in self.graph.transfers[task].links:
                    if link in waiting:
                        left[link] -= share
                        waiting[link].remove(task)
                        if not waiting[link]:
                            del waiting[link]
        for task, rate in settled.items():
            self.flows[task].set_rate(rate)

    def _hold_sms(self, task: int) -> None:
        for stream, _ in self.graph.sm_taken_ppm[task]:
            self.takers[stream].append(task)
            self._reset_kernel(stream)

    def _release_sms(self, task: int) -> None:
        for stream, _ in self.graph.sm_taken_ppm[task]:
            self.takers[stream].remove(task)
            self._reset_kernel(stream)

    def _reset_kernel(self, stream: int) -> None:
        if stream in self.kernels:
            self.kernels[stream].set_rate(self._kernel_rate(self.kernels[stream].task))

    def _kernel_rate(self, task: int) -> int:
        """Parts per million of full speed; of several streams (a collective), that of the slowest."""
        sensitivity = self.graph.sm_sensitivity_ppm.get(task, PPM)
        slowest = PPM
        for stream in self.slowable[task]:
            taken = sum(dict(self.graph.sm_taken_ppm[t])[stream] for t in self.takers[stream])
            if taken >= PPM:
                names = [self.graph.name(t) for t in self.takers[stream]]
                raise ValueError(f"stream {self.graph.streams[stream]!r}: {names} together take all its SMs")
            slowest = min(slowest, PPM - sensitivity * taken // PPM)
        return slowest

"""Collectives: a process a GPU, all timing the same points in step.

Ranks never start a collective at the same moment, and those that come early wait in it. The last one to come
waits for nobody, so a sample is the shortest of the ranks' times.
"""

import os
import queue as queues
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from hyscale_ref.profile import ProfilePoint

from .ceilings import Ceilings
from .machine import CudaMachine, Machine, Measurement
from .measure import failed, measure
from .op import Entry, Work
from .ops import ALL
from .session import Sink

SAMPLES, WARM_UPS = 20, 5
PATIENCE_S = 120.0  # without a point, after which the ranks are taken to wait for each other

Wanted = Sequence[tuple[str, dict[str, int]]]


class Sampler(Machine, Protocol):
    """A machine that times single calls."""

    def sample(self, work: Work) -> list[float]:
        """Milliseconds of one call."""


class Ranks:
    """This rank's GPU, in step with the others: every sample is that of the rank that waited least."""

    def __init__(self, machine: Sampler, versions: Mapping[str, str]) -> None:
        self.device, self._machine = machine.device, machine
        every = tuple(sorted({**dict(machine.conditions.versions), **versions}.items()))
        self.conditions = replace(machine.conditions, versions=every)

    def time(self, works: Sequence[Work], seconds: float) -> Measurement:
        """A fixed number of samples, because the ranks must agree on it; ``seconds`` is not used."""
        del seconds
        for _ in range(WARM_UPS):
            works[0].call()
        times: list[float] = []
        for sample in range(SAMPLES):
            dist.barrier()
            times += self._machine.sample(works[sample % len(works)])
        shortest = torch.tensor(times, device=self.device)
        dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
        return Measurement(shortest.tolist())

    def clock_mhz(self) -> float | None:
        return self._machine.clock_mhz()

    def alive(self) -> bool:
        return self._machine.alive()

    def clear(self, above_bytes: float = 0.0) -> None:
        self._machine.clear(above_bytes)


def _rank(rank: int, size: int, store: str, wanted: Wanted, commit: str, points: Any) -> None:
    """One process: measures ``wanted`` in order; rank 0 hands the points over, then None."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=device
    )
    version = ".".join(map(str, torch.cuda.nccl.version()))
    machine = Ranks(CudaMachine(commit), {"nccl": version, **nccl_settings()})
    measure_in_step(wanted, machine, points.put if rank == 0 else lambda point: None)
    dist.destroy_process_group()


def measure_in_step(wanted: Wanted, machine: Machine, put: Callable[[ProfilePoint | None], object]) -> None:
    """This rank's share: each point in order, then None. A failure ends it, for the ranks are out of step."""
    ops = {op.label: op for op in ALL}
    for label, shape in wanted:
        point = measure(Entry(ops[label], shape), machine, Ceilings())
        put(point)
        if point.status == "failed":
            break
    put(None)


@dataclass
class Group:
    """The processes of one number of ranks, and the points they have still to make."""

    processes: list[Any]
    points: Any

    def next(self, patience_s: float = PATIENCE_S) -> ProfilePoint | None:
        """Rank 0's next point, None when it has no more. TimeoutError when the ranks stopped."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            try:
                point: ProfilePoint | None = self.points.get(timeout=2)
                return point
            except queues.Empty:
                if any(process.exitcode not in (None, 0) for process in self.processes):
                    break
        raise TimeoutError("the ranks stopped: one failed or waits for another")

    def stop(self, patience_s: float = 10.0) -> None:
        """End the processes: those that have not ended by themselves after ``patience_s`` are killed."""
        until = time.monotonic() + patience_s
        for process in self.processes:
            process.join(timeout=max(until - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()


def start(size: int, store: str, wanted: Wanted, commit: str) -> Group:
    """Processes of ``size`` ranks, each on its own GPU."""
    context = multiprocessing.get_context("spawn")
    points = context.Queue()
    arguments = (size, store, wanted, commit, points)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    return Group(processes, points)


def measure_collectives(
    entries: Sequence[Entry],
    machine: Machine,
    sink: Sink,
    *,
    time_left: Callable[[], float] = lambda: float("inf"),
    starter: Callable[[int, str, Wanted, str], Any] = start,
) -> list[ProfilePoint]:
    """Measure collectives over groups of this machine's GPUs, until no time is left.

    Where a group of ranks stops, the point it was at is recorded as failed and the next group goes on.
    """
    made: list[ProfilePoint] = []
    sizes = sorted({entry.shape["ranks"] for entry in entries})
    for size in [size for size in sizes if size <= machine.conditions.gpus]:
        ours = [entry for entry in entries if entry.shape["ranks"] == size]
        if time_left() <= 0:
            break
        with tempfile.TemporaryDirectory() as folder:
            wanted = [(entry.op.label, dict(entry.shape)) for entry in ours]
            group = starter(size, str(Path(folder) / "store"), wanted, machine.conditions.commit)
            patience_s = 0.0  # however the loop ends, no process outlives it
            try:
                for entry in ours:
                    if time_left() <= 0:
                        break
                    try:
                        point = group.next()
                    except TimeoutError as error:
                        point = failed(entry, machine, str(error))
                    if point is None:
                        break
                    sink.add(point)
                    made.append(point)
                    if point.status == "failed":
                        break
                patience_s = 10.0 if time_left() > 0 else 0.0
            finally:
                group.stop(patience_s)
    return made


def nccl_settings() -> dict[str, str]:
    """NCCL's environment variables: the time of a collective depends on them."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}

"""Run tasks in a few worker processes: results stream back, a worker that dies loses only its task.

``concurrent.futures`` gives up the whole pool when a worker dies, and ``multiprocessing.Pool`` waits for
ever; kernels under test do crash.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True)
class Died:
    """The process that ran a task ended without an answer."""

    exit_code: int | None

    def __str__(self) -> str:
        code = self.exit_code
        if code is not None and code < 0:
            return f"the process died by {signal.Signals(-code).name}"
        return f"the process ended with exit code {code}"


class _Worker(Generic[A, R]):
    def __init__(self, function: Callable[[A], R]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()
        self.task: A | None = None


def _serve(pipe: Connection, function: Callable[[A], R]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interruption means
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(function(task))


def run_tasks(function: Callable[[A], R], tasks: Sequence[A], jobs: int) -> Iterator[tuple[A, R | Died]]:
    """Yield (task, function(task)) as they finish, from ``jobs`` processes; ``Died`` for a lost one.

    With one job everything runs in this process. ``function`` must not raise; it, the tasks and the results
    must pickle. Closing the iterator early ends the processes.
    """
    if jobs <= 1:
        yield from ((task, function(task)) for task in tasks)
        return
    waiting = list(reversed(tasks))
    workers: list[_Worker[A, R]] = []
    try:
        while len(workers) < min(jobs, len(tasks)):
            workers.append(_start(function, waiting))
        while workers:
            for pipe in wait([worker.pipe for worker in workers]):
                worker = next(w for w in workers if w.pipe is pipe)
                task = worker.task
                assert task is not None
                result: R | Died
                try:
                    result = worker.pipe.recv()
                except EOFError:
                    worker.process.join()
                    result = Died(worker.process.exitcode)
                    workers.remove(worker)
                    if waiting:
                        workers.append(_start(function, waiting))
                else:
                    if waiting:
                        worker.task = waiting.pop()
                        worker.pipe.send(worker.task)
                    else:
                        worker.pipe.close()
                        workers.remove(worker)
                yield task, result
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.join()


def _start(function: Callable[[A], R], waiting: list[A]) -> _Worker[A, R]:
    worker = _Worker[A, R](function)
    worker.task = waiting.pop()
    worker.pipe.send(worker.task)
    return worker

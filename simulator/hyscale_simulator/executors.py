"""Where many evaluations run: in this process, on this machine's cores, or on a Dask cluster.

Tasks are pure, so neither the place nor the order changes a result.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from typing import Any, TypeVar

from hyscale_simulator.descriptions import DescriptionError

__all__ = ["Executor", "ExecutorError", "executor"]

T = TypeVar("T")
R = TypeVar("R")

CONNECT_S = 10


class ExecutorError(DescriptionError):
    """An executor that cannot be reached, or is not installed."""


class Executor:
    """Runs a function over items and yields (index, result) as they finish, in any order.

    Closed, or left through an exception, it cancels what has not begun.
    """

    workers = 1

    def run(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R]]:
        """``function`` of each item, in this process."""
        for index, item in enumerate(items):
            yield index, function(item)

    def close(self) -> None:
        """Release what the executor holds."""


class _Local(Executor):
    """Processes of this machine."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        # Spawned, since the caller may have threads; deaf to Ctrl-C, which the caller handles.
        self._pool = ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),
        )  # fmt: skip

    def run(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R]]:
        futures = {self._pool.submit(function, item): index for index, item in enumerate(items)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Dask(Executor):
    """Workers of a Dask scheduler; they need this package installed."""

    def __init__(self, address: str) -> None:
        try:
            self._distributed: Any = import_module("distributed")
        except ImportError:
            raise ExecutorError(
                "--executor dask: the package 'distributed' is not installed: pip install 'hyscale[dask]'"
            ) from None
        try:
            self._client = self._distributed.Client(address, timeout=CONNECT_S)
        except (OSError, ValueError, TypeError) as error:
            raise ExecutorError(f"--executor dask:{address}: unreachable: {error}") from None
        self.workers = max(len(self._client.scheduler_info()["workers"]), 1)

    def run(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R]]:
        futures = self._client.map(function, list(items), pure=False)
        index = {future.key: at for at, future in enumerate(futures)}
        try:
            for future, result in self._distributed.as_completed(futures, with_results=True):
                yield index[future.key], result
        finally:
            with suppress(OSError):
                self._client.cancel(futures)

    def close(self) -> None:
        self._client.close()


def executor(name: str, items: int) -> Executor:
    """``local`` (as many processes as there are cores, none for a handful of items), ``local:N``, or
    ``dask:ADDRESS``; :class:`ExecutorError` for another name or an address that does not answer."""
    kind, _, where = name.partition(":")
    if kind == "local" and (not where or where.isdecimal()):
        workers = int(where) if where else len(os.sched_getaffinity(0))
        if workers < 1:
            raise ExecutorError(f"--executor {name}: at least one process is needed")
        return Executor() if workers == 1 or items < 8 else _Local(workers)
    if kind == "dask" and where:
        return _Dask(where)
    raise ExecutorError(f"--executor {name!r}: allowed are local, local:PROCESSES and dask:ADDRESS")

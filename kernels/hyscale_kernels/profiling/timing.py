"""Timing on a GPU that is shared, boosts and caches: interleaved, L2 flushed, medians with their spread.

Contenders take turns inside one process, in an order that rotates from round to round, so that drift of
clocks and temperature meets them all. Before every timed call the L2 cache is overwritten. Times are
CUDA events around one call; a short spin before it keeps the device busy while the host enqueues, so
that launch gaps of the host do not count.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

FLUSH_BYTES = 256 * 2**20
SPIN_CYCLES = 10_000_000  # some 5 ms: longer than a slow host needs to enqueue three dozen kernels


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds over ``samples`` calls."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> "Timing":
        p20, median, p80 = np.percentile(milliseconds, [20, 50, 80])
        return cls(float(median), float(p20), float(p80), len(milliseconds))


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = 15, budget_s: float = 20.0, warmups: int = 2
) -> dict[str, Timing]:
    """Time every call ``rounds`` times, taking turns; fewer rounds (at least 3) once ``budget_s`` is spent.

    The calls run on the current device and stream. ValueError for no calls or fewer than 3 rounds.
    """
    if not calls:
        raise ValueError("no calls to time")
    if rounds < 3:
        raise ValueError(f"rounds is {rounds}; at least 3 are needed for a median with a spread")
    for call in calls.values():
        for _ in range(warmups):
            call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    spent = 0.0
    for turn in range(rounds):
        if turn >= 3 and spent > budget_s * 1e3:
            break
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            torch.cuda._sleep(SPIN_CYCLES)
            begin.record()
            calls[name]()
            end.record()
            end.synchronize()
            elapsed = begin.elapsed_time(end)
            times[name].append(elapsed)
            spent += elapsed
    return {name: Timing.of(values) for name, values in times.items()}


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """Peak memory of one call above what is allocated when it returns (its outputs and all before it)."""
    result = call()
    del result
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()  # kept until the memory it holds has been counted
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return extra

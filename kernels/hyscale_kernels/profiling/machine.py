"""The machine that is measured: its GPU, the conditions it runs under, and the clock that times a call.

:class:`Machine` is what the rest of the profiler needs of it; :class:`CudaMachine` is a real one. Settings of
the card are read, never changed.
"""

import itertools
import math
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import torch

from ..provenance import environment
from .op import Work
from .timing import FLUSH_BYTES

MEASURED_SOURCES = ("attention", "baselines", "hytopk", "indexer", "layer", "profiling", "replay")
SPIN_CYCLES = 3_000_000  # some 1.6 ms: longer than the host needs to enqueue any op measured here
LEAST_SAMPLES, MOST_SAMPLES = 15, 60
STEADY = 0.004  # standard error of the median, over the median, at which sampling stops
ASK_S = 2.0  # between two calls of nvidia-smi
SETTLE_S = 0.02  # of running before timing, so that clocks are up
SUSTAINED_S = 1.0  # of calls back to back: the first half brings the card to its power limit
STRETCHES = 10  # that the second half is timed in


@dataclass(frozen=True)
class Measurement:
    """Milliseconds of every timed call, and the peak memory of one above inputs and outputs."""

    milliseconds: list[float]
    peak_extra_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What every point of a run shares: the board, its limits and the software."""

    name: str
    serial: str = ""
    gpus: int = 1
    power_limit_w: float | None = None
    versions: tuple[tuple[str, str], ...] = ()
    commit: str = ""


class Machine(Protocol):
    """Somewhere to run calls and time them."""

    device: torch.device
    conditions: Conditions

    def time(self, works: Sequence[Work], seconds: float) -> Measurement:
        """Time calls of ``works`` in turn, for about ``seconds``; sustained ones back to back."""

    def clock_mhz(self) -> float | None:
        """The multiprocessors' clock now."""

    def alive(self) -> bool:
        """Whether the device still answers."""

    def clear(self, above_bytes: float = 0.0) -> None:
        """Give cached memory back to the device, if more than ``above_bytes`` are held."""


class CudaMachine:
    """One GPU of this process. RuntimeError where PyTorch sees none."""

    def __init__(self, commit: str = "") -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("needs a CUDA device, and PyTorch sees none on this machine")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.conditions = conditions(commit)
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        self._asked = float("-inf")

    def time(self, works: Sequence[Work], seconds: float) -> Measurement:
        """Medians over turns through ``works``: the L2 cache is flushed before each call, and a spin lets the
        host enqueue it before the device gets there. Stops once the median is steady. Sustained calls are
        timed in stretches instead (ValueError if they need a reset)."""
        peak = self._peak(works[0])
        if works[0].sustained:
            return Measurement(self._sustained(works), peak)
        begun = time.perf_counter()
        while True:
            for work in works:
                self._once(work)
            torch.cuda.synchronize(self.device)
            if time.perf_counter() - begun >= SETTLE_S:
                break
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < MOST_SAMPLES:
            times += self._turns(works)
            if len(times) >= LEAST_SAMPLES and steady(times):
                break
            if time.perf_counter() - begun >= seconds and len(times) >= 3:
                break
        return Measurement(times, peak)

    def _sustained(self, works: Sequence[Work]) -> list[float]:
        """Milliseconds of the mean call of each of STRETCHES stretches: the second half of SUSTAINED_S of
        calls back to back, without a flush or a spin."""
        if any(work.reset is not None for work in works):
            raise ValueError("calls that are timed back to back cannot be reset")
        once = statistics.median(self._turns(works))
        calls = max(1, round(SUSTAINED_S * 1e3 / (2 * STRETCHES * once)))
        turns = itertools.cycle(works)
        ends = []
        for stretch in range(2 * STRETCHES):
            if stretch >= STRETCHES:
                ends.append(self._now())
            for _ in range(calls):
                next(turns).call()
        ends.append(self._now())
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / calls for begin, end in itertools.pairwise(ends)]

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _peak(self, work: Work) -> int:
        """Call it twice: the first compiles and allocates workspaces, of the second we want the peak memory
        above inputs and outputs."""
        self._once(work)
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = work.call()  # kept until the memory it holds has been counted
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        del result
        return max(peak, 0)

    def _once(self, work: Work) -> None:
        if work.reset is not None:
            work.reset()
        work.call()

    def _turns(self, works: Sequence[Work]) -> list[float]:
        """Milliseconds of a call of each, enqueued together."""
        events = [self._timed(work) for work in works]
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in events]

    def sample(self, work: Work) -> list[float]:
        """Milliseconds of one call."""
        return self._turns([work])

    def _timed(self, work: Work) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if work.reset is not None:
            work.reset()
        self._flush.zero_()
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        work.call()
        end.record()
        return begin, end

    def clock_mhz(self) -> float | None:
        """NVML's, where its package is installed; else nvidia-smi's, which is slow and asked now and then."""
        try:
            return float(torch.cuda.clock_rate(self.device)) or None
        except Exception:  # no package, no driver, or an error of NVML's own type: ask the other way
            if time.monotonic() - self._asked < ASK_S:
                return None
            self._asked = time.monotonic()
            return _number(_query("clocks.sm"))

    def alive(self) -> bool:
        try:
            torch.cuda.synchronize(self.device)
            return int(torch.ones(8, device=self.device).sum().item()) == 8
        except RuntimeError:
            return False

    def clear(self, above_bytes: float = 0.0) -> None:
        if torch.cuda.memory_reserved(self.device) > above_bytes:
            torch.cuda.empty_cache()


def steady(milliseconds: Sequence[float]) -> bool:
    """Whether the standard error of the median, by the middle 60 %, is within :data:`STEADY` of it."""
    ordered = sorted(milliseconds)
    n = len(ordered)
    low, middle, high = ordered[n // 5], ordered[n // 2], ordered[-(n // 5) - 1]
    # The middle 60 % of a normal distribution spans 1.68 sigma; its median's error is 1.25 sigma / sqrt(n).
    return 1.25 * (high - low) / 1.68 / math.sqrt(n) <= STEADY * middle


def conditions(commit: str = "") -> Conditions:
    """Of this process's GPU."""
    found = environment(*MEASURED_SOURCES)
    versions = {name: str(found[name]) for name in ("python", "torch", "triton", "cuda")}
    versions["sources"] = found["source_hash"]
    for name, value in (("driver", _query("driver_version")), ("hyscale", _installed())):
        if value:
            versions[name] = value
    return Conditions(
        name=found["gpu"],
        serial=_query("serial") or found["serial"],
        gpus=torch.cuda.device_count(),
        power_limit_w=_number(_query("power.limit")),
        versions=tuple(sorted(versions.items())),
        commit=commit or git_commit(),
    )


def _installed() -> str:
    try:
        return version("hyscale")
    except PackageNotFoundError:
        return ""


def _query(field: str) -> str:
    """One field of nvidia-smi for this process's GPU; "" where it says nothing."""
    uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    which = [f"--id=GPU-{uuid}"] if uuid else []
    command = ["nvidia-smi", *which, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    said = done.stdout.strip().splitlines()
    return "" if done.returncode or not said or said[0].startswith("[") else said[0].strip()


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value > 0 else None


def git_commit() -> str:
    """The commit of the checkout this package runs from, "+" where it was changed; "" outside one."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return ""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return f"{head}+" if head and git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.TimeoutExpired):
        return ""

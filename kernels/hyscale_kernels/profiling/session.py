"""A run: ceilings first, then points in order of value, each written before the next begins.

It stops in time, goes on after a failure, and loses nothing when the device is lost: what is on disk is a
profile at every moment, and a later run takes it up.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hyscale_ref.profile import ProfilePoint

from .ceilings import NOMINAL, Ceilings
from .ceilings import entries as ceiling_entries
from .machine import Machine
from .measure import POINT_S, estimate_s, measure, seconds_of
from .op import Cost, Entry

GIVE_UP = 3  # failures of an op in a row, out of memory not counted
FASTEST, SLOWEST = 0.5, 4.0  # what points may take over what was expected, to be learnt from
CLEAR_BYTES = 60e9  # held by the allocator, above which a point starts afresh
OUT_OF_MEMORY = "OutOfMemoryError"

Clock = Callable[[], float]


class DeviceLostError(RuntimeError):
    """The device stopped answering; everything measured before is on disk."""


class Sink(Protocol):
    def add(self, point: ProfilePoint) -> None:
        """Keep the point, at once and for good."""


@dataclass
class Progress:
    """Where a run stands. ``seconds`` are since it began; budget_s None: no limit."""

    total: int
    budget_s: float | None
    seconds: float = 0.0
    measured: int = 0
    failed: int = 0
    left: int = 0
    current: str = ""


@dataclass
class Summary:
    """What a run did: points by status, those left for the next run, ops left out and why."""

    points: list[ProfilePoint] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> list[ProfilePoint]:
        return [point for point in self.points if point.status == "failed"]


class Session:
    """One run on one machine.

    entries: what to measure, most valuable first.  sink: where points go.  known: points of earlier runs;
    what they measured is not measured again, and what failed then comes last.  budget_s: seconds after which
    nothing new is begun; a point that would not fit is passed over for those that do.
    """

    def __init__(
        self,
        machine: Machine,
        entries: Sequence[Entry],
        sink: Sink,
        *,
        known: Iterable[ProfilePoint] = (),
        budget_s: float | None = None,
        point_s: float = POINT_S,
        tiny: bool = False,
        report: Callable[[Progress], None] = lambda progress: None,
        clock: Clock = time.monotonic,
        began: float | None = None,
    ) -> None:
        self.machine, self.sink, self.report, self.clock = machine, sink, report, clock
        self.budget_s, self.point_s, self.tiny = budget_s, point_s, tiny
        self._began = clock() if began is None else began
        self._compiled: set[tuple[str, ...]] = set()
        self._in_a_row: Counter[str] = Counter()
        self._slowness = 1.0  # of this machine, by what points took over what was expected
        self.ceilings = Ceilings()
        self.summary = Summary()
        done = {_key(point) for point in known if point.status == "ok"}
        before = {_key(point) for point in known} - done
        fresh = [entry for entry in entries if entry.key not in done]
        self.entries = sorted(fresh, key=lambda entry: entry.key in before)  # stable: value within each
        self.progress = Progress(len(self.entries), budget_s)

    def run(self) -> Summary:
        """Measure what fits. DeviceLostError when the device stops answering."""
        self._ceilings()
        for entry in self.entries:
            missing = entry.op.missing()
            if missing is not None:
                self.summary.left_out[entry.op.label] = f"needs {missing!r}, which is not installed"
                self.progress.total -= 1
            elif self._in_a_row[entry.op.label] >= GIVE_UP or not self._fits(entry):
                self.summary.left.append(entry)
            else:
                self._one(entry)
        self._tell("")
        self.summary.seconds = self.seconds
        return self.summary

    @property
    def seconds(self) -> float:
        return self.clock() - self._began

    def _ceilings(self) -> None:
        """Measure them. What comes first is thrown away: an idle GPU's clocks are still rising."""
        measure(next(iter(ceiling_entries(self.tiny))), self.machine, self.ceilings, self.point_s)
        found: dict[tuple[str, str], tuple[Cost, float]] = {}
        for entry in ceiling_entries(self.tiny):
            point = self._one(entry, counted=False)
            if point.status == "ok":
                found[entry.op.implementation, entry.op.dtype] = (
                    entry.op.cost(entry.shape), seconds_of(point)
                )  # fmt: skip
        self.ceilings = Ceilings.of(found)

    def _expected_s(self, entry: Entry) -> float:
        compiling = 0.0 if entry.compiled in self._compiled else entry.op.compile_s
        return estimate_s(entry, NOMINAL, self.point_s) * self._slowness + compiling

    def _fits(self, entry: Entry) -> bool:
        return self.budget_s is None or self.seconds + self._expected_s(entry) <= self.budget_s

    def _one(self, entry: Entry, *, counted: bool = True) -> ProfilePoint:
        self._tell(entry.label)
        expected, begun = self._expected_s(entry), self.clock()
        self.machine.clear(CLEAR_BYTES)
        point = measure(entry, self.machine, self.ceilings, self.point_s)
        if OUT_OF_MEMORY in point.error:  # perhaps for what earlier points left behind
            self.machine.clear()
            point = measure(entry, self.machine, self.ceilings, self.point_s)
        self.sink.add(point)
        self.summary.points.append(point)
        if point.status == "ok":
            if entry.compiled in self._compiled:
                took = (self.clock() - begun) / max(expected, 1e-3) * self._slowness
                # One point that took long (another shape was compiled, say) is no slow machine.
                self._slowness = max(0.9 * self._slowness + 0.1 * min(took, SLOWEST), FASTEST)
            self._compiled.add(entry.compiled)
            self._in_a_row[entry.op.label] = 0
            self.progress.measured += counted
        else:
            self.progress.failed += 1
            if not self.machine.alive():
                raise DeviceLostError(f"{entry.label}: {point.error}")
            if OUT_OF_MEMORY in point.error:
                self.machine.clear()
            else:
                self._in_a_row[entry.op.label] += 1
        return point

    def _tell(self, current: str) -> None:
        self.progress.seconds, self.progress.current = self.seconds, current
        self.progress.left = len(self.summary.left)
        self.report(self.progress)


def _key(point: ProfilePoint) -> object:
    return (point.op, point.implementation, point.dtype, point.regime, tuple(point.shape))


def planned_s(entries: Sequence[Entry], point_s: float = POINT_S) -> float:
    """Seconds that a run of these points is expected to take on an H200, compilation and ceilings counted."""
    points = [entry for entry in [*ceiling_entries(), *entries] if entry.op.missing() is None]
    compiling = sum({entry.compiled: entry.op.compile_s for entry in points}.values())
    return compiling + sum(estimate_s(entry, NOMINAL, point_s) for entry in points)

"""One point: build the inputs, time the calls, and write down what was found, or why nothing was."""

import gc
import math
from datetime import UTC, datetime
from typing import Any

import numpy as np

from hyscale_ref.profile import ProfilePoint, as_shape

from .ceilings import NOMINAL, Ceilings
from .machine import SETTLE_S, Machine
from .op import Draw, Entry

SETS = 3  # input sets a point rotates through
LARGE_BYTES, HUGE_BYTES = 1.5e9, 12e9  # of one set: two above the first, one above the second
POINT_S = 0.4  # of timing
PAUSE_S, USUAL_SAMPLES = 7e-4, 20  # before each timed call, and how many it takes: for planning
IMPOSSIBLE = 1.5  # times its floor's rate: such a call did not do its work


def measure(entry: Entry, machine: Machine, ceilings: Ceilings, seconds: float = POINT_S) -> ProfilePoint:
    """The measured point, or a failed one that says what was raised."""
    try:
        return _measure(entry, machine, ceilings, seconds)
    except Exception as error:  # whatever a kernel does wrong is a result of the measurement
        point = failed(entry, machine, f"{type(error).__name__}: {first_line(error)}")
        error.__traceback__ = None  # its frames hold the inputs
        gc.collect()
        return point


def _measure(entry: Entry, machine: Machine, ceilings: Ceilings, seconds: float) -> ProfilePoint:
    op, shape = entry.op, entry.shape
    cost = op.cost(shape)
    works = [op.build(Draw(machine.device, seed), shape) for seed in range(input_sets(cost.bytes))]
    found = machine.time(works, seconds)
    wrong = [ms for ms in found.milliseconds if not (math.isfinite(ms) and ms > 0)]
    if wrong:
        raise RuntimeError(f"the clock says that a call took {wrong[0]} ms")
    p20, median, p80 = (float(1e3 * value) for value in np.percentile(found.milliseconds, [20, 50, 80]))
    floor = None if op.link else ceilings.floor_s(cost, op.dtype)
    fraction = None if floor is None else floor * 1e6 / median
    if fraction is not None and fraction > IMPOSSIBLE:
        raise RuntimeError(
            f"took {median:.1f} us, {fraction:.1f} times faster than its floor: it did not do the work"
        )
    return ProfilePoint(
        **common(entry, machine),
        median_us=round(median, 3),
        p20_us=round(min(p20, median), 3),
        p80_us=round(max(p80, median), 3),
        samples=len(found.milliseconds),
        flops_per_s=rounded(cost.flops / median * 1e6) or None,
        bytes_per_s=rounded(cost.bytes / median * 1e6) or None,
        ceiling_fraction=None if fraction is None else rounded(fraction),
        peak_extra_bytes=found.peak_extra_bytes,
        clock_mhz=machine.clock_mhz(),
    )


def failed(entry: Entry, machine: Machine, error: str) -> ProfilePoint:
    return ProfilePoint(**common(entry, machine), median_us=None, status="failed", error=error[:300])


def common(entry: Entry, machine: Machine) -> dict[str, Any]:
    op = entry.op
    return {
        "op": op.name,
        "implementation": op.implementation,
        "dtype": op.dtype,
        "shape": as_shape(entry.shape),
        "regime": op.regime,
        **shared(machine),
        "time_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def shared(machine: Machine) -> dict[str, Any]:
    """The fields that all points of a run have in common."""
    conditions = machine.conditions
    return {
        "device": conditions.name,
        "serial": conditions.serial,
        "versions": conditions.versions,
        "commit": conditions.commit,
        "power_limit_w": conditions.power_limit_w,
    }


def input_sets(bytes_of_one: float) -> int:
    """How many sets of inputs a point rotates through: each is allocated."""
    return SETS if bytes_of_one < LARGE_BYTES else 2 if bytes_of_one < HUGE_BYTES else 1


def estimate_s(entry: Entry, ceilings: Ceilings = NOMINAL, seconds: float = POINT_S) -> float:
    """Seconds that the point will take, compilation not counted."""
    op = entry.op
    cost = op.cost(entry.shape)
    floor = ceilings.floor_s(cost, op.dtype) or NOMINAL.floor_s(cost, op.dtype) or 0.0
    call = floor / op.efficiency + 5e-6
    sets = input_sets(cost.bytes)
    turn = sets * (call + PAUSE_S)
    turns = min(math.ceil(USUAL_SAMPLES / sets), max(math.ceil(3 / sets), math.ceil(seconds / turn)))
    made = 4 * sets * cost.bytes / 2e12  # inputs drawn and converted
    return 0.03 + made + 2 * call + max(SETTLE_S, sets * call) + max(op.timing_s, turns * turn)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def rounded(value: float) -> float:
    """Five significant digits: more than a measurement has."""
    return float(f"{value:.5g}")


def seconds_of(point: ProfilePoint) -> float:
    assert point.median_us is not None
    return point.median_us * 1e-6

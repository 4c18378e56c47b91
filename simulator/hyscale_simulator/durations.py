"""How long a kernel takes on a GPU, and how we know.

In this order: measured for that shape; interpolated in a measured table; projected from another GPU's table;
built from measured parts or priced as a measured equivalent; a streaming kernel at the measured copy rate or
an op at a stated fraction of its roofline; otherwise an error.
"""

from dataclasses import dataclass, replace
from typing import Literal

from hyscale_simulator.calibration import calibration
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.kernels import OPS, Kernel
from hyscale_simulator.profiles import Profiles
from hyscale_simulator.roofline import floor_us, project_us
from hyscale_simulator.tables import Table

__all__ = ["Duration", "How", "MissingProfileError", "Prices"]

How = Literal["measured", "interpolated", "projected", "assumed"]
HOWS: tuple[How, ...] = ("measured", "interpolated", "projected", "assumed")

# Relative standard error by provenance; the command ``hyscale validate`` prints what supports each.
MEASURED = 0.03  # repeatability of two runs on different boards
INTERPOLATED = 0.06  # leave-one-shape-out: the most that the median of a table may be
PROJECTED = 0.12  # published H20 kernels against their projection from an H200
STREAMED = 0.15  # streaming kernels of training frameworks at the copy rate
STRETCHED = 0.15  # added beyond twice the measured range


KEPT_PRICES = 65536


class MissingProfileError(LookupError):
    """An op with neither a measurement nor a stated assumption."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Microseconds, how they are known, from what, how far off they may be, and what to warn about."""

    us: float
    how: How
    source: str
    uncertainty: float
    warning: str = ""
    parts: "tuple[Duration, ...]" = ()
    """Where kernels were added up: each of them."""


class Prices:
    """Prices kernels on one GPU, each once."""

    def __init__(self, profiles: Profiles, gpu: Gpu) -> None:
        self.gpu = gpu
        self._profiles = profiles
        self._known: dict[Kernel, Duration] = {}

    def __call__(self, call: Kernel) -> Duration:
        """The duration of ``call``; :class:`MissingProfileError` if nothing is known about it."""
        found = self._known.get(call)
        if found is None:
            if len(self._known) >= KEPT_PRICES:
                self._known.clear()
            found = self._known[call] = self._price(call)
        return found

    def _price(self, call: Kernel) -> Duration:
        op = OPS[call.op]
        if any(size == 0 for _, size in call.shape):  # an empty call is not launched
            return Duration(0.0, "measured", "no work", 0.0)
        table = self._profiles.table(call, self.gpu)
        if table is not None:
            return self._from_table(call, table)
        if op.parts is not None:
            return _sum([self(part) for part in op.parts(call)])
        if op.proxy is not None:
            equivalent = self(op.proxy(call))
            us = max(equivalent.us, floor_us(call, self.gpu))
            how: How = "interpolated" if equivalent.how == "measured" else equivalent.how
            return replace(equivalent, us=us, how=how, uncertainty=max(equivalent.uncertainty, 0.1))
        assumption = calibration().assumption(call.op)
        if assumption is not None:
            us = floor_us(call, self.gpu, loaded=True) / assumption.fraction
            return Duration(us, "assumed", assumption.source, assumption.uncertainty)
        if op.memory:
            return Duration(floor_us(call, self.gpu), "assumed", calibration().stream.source, STREAMED)
        raise MissingProfileError(
            f"{call.op} ({call.dtype}, {self.gpu.name}): neither measured nor assumed; give a profile with "
            f"--profiles, or an [[assumed]] entry in calibration.toml"
        )

    def _from_table(self, call: Kernel, table: Table) -> Duration:
        found = table.lookup(call)
        warnings = []
        uncertainty = max(found.spread, MEASURED if found.exact else INTERPOLATED)
        how: How = "measured" if found.exact else "interpolated"
        us = found.us
        if found.stretch > 2:
            uncertainty += STRETCHED
            warnings.append(
                f"{call.op} ({call.dtype}): extrapolated {found.stretch:.0f}x beyond the measured shapes"
            )
        if not OPS[call.op].jagged and call.implementation not in ("", table.implementation):
            warnings.append(
                f"{call.op} ({call.dtype}): no profile of {call.implementation}, "
                f"{table.implementation}'s is used"
            )
        wanted, given = (regime.partition(", ")[0] for regime in (call.regime, table.regime))
        if {wanted, given} == {"trained", "untrained"}:
            warnings.append(f"{call.op} ({call.dtype}): no profile on {wanted} scores, {given} ones are used")
            uncertainty += STRETCHED
        if table.gpu.device != self.gpu.device:
            us = project_us(us, call, table.gpu, self.gpu, found.nearest)
            how = "projected"
            uncertainty = max(uncertainty, PROJECTED)
        return Duration(us, how, found.source, uncertainty, "; ".join(warnings))


def _sum(parts: list[Duration]) -> Duration:
    """Kernels one after another: known as the longest is, uncertainties weighted by time."""
    total, longest = sum(part.us for part in parts), max(parts, key=lambda part: part.us)
    return Duration(
        total,
        longest.how,
        longest.source,
        sum(part.us * part.uncertainty for part in parts) / total if total else 0.0,
        "; ".join(dict.fromkeys(part.warning for part in parts if part.warning)),
        tuple(parts),
    )

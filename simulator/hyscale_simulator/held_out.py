"""Leave-one-shape-out error of measured tables: how far interpolation may be trusted."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hyscale_simulator.tables import Table

__all__ = ["JUDGED", "MEDIAN_PCT", "P90_PCT", "HeldOut", "hold_out"]

MEDIAN_PCT, P90_PCT = 6.0, 20.0
"""What is demanded of every table, at most."""

FEWEST, JUDGED = 3, 5
"""Shapes from which on a table is listed, and judged: a 90th percentile of fewer says nothing."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Leave-one-shape-out error of one table: see :meth:`Table.held_out`."""

    op: str
    dtype: str
    implementation: str
    regime: str
    gpu: str
    points: int
    median_pct: float
    p90_pct: float

    @property
    def judged(self) -> bool:
        """Whether there are shapes enough to judge it by."""
        return self.points >= JUDGED

    @property
    def within(self) -> bool:
        """Whether it is within the targets."""
        return self.median_pct <= MEDIAN_PCT and self.p90_pct <= P90_PCT

    def to_json(self) -> dict[str, Any]:
        """The record that ``hyscale validate --holdout --json`` writes."""
        return {**asdict(self), "judged": self.judged, "within": self.within}


def hold_out(tables: Iterable[Table]) -> list[HeldOut]:
    """Of every table with at least three shapes that lie between others."""
    found = []
    for table in tables:
        errors = [abs(error) for _, error in table.held_out()]
        if len(errors) >= FEWEST:
            median, p90 = (100 * float(q) for q in np.quantile(errors, [0.5, 0.9]))
            found.append(
                HeldOut(
                    table.op, table.dtype, table.implementation, table.regime, table.gpu.name, len(errors),
                    median, p90,
                )
            )  # fmt: skip
    return found

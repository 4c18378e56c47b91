"""What a property is, and the trial it is given: one drawn case and one target."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption

from hyscale_verify.cases import Case, Float32, Float64
from hyscale_verify.errors import FalsifiedError, InapplicableError
from hyscale_verify.strategies import Space
from hyscale_verify.targets import HyTopK, Result, Target

__all__ = ["FalsifiedError", "InapplicableError", "Property", "Trial", "promise"]

V = TypeVar("V")


@dataclass
class Trial:
    """One example: the case, the target, and further choices drawn by the property."""

    target: Target
    case: Case
    space: Space
    device: str
    data: st.DataObject
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)

    def draw(self, strategy: st.SearchStrategy[V], label: str) -> V:
        """Draw a further choice; it is listed in the counterexample."""
        value = self.data.draw(strategy, label=label)
        self.notes.append(f"{label}: {value}")
        return value

    def assume(self, condition: bool) -> None:
        """Drop this example, uncounted, where the property says nothing about it."""
        if not condition:
            raise UnsatisfiedAssumption

    def select(self, case: Case | None = None, **options: Any) -> Result:
        """The target's selection, of this trial's case by default."""
        return self.target.select(self.case if case is None else case, **options)

    def dense(self, case: Case | None = None) -> Float32:
        """The target's own scores, float32 [T, S]."""
        return self.target.dense(self.case if case is None else case)

    def ranked(self) -> Float32 | Float64:
        """The scores that decide: the target's own where it shows them, else the exact ones.

        Exact scores do not decide where the target's may overflow; such an example is dropped.
        """
        if "dense" in self.target.offers:
            return self.dense()
        self.assume(bool((np.abs(self.case.w) < 1e38).all()))
        return self.case.scores()

    @property
    def hytopk(self) -> HyTopK:
        """The target, where it offers the whole contract."""
        if not isinstance(self.target, HyTopK):
            raise TypeError(f"{self.target.name} does not offer the whole contract of hytopk")
        return self.target


@dataclass(frozen=True)
class Property:
    """A promise of the contract and how it is judged.

    name      unique; what ``--only`` takes
    row       the row of the contract table it belongs to
    regimes   the input families it is tried on
    needs     what a target must offer (see :mod:`hyscale_verify.targets`)
    device    "any", or the only device it means anything on
    windows   window kinds to draw, where the regime's own will not do
    share     part of a profile's examples that is drawn, and ``why_few`` if less than all
    run       the judgement; raises FalsifiedError
    """

    name: str
    row: str
    regimes: tuple[str, ...]
    run: Callable[[Trial], None]
    needs: frozenset[str] = frozenset()
    device: str = "any"
    windows: tuple[str, ...] | None = None
    share: float = 1.0
    why_few: str = ""

    @property
    def words(self) -> str:
        """What it demands and how it is judged: the docstring's first paragraph."""
        return " ".join((self.run.__doc__ or "").split("\n\n")[0].split())

    def lacks(self, target: Target, device: str) -> str:
        """Why it does not apply here; empty where it does."""
        if self.device not in ("any", device):
            return f"needs device {self.device}"
        missing = sorted(self.needs - target.offers)
        return f"needs a target that offers: {', '.join(missing)}" if missing else ""


def promise(
    row: str, regimes: tuple[str, ...], **options: Any
) -> Callable[[Callable[[Trial], None]], Property]:
    """Make a function a :class:`Property` of contract row ``row``, named like the function."""

    def decorate(run: Callable[[Trial], None]) -> Property:
        needs = frozenset(options.pop("needs", ()))
        return Property(run.__name__, row, regimes, run, needs=needs, **options)

    return decorate

"""Runs properties on input regimes with hypothesis and turns what happens into verdicts.

Determinism: a run is a function of the target, the device, the profile and the seed. Each unit (property,
regime) draws from its own seed, derived from these names, so that running one alone reproduces it.
"""

import gc
import math
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky, StopTest, Unsatisfiable, UnsatisfiedAssumption

from hyscale_verify import targets
from hyscale_verify.draws import draws_of_the_seed_alone
from hyscale_verify.errors import EnvironmentLackingError
from hyscale_verify.properties import FalsifiedError, InapplicableError, Property, Trial
from hyscale_verify.strategies import CPU, CUDA, Space, cases
from hyscale_verify.suite import PROPERTIES
from hyscale_verify.targets import Target
from hyscale_verify.workers import Died, run_tasks

HOLDS, FALSIFIED, SKIPPED = "holds", "falsified", "skipped"


@dataclass(frozen=True)
class Profile:
    """How hard to look.

    examples  drawn calls a property, summed over its regimes
    floor     fewest of one regime
    """

    examples: int
    floor: int
    shrink: bool = True
    remember: bool = False


PROFILES = {
    "quick": Profile(examples=14, floor=2),
    "ci": Profile(examples=54, floor=3),
    "deep": Profile(examples=4000, floor=200, remember=True),
}
DATABASE = ".hypothesis/hyscale"


@dataclass(frozen=True)
class Plan:
    """What one run of the suite is asked to do; travels to the worker processes."""

    target: str
    device: str
    profile: str
    seed: int
    dtype: str | None = None
    shrink: bool = True

    def command(self, property_name: str, regime: str) -> str:
        """The command that runs one unit of this plan again."""
        pinned = f" --dtype {self.dtype}" if self.dtype else ""
        return (
            f"hyscale verify --target {self.target} --device {self.device} --profile {self.profile} "
            f"--only {property_name} --regime {regime} --seed {self.seed}{pinned}"
        )


@dataclass(frozen=True)
class Unit:
    """One property on one regime."""

    plan: Plan
    property: str
    regime: str


@dataclass(frozen=True)
class Verdict:
    """What became of one unit. ``reason`` explains a skip, a shortage of examples or a failure.

    ``crashed`` (the target raised something else than a failed judgement) and ``size`` (keys in the
    counterexample) do not go into the report.
    """

    name: str
    regime: str
    examples: int
    verdict: str
    reason: str = ""
    counterexample: str = ""
    reproduce: str = ""
    crashed: bool = False
    size: int = 0

    def record(self) -> dict[str, Any]:
        """The unit as it stands in the JSON report; empty texts are null."""
        fields = asdict(self)
        del fields["crashed"], fields["size"]
        return {key: None if value == "" else value for key, value in fields.items()}


def units(plan: Plan, properties: Sequence[str], regimes: Sequence[str]) -> list[Unit]:
    """All units of the chosen properties and regimes, in the suite's order (empty choices mean all)."""
    return [
        Unit(plan, each.name, regime)
        for each in PROPERTIES.values()
        if not properties or each.name in properties
        for regime in each.regimes
        if not regimes or regime in regimes
    ]


def run(work: Sequence[Unit], jobs: int) -> Iterator[Verdict]:
    """Verdicts of the units as they finish."""
    for unit, answer in run_tasks(run_unit, work, jobs):
        if isinstance(answer, Died):
            yield Verdict(
                unit.property,
                unit.regime,
                0,
                FALSIFIED,
                reason=f"crash: {answer}",
                reproduce=unit.plan.command(unit.property, unit.regime),
                crashed=True,
            )
        else:
            yield answer


def unfinished(work: Sequence[Unit], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Skips for the units that an interruption left without a verdict."""
    judged = {(each.name, each.regime) for each in verdicts}
    return [
        Verdict(unit.property, unit.regime, 0, SKIPPED, reason="interrupted before it was judged")
        for unit in work
        if (unit.property, unit.regime) not in judged
    ]


def in_order(work: Sequence[Unit], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts in the order of the units, whatever order they finished in."""
    place = {(unit.property, unit.regime): i for i, unit in enumerate(work)}
    return sorted(verdicts, key=lambda each: place[each.name, each.regime])


def run_unit(unit: Unit) -> Verdict:
    """Load the target and judge one unit; what the target cannot do is a skip with its reason."""
    try:
        target = targets.load(unit.plan.target, unit.plan.device)
    except EnvironmentLackingError as error:
        return Verdict(unit.property, unit.regime, 0, SKIPPED, reason=str(error))
    return judge(unit, target)


def judge(unit: Unit, target: Target) -> Verdict:
    """Draw the unit's examples and judge each, until one fails."""
    prop = PROPERTIES[unit.property]
    lacking = prop.lacks(target, unit.plan.device)
    if lacking:
        return Verdict(prop.name, unit.regime, 0, SKIPPED, reason=lacking)
    space = _space(unit.plan, target)
    if not space.dtypes:
        return Verdict(
            prop.name, unit.regime, 0, SKIPPED, reason=f"{target.name} does not take {unit.plan.dtype}"
        )
    return _Search(unit, prop, target, space).verdict()


def _space(plan: Plan, target: Target) -> Space:
    space = CUDA if plan.device == "cuda" else CPU
    allowed = [plan.dtype] if plan.dtype else space.dtypes
    return replace(space, dtypes=tuple(dtype for dtype in allowed if dtype in target.dtypes))


def _conditions(target: Target, device: str) -> ExitStack:
    """What a search runs under: NumPy silent about NaN, and the interpreter checked where it is in use.

    The cyclic garbage collector runs between examples only (see ``_example``), on what they made: the
    interpreter makes millions of small objects, and collecting while it does costs a quarter of the time.
    """
    stack = ExitStack()
    stack.enter_context(draws_of_the_seed_alone())
    stack.enter_context(np.errstate(all="ignore"))
    gc.disable()
    gc.freeze()
    stack.callback(gc.enable)
    stack.callback(gc.unfreeze)
    stack.callback(gc.collect)
    if device == "cpu" and "fused" in target.offers:
        from hyscale_verify.interpreter import checked_memory, quicken

        quicken()
        stack.enter_context(checked_memory())
    return stack


class _Search:
    """One hypothesis run; remembers the last failure, which after shrinking is the smallest."""

    def __init__(self, unit: Unit, prop: Property, target: Target, space: Space) -> None:
        self.unit = unit
        self.prop = prop
        self.target = target
        self.space = space
        self.examples = 0
        self.trial: Trial | None = None
        self.failure: Exception | None = None
        self.numbers: dict[str, list[float]] = {}

    def verdict(self) -> Verdict:
        profile = PROFILES[self.unit.plan.profile]
        wanted = max(profile.floor, math.ceil(profile.examples / len(self.prop.regimes)))
        wanted = max(1, math.ceil(wanted * self.prop.share))
        phases = [Phase.reuse] if profile.remember else []
        phases += [Phase.generate, *([Phase.shrink] if profile.shrink and self.unit.plan.shrink else [])]
        configure = settings(
            max_examples=wanted,
            phases=phases,
            database=DirectoryBasedExampleDatabase(DATABASE) if profile.remember else None,
            derandomize=False,
            deadline=None,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        plan = self.unit.plan
        name = f"{plan.seed}/{plan.device}/{plan.dtype}/{self.prop.name}/{self.unit.regime}"
        search = seed(zlib.crc32(name.encode()))(configure(given(st.data())(self._example)))
        try:
            with _conditions(self.target, plan.device):
                search()
        except InapplicableError as error:
            return self._make(SKIPPED, reason=str(error))
        except Flaky:
            return self._falsified(" (not on every run: the target is not deterministic)")
        except Unsatisfiable:
            return self._make(SKIPPED, reason="no drawn case meets the property's precondition")
        except Exception as error:
            if error is not self.failure:
                raise
            return self._falsified("")
        return self._make(HOLDS, reason="; ".join(filter(None, [self.prop.why_few, self._measured()])))

    def _example(self, data: st.DataObject) -> None:
        sizes = "hytopk" in self.target.offers
        gc.collect()
        case = data.draw(cases(self.unit.regime, self.space, self.prop.windows, sizes))
        trial = Trial(self.target, case, self.space, self.unit.plan.device, data)
        try:
            self.prop.run(trial)
        except (UnsatisfiedAssumption, StopTest, InapplicableError):
            raise
        except Exception as error:
            self.trial, self.failure = trial, error
            raise
        if self.failure is None:
            self.examples += 1
            for key, value in trial.numbers.items():
                self.numbers.setdefault(key, []).append(value)

    def _measured(self) -> str:
        return "; ".join(
            f"{key}: mean {sum(values) / len(values):.4g}, most {max(values):.4g}"
            for key, values in self.numbers.items()
        )

    def _falsified(self, remark: str) -> Verdict:
        failure, trial = self.failure, self.trial
        assert failure is not None
        assert trial is not None
        crashed = not isinstance(failure, FalsifiedError)
        rows, keys = (failure.rows, failure.keys) if isinstance(failure, FalsifiedError) else ((), ())
        message = _raised(failure) if crashed else str(failure)
        told = [trial.case.in_words(rows, keys), *trial.notes, message]
        reason = "the target raised " + type(failure).__name__ if crashed else "assertion"
        self.examples += 1
        return self._make(
            FALSIFIED,
            reason=reason + remark,
            counterexample="\n".join(told),
            crashed=crashed,
            size=trial.case.num_keys,
        )

    def _make(self, verdict: str, **fields: Any) -> Verdict:
        command = self.unit.plan.command(self.prop.name, self.unit.regime) if verdict == FALSIFIED else ""
        return Verdict(self.prop.name, self.unit.regime, self.examples, verdict, reproduce=command, **fields)


def _raised(error: Exception) -> str:
    """An exception of the target's own, and the line that raised it."""
    message = "".join(traceback.format_exception_only(error)[:1]).strip()
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{message}\nraised in {place.name}, {Path(place.filename).name} line {place.lineno}"

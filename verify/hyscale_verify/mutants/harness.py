"""Plants a bug in a copy of the kernels' package and runs the suite against the copy.

The copy lies in a temporary folder under a name of its own, so it is imported beside the real package and
registers its own torch operator. A bug is killed by an assertion of a property; a crash alone kills nothing.
"""

import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hyscale_verify.mutants.catalogue import Mutant
from hyscale_verify.runner import FALSIFIED, HOLDS, Plan, Unit, Verdict, judge
from hyscale_verify.suite import MUTANTS, PARTS
from hyscale_verify.targets import HyTopK
from hyscale_verify.workers import Died, run_tasks

PACKAGE = "hyscale_kernels"


@dataclass(frozen=True)
class Task:
    """One bug to plant, whether to go on after its first kill, and the seconds after which to give up.

    ``properties``: try these alone; all of the bug's part where none is named.
    """

    mutant: Mutant
    plan: Plan
    everything: bool
    limit_s: float
    properties: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fate:
    """What became of one planted bug: units that killed it, that let it live, that crashed.

    ``cut_short`` says why not all of the suite was tried, where that is so.
    """

    mutant: Mutant
    killed_by: tuple[Verdict, ...]
    survives: tuple[Verdict, ...]
    crashes: tuple[Verdict, ...]
    cut_short: str = ""

    @property
    def killed(self) -> bool:
        return bool(self.killed_by)

    def in_words(self) -> str:
        """The bug's name and what first killed it, if anything did."""
        if self.killed:
            first = self.killed_by[0]
            return f"{self.mutant.name}: killed by {first.name} on {first.regime}"
        crashes = self.cut_short or f"{len(self.crashes)} crashes"
        return f"{self.mutant.name}: survives {len(self.survives)} units ({crashes})"

    def record(self) -> dict[str, Any]:
        """The bug as it stands in the JSON report."""
        return {
            "name": self.mutant.name,
            "stage": self.mutant.stage,
            "description": self.mutant.words,
            "killed_by": [_pair(each) for each in self.killed_by],
            "survives": [_pair(each) for each in self.survives],
        }


def _pair(verdict: Verdict) -> dict[str, str]:
    return {"property": verdict.name, "regime": verdict.regime}


@contextmanager
def planted(mutant: Mutant) -> Iterator[str]:
    """The import name of a package with the bug in it; ValueError where the edit does not fit."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    name = f"{PACKAGE}_{mutant.name}"
    with tempfile.TemporaryDirectory(prefix="hyscale-mutant-") as folder:
        copy = Path(folder) / name
        shutil.copytree(Path(spec.origin).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
        source = copy / mutant.file
        text = source.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise ValueError(
                f"mutant {mutant.name}: its text occurs {text.count(mutant.old)} times in {mutant.file}; "
                "allowed: once"
            )
        source.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            yield name
        finally:
            sys.path.remove(folder)


def try_mutant(task: Task) -> Fate:
    """Plant the bug and run the suite until it is killed (or all of it, where everything is asked for)."""
    killed: list[Verdict] = []
    survived: list[Verdict] = []
    crashed: list[Verdict] = []
    given_up = ""
    begun = time.monotonic()
    with planted(task.mutant) as package:
        target = HyTopK(task.plan.device, package)
        for unit in _ordered(task):
            if time.monotonic() - begun > task.limit_s:
                given_up = f"given up after {task.limit_s:.0f} s"
                break
            verdict = judge(unit, target)
            if verdict.verdict == FALSIFIED:
                (crashed if verdict.crashed else killed).append(verdict)
            elif verdict.verdict == HOLDS:
                survived.append(verdict)
            if killed and not task.everything:
                break
    return Fate(task.mutant, tuple(killed), tuple(survived), tuple(crashed), given_up)


def _ordered(task: Task) -> list[Unit]:
    """The units that try a bug: likely properties first, every property's first regime before its second.

    A bug is tried by the properties of its part of the suite; one of no part, by those of selection.
    """
    part = next((each for each in PARTS if task.mutant in each.mutants), PARTS[0])
    units = []
    for prop in part.properties:
        if task.properties and prop.name not in task.properties:
            continue
        likely = prop.name in task.mutant.likely
        for place, regime in enumerate(prop.regimes):
            units.append(((not likely, place), Unit(task.plan, prop.name, regime)))
    return [unit for _, unit in sorted(units, key=lambda pair: pair[0])]


def tasks_of(
    plan: Plan, names: Sequence[str], properties: Sequence[str], everything: bool, limit_s: float
) -> list[Task]:
    """The chosen bugs, all where none is named, that the chosen properties, all where none is named, try."""
    chosen = [
        Task(each, plan, everything, limit_s, tuple(properties))
        for each in MUTANTS
        if not names or each.name in names
    ]
    return [task for task in chosen if _ordered(task)]


def run_mutants(tasks: Sequence[Task], jobs: int) -> Iterator[Fate]:
    """Fates of the bugs as they are known."""
    for task, fate in run_tasks(try_mutant, tasks, jobs):
        yield Fate(task.mutant, (), (), (), cut_short=str(fate)) if isinstance(fate, Died) else fate


def as_record(fates: Sequence[Fate], properties: Sequence[str] = ()) -> dict[str, Any]:
    """The report: every planted bug, what killed it and what let it live.

    ``properties``: the only ones that tried, where not all of the suite did.
    """
    place = {mutant.name: i for i, mutant in enumerate(MUTANTS)}
    ordered = sorted(fates, key=lambda fate: place[fate.mutant.name])
    killed = sum(fate.killed for fate in ordered)
    return {
        **({"properties": list(properties)} if properties else {}),
        "mutants": [fate.record() for fate in ordered],
        "summary": {"killed": killed, "survived": len(ordered) - killed},
    }


def print_fates(console: Console, fates: Sequence[Fate]) -> None:
    """A line for each bug, with what killed it, and a count."""
    table = Table(box=None, pad_edge=False)
    for column in ("planted bug", "stage", "killed by", "on"):
        table.add_column(column, no_wrap=column == "planted bug")
    place = {mutant.name: i for i, mutant in enumerate(MUTANTS)}
    for fate in sorted(fates, key=lambda each: place[each.mutant.name]):
        killers = list(dict.fromkeys(verdict.name for verdict in fate.killed_by))
        regimes = [verdict.regime for verdict in fate.killed_by if verdict.name in killers[:1]]
        more = f" and {len(killers) - 1} more" if len(killers) > 1 else ""
        crashes = fate.cut_short or f"nothing; crashed {len(fate.crashes)} of {len(fate.survives)} units"
        by = killers[0] + more if killers else f"[bold red]{crashes}[/]"
        table.add_row(fate.mutant.name, fate.mutant.stage, by, " ".join(regimes))
    console.print(table)
    killed = sum(fate.killed for fate in fates)
    console.print(f"{killed} of {len(fates)} planted bugs killed", highlight=False)
    for fate in fates:
        for verdict in fate.crashes[:1] if not fate.killed else ():
            console.print(f"{fate.mutant.name}: {verdict.name} on {verdict.regime}", markup=False)
            console.print(verdict.counterexample, markup=False, highlight=False, soft_wrap=True)

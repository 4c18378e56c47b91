"""Planted bugs: the edits fit the kernels, the harness kills by assertions alone, the artefact is current."""

import importlib.util
import math
from collections import Counter
from pathlib import Path

import pytest

from hyscale_verify.mutants import Mutant, harness
from hyscale_verify.mutants.harness import PACKAGE, Task, planted, try_mutant
from hyscale_verify.properties import PROPERTIES as SELECTION
from hyscale_verify.runner import Plan
from hyscale_verify.suite import MUTANTS, PARTS, PROPERTIES, Part

PLAN = Plan("hytopk", "cpu", "quick", seed=0, shrink=False)


def source(mutant: Mutant) -> str:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / mutant.file).read_text()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_edit_fits_its_file(mutant: Mutant) -> None:
    assert source(mutant).count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert mutant.words
    assert set(mutant.likely) <= set(PROPERTIES)


def test_there_are_enough_of_every_stage_and_no_two_alike() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert min(Counter(mutant.stage for mutant in MUTANTS).values()) >= 2


def test_a_bug_is_tried_by_the_properties_of_its_part() -> None:
    for part in PARTS:
        assert part.mutants
        units = harness._ordered(Task(part.mutants[0], PLAN, everything=True, limit_s=math.inf))
        assert {unit.property for unit in units} == {prop.name for prop in part.properties}


def test_a_copy_is_its_own_package_with_its_own_operator() -> None:
    import torch

    mutant = next(each for each in MUTANTS if each.name == "causal_diagonal_lost")
    with planted(mutant) as name:
        assert name == "hyscale_kernels_causal_diagonal_lost"
        module = importlib.import_module(f"{name}.hytopk")
        assert module.__name__ == "hyscale_kernels_causal_diagonal_lost.hytopk"
        assert hasattr(torch.ops.hyscale_kernels_causal_diagonal_lost, "hytopk")
    assert "hi = rows.to" not in source(mutant)  # the original is as it was


def test_an_edit_that_does_not_fit_is_an_error() -> None:
    mutant = Mutant("lost", "scan", "hytopk/scan.py", "no such text", "", "an edit of a text that is gone")
    with (
        pytest.raises(ValueError, match="mutant lost: its text occurs 0 times"),
        planted(mutant),
    ):
        pass


def test_a_crash_alone_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PARTS", (Part((PROPERTIES["tie_rule"],), ()),))
    mutant = Mutant(
        "crashes",
        "call",
        "hytopk/api.py",
        "table = launch_dense(problem, row0, R, plan, as_ordered=True)",
        "table = launch_dense(problem.no_such_thing, row0, R, plan, as_ordered=True)",
        "the call raises AttributeError",
    )
    fate = try_mutant(Task(mutant, PLAN, everything=True, limit_s=math.inf))
    assert not fate.killed
    assert len(fate.crashes) == len(PROPERTIES["tie_rule"].regimes)


def test_an_edit_that_changes_nothing_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = (PROPERTIES["tie_rule"], PROPERTIES["empty_calls"])
    monkeypatch.setattr(harness, "PARTS", (Part(tried, ()),))
    mutant = Mutant(
        "harmless",
        "threshold",
        "hytopk/threshold.py",
        "CAUTION = tl.constexpr(sizes.CAUTION)",
        "CAUTION = tl.constexpr(sizes.CAUTION + 1)",
        "x",
    )
    fate = try_mutant(Task(mutant, PLAN, everything=False, limit_s=math.inf))
    assert not fate.killed
    assert not fate.crashes
    assert len(fate.survives) == sum(len(prop.regimes) for prop in tried)


def test_a_bug_that_lives_too_long_is_given_up_and_said_so() -> None:
    mutant = next(each for each in MUTANTS if each.name == "ties_from_the_right")
    fate = try_mutant(Task(mutant, PLAN, everything=False, limit_s=0.0))
    assert not fate.killed
    assert not fate.survives
    assert fate.cut_short == "given up after 0 s"
    assert "given up" in fate.in_words()


def test_likely_properties_come_first_and_regimes_in_turn() -> None:
    mutant = next(each for each in MUTANTS if each.name == "ties_from_the_right")
    units = harness._ordered(Task(mutant, PLAN, everything=False, limit_s=math.inf))
    first = PROPERTIES["tie_rule"].regimes
    assert [unit.regime for unit in units[: len(first)]] == list(first)
    assert {unit.property for unit in units[: len(first)]} == {"tie_rule"}
    rest = units[len(first) :]
    heads = [unit.regime == PROPERTIES[unit.property].regimes[0] for unit in rest]
    assert heads[: len(SELECTION) - 1] == [True] * (len(SELECTION) - 1)
    assert len(units) == sum(len(prop.regimes) for prop in SELECTION.values())

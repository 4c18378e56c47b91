"""Switches lead from one scenario to another, one named difference at a time."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyscale_simulator.scenario import load
from hyscale_simulator.switches import BASELINES, Baseline, Switch, SwitchError, apply, between

FIELDS: dict[str, list[Any]] = {
    "layout.context_split": ["zigzag", "contiguous"],
    "precision.linear": ["bf16", "fp8"],
    "precision.dispatch": ["bf16", "fp8"],
    "selection.record": ["int32", "packed"],
    "offload.selection": [False, True],
    "overlap.context": [True, False],
    "routing.exponent": [0.5, 1.0],
    "batch.sequences_per_microbatch": [1, 2],
}


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda b: b.letter)
def test_all_switches_together_are_the_improved_scenario(baseline: Baseline) -> None:
    old, new = baseline.scenario(), baseline.improved()
    switches = between(old, new)
    assert apply(old, switches, [s.name for s in switches]).hash == new.hash
    assert apply(old, switches, []) == old


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda b: b.letter)
def test_every_subset_of_switches_is_a_legal_scenario(baseline: Baseline) -> None:
    old = baseline.scenario()
    switches = between(old, baseline.improved())
    names = [s.name for s in switches]
    for size in range(len(names) + 1):
        for subset in itertools.combinations(names, size):
            apply(old, switches, subset)


@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FIELDS.items()}))
def test_switches_cover_any_difference(changes: dict[str, Any]) -> None:
    old = load("glm-5.1-1m-512xh20")
    new = old.with_(**changes)
    switches = between(old, new)
    differing = {name for name, value in changes.items() if value != FIELDS[name][0]}
    assert len(switches) == len(differing) - ("selection.record" in differing) + (
        changes["selection.record"] != old.selection.record
    )
    assert apply(old, switches, [s.name for s in switches]).hash == new.hash


def test_a_slow_selector_is_first_replaced_by_a_fast_one() -> None:
    old = BASELINES[1].scenario()
    switches = between(old, BASELINES[1].improved())
    assert [s.name for s in switches] == ["causal_half", "selector", "score_table", "replay", "record"]
    assert apply(old, switches, ["selector"]).selection.selector == "flashinfer"
    assert apply(old, switches, ["selector", "score_table"]).selection.selector == "hytopk"


def test_a_switch_without_what_it_needs_does_nothing() -> None:
    old = load("glm-5.1-1m-512xh20-baseline")
    new = load("glm-5.1-1m-512xh20").with_(**{"selection.skipped_fraction": 0.5})
    switches = between(old, new)
    needs = {s.name: s.needs for s in switches}
    assert needs["pruning"] == ("score_table",)
    assert needs["record"] == ("replay",)
    assert apply(old, switches, ["pruning"]) == old
    assert apply(old, switches, ["pruning", "score_table"]).selection.skipped_fraction == 0.5


def test_contradictory_switches_are_named() -> None:
    old = load("glm-5.1-1m-512xh20-baseline")
    wrong = Switch("wrong", "wrong", (("selection.table", False),))
    with pytest.raises(SwitchError, match=r"wrong contradict each other: .*reads a score table"):
        apply(old, [wrong], ["wrong"])


def test_an_unknown_switch_is_named() -> None:
    with pytest.raises(SwitchError, match="switch 'nothing': there are: none"):
        apply(load("glm-5.1-1m-512xh20"), [], ["nothing"])


@pytest.mark.parametrize(
    ("letter", "fits"), [("A", False), ("B", False), ("C", True), ("D", False), ("E", True)]
)
def test_baselines_say_whether_they_fit(letter: str, fits: bool) -> None:
    from hyscale_simulator.memory import memory, what_would_fit

    scenario = next(b for b in BASELINES if b.letter == letter).scenario()
    assert memory(scenario).fits is fits
    assert fits or what_would_fit(scenario)

"""The runner: deterministic, reproducible, honest about counts, crashes and what it could not do."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyscale_ref.topk import topk
from hyscale_verify import runner
from hyscale_verify.properties import Property
from hyscale_verify.runner import FALSIFIED, HOLDS, PROFILES, SKIPPED, Plan, Unit, judge, units
from hyscale_verify.suite import PROPERTIES
from hyscale_verify.targets import HyTopK, Selector, load

PLAN = Plan("torch_topk", "cpu", "quick", seed=0)


def exact(scores: torch.Tensor, top_k: int, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(topk(scores.numpy(), top_k, start.numpy(), end.numpy()).indices)


def test_a_unit_is_a_function_of_its_plan() -> None:
    unit = Unit(dataclasses.replace(PLAN, profile="ci"), "tie_rule", "tie_rich")
    first, second = (judge(unit, load("torch_topk", "cpu")) for _ in range(2))
    assert first == second
    assert first.verdict == FALSIFIED


def drawn_with(seed: int) -> list[bytes]:
    """The scores of every call that the unit makes."""
    drawn: list[bytes] = []

    def note(scores: Any, *rest: Any) -> Any:
        drawn.append(scores.numpy().tobytes())
        return exact(scores, *rest)

    plan = dataclasses.replace(PLAN, seed=seed)
    judge(Unit(plan, "repeated_calls", "random_normal"), Selector("note", note, "cpu"))
    return drawn


def test_another_seed_draws_other_cases() -> None:
    assert drawn_with(0) != drawn_with(1)


def test_what_is_drawn_does_not_depend_on_what_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [drawn_with(seed) for seed in range(4)]
    constants = ", ".join(str(number) for number in range(2, 250))
    (tmp_path / "full_of_constants.py").write_text(f"NUMBERS = ({constants})\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("full_of_constants")
    assert [drawn_with(seed) for seed in range(4)] == before


def test_the_smallest_counterexample_is_told_in_words_with_its_command() -> None:
    unit = Unit(dataclasses.replace(PLAN, profile="ci"), "tie_rule", "tie_rich")
    verdict = judge(unit, load("torch_topk", "cpu"))
    assert verdict.reason == "assertion"
    assert verdict.size <= 8
    first, second, last = verdict.counterexample.splitlines()
    assert first.startswith(f"1 query, {verdict.size} keys, K=1")
    assert second.startswith("row 0 may select keys [0, ")
    assert "the smaller index comes first" in last
    assert verdict.reproduce == (
        "hyscale verify --target torch_topk --device cpu --profile ci "
        "--only tie_rule --regime tie_rich --seed 0"
    )


def test_without_shrinking_the_first_failure_stands() -> None:
    plan = dataclasses.replace(PLAN, profile="ci", shrink=False)
    verdict = judge(Unit(plan, "tie_rule", "tie_rich"), load("torch_topk", "cpu"))
    assert verdict.verdict == FALSIFIED


def test_examples_are_counted_up_to_the_failure() -> None:
    unit = Unit(dataclasses.replace(PLAN, profile="ci"), "exact_set_of_own_scores", "random_normal")
    assert judge(unit, Selector("exact", exact, "cpu")).examples == 3  # 54 over 20 regimes, at least 3
    failing = judge(unit, Selector("fails", lambda s, K, a, b: exact(s, K, a, b) * 0 - 7, "cpu"))
    assert failing.verdict == FALSIFIED
    assert failing.examples == 1


@pytest.mark.parametrize("profile", PROFILES)
def test_every_property_gets_its_examples_or_says_why_not(profile: str) -> None:
    wanted = PROFILES[profile]
    for prop in PROPERTIES.values():
        each = max(wanted.floor, -(-wanted.examples // len(prop.regimes)))
        assert each * len(prop.regimes) >= wanted.examples
    assert PROFILES["ci"].examples >= 50


def test_a_crash_is_told_from_a_failed_judgement() -> None:
    def crash(*args: Any) -> Any:
        raise RuntimeError("out of luck")

    verdict = judge(Unit(PLAN, "repeated_calls", "tie_rich"), Selector("crash", crash, "cpu"))
    assert verdict.verdict == FALSIFIED
    assert verdict.crashed
    assert verdict.reason == "the target raised RuntimeError"
    assert verdict.counterexample.endswith(
        "RuntimeError: out of luck\nraised in crash, test_runner.py line 102"
    )


def test_an_assertion_of_the_target_is_a_crash_too() -> None:
    def crash(*args: Any) -> Any:
        raise AssertionError("internal")

    assert judge(Unit(PLAN, "repeated_calls", "tie_rich"), Selector("crash", crash, "cpu")).crashed


def test_a_failure_that_does_not_come_again_is_said_to_be_so() -> None:
    seen: list[bytes] = []

    def moody(scores: Any, *rest: Any) -> Any:
        seen.append(scores.numpy().tobytes())
        return exact(scores, *rest) * 0 - 7 if len(seen) == 5 else exact(scores, *rest)

    plan = dataclasses.replace(PLAN, profile="ci")
    verdict = judge(Unit(plan, "tail_is_minus_one", "exact_integers"), Selector("moody", moody, "cpu"))
    assert verdict.verdict == FALSIFIED
    assert verdict.reason == "assertion (not on every run: the target is not deterministic)"
    assert "-7" in verdict.counterexample


def test_what_a_target_lacks_is_skipped_with_a_reason() -> None:
    verdict = judge(Unit(PLAN, "returned_scores", "tie_rich"), load("torch_topk", "cpu"))
    assert (verdict.verdict, verdict.examples) == (SKIPPED, 0)
    assert verdict.reason == "needs a target that offers: hytopk"


def test_an_operand_type_that_a_target_does_not_take_is_a_skip() -> None:
    plan = dataclasses.replace(PLAN, dtype="fp8")
    verdict = judge(Unit(plan, "tie_rule", "tie_rich"), load("torch_topk", "cpu"))
    assert verdict.verdict == SKIPPED
    assert verdict.reason == "torch_topk does not take fp8"


def test_a_pinned_operand_type_is_drawn_alone(imitate: Callable[..., HyTopK]) -> None:
    seen: set[torch.dtype] = set()
    target = imitate(lambda answer: seen.add(answer.call["q"].dtype))
    judge(Unit(dataclasses.replace(PLAN, dtype="bf16"), "repeated_calls", "tie_rich"), target)
    assert seen == {torch.bfloat16}


def test_a_precondition_that_never_holds_is_a_skip_not_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Property("never", "none", ("tie_rich",), lambda trial: trial.assume(False))
    monkeypatch.setitem(runner.PROPERTIES, "never", never)
    verdict = judge(Unit(PLAN, "never", "tie_rich"), load("reference", "cpu"))
    assert verdict.verdict == SKIPPED
    assert verdict.reason == "no drawn case meets the property's precondition"


def test_measured_numbers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(trial: Any) -> None:
        trial.numbers["rows"] = trial.case.num_queries

    monkeypatch.setitem(runner.PROPERTIES, "m", Property("m", "none", ("tie_rich",), measure))
    assert judge(Unit(PLAN, "m", "tie_rich"), load("reference", "cpu")).reason.startswith("rows: mean ")


def test_units_follow_the_choice() -> None:
    assert len(units(PLAN, [], [])) == sum(len(prop.regimes) for prop in PROPERTIES.values())
    chosen = units(PLAN, ["tie_rule", "ascending_and_unique"], ["tie_rich"])
    assert [(unit.property, unit.regime) for unit in chosen] == [
        ("tie_rule", "tie_rich"),
        ("ascending_and_unique", "tie_rich"),
    ]


def test_processes_find_what_one_finds() -> None:
    plan = dataclasses.replace(PLAN, target="torch_topk")
    work = units(plan, ["tie_rule"], [])
    alone = list(runner.run(work, 1))
    together = runner.in_order(work, list(runner.run(work, 2)))
    assert alone == together


def test_a_process_that_dies_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dataclasses.replace(PLAN, target="verify_death:die")
    unit = Unit(plan, "tie_rule", "tie_rich")
    monkeypatch.setattr(runner, "run_tasks", lambda f, work, jobs: [(unit, runner.Died(-11))])
    (verdict,) = runner.run([unit], 2)
    assert verdict.verdict == FALSIFIED
    assert verdict.crashed
    assert verdict.reason == "crash: the process died by SIGSEGV"


def test_the_exact_oracle_passes_everything_that_applies_to_it() -> None:
    plan = dataclasses.replace(PLAN, target="reference")
    found = [judge(unit, load("reference", "cpu")) for unit in units(plan, [], [])]
    assert {verdict.verdict for verdict in found} == {HOLDS, SKIPPED}
    assert len({verdict.name for verdict in found if verdict.verdict == HOLDS}) >= 18
    assert np.sum([verdict.examples for verdict in found]) > 250

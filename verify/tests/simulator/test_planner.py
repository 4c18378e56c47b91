"""The search of layouts: nothing legal is missed, nothing illegal is shown, and refusals are counted."""

import json
from pathlib import Path

import pytest

from hyscale_simulator.evaluate import evaluator
from hyscale_simulator.executors import Executor
from hyscale_simulator.explain_commands import plan as command
from hyscale_simulator.layout import plan
from hyscale_simulator.memory import memory
from hyscale_simulator.planner import Outcome, candidates, search
from hyscale_simulator.scenario import Scenario, load
from hyscale_simulator.sweep import OBJECTIVES, Journal

SMALL = load("llama3-405b-8192xh100").with_(**{
    "model": "llama3-8b", "gpus": 16, "layout.pipeline_parallel": 1, "layout.tensor_parallel": 1,
    "layout.schedule": "1f1b", "layout.virtual_stages": 1, "layout.stage_layers": (),
    "batch.sequences_per_step": 32,
})  # fmt: skip


def run(scenario: Scenario, top: int = 10) -> Outcome:
    return search(scenario, OBJECTIVES["step_time"], Executor(), Journal(None), top=top)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run(SMALL)


def test_the_best_are_legal_fit_and_are_in_order(outcome: Outcome) -> None:
    steps = []
    for choice in outcome.best:
        assert plan(choice.scenario) == choice.cut
        assert memory(choice.scenario).fits
        steps.append(choice.row["step_time_s"])
    assert len(steps) == 10
    assert steps == sorted(steps)


def test_no_legal_layout_is_better_than_the_best(outcome: Outcome) -> None:
    best = outcome.best[0].row["step_time_s"]
    priced = 0
    for changes in candidates(SMALL):
        scenario = SMALL.with_(**changes)
        try:
            cut = plan(scenario)
        except ValueError:
            continue
        if memory(scenario, cut).fits and priced < 120:
            priced += 1
            assert evaluator()(scenario).step_time_s >= best * (1 - 1e-9)
    assert priced > 20


def test_every_candidate_runs_or_is_refused(outcome: Outcome) -> None:
    assert outcome.ran + sum(r.count for r in outcome.refusals) == outcome.tried
    assert outcome.tried == len(list(candidates(SMALL)))


def test_refusals_state_the_rule_and_an_example() -> None:
    found = run(SMALL.with_(**{"batch.sequences_per_step": 3}), top=1)
    rules = {r.rule: r for r in found.refusals}
    rule = next(rule for rule in rules if rule.startswith("batch.sequences_per_step"))
    assert "must be a multiple of data-parallel ranks" in rules[rule].example


def test_what_does_not_fit_is_shown_by_the_nearest_miss() -> None:
    found = run(load("glm-5.1-1m-512xh20").with_(gpus=64, **{"batch.sequences_per_step": 1}), top=1)
    assert found.best == ()
    misses = next(r for r in found.refusals if r.rule == "does not fit into memory")
    assert misses.excess > 0


def test_stages_begin_with_a_layer_that_selects() -> None:
    scenario = load("glm-5.2-1m-512xh20")
    model = scenario.model_description
    cuts = {c["layout.stage_layers"] for c in candidates(scenario)}
    assert len(cuts) > 3
    for layers in cuts:
        first = 0
        assert isinstance(layers, tuple)
        for size in layers:
            assert model.selects(first)
            first += size
        assert first in (0, model.layers)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    arguments = [
        "--preset",
        "glm-5.1-1m-512xh20",
        "--set",
        "gpus=64",
        "--set",
        "batch.sequence_tokens=131072",
    ]
    arguments += ["--set", "batch.sequences_per_step=4", "--top", "2", "--executor", "local:1"]
    assert command([*arguments, "--json", str(out)]) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["tried"] == record["ran"] + sum(r["count"] for r in record["refused"])
    assert "refused:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a scenario file or --preset NAME"),
        (["--preset", "nothing"], "not shipped"),
        (["--preset", "glm-5.1-1m-512xh20", "--top", "0"], "1 or more is wanted"),
        (["--preset", "glm-5.1-1m-512xh20", "--json", "missing/x.json"], "does not exist"),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())

"""The kill matrix: what it counts, how reports are merged, and that the recorded one is of today's suite."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyscale_verify.mutants import matrix
from hyscale_verify.suite import MUTANTS, PARTS, PROPERTIES

RECORDED = Path(__file__).parents[3] / "benchmarks" / "kill_matrix.json"


def bug(name: str, *killers: tuple[str, str]) -> dict[str, Any]:
    killed_by = [{"property": prop, "regime": regime} for prop, regime in killers]
    return {
        "name": name, "stage": "scan", "description": "wrong", "killed_by": killed_by, "survives": [],
    }  # fmt: skip


FIRST, SECOND = MUTANTS[0].name, MUTANTS[1].name
ONE = bug(FIRST, ("tie_rule", "tie_rich"), ("tie_rule", "random_normal"))
TWO = bug(SECOND, ("tie_rule", "constant"), ("returned_scores", "tie_rich"))


def record(*bugs: dict[str, Any]) -> dict[str, Any]:
    return {"mutants": list(bugs), "summary": {"killed": len(bugs), "survived": 0}}


def test_the_only_killer_of_a_bug_is_named() -> None:
    assert matrix.only_killer(record(ONE, TWO)) == {"tie_rule": [FIRST]}


def test_a_bug_lives_on_random_inputs_if_no_property_kills_it_there() -> None:
    assert not matrix.survives_random_normal(ONE)
    assert matrix.survives_random_normal(TWO)


def test_the_document_has_a_row_for_each_bug_and_each_property() -> None:
    text = matrix.render(record(ONE, TWO))
    assert f"| {FIRST} | scan | wrong | tie_rule (tie_rich, random_normal) | kill it |" in text
    assert (
        f"| {SECOND} | scan | wrong | tie_rule (constant); returned_scores (tie_rich) | let it live |" in text
    )
    assert all(f"| {name} |" in text for name in PROPERTIES)
    assert "**nothing**" in matrix.render(record(bug(FIRST)))


def test_later_reports_replace_what_earlier_ones_say_and_old_bugs_go() -> None:
    found = matrix.merged([record(ONE, bug("of_old")), record(bug(SECOND), bug(FIRST))])
    assert found["mutants"] == [bug(FIRST), bug(SECOND)]
    assert found["summary"] == {"killed": 0, "survived": 2}


def test_a_report_of_one_property_replaces_what_that_one_did() -> None:
    killed = bug(FIRST, ("tie_rule", "constant"), ("returned_scores", "tie_rich"))
    spared = {**bug(FIRST), "survives": [{"property": "tie_rule", "regime": "constant"}]}
    (found,) = matrix.merged([record(killed), {**record(spared), "properties": ["tie_rule"]}])["mutants"]
    assert found["killed_by"] == [{"property": "returned_scores", "regime": "tie_rich"}]
    assert found["survives"] == spared["survives"]
    with pytest.raises(ValueError, match=f"{SECOND}: only tie_rule tried it"):
        matrix.merged([record(killed), {**record(bug(SECOND)), "properties": ["tie_rule"]}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ('{"mut', "report.json: "),
        ("[]", "not a report"),
        ('{"schema": 1}', "not a report"),
    ],
)
def test_what_is_no_report_is_named_and_stays(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    assert matrix.main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(str(path))
    assert message in said
    assert text is None or path.read_text() == text
    assert matrix.main([]) == 2


@pytest.mark.skipif(not RECORDED.exists(), reason="no matrix is recorded; see mutants/matrix.py")
def test_the_recorded_matrix_is_of_todays_suite_and_every_bug_is_killed() -> None:
    found = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert [each["name"] for each in found["mutants"]] == [mutant.name for mutant in MUTANTS]
    assert found["summary"] == {"killed": len(MUTANTS), "survived": 0}
    assert RECORDED.with_suffix(".md").read_text(encoding="utf-8") == matrix.render(found)
    alone = matrix.only_killer(found)
    unexplained = [name for name in PROPERTIES if name not in alone and name not in matrix.WHY_IT_STAYS]
    assert unexplained == []
    stale = [name for name in matrix.WHY_IT_STAYS if name in alone or name not in PROPERTIES]
    assert stale == []


def test_every_property_that_runs_on_a_cpu_was_tried_on_the_bugs_of_its_part() -> None:
    """A bug that crashes a property is in neither list of that property: a few may be missing."""
    bugs = json.loads(RECORDED.read_text(encoding="utf-8"))["mutants"]
    tried = {bug["name"]: {pair["property"] for pair in bug["killed_by"] + bug["survives"]} for bug in bugs}
    for part in PARTS:
        for prop in part.properties:
            count = sum(prop.name in tried[mutant.name] for mutant in part.mutants)
            assert prop.device == "cuda" or count >= 0.9 * len(part.mutants), prop.name

"""The verbs verify, mutants and doctor: exit codes, reports, wrong arguments, interruption."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hyscale_verify import commands, runner
from hyscale_verify.mutants import harness
from hyscale_verify.suite import PROPERTIES

ROW = {"name", "regime", "examples", "verdict", "reason", "counterexample", "reproduce"}


def run(verb: str, *argv: str) -> int:
    return getattr(commands, verb)(list(argv))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def torch_report(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """What ``hyscale verify --target torch_topk`` returns and writes."""
    path = tmp_path_factory.mktemp("reports") / "torch.json"
    return run("verify", "--target", "torch_topk", "--json", str(path)), json.loads(path.read_text())


def _falsified(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rows = report["properties"]
    return [row for row in rows if row["name"] == name and row["verdict"] == "falsified"]


def _keys(row: dict[str, Any]) -> int:
    """How many keys the counterexample has."""
    found = re.search(r"(\d+) keys?,", row["counterexample"])
    assert found
    return int(found.group(1))


def test_torch_topk_is_convicted_of_the_tie_rule_by_eight_keys_or_fewer(
    torch_report: tuple[int, dict[str, Any]],
) -> None:
    code, report = torch_report
    assert code == 1
    assert min(_keys(row) for row in _falsified(report, "tie_rule")) <= 8


def test_the_report_follows_its_schema(torch_report: tuple[int, dict[str, Any]]) -> None:
    _, report = torch_report
    assert set(report) == {"schema", "target", "device", "properties", "summary"}
    assert (report["schema"], report["target"], report["device"]) == (1, "torch_topk", "cpu")
    counts = dict.fromkeys(("holds", "falsified", "skipped"), 0)
    for row in report["properties"]:
        assert set(row) == ROW
        counts[row["verdict"]] += 1
        assert (row["counterexample"] is not None) == (row["verdict"] == "falsified")
        assert (row["reproduce"] is not None) == (row["verdict"] == "falsified")
        assert row["reason"] or row["verdict"] == "holds"
        assert (row["examples"] == 0) == (row["verdict"] == "skipped")
    assert report["summary"] == counts
    pairs = [(row["name"], row["regime"]) for row in report["properties"]]
    assert pairs == [(name, regime) for name, prop in PROPERTIES.items() for regime in prop.regimes]


def test_the_printed_command_finds_the_same_counterexample(
    torch_report: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    _, report = torch_report
    row = _falsified(report, "tie_rule")[0]
    hyscale, verb, *argv = shlex.split(row["reproduce"])
    assert (hyscale, verb) == ("hyscale", "verify")
    path = tmp_path / "again.json"
    assert run("verify", *argv, "--json", str(path)) == 1
    (again,) = json.loads(path.read_text())["properties"]
    assert again == row


def test_the_reference_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--target", "reference", "--device", "cpu") == 0
    shown = capsys.readouterr()
    assert re.search(r"\d+ properties hold, 0 falsified, \d+ skipped; \d+ examples drawn", shown.out)
    assert "tie_rule" in shown.out
    assert "units" in shown.err
    assert "units" not in shown.out


def test_a_report_goes_to_standard_output_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("--target", "reference", "--only", "tie_rule", "--regime", "tie_rich")
    assert run("verify", *argv, "--json", "-") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["summary"] == {"holds": 1, "falsified": 0, "skipped": 0}
    assert "1 property holds, 0 falsified" in shown.err
    assert run("mutants", "--only", "causal_diagonal_lost", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["summary"] == {"killed": 1, "survived": 0}
    assert list(tmp_path.iterdir()) == []


def test_somebodys_module_is_found_where_the_command_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the worker processes too; one that cannot be imported is named, whatever it raises."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sound_kernel.py").write_text(
        "def select(scores, top_k, start, end):\n    raise RuntimeError('not today')\n"
    )
    (tmp_path / "unsound_kernel.py").write_text("def select(:\n")
    (tmp_path / "raising_kernel.py").write_text("1 / 0\n")
    assert run("verify", "--target", "sound_kernel:select", "--only", "tie_rule") == 1
    said = capsys.readouterr().out
    assert "RuntimeError: not today\nraised in select, sound_kernel.py line 2\n" in said
    for name, error in (("unsound", "SyntaxError"), ("raising", "ZeroDivisionError")):
        assert run("verify", "--target", f"{name}_kernel:select") == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"target: '{name}_kernel:select' cannot be imported: {error}" in said


def test_hytopk_holds_on_one_property(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--only", "tie_rule", "--only", "returned_scores", "--regime", "tie_rich", "--dtype", "bf16")
    assert run("verify", *argv) == 0
    assert "2 properties hold, 0 falsified, 0 skipped" in capsys.readouterr().out


def test_a_falsified_property_is_printed_once_with_its_smallest_counterexample(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("verify", "--target", "torch_topk", "--only", "nan_never_selected") == 1
    shown = capsys.readouterr().out
    assert shown.count("nan_never_selected is falsified (assertion)") == 1
    assert shown.count("again: hyscale verify --target torch_topk") == 1
    assert "also on: infinities" in shown


WRONG: list[tuple[list[str], str]] = [
    (["--bogus"], "--bogus"),
    (["stray"], "stray"),
    (["--target", "hytop"], "target: 'hytop'; allowed: hytopk, materialised"),
    (["--target", "no_such_module:f"], "no_such_module:f"),
    (["--target", "math:sqrt"], "allowed: (q, k, w, top_k, start, end"),
    (["--target", "math:nothing"], "has no function 'nothing'"),
    (["--profile", "slow"], "--profile: 'slow'; allowed: quick, ci, deep"),
    (["--device", "gpu"], "--device: 'gpu'; allowed: auto, cpu, cuda"),
    (["--only", "exactness"], "--only: 'exactness'; allowed: exact_set_of_exact_inputs"),
    (["--regime", "ties"], "--regime: 'ties'; allowed: exact_integers"),
    (["--only", "tie_rule", "--regime", "sorted"], "no chosen property is tried on sorted"),
    (["--dtype", "int8"], "--dtype: 'int8'; allowed: fp32, bf16, fp16, fp8"),
    (["--target", "torch_topk", "--dtype", "fp8"], "takes fp32"),
    (["--seed", "one"], "'one'; allowed: an integer"),
    (["--seed"], "--seed"),
    (["--jobs", "0"], "--jobs: 0; allowed: at least 1"),
    (["--jobs", "two"], "'two'; allowed: an integer"),
    (["--json", "/no/such/folder/report.json"], "its folder does not exist"),
    (["--json", "/"], "is a folder; allowed: a file name"),
    (["--json", "/proc/report.json"], "--json: /proc/report.json cannot be written"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_a_wrong_argument_of_verify_is_usage_and_named(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", *argv) == 2
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    assert shown.out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "no_such_bug"], "--only: 'no_such_bug'; allowed: causal_diagonal_lost"),
        (["--property", "no_such"], "--property: 'no_such'; allowed: exact_set_of_exact_inputs"),
        (["--property", "tie_rule", "--only", "ends_left_out"], "--property: belongs to another part"),
        (["--profile", "slow"], "--profile: 'slow'"),
        (["--device", "tpu"], "--device: 'tpu'"),
        (["--jobs", "-1"], "--jobs: -1"),
        (["--json", "/no/such/folder/m.json"], "its folder does not exist"),
        (["--target", "slab"], "--target"),
    ],
)
def test_a_wrong_argument_of_mutants_is_usage_and_named(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("mutants", *argv) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["verify", "--device", "cuda"], "device cuda: torch"),
        (["verify", "--target", "flashinfer"], "target flashinfer: needs a CUDA device"),
        (["mutants", "--device", "cuda"], "device cuda: torch"),
    ],
)
def test_what_the_machine_lacks_is_environment(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 3
    assert message in capsys.readouterr().err


def test_nothing_but_skips_is_environment_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--only", "cuda_graph") == 3
    assert "needs device cuda" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["verify", "mutants", "doctor"])
def test_help_explains_a_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    assert f"hyscale {verb}" in capsys.readouterr().out


def test_doctor_says_what_runs_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor") == 0
    shown = capsys.readouterr().out
    assert re.search(r"hyscale verify --device cpu +yes", shown)
    assert re.search(r"hyscale verify --device cuda +no +device cuda: torch .* sees no CUDA device", shown)
    assert re.search(r"hyscale profile run, race, trace +no +device cuda: torch .* sees no CUDA", shown)
    assert re.search(r"plots of hyscale profile show +yes", shown)
    assert re.search(r"hyscale simulate, explain, sweep, plan +yes", shown)
    for name in ("torch", "triton", "hypothesis", "numpy"):
        assert re.search(rf"{name} \d", shown)


def test_doctor_writes_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] == torch.__version__
    assert found["obstacles"]["hyscale verify --device cpu"] is None
    assert "sees no CUDA device" in found["obstacles"]["hyscale verify --device cuda"]


def test_doctor_without_torch_is_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    assert run("doctor") == 3
    shown = capsys.readouterr().out
    assert "no torch, so no GPU can be seen" in shown
    assert re.search(r"hyscale verify --device cpu +no +not installed: torch", shown)


def test_an_interruption_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(work: Any, jobs: int) -> Any:
        yield from (runner.run_unit(unit) for unit in work[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    path = tmp_path / "partial.json"
    assert run("verify", "--target", "reference", "--only", "tie_rule", "--json", str(path)) == 130
    rows = json.loads(path.read_text())["properties"]
    assert [row["verdict"] for row in rows[:2]] == ["holds", "holds"]
    assert {row["reason"] for row in rows[2:]} == {"interrupted before it was judged"}
    assert len(rows) == len(PROPERTIES["tie_rule"].regimes)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_its_processes_and_leaves_the_report(
    sent: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "partial.json"
    argv = ["verify", "--target", "reference", "--profile", "deep", "--seed", "1", "--json", str(path)]
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from hyscale_verify.commands import verify; raise SystemExit(verify({argv[1:]!r}))",
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        text=True,
        # What a shell starts in the background, and all that it starts, ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert "units" in process.stderr.readline()
    time.sleep(1)
    process.send_signal(sent)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; " in out
    report = json.loads(path.read_text())
    reasons = [row["reason"] for row in report["properties"]]
    assert "interrupted before it was judged" in reasons
    assert report["summary"]["falsified"] == 0


def test_mutants_reports_what_kills_a_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mutants.json"
    argv = (
        "--only",
        "ties_from_the_right",
        "--only",
        "causal_diagonal_lost",
        "--json",
        str(path),
        "--jobs",
        "1",
    )
    assert run("mutants", *argv) == 0
    report = json.loads(path.read_text())
    assert set(report) == {"mutants", "summary"}
    assert report["summary"] == {"killed": 2, "survived": 0}
    for bug in report["mutants"]:
        assert set(bug) == {"name", "stage", "description", "killed_by", "survives"}
        assert all(set(pair) == {"property", "regime"} for pair in bug["killed_by"] + bug["survives"])
    assert report["mutants"][0]["killed_by"] == [{"property": "windows_left_out", "regime": "tie_rich"}]
    assert "2 of 2 planted bugs killed" in capsys.readouterr().out


def test_bugs_are_tried_by_a_property_alone_and_the_report_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mutants.json"
    bugs = ("--only", "causal_diagonal_lost", "--only", "ends_left_out")
    assert run("mutants", *bugs, "--property", "windows_left_out", "--matrix", "--json", str(path)) == 0
    report = json.loads(path.read_text())
    assert report["properties"] == ["windows_left_out"]
    (bug,) = report["mutants"]  # the other one belongs to another part of the suite
    assert bug["name"] == "causal_diagonal_lost"
    assert {pair["property"] for pair in bug["killed_by"] + bug["survives"]} == {"windows_left_out"}


def test_a_surviving_bug_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def survive(tasks: Any, jobs: int) -> Any:
        yield from (harness.Fate(task.mutant, (), (), ()) for task in tasks)

    monkeypatch.setattr(harness, "run_mutants", survive)
    assert run("mutants", "--only", "nan_admitted") == 1
    assert "0 of 1 planted bugs killed" in capsys.readouterr().out

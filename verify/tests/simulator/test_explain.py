"""``hyscale explain`` from the command line, its JSON, and measured steps held against predictions."""

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from hyscale_simulator import validation
from hyscale_simulator.commands import validate
from hyscale_simulator.descriptions import DescriptionError
from hyscale_simulator.evaluate import evaluate
from hyscale_simulator.explain_commands import explain
from hyscale_simulator.measured_steps import compare_measured, read_steps, speedups, within
from hyscale_simulator.scenario import Scenario, load
from hyscale_simulator.validation import Comparison, KernelComparison, MemoryComparison, Validation


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The JSON and the text of one run."""
    path, text = tmp_path_factory.mktemp("explain") / "explain.json", io.StringIO()
    with contextlib.redirect_stdout(text):
        assert explain(["--json", str(path), "--samples", "8"]) == 0
    return json.loads(path.read_text(encoding="utf-8")), text.getvalue()


@pytest.fixture
def record(answer: tuple[dict[str, Any], str]) -> dict[str, Any]:
    return answer[0]


def test_the_record_has_exactly_the_promised_keys(record: dict[str, Any]) -> None:
    assert list(record) == [
        "schema", "baseline", "improved", "speedup", "speedup_low", "speedup_high", "waterfall", "shapley",
        "interactions", "critical_path", "consistent_with_claim", "claims",
    ]  # fmt: skip
    assert record["schema"] == 1
    for row in record["waterfall"]:
        assert set(row) == {"switch", "seconds"}
    for row in record["shapley"]:
        assert set(row) == {"switch", "log_share", "seconds"}
    for row in record["consistent_with_claim"]:
        assert set(row) == {"baseline", "linear_precision", "kernel_gain", "speedup"}
    for row in record["claims"]:
        assert set(row) == {"claim", "evidence", "falsified_by"}
        assert all(row.values())


def test_its_shares_and_bars_add_up(record: dict[str, Any]) -> None:
    saved = record["baseline"]["step_time_s"] - record["improved"]["step_time_s"]
    assert math.fsum(row["log_share"] for row in record["shapley"]) == pytest.approx(1, abs=1e-9)
    for bars in ("waterfall", "shapley"):
        assert math.fsum(row["seconds"] for row in record[bars]) == pytest.approx(saved, abs=1e-9)
    for which in ("baseline", "improved"):
        step = record[which]["step_time_s"]
        path = [row["seconds"] for row in record["critical_path"] if row["scenario"] == which]
        assert math.fsum(path) == pytest.approx(step, abs=1e-9)
        parts = [row["seconds"] for row in record[which]["breakdown"]]
        assert math.fsum(parts) == pytest.approx(step, abs=1e-9)


def test_the_speedup_is_within_its_band(record: dict[str, Any]) -> None:
    ratio = record["baseline"]["step_time_s"] / record["improved"]["step_time_s"]
    assert record["speedup"] == pytest.approx(ratio, rel=1e-12)
    assert record["speedup_low"] < record["speedup"] < record["speedup_high"]


def test_every_consistent_cell_is_near_the_claim(record: dict[str, Any]) -> None:
    assert all(abs(row["speedup"] / 2.07 - 1) <= 0.05 for row in record["consistent_with_claim"])


def test_the_headline_comparison_is_baseline_c_with_bf16_linears(record: dict[str, Any]) -> None:
    assert record["baseline"]["scenario"] == "baseline-C"
    preset = load("glm-5.1-1m-512xh20-baseline")
    assert record["baseline"]["scenario_hash"] == preset.hash
    assert preset.precision.linear == "bf16"


def test_the_answer_names_what_is_unknown_and_the_public_h20_figures(
    answer: tuple[dict[str, Any], str],
) -> None:
    shown = " ".join(answer[1].split())
    assert "names neither its baseline nor the precision" in shown
    assert "Replay alone stays below 2x" in shown
    assert re.search(r"at 128K .*33\.83 ms with a score table, 32\.54 without \(4 % less\)", shown)
    assert "not priced are" in shown


def test_any_two_scenarios_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    arguments = ["glm-5.1-1m-512xh20", "glm-5.1-1m-512xh20", "--samples", "2", "--json", str(path)]
    assert explain(arguments) == 0
    assert "do not differ" in capsys.readouterr().out
    assert json.loads(path.read_text(encoding="utf-8"))["speedup"] == 1.0


def test_changes_apply_to_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert explain(["E", "--set", "precision.linear=fp8", "--samples", "2", "--json", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert "linear_precision" not in [row["switch"] for row in found["shapley"]]
    assert found["consistent_with_claim"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["glm-5.1-1m-512xh20"], "compared with what?"),
        (["Z", "C"], "not shipped"),
        (["--samples", "12"], "a power of two is wanted"),
        (["--report", "missing/r.html"], "does not exist"),
        (["--report", "."], "cannot be written"),
        (["--json", "missing/r.json"], "does not exist"),
        (["--set", "layout.context=1"], "no such field"),
        (["--set", "selection.skipped_fraction=0.5"], "skips nothing"),
        (["--profiles", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_bad_input_is_one_message_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(arguments) in (2, 3)
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())
    assert captured.out == ""


# Measured steps.  The durations below are the simulator's own, altered by known factors: no measurement.


def one_gpu(replay: bool, table: bool) -> dict[str, Any]:
    base = load("glm-5.1-1m-512xh20-baseline" if table else "glm-5.1-1m-512xh20")
    changed = base.with_(**{
        "cluster": "h200-64x8", "gpus": 1, "layout.context_parallel": 1, "layout.pipeline_parallel": 1,
        "layout.expert_parallel": 1, "batch.sequence_tokens": 16384, "batch.sequences_per_step": 1,
        "model.layers": 2, "model.experts": None, "recompute.replay": replay,
    })  # fmt: skip
    return changed.model_dump(mode="json")


def line(mode: str, step_ms: float, **changes: Any) -> dict[str, Any]:
    scenario = one_gpu(mode == "hytopk+replay", mode == "materialised")
    return {
        "schema": 1, "commit": "0" * 40, "gpu": "NVIDIA H200", "gpus": 1, "sequence": 16384, "mode": mode,
        "step_ms": step_ms, "parts": {}, "peak_bytes": 10**10, "loss": 1.0,
        "config": {"scenario": scenario, "layers": 2}, **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def predicted() -> dict[str, float]:
    modes = {"materialised": (False, True), "hytopk": (False, False), "hytopk+replay": (True, False)}
    return {
        mode: evaluate(Scenario.model_validate(one_gpu(*which))).step_time_s for mode, which in modes.items()
    }


def test_errors_and_speedups_are_against_the_measurement(tmp_path: Path, predicted: dict[str, float]) -> None:
    path = tmp_path / "train_step.jsonl"
    records = [
        line(mode, 1e3 * seconds * factor)
        for (mode, seconds), factor in zip(predicted.items(), (1.0, 0.8, 0.5), strict=True)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    rows = compare_measured(path)
    assert [row.error_pct for row in rows] == pytest.approx([0.0, 25.0, 100.0])
    for row, measured, simulated in speedups(rows):
        factor = {"hytopk": 0.8, "hytopk+replay": 0.5}[row.step.mode]
        assert measured == pytest.approx(simulated / factor)


def test_speedups_are_over_the_baseline_of_the_same_split(tmp_path: Path) -> None:
    path = tmp_path / "scaling.jsonl"
    records = []
    for split, factor in (("contiguous", 2.0), ("zigzag", 4.0)):
        for mode, step_ms in (("materialised", 1000.0 * factor), ("hytopk", 1000.0)):
            record = line(mode, step_ms)
            record["config"]["scenario"]["layout"]["context_split"] = split
            records.append(record)
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    assert [measured for _, measured, _ in speedups(compare_measured(path))] == pytest.approx([2.0, 4.0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "hytopk"}, "mode = 'hytopk', but config.scenario means 'materialised'"),
        ({"gpus": 2}, "gpus = 2, but"),
        ({"sequence": 1}, "sequence = 1, but"),
        ({"gpu": "NVIDIA H20"}, "gpu = 'NVIDIA H20', but"),
        ({"step_ms": -1.0}, "step_ms"),
        ({"extra": 1}, "extra"),
        ({"config": {}}, "config.scenario"),
        ({"step_ms": 2.0, "parts": {"a": 1.0, "b": 1.1}}, "parts add up to 2.1 ms, but step_ms = 2.0"),
    ],
)
def test_a_bad_record_names_line_and_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "train_step.jsonl"
    path.write_text(json.dumps({**line("materialised", 1.0), **changes}) + "\n", encoding="utf-8")
    with pytest.raises(DescriptionError, match=re.escape(message)) as caught:
        read_steps(path)
    assert "line 1" in str(caught.value)


def test_validate_holds_measured_steps_to_their_targets(
    tmp_path: Path,
    predicted: dict[str, float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside published figures that are met: they are held to their targets in test_validation."""
    step = evaluate(load("glm-5.1-1m-512xh20"))
    published = Validation(
        [Comparison(str(s), "", True, s, 1.01 * s, step) for s in (1.0, 2.0, 3.0)],
        [MemoryComparison("m", "", 10.0, 10.0)],
        [KernelComparison("k", (1.0, 1.0), 1.0, "ms")],
    )
    monkeypatch.setattr(validation, "validate", lambda _: published)
    path, out = tmp_path / "train_step.jsonl", tmp_path / "v.json"

    def measure(factor: float, memory: float = 1.0) -> None:
        records = [
            line(mode, 1e3 * seconds * factor, peak_bytes=int(memory * peaks[mode]))
            for mode, seconds in predicted.items()
        ]
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")

    peaks = dict.fromkeys(predicted, 10**10)
    measure(1.0)
    peaks = {row.step.mode: int(row.predicted_bytes) for row in compare_measured(path)}
    measure(1.04, 0.95)
    assert within(compare_measured(path))
    assert validate(["--steps", str(path)]) == 0
    measure(1.0, 1.2)
    assert validate(["--steps", str(path)]) == 1
    measure(1.2)
    assert not within(compare_measured(path))
    assert validate(["--steps", str(path), "--json", str(out)]) == 1
    assert "speed-ups within 5 %: missed" in capsys.readouterr().out
    assert len(json.loads(out.read_text(encoding="utf-8"))["measured"]) == 3


def test_validate_refuses_a_bad_file_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train_step.jsonl"
    for text, said in (("nonsense\n", "line 1: not JSON"), ("\n", "holds no measured step")):
        path.write_text(text, encoding="utf-8")
        assert validate(["--steps", str(path)]) == 2
        captured = capsys.readouterr()
        assert said in " ".join(captured.err.split())
        assert captured.out == ""

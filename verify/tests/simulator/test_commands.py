"""The commands: schemas, exit codes, and one message for each mistake."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hyscale_simulator.commands import presets, setting, simulate, validate
from hyscale_simulator.descriptions import DescriptionError
from hyscale_simulator.evaluate import evaluate
from hyscale_simulator.scenario import load
from hyscale_simulator.validation import Comparison, KernelComparison, MemoryComparison, Validation

PRESET = ["--preset", "glm-5.1-1m-512xh20"]


def test_simulate_writes_its_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    assert simulate([*PRESET, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["schema"] == 1
    assert record.keys() == {
        "schema", "scenario", "scenario_hash", "step_time_s", "tokens_per_s_per_gpu", "mfu", "breakdown",
        "critical_path", "memory", "provenance", "coverage", "uncertainty", "warnings",
    }  # fmt: skip
    assert all(part.keys() == {"name", "seconds"} for part in record["breakdown"] + record["critical_path"])
    assert sum(part["seconds"] for part in record["breakdown"]) == pytest.approx(record["step_time_s"])
    assert record["memory"].keys() == {"peak_gib", "capacity_gib", "fits", "stage", "items", "remedies"}
    assert all(item.keys() == {"name", "gib"} for item in record["memory"]["items"])
    assert record["uncertainty"].keys() == {"low_s", "high_s"}
    assert record["provenance"].keys() == {"measured", "interpolated", "projected", "assumed"}
    assert record["uncertainty"]["low_s"] < record["step_time_s"] < record["uncertainty"]["high_s"]
    printed = capsys.readouterr().out
    assert "tokens/s/GPU" in printed
    assert "selection" in printed
    assert "fits" in printed


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(simulate, PRESET), (presets, []), (validate, ["--holdout"])],
    ids=["simulate", "presets", "validate"],
)
def test_json_to_standard_output_stands_there_alone(
    command: Callable[[list[str]], int],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command([*arguments, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)
    assert printed.err
    assert not list(tmp_path.iterdir())


def test_simulate_takes_a_file_changes_and_writes_a_trace(tmp_path: Path) -> None:
    scenario, trace, out = tmp_path / "mine.toml", tmp_path / "trace.json", tmp_path / "out.json"
    scenario.write_text(
        'name = "mine"\nmodel = "llama3-8b"\ncluster = "h200-64x8"\ngpus = 8\n'
        "[batch]\nsequence_tokens = 8192\nsequences_per_step = 16\n"
    )
    arguments = [str(scenario), "--set", "layout.tensor_parallel=2", "--set", 'recompute.policy="none"']
    assert simulate([*arguments, "--trace", str(trace), "--json", str(out), "--engine", "simpy"]) == 0
    events = json.loads(trace.read_text())
    assert len(events["traceEvents"] if isinstance(events, dict) else events) > 10
    assert json.loads(out.read_text())["scenario"] == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a scenario file or --preset NAME"),
        ([*PRESET, "mine.toml"], "give a scenario file or --preset NAME"),
        (["--preset", "glm"], "preset 'glm': not shipped; there are:"),
        (["mine.yaml"], "ends in .toml"),
        (["none.toml"], "none.toml: unreadable"),
        ([*PRESET, "--set", "layout.context_parallel"], "key=value is wanted"),
        ([*PRESET, "--set", "layout.colour=1"], "layout.colour: no such field"),
        ([*PRESET, "--set", "gpus=-1"], "gpus = -1"),
        ([*PRESET, "--set", "gpus=100000"], "gpus = 100000: the cluster"),
        ([*PRESET, "--profiles", "none.jsonl"], "none.jsonl:1: unreadable"),
        ([*PRESET, "--engine", "magic"], "--engine 'magic'"),
        (
            [*PRESET, "--set", "recompute.replay=yes"],
            "recompute.replay = 'yes': Input should be a valid boolean",
        ),
        ([*PRESET, "--set", "recompute.replay=1"], "recompute.replay = 1: Input should be a valid boolean"),
        (
            [*PRESET, "--set", 'offload.activations="0.5"'],
            "offload.activations = '0.5': Input should be a valid",
        ),
        ([*PRESET, "--set", "offload.activations=50"], "less than or equal to 1"),
        (
            [*PRESET, "--set", f"batch.sequence_tokens={10**23}"],
            "the work of a step must stay below 146 years",
        ),
        ([*PRESET, "--set", f"batch.sequences_per_step={10**9}"], "are more than 262,144 passes"),
        ([*PRESET, "--set", "overlap.communication_sms=78"], "at most 70 of the 78 SMs"),
        ([*PRESET, "--set", "layout.stage_layers=[78,0,0,0,0,0,0,0]"], "may hold no layer"),
        (
            [*PRESET, "--set", "model=glm-6"],
            "scenario glm-5.1-1m-512xh20: model: models: no 'glm-6' is shipped",
        ),
        ([*PRESET, "--set", "model={layers=1.5}"], "model.layers = 1.5: Input should be a valid integer"),
        ([*PRESET, "--set", "cluster.gpu.memory_gb=96e9"], "cluster.gpu.memory_gb = 96000000000.0"),
        ([*PRESET, "--set", "cluster.gpu.family=rubin"], "gpu H20: family = 'rubin': no sustained bf16 rate"),
        (
            [*PRESET, "--set", "cluster.gpu.nvlink.bus_gb_per_s=900.0"],
            "nvlink.bus_gb_per_s = 900.0: at most the data sheet's nvlink_gb_per_s = 450.0",
        ),
        ([*PRESET, "--trace", "step.txt"], "--trace step.txt: a file that ends in .json or .json.gz"),
        ([*PRESET, "--layer", "3"], "--layer: needs --trace FILE"),
        ([*PRESET, "--layer", "78", "--trace", "unwritten.json"], "layer = 78; the model has 0 to 77"),
        ([*PRESET, "--nonsense"], "No such option"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_description_in_place_of_a_name_is_checked_field_by_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate([*PRESET, "--set", "model={layers=78,colour=1}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "hyscale simulate: scenario glm-5.1-1m-512xh20: model.name: required, but missing"
    assert lines[-1] == "scenario glm-5.1-1m-512xh20: model.colour: unknown field (value 1)"


def test_coverage_lists_what_every_op_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    assert simulate([*PRESET, "--coverage", "--json", str(path)]) == 0
    listed = json.loads(path.read_text())["coverage"]
    assert {"hytopk", "grouped_gemm", "sparse_attention_bwd", "rmsnorm"} <= {item["op"] for item in listed}
    assert all(item["source"] and item["seconds"] >= 0 for item in listed)
    assert "% of time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--holdout", "--steps", "steps.jsonl"], "--holdout and --steps: one of them"),
        (["--profiles", "none.jsonl"], "none.jsonl:1: unreadable"),
        (["--steps", "none.jsonl"], "none.jsonl: unreadable"),
        (["--steps", "bad.jsonl"], "bad.jsonl: line 1: step_ms = -1: Input should be greater than 0"),
    ],
)
def test_a_mistake_of_validate_is_one_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"schema": 1, "step_ms": -1}\n')
    assert validate(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "pydantic" not in error


def test_an_unwritable_result_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate([*PRESET, "--json", "/nowhere/step.json"]) == 3
    assert "/nowhere/step.json" in capsys.readouterr().err


def test_help_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(["--help"]) == 0
    assert "--preset" in capsys.readouterr().out


def test_settings_are_toml_values_or_words() -> None:
    assert setting("gpus=8") == ("gpus", 8)
    assert setting("layout.stage_layers=[1, 2]") == ("layout.stage_layers", [1, 2])
    assert setting("recompute.replay=false") == ("recompute.replay", False)
    assert setting("layout.schedule=1f1b") == ("layout.schedule", "1f1b")
    with pytest.raises(DescriptionError):
        setting("=1")


def test_presets_lists_everything_shipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "presets.json"
    assert presets(["--json", str(path)]) == 0
    listed = json.loads(path.read_text())
    assert "glm-5.1-1m-512xh20-baseline" in listed["scenarios"]
    assert "743,911,199,232" in capsys.readouterr().out
    assert presets(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["Cluster"]["title"] == "Cluster"


def test_validate_holds_every_table_to_its_held_out_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, mine = tmp_path / "holdout.json", tmp_path / "mine.jsonl"
    assert validate(["--holdout", "--json", str(path)]) == 0
    assert "20 %: met" in capsys.readouterr().out
    assert all(table["within"] or not table["judged"] for table in json.loads(path.read_text())["tables"])
    header = {"schema": 1, "device": "NVIDIA H200", "op": "hytopk", "implementation": "mine", "dtype": "bf16"}
    shape = {"heads": 32, "dim": 128, "top_k": 2048, "rows": 4096}
    points = [
        {"shape": {**shape, "keys": 65536 * n}, "median_us": 9e3 if n % 2 else 1e3} for n in range(1, 9)
    ]
    mine.write_text("".join(json.dumps(line) + "\n" for line in [header, *points]))
    assert validate(["--holdout", "--profiles", str(mine)]) == 1
    assert "20 %: missed" in capsys.readouterr().out


def test_validate_writes_its_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the small sources: the whole set is held to its targets in test_validation."""
    from hyscale_simulator import validation

    few = tuple(source for source in validation.sources() if len(source.cases) <= 5)
    monkeypatch.setattr(validation, "sources", lambda: few)
    path = tmp_path / "validate.json"
    assert validate(["--json", str(path)]) in (0, 1)
    record = json.loads(path.read_text())
    assert record.keys() == {"cases", "memory", "kernels", "summary"}
    figure = {"name", "published", "predicted", "unit", "error_pct"}
    assert all(row.keys() == {*figure, "source", "compared"} for row in record["cases"])
    assert all(row.keys() == {*figure, "what"} for row in record["memory"])
    assert all(row.keys() == figure for row in record["kernels"])
    assert record["summary"].keys() == {"mape_pct", "worst_pct", "bias_pct", "spearman"}
    printed = capsys.readouterr().out
    assert "rank correlation" in printed
    assert "5 figures of memory: worst -5.9 %  (target 10: met)" in printed
    assert "7 kernels: worst" in printed


def test_validate_fails_on_memory_or_a_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from hyscale_simulator import validation

    steps = [Comparison(str(s), "", True, s, 1.01 * s, evaluate(load(PRESET[1]))) for s in (1.0, 2.0, 3.0)]
    memory, kernel = MemoryComparison("m", "", 10.0, 10.9), KernelComparison("k", (1.0, 1.0), 1.14, "ms")
    for item, figure, code in (
        (memory, kernel, 0),
        (replace(memory, predicted_gib=11.1), kernel, 1),
        (memory, replace(kernel, predicted=0.8), 1),
    ):
        found = Validation(steps, [item], [figure])
        monkeypatch.setattr(validation, "validate", lambda _, found=found: found)
        assert validate([]) == code

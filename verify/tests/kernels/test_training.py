"""Training on a CPU: the run, its text, checkpoints, two ranks, the script, and what is recorded."""

import importlib.util
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from hyscale_kernels.layer import ContextParallel
from hyscale_kernels.profiling import captured as captures
from hyscale_kernels.training import (
    PRESETS,
    CheckpointError,
    NotSavedError,
    Phase,
    RunConfig,
    StepResult,
    Text,
    Trainer,
    draw,
    library_text,
    load,
    measure,
    save,
)
from hyscale_kernels.training.measure import GIB, Baseline, best_baseline, in_turns, longest
from hyscale_kernels.training.modes import measure_modes, summarise
from hyscale_kernels.training.ranks import torchrun_group
from hyscale_kernels.training.records import MODES, append, scenario, step_record
from hyscale_simulator.measured_steps import read_steps

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
WARMUP = Phase(stage="warmup", steps=1, sequence=8, learning_rate=1e-2)
SPARSE = Phase(stage="sparse", steps=2, sequence=8, learning_rate=1e-2)
TINY = replace(PRESETS["tiny"], phases=(WARMUP, SPARSE), row_block=2)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny model is for the interpreter")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread has nothing to do for tensors this small, and waits for work at the others' expense."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text() -> Text:
    return library_text(2**16)


@pytest.fixture(scope="module")
def run(device: str, text: Text, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[StepResult], Path]:
    """A whole tiny run: its steps, and the checkpoint before the last."""
    path = tmp_path_factory.mktemp("run") / "run.pt"
    trainer, steps = Trainer(TINY, text, device), []
    while trainer.done < TINY.steps:
        if trainer.done == TINY.steps - 1:
            save(trainer, path)
        steps.append(trainer.step())
    return steps, path


def script(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / folder))
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


# The text.


def test_text_is_the_same_every_time_and_says_so(text: Text) -> None:
    again = library_text(2**16)
    assert again.sha256 == text.sha256
    assert torch.equal(again.data, text.data)
    assert text.data.shape == (2**16,)


def test_text_depends_on_every_file(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("b")
    (tmp_path / "a.py").write_text("a")
    found = library_text(folder=tmp_path)
    assert bytes(found.data.tolist()) == b"a\0b\0"
    (tmp_path / "b.py").write_text("c")
    assert library_text(folder=tmp_path).sha256 != found.sha256


def test_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.py files"):
        library_text(folder=tmp_path)


def test_a_step_sees_a_stretch_of_the_text_and_held_out_text_is_apart(text: Text) -> None:
    for held_out in (False, True):
        tokens, targets, bounds = draw(text, 64, None, seed=1, step=5, held_out=held_out)
        part = bytes(text.part(held_out).tolist())
        assert bytes(tokens.tolist()) in part
        assert bounds is None
        assert torch.equal(targets[:-1], tokens[1:])
        assert targets[-1] < 0
    assert text.part(False).shape[0] + text.part(True).shape[0] == text.data.shape[0]
    assert not torch.equal(
        draw(text, 64, None, seed=1, step=6).tokens, draw(text, 64, None, seed=1, step=5).tokens
    )


def test_documents_end_where_they_are_cut(text: Text) -> None:
    batch = draw(text, 64, 16, seed=0, step=0)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 16, 32, 48, 64]
    assert (batch.targets.view(4, 16)[:, -1] < 0).all()


@pytest.mark.parametrize(
    ("sequence", "document", "message"),
    [(64, 48, "document: 48"), (2**20, None, "sequence: 1048576"), (2**20, 2**19, "document: 524288")],
)
def test_a_sequence_that_the_text_cannot_fill(
    text: Text, sequence: int, document: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        draw(text, sequence, document, seed=0, step=0)


# The configuration.


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_configuration_survives_its_record(name: str) -> None:
    config = PRESETS[name]
    assert RunConfig.from_json(json.loads(json.dumps(config.as_json()))) == config


def test_phases_come_one_after_the_other() -> None:
    assert [TINY.place(step) for step in range(3)] == [(WARMUP, 0), (SPARSE, 0), (SPARSE, 1)]
    with pytest.raises(IndexError):
        TINY.place(3)


def test_a_head_count_that_no_kernel_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="heads of tiny is 200; allowed: 1 to 128"):
        replace(TINY, shape=replace(TINY.shape, heads=200))


@pytest.mark.parametrize(("sequence", "ranks"), [(18, 2), (4, 8), (7, 2)])
def test_a_sequence_that_ranks_cannot_share_is_refused(text: Text, sequence: int, ranks: int) -> None:
    config = replace(TINY, phases=(replace(SPARSE, sequence=sequence),))
    context = ContextParallel(None, "zigzag", ranks, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"num_positions: {sequence}; allowed for {ranks} rank"):
        Trainer(config, text, CPU, context)


# Steps.


def test_a_run_goes_through_its_stages_and_accounts_for_its_time(run: tuple[list[StepResult], Path]) -> None:
    steps, _ = run
    assert [step.stage for step in steps] == ["warmup", "sparse", "sparse"]
    for step in steps:
        assert sum(step.parts.values()) == pytest.approx(step.step_ms)
        assert step.kl[0] > 0
        assert step.kl[1] == 0  # it shares the first layer's selection
    assert {"selection.forward", "selection.recompute", "attention.backward"} <= steps[2].parts.keys()


def test_both_stages_learn(text: Text) -> None:
    few = Text(text.data[:8].clone(), "", 1, "")  # every step sees the same sequence
    config = replace(TINY, recompute="none", phases=(replace(WARMUP, steps=20), SPARSE))
    trainer = Trainer(config, few, CPU)
    steps = [trainer.step() for _ in range(22)]
    assert steps[19].kl[0] < 0.5 * steps[0].kl[0]
    assert steps[19].loss == steps[0].loss  # the warm-up stage moves nothing but the indexer
    assert steps[21].loss < steps[20].loss


@pytest.mark.parametrize("selection", ["hytopk", "own-table"])
def test_without_replay_and_from_a_table_every_loss_is_the_same(
    text: Text, run: tuple[list[StepResult], Path], selection: Any
) -> None:
    trainer = Trainer(replace(TINY, recompute="full", selection=selection), text, CPU)
    for kept in run[0][:2]:
        step = trainer.step()
        assert (step.loss, step.kl, step.gradient_norm) == (kept.loss, kept.kl, kept.gradient_norm)


def test_a_resumed_run_is_the_same_run(text: Text, run: tuple[list[StepResult], Path]) -> None:
    steps, path = run
    longer = replace(TINY, phases=(WARMUP, replace(SPARSE, steps=9)))  # it may be prolonged
    trainer = Trainer(longer, text, CPU)
    load(trainer, path)
    step = trainer.step()
    assert (step.step, step.loss, step.kl, step.gradient_norm) == (
        steps[2].step, steps[2].loss, steps[2].kl, steps[2].gradient_norm,
    )  # fmt: skip


def test_a_loss_that_is_not_finite_stops_the_run_and_moves_nothing(text: Text) -> None:
    trainer = Trainer(replace(TINY, phases=(WARMUP,)), text, CPU)
    with torch.no_grad():
        trainer.model.embedding.fill_(float("nan"))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(FloatingPointError, match=r"step 1: .*not finite"):
        trainer.step()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value.nan_to_num(0), before[name].nan_to_num(0))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert trainer.done == 0


# Checkpoints.


def test_another_configuration_is_refused_field_by_field(
    text: Text, run: tuple[list[StepResult], Path]
) -> None:
    other = replace(TINY, seed=7, phases=(WARMUP, replace(SPARSE, learning_rate=0.5)))
    trainer = Trainer(other, text, CPU)
    with pytest.raises(CheckpointError) as caught:
        load(trainer, run[1])
    message = str(caught.value)
    assert "phases.1.learning_rate: 0.01 in the checkpoint, 0.5 here" in message
    assert "seed: 0 in the checkpoint, 7 here" in message
    assert "mlp" not in message
    assert trainer.done == 0


def test_another_text_or_number_of_ranks_is_refused(text: Text, run: tuple[list[StepResult], Path]) -> None:
    trainer = Trainer(TINY, replace(text, sha256="other"), CPU)
    trainer.context = ContextParallel(None, "zigzag", 2, 0)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"ranks: 1 in the checkpoint, 2 here.*text_sha256: "):
        load(trainer, run[1])


@pytest.mark.parametrize("damage", ["missing", "cut", "text", "other", "hollow"])
def test_a_checkpoint_that_is_none(
    text: Text, run: tuple[list[StepResult], Path], tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "run.pt"
    if damage == "cut":
        path.write_bytes(run[1].read_bytes()[:1000])
    elif damage == "other":
        torch.save({"weights": 1}, path)
    elif damage == "hollow":
        torch.save({"schema": 1, "step": "3"}, path)
    elif damage == "text":
        path.write_text("not an archive")
    with pytest.raises(CheckpointError, match=r"run\.pt: (there is no|not a)"):
        load(Trainer(TINY, text, CPU), path)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process can grow beyond ``size`` bytes: what a full disk looks like."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_earlier_checkpoint_alone(
    text: Text, run: tuple[list[StepResult], Path], tmp_path: Path
) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(run[1].read_bytes())
    with (
        file_limit(10_000),
        pytest.raises(NotSavedError, match=r"run\.pt: not saved: .*Free space for about .*earlier"),
    ):
        save(Trainer(TINY, text, CPU), path)
    assert path.read_bytes() == run[1].read_bytes()
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(NotSavedError, match=r"gone/run\.pt: not saved: No such file or directory$"):
        save(Trainer(TINY, text, CPU), tmp_path / "gone" / "run.pt")


# The script.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "200"], "heads of tiny is 200"),
        (["--layers", "3"], "layers: 3; allowed for tiny: 1 to 2"),
        (["--context-parallel", "2"], "no process group of that size, it was not started by torchrun"),
        (["--selection", "materialised", "--recompute", "full+replay"], "'full+replay' with selection"),
        (["--resume", "nowhere.pt"], "nowhere.pt: there is no checkpoint"),
        (["--sequence", "100000"], "sequence: 100000; allowed with this text"),
        (["--save", "nowhere/run.pt"], "nowhere/run.pt; its folder does not exist"),
        (["--jsonl", "nowhere/log.jsonl"], "nowhere/log.jsonl; its folder does not exist"),
        (["--save-every", "1"], "needs --save"),
    ],
)
def test_the_script_says_what_is_wrong(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    train = script("examples", "train_dsa", monkeypatch)
    found = CliRunner().invoke(train.app, ["--device", "cpu", *options])
    assert found.exit_code == 2
    assert message in found.stderr


def test_a_run_that_diverges_fails_and_one_that_is_done_is_saved_again(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, first, again = script("examples", "train_dsa", monkeypatch), tmp_path / "a.pt", tmp_path / "b.pt"
    monkeypatch.setitem(PRESETS, "tiny", TINY)

    def ask(*options: str) -> Any:
        return CliRunner().invoke(train.app, ["--device", "cpu", *options])

    diverged = ask("--warmup-steps", "0", "--learning-rate", "1e30")
    assert (diverged.exit_code, "not finite" in diverged.stderr) == (1, True)
    assert ask("--save", str(first)).exit_code == 0
    done = ask("--resume", str(first), "--save", str(again))
    assert (done.exit_code, done.stdout) == (0, "")
    assert f"nothing left to train: {first} is of the last step, 3" in done.stderr
    assert torch.load(again, weights_only=True)["step"] == 3
    short = ask("--resume", str(first), "--steps", "1")
    assert short.exit_code == 2
    assert "is of step 3, and the run ends at step 2: give more --steps" in short.stderr


def test_torchrun_must_have_started_as_many_ranks_as_asked_for() -> None:
    with (
        pytest.raises(RuntimeError, match=r"over 4 rank.*WORLD_SIZE is 1"),
        torchrun_group("cpu", "zigzag", 4, {"WORLD_SIZE": "1"}),
    ):
        pass


def test_two_ranks_train_as_one(run: tuple[list[StepResult], Path], tmp_path: Path) -> None:
    log, checkpoint = tmp_path / "log.jsonl", tmp_path / "run.pt"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(ROOT / "examples" / "train_dsa.py"), "--device", "cpu", "--preset", "tiny", "--warmup-steps", "1",
        "--steps", "1", "--sequence", "8", "--row-block", "2", "--context-parallel", "2",
        "--recall-every", "2", "--jsonl", str(log), "--save", str(checkpoint),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    header, *steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert header["ranks"] == 2
    assert header["shape"]["name"] == "tiny"
    for step, alone in zip(steps, run[0], strict=False):
        assert step["loss"] == pytest.approx(alone.loss, rel=1e-5)
        assert step["kl"] == pytest.approx(alone.kl, rel=1e-4)
        assert step["gradient_norm"] == pytest.approx(alone.gradient_norm, rel=1e-4)
    assert "communication.forward" in steps[-1]["parts"]
    recall = steps[-1]["recall"]["layer 0"]
    assert 0 < recall["selected"] <= recall["best"] <= 1
    assert torch.load(checkpoint, weights_only=True)["step"] == 2


# What is recorded.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", ["glm", "small"])
def test_a_record_is_what_the_simulator_reads(mode: Any, preset: str, tmp_path: Path) -> None:
    config = PRESETS[preset]
    path = tmp_path / "train_step.jsonl"
    for split, baseline in (("zigzag", "materialised"), ("contiguous", "deepgemm+flashinfer")):
        fields = scenario(config, mode, sequence=131072, gpus=2, split=split, baseline=baseline)  # type: ignore[arg-type]
        record = step_record(
            commit="", gpu="NVIDIA H200", gpus=2, sequence=131072, mode=mode, step_ms=1.0,
            parts={"selection.forward": 1.0}, peak_bytes=1, loss=5.0, config={"scenario": fields},
        )  # fmt: skip
        append(path, record)
    for step, read in read_steps(path):
        assert step.mode == mode
        assert read.layout.context_parallel == 2
        assert read.model_description.layers == config.shape.layers
        assert read.model_description.indexer is not None
        assert read.model_description.indexer.top_k == 2048


def test_a_record_needs_its_scenario() -> None:
    with pytest.raises(ValueError, match="without 'scenario'"):
        step_record(
            commit="", gpu="cpu", gpus=1, sequence=1, mode="hytopk", step_ms=1.0, parts={}, peak_bytes=1,
            loss=1.0, config={},
        )  # fmt: skip


def result(ms: float, **parts: float) -> StepResult:
    parts = {**parts, "other": ms - sum(parts.values())}
    return StepResult(
        step=1, stage="sparse", sequence=8, loss=ms, kl=[], gradient_norm=1.0, learning_rate=1.0, step_ms=ms,
        parts={name.replace("_", "."): each for name, each in parts.items()}, peak_bytes=int(ms),
    )  # fmt: skip


def test_a_summary_is_of_the_median_step_as_its_slowest_rank_saw_it() -> None:
    steps = [
        [result(10, selection_forward=2, communication_forward=5), result(12, selection_forward=6)],
        [result(30, selection_forward=2, communication_forward=5), result(20, selection_forward=6)],
        [result(11, selection_forward=2, communication_forward=5), result(14, selection_forward=6)],
    ]
    found = summarise(steps)
    assert (found.step_ms, found.loss, found.peak_bytes) == (14, 14, 30)
    assert sum(found.parts.values()) == 14
    assert found.samples_ms == [12, 30, 14]
    assert found.communication_ms == [5, 0]
    assert found.imbalance["selection.forward"] == pytest.approx(6 / 4)
    with pytest.raises(ValueError, match="samples: none"):
        summarise([])


def test_steps_are_measured_on_the_same_parameters_and_text(text: Text, device: str) -> None:
    trainer = Trainer(replace(TINY, phases=(SPARSE,)), text, device)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    table = Baseline("own-table", 2**20, {})  # of the scores that HyTopK ranks
    found = measure_modes(trainer, SPARSE, MODES, table, warmups=0, rounds=1)
    assert list(found) == list(MODES)
    assert len({each.loss for each in found.values()}) == 1  # type: ignore[union-attr]
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_modes_take_turns_and_one_that_runs_out_of_memory_leaves() -> None:
    order: list[str] = []

    def call(name: str) -> str:
        order.append(name)
        if name == "b" and len(order) > 3:
            raise torch.OutOfMemoryError("too much\nand more")
        return name

    calls = {name: (lambda name=name: call(name)) for name in "abc"}
    turns = in_turns(calls, warmups=1, rounds=2, device=CPU)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a"]
    assert turns.samples == {"a": ["a", "a"], "c": ["c", "c"]}
    assert turns.faults == {"b": "out of memory: too much"}


@pytest.mark.parametrize("really", [700, 1000, 1400])
def test_the_longest_sequence_is_predicted_then_tried(really: int) -> None:
    """Memory is 100 + length up to there; what does not fit is seen to fail."""
    found, tried = longest(
        lambda length: 100 + length if length <= really else None, start=64, unit=8, capacity=1100, limit=9999
    )
    assert found <= min(really, 1000)
    assert found > 0.75 * min(really, 1000)
    assert len(tried) <= 6
    assert found % 8 == 0


def test_nothing_fits_when_the_first_length_does_not() -> None:
    assert longest(lambda length: None, start=64, unit=8, capacity=1, limit=99)[0] == 0


def test_the_best_way_to_materialise_is_one_that_was_tried() -> None:
    layer = TINY.decoder().layer
    found = best_baseline(layer, 64, CPU, tables=(2**12, 2**20))
    assert isinstance(found, Baseline)
    assert found.selection == "materialised"
    assert found.table_bytes in (2**12, 2**20)
    assert len(found.tried) == 2


def test_a_way_to_materialise_far_behind_the_best_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rival, torch_ = "deepgemm+flashinfer", "materialised"
    took = {  # ms of each run
        (rival, GIB): [50.0, 2.0, 3.0], (rival, 2 * GIB): [8.0],
        (torch_, GIB): [7.9, 1.5, 9.0], (torch_, 2 * GIB): [6.1],
    }  # fmt: skip

    def timed(call: Any, device: torch.device) -> float:
        config = call.args[0]
        return took[config.selection, config.table_bytes].pop(0)

    monkeypatch.setattr(measure, "_timed", timed)
    monkeypatch.setattr(measure.importlib.util, "find_spec", lambda name: name)  # both are installed
    layer = replace(TINY, indexer_dtype="fp8").decoder().layer
    found = best_baseline(layer, 64, CPU, tables=(GIB, 2 * GIB))
    assert found.tried == {
        f"{rival}, table of 1 GiB": 2.0, f"{rival}, table of 2 GiB": 8.0,
        "torch, table of 1 GiB": 1.5, "torch, table of 2 GiB": 6.1,
    }  # fmt: skip
    assert (found.selection, found.table_bytes) == (torch_, GIB)
    assert not any(took.values())


# The scripts that measure.


def test_a_layer_is_measured_in_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    gains = script("benchmarks", "layer_gains", monkeypatch)
    options = ["--model", "tiny", "--device", "cpu", "--tokens", "8", "--only", "hytopk+replay"]
    found = CliRunner().invoke(
        gains.app, [*options, "--rounds", "1", "--warmups", "0", "--out", str(tmp_path), "--commit", "test"]
    )
    assert found.exit_code == 0, found.output
    record = json.loads((tmp_path / "layer_gains.jsonl").read_text())
    assert record["mode"] == "hytopk+replay"
    assert sum(record["parts"].values()) == pytest.approx(record["ms"])
    assert {"selection.forward", "selection.recompute", "attention.backward"} <= record["parts"].keys()
    assert record["config"]["layer"]["recompute"] == "full+replay"


def test_an_indexer_is_trained_and_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    train = script("benchmarks", "trained_indexer", monkeypatch)
    data = tmp_path / "indexer.npz"
    options = ["--tiny", "--device", "cpu", "--most-steps", "1", "--every", "1", "--data", str(data)]
    found = CliRunner().invoke(train.app, [*options, "--out", str(tmp_path), "--commit", "test"])
    record = json.loads((tmp_path / "trained_indexer.jsonl").read_text())
    assert found.exit_code == (0 if record["holds"] else 1), found.output
    assert record["holds"] == (record["kl_end_over_start"] <= 0.5)
    assert record["steps"] == {"dense": 1, "warmup": 1, "sparse": 1}
    seen = captures.read(data)
    assert seen.provenance["run"]["text_sha256"] == record["run"]["text_sha256"]
    assert seen.layers[0].positions.tolist() == [4, 5, 6, 7]
    assert seen.layers[0].k.values.shape == (8, 16)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("train_dsa", ["--preset", "glm"], "--preset glm needs a GPU"),
        ("train_dsa", ["--preset", "small", "--device", "cpu"], "--preset small needs a GPU"),
        ("train_dsa", ["--device", "cuda"], "--device cuda needs a GPU"),
        ("train_step", [], "--preset glm needs a GPU"),
        ("train_step", ["--preset", "small", "--device", "cpu"], "--preset small needs a GPU"),
        ("train_step", ["--gpus", "2", "--device", "cuda"], "--preset glm needs 2 GPUs"),
        ("layer_gains", [], "--model deepseek-v3.2 needs a GPU"),
        (
            "layer_gains",
            ["--model", "tiny", "--model", "glm-5.1", "--device", "cpu"],
            "--model glm-5.1 needs",
        ),
        ("layer_gains", ["--model", "tiny", "--device", "cuda"], "--device cuda needs a GPU"),
        ("trained_indexer", ["--device", "cpu"], "the model without --tiny needs a GPU"),
        ("scaling", ["--ranks", "2"], "the model without --tiny needs 2 GPUs"),
    ],
)
def test_without_a_gpu_what_needs_one_says_so_in_a_line_and_is_not_run_on_the_cpu(
    name: str, options: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = script("examples" if name == "train_dsa" else "benchmarks", name, monkeypatch)
    found = CliRunner().invoke(module.app, options)
    assert found.exit_code == 3, found.output
    assert found.output.count("\n") == 1
    assert said in found.output


def test_a_script_takes_the_gpus_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = script("benchmarks", "devices", monkeypatch)
    assert devices.MODES == MODES
    for name in (*devices.FIXED, *devices.USUAL, "TRITON_INTERPRET"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # put back when the test ends
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.prepare(None, needs="glm", gpus=2) == "cuda"
    assert devices.prepare(None) == "cuda"
    assert devices.prepare("cpu") == "cpu"
    for device in (None, "cuda"):
        with pytest.raises(typer.Exit):
            devices.prepare(device, gpus=4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices.prepare(None) == "cpu"
    assert os.environ["TRITON_INTERPRET"] == "1"


# Scaling.


def test_scaling_measures_each_step_once_and_the_most_telling_first(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = script("benchmarks", "scaling", monkeypatch)
    found = scaling.jobs((1, 2, 4, 8), 65536, 131072, ("zigzag", "contiguous"))
    assert tuple(found[0][:3]) == (8, 524288, "zigzag")
    keys = [tuple(job[:3]) for job in found]
    assert len(set(keys)) == len(keys)
    wanted = {(size, 65536 * size, "zigzag") for size in (1, 2, 4, 8)}
    wanted |= {(size, 131072, "zigzag") for size in (1, 2, 4, 8)}
    wanted |= {(size, sequence, "contiguous") for size, sequence, _ in wanted if size > 1}
    assert set(keys) == wanted
    assert {job.kind for job in found if job.ranks == 2} == {"weak and strong"}


@pytest.mark.slow
def test_scaling_runs_dry_on_two_ranks(tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "benchmarks" / "scaling.py"), "--tiny", "--device", "cpu", "--ranks", "2",
        "--weak", "4", "--strong", "8", "--split", "zigzag", "--only", "hytopk+replay", "--warmups", "0",
        "--rounds", "1", "--out", str(tmp_path), "--commit", "test",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "scaling.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["gpus"], record["sequence"], record["mode"]) == (2, 8, "hytopk+replay")
    assert sum(record["parts"].values()) == pytest.approx(record["step_ms"])
    assert len(record["config"]["communication_ms"]) == 2
    assert record["config"]["scaling"] == "weak and strong"

"""Measured steps are priced as they ran: the same products and parts as the trainer's, counted as it runs."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest

from hyscale_ref.profile import ProfileError, ProfilePoint, as_shape, write_profile
from hyscale_simulator.descriptions import find
from hyscale_simulator.evaluate import evaluator
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.kernels import kernel
from hyscale_simulator.measured_steps import compare_measured, executed, part_of, within
from hyscale_simulator.profiles import Profiles
from hyscale_simulator.scenario import Scenario
from hyscale_simulator.work import Communicate, Compute, Item

# One step of the tiny preset in Triton's interpreter, every matrix product counted by its sizes.
TRAINER = """
import json
from collections import Counter
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyscale_kernels.training import PRESETS, Phase, Trainer, library_text, retargeted
from hyscale_kernels.training.records import layer_options, scenario
from hyscale_verify.interpreter import quicken


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            *batch, m, k = args[0].shape
            self.found[str([*(batch or [1]), *sorted((m, k, args[1].shape[-1]))])] += 1
        return function(*args, **(kwargs or {}))


quicken()
torch.set_num_threads(1)
phase = Phase(stage="sparse", steps=1, sequence=8, learning_rate=1e-2)
config = replace(PRESETS["tiny"], phases=(phase,), row_block=2)
trainer = Trainer(config, library_text(2**16), "cpu")
own, found = trainer.model, {}
for mode in ("hytopk", "hytopk+replay"):
    trainer.model = retargeted(own, **layer_options(mode, "materialised", 2**20))
    with Products() as products:
        step = trainer.step(phase, 0)
    found[mode] = {
        "products": products.found, "parts": list(step.parts), "run": trainer.identity(),
        "scenario": scenario(config, mode, sequence=8, gpus=1),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def trainer() -> dict[str, Any]:
    """What the trainer ran, by mode."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", TRAINER], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def items(ran: dict[str, Any]) -> list[Item]:
    scenario = executed(Scenario.model_validate(ran["scenario"]), ran["run"])
    return [item for item, _ in evaluator().items(scenario)]


@pytest.mark.parametrize("mode", ["hytopk", "hytopk+replay"])
def test_every_product_of_the_trainer_is_priced_as_often_as_it_runs(
    mode: str, trainer: dict[str, Any]
) -> None:
    ours: Counter[str] = Counter()
    for item in items(trainer[mode]):
        if isinstance(item, Compute) and item.call.op in ("gemm", "batched_gemm"):
            shape = dict(item.call.shape)
            ours[str([shape.get("batch", 1), *sorted(shape[axis] for axis in "mnk")])] += item.count
    assert ours == Counter(trainer[mode]["products"])


@pytest.mark.parametrize("mode", ["hytopk", "hytopk+replay"])
def test_the_parts_are_those_of_the_trainers_timer(mode: str, trainer: dict[str, Any]) -> None:
    assert {part_of(item) for item in items(trainer[mode])} == set(trainer[mode]["parts"])


# The large model, as benchmarks/train_step.py records it.

GLM = {
    "name": "glm-5.1-2-layers", "source": "test", "layers": 2, "hidden": 6144, "vocabulary": 256,
    "feed_forward": 12288,
    "attention": {"kind": "latent", "heads": 64, "q_rank": 2048, "kv_rank": 512, "nope_dim": 192,
                  "rope_dim": 64, "value_dim": 256},
    "indexer": {"heads": 32, "head_dim": 128, "top_k": 2048},
}  # fmt: skip
SELECTIONS = {
    "materialised": {"table": True, "scorer": "deepgemm", "selector": "flashinfer", "scoring_dtype": "fp8",
                     "table_rows": 32768},
    "hytopk": {"table": False, "scoring_dtype": "fp8"},
    "hytopk+replay": {"table": False, "scoring_dtype": "fp8", "record": "packed"},
}  # fmt: skip


def measured(mode: str, gpus: int = 1, tokens: int = 65536) -> Scenario:
    fields = {
        "name": mode, "model": GLM, "cluster": "h200-64x8", "gpus": gpus,
        "layout": {"context_parallel": gpus, "zero_stage": 0},
        "batch": {"sequence_tokens": tokens, "sequences_per_step": 1},
        "selection": SELECTIONS[mode], "recompute": {"policy": "full", "replay": "replay" in mode},
        "overlap": {"context": False, "gradients": False, "parameters": False},
    }  # fmt: skip
    return executed(Scenario.model_validate(fields), {"row_block": 4096})


def named(mode: str, phase: str, **changes: Any) -> Counter[str]:
    """How often each kernel of the step's ``phase`` runs, by op."""
    found: Counter[str] = Counter()
    for item, _ in evaluator().items(measured(mode, **changes)):
        if isinstance(item, Compute) and item.kind.startswith(f"{phase}/"):
            found[item.call.op] += item.count
    return found


@pytest.mark.parametrize("mode", SELECTIONS)
@pytest.mark.parametrize("gpus", [1, 2])
def test_the_items_of_a_step_add_up_to_it(mode: str, gpus: int) -> None:
    scenario = measured(mode, gpus)
    found = evaluator().items(scenario)
    assert sum(ns for _, ns in found) == evaluator()(scenario).step_ns
    assert any(isinstance(item, Communicate) and ns for item, ns in found) == (gpus > 1)


def test_each_mode_selects_as_often_as_it_says() -> None:
    for phase in ("forward", "recompute"):
        assert named("materialised", phase)["index_select"] == 4  # two layers, tables of two blocks
        assert named("materialised", phase)["index_order"] == 2
        assert named("hytopk", phase)["hytopk"] == 2
    assert named("hytopk+replay", "forward")["hytopk"] == 2
    assert named("hytopk+replay", "recompute")["hytopk"] == 0
    # The record is all that selection hands on: it is unpacked in both passes.
    assert [named("hytopk+replay", phase)["record_decode"] for phase in ("forward", "recompute")] == [2, 2]
    assert named("hytopk+replay", "forward")["record_encode"] == 2


@pytest.mark.parametrize("mode", SELECTIONS)
def test_every_pass_forward_quantises_and_runs_the_loss(mode: str) -> None:
    for phase in ("forward", "recompute"):
        found = named(mode, phase)
        assert [found[op] for op in ("quantise_rows", "attention_mass", "indexer_loss")] == [2, 2, 2]


def test_rows_that_a_block_does_not_fill_are_a_product_of_their_own() -> None:
    scenario = measured("hytopk", tokens=10000)
    rows = Counter[int]()
    for item, _ in evaluator().items(scenario):
        if isinstance(item, Compute) and item.name == "out" and item.kind.startswith("forward/"):
            rows[dict(item.call.shape)["m"]] += item.count
    assert rows == {4096: 2 * 2, 10000 - 2 * 4096: 2}


def test_without_the_trainers_configuration_a_record_is_taken_as_its_scenario_says() -> None:
    scenario = measured("hytopk").with_(**{"kernels.framework": "fused"})
    assert executed(scenario, None) is scenario


def test_a_selector_that_is_told_where_rows_start_is_priced_so() -> None:
    told = measured("materialised").with_(**{"selection.row_starts": True})

    def topk(scenario: Scenario) -> int:
        found = evaluator().items(scenario)
        return sum(ns for item, ns in found if item.name == "select.topk")

    assert 1.4 < topk(told) / topk(measured("materialised")) < 2.0


# Collectives of the very machine.


def exchange(us: float, size: int, device: str = "NVIDIA H200", **changes: Any) -> ProfilePoint:
    shape = as_shape({"ranks": 2, "bytes": size})
    return changed(
        ProfilePoint(
            op="all_reduce", implementation="nccl", dtype="bf16", shape=shape, device=device, median_us=us
        ),
        **changes,
    )


def test_measured_collectives_go_before_the_public_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write_profile(path, [exchange(1e9, 2**34)])
    scenario = measured("hytopk", gpus=2)

    def reduced(profiles: tuple[str, ...]) -> int:
        found = evaluator(profiles).items(scenario)
        return sum(ns for item, ns in found if isinstance(item, Communicate) and item.group == "data")

    assert reduced((str(path),)) > 10 * reduced(())


def test_collectives_belong_to_one_device_and_need_their_sizes() -> None:
    h200, h20 = _gpus("h200", "h20")
    profiles = Profiles([exchange(10.0, 2**20), exchange(90.0, 2**28)], [h200, h20])
    (table,) = profiles.collectives(h200)
    assert (table.op, table.ranks, table.num_bytes) == ("all_reduce", 2, (2**20, 2**28))
    assert profiles.collectives(h20) == ()
    with pytest.raises(ProfileError, match="all_reduce: shape has no 'bytes'"):
        Profiles([exchange(1.0, 1, shape=as_shape({"ranks": 2}))], [h200])


def _gpus(*names: str) -> list[Gpu]:
    return [find(Gpu, "gpus", name) for name in names]


# Selections spread over more keys.


def test_a_selections_spread_is_read_from_the_shape_or_the_regime() -> None:
    shape = {"rows": 8192, "heads": 64, "qk_dim": 576, "v_dim": 512, "top_k": 2048}
    near = ProfilePoint(
        op="sparse_attention", implementation="mine", dtype="bf16", shape=as_shape(shape),
        device="NVIDIA H200", median_us=8000.0,
    )  # fmt: skip
    far = changed(near, regime="1048576 keys", median_us=16000.0)
    (table,) = Profiles([near, far], _gpus("h200")).tables()

    def us(**keys: int) -> float:
        return table.lookup(kernel("sparse_attention", "bf16", **shape, **keys)).us

    assert [us(), us(keys=65536), us(keys=1048576)] == [8000.0, 8000.0, 16000.0]
    # On the scale of square roots 512 is a third of the way from 256 to 1024.
    assert us(keys=262144) == pytest.approx(8000.0 * 2 ** (1 / 3), rel=1e-6)


RECORDED = Path(__file__).parents[3] / "benchmarks" / "results" / "train_step.jsonl"


@pytest.mark.skipif(not RECORDED.exists(), reason=f"no measured steps: {RECORDED.name}")
def test_measured_steps_are_predicted_from_kernel_profiles() -> None:
    """Each step within 10 %, each speed-up within 5 %; attention, half of a step, within 10 % by itself; peak
    memory within 2 %."""
    rows = compare_measured(RECORDED)
    assert len(rows) >= 6
    assert within(rows), [(row.step.mode, row.step.sequence, row.error_pct) for row in rows]
    for row in rows:
        parts = {name: (measured, predicted) for name, measured, predicted in row.parts()}
        for name in ("attention.forward", "attention.backward"):
            took, expected = parts[name]
            assert expected == pytest.approx(took, rel=0.1), (row.step.mode, name)
        assert sum(row.predicted_parts.values()) == pytest.approx(1e3 * row.predicted_s)
        assert row.predicted_bytes == pytest.approx(row.step.peak_bytes, rel=0.02)

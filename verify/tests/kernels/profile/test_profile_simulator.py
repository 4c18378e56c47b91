"""What a run writes, the simulator reads as it stands: exact points, interpolation, a whole training step."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyscale_kernels.profiling.ceilings import NOMINAL
from hyscale_kernels.profiling.measure import measure, shared
from hyscale_kernels.profiling.op import Draw, Entry, Work
from hyscale_kernels.profiling.ops import ALL
from hyscale_kernels.profiling.suites import suite
from hyscale_ref.profile import ProfileWriter, read_profile, write_profile
from hyscale_simulator.descriptions import DATA, find
from hyscale_simulator.durations import Prices
from hyscale_simulator.evaluate import Evaluator
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.kernels import OPS, kernel
from hyscale_simulator.profiles import load_profiles
from hyscale_simulator.scenario import load

SLOWNESS = 2.0  # of every pretended kernel, against its floor


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The glm-5.1 suite as a run on an H200 writes it, every kernel at half of its floor's rate."""
    from hyscale_kernels.profiling.machine import Conditions, Measurement

    class Machine:
        device = "cpu"
        conditions = Conditions(name="NVIDIA H200", serial="77", commit="abc")

        def time(self, works: list[Work], seconds: float) -> Measurement:
            us = works[0].call()
            return Measurement([us / 1e3] * 5, 0)  # type: ignore[operator]

        def clock_mhz(self) -> float:
            return 1980.0

    path = tmp_path_factory.mktemp("profile") / "mine.jsonl"
    machine: Any = Machine()
    plain = [op for op in ALL if not op.needs or op.needs[0].startswith("hyscale")]
    with ProfileWriter(path, shared(machine)) as sink:
        for entry in suite("glm-5.1", [op for op in plain if op.family != "collectives"]):
            floor = NOMINAL.floor_s(entry.op.cost(entry.shape), entry.op.dtype) or 1e-6

            def build(inputs: Draw, shape: Mapping[str, int], us: float = SLOWNESS * floor * 1e6) -> Work:
                return Work(lambda: us)

            sink.add(measure(Entry(replace(entry.op, build=build), entry.shape), machine, NOMINAL))
    return path


def test_every_point_is_measured_and_own(profile: Path) -> None:
    points = read_profile(profile)
    assert len(points) >= 600
    assert {(point.status, point.source, point.device) for point in points} == {("ok", "", "NVIDIA H200")}
    assert {round(point.ceiling_fraction or 0, 2) for point in points if point.ceiling_fraction} == {0.5}


def test_a_measured_shape_comes_back_exactly(profile: Path) -> None:
    prices = Prices(load_profiles((str(profile),)), find(Gpu, "gpus", "h200"))
    known = 0
    seen = set()
    for point in read_profile(profile):
        if point.op not in OPS:
            continue
        call = kernel(point.op, point.dtype, point.implementation, point.regime, **dict(point.shape))
        found = prices(call)
        assert found.how == "measured", call
        same = (
            point.op,
            point.dtype,
            point.regime,
            point.shape,
        )  # a library's name does not tell GEMMs apart
        if same not in seen:
            assert found.us == point.median_us, call
        seen.add(same)
        known += 1
    assert known >= 500


def test_a_training_step_is_priced_from_them(profile: Path) -> None:
    """On the GPU that was measured, nothing is projected, and only what no kernel stands for is assumed."""
    scenario = load("glm-5.1-1m-512xh20").model_copy(update={"cluster": "h200-64x8"})
    found = Evaluator((str(profile),))
    result = found(scenario)
    assert result.timeline is not None
    gpu = find(Gpu, "gpus", "h200")
    known = found._prices[gpu.model_dump_json()]._known
    hows: dict[str, set[str]] = {}
    for call, duration in known.items():
        hows.setdefault(duration.how, set()).add(call.op)
    assert "projected" not in hows
    assert hows["assumed"] <= {"accumulate", "index_loss_bwd", "index_target"}
    assert "hytopk" in hows["measured"]
    priced = hows["measured"] | hows["interpolated"]
    assert {"gemm", "rmsnorm", "swiglu", "adamw", "sparse_attention", "sparse_attention_bwd"} <= priced
    assert priced & {"index_loss", "attention_mass"}
    for call, duration in known.items():
        assert not duration.warning, (call, duration.warning)


def test_every_kernel_of_the_preset_is_twice_its_floor(profile: Path) -> None:
    """The step follows the file: kernels all at half rate take about twice what their work needs."""
    prices = Prices(load_profiles((str(profile),)), find(Gpu, "gpus", "h200"))
    shape = {"rows": 16384, "keys": 524288, "heads": 32, "dim": 128, "top_k": 2048}
    found = prices(kernel("hytopk", "bf16", "", "untrained", **shape))
    flops = 2.0 * 32 * 128 * 16384 * 524288
    assert found.us == pytest.approx(SLOWNESS * flops / (NOMINAL.bf16_flops or 1) * 1e6, rel=0.01)


def test_shipped_profiles_are_small_and_name_their_source() -> None:
    folder = Path(str(DATA)) / "profiles"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 5e6
    for path in folder.iterdir():
        if ".jsonl" in path.name:
            for point in read_profile(path):
                assert point.source or point.serial or point.implementation in ("hytopk",), (path.name, point)


def test_a_run_compares_with_the_public_table_where_shapes_coincide(profile: Path, tmp_path: Path) -> None:
    from hyscale_kernels.profiling.compare import compare

    public = read_profile(Path(str(DATA)) / "profiles" / "h200-gemm.jsonl.gz")
    found = compare(read_profile(profile), public)
    assert {(pair.first.op, pair.first.dtype) for pair in found.pairs} == {("gemm", "bf16")}
    assert len(found.pairs) >= 20
    wide = compare(read_profile(profile), public, any_implementation=True)
    assert len([pair for pair in wide.pairs if pair.first.dtype == "fp8"]) >= 5
    write_profile(tmp_path / "own.jsonl", [pair.first for pair in found.pairs])
    assert len(compare(read_profile(tmp_path / "own.jsonl"), public).pairs) == len(found.pairs)

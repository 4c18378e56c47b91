"""Prices: measured points exactly, interpolation and projection as stated, and never a silent default."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyscale_ref.profile import ProfileError, ProfilePoint, as_shape, write_profile
from hyscale_simulator.descriptions import find, shipped
from hyscale_simulator.durations import MissingProfileError, Prices
from hyscale_simulator.evaluate import evaluate
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.held_out import hold_out
from hyscale_simulator.kernels import OPS, Op, kernel
from hyscale_simulator.profiles import Profiles, load_profiles
from hyscale_simulator.roofline import floor_us, project_us, terms_us
from hyscale_simulator.scenario import load
from hyscale_simulator.validation import compare_kernels

GPUS = [find(Gpu, "gpus", name) for name in shipped("gpus")]
H200, H100, H20 = (find(Gpu, "gpus", name) for name in ("h200", "h100", "h20"))


def point(
    us: float, op: str = "index_scores", who: str = "mine", regime: str = "", /, **shape: int
) -> ProfilePoint:
    return ProfilePoint(
        op=op,
        implementation=who,
        dtype="fp8",
        shape=as_shape(shape),
        device=H200.device,
        median_us=us,
        regime=regime,
    )


def scores(rows: int, keys: int, us: float) -> ProfilePoint:
    return point(us, rows=rows, keys=keys, heads=32, dim=128)


def test_every_shipped_point_comes_back_exactly() -> None:
    profiles = load_profiles()
    for table in profiles.tables():
        prices = Prices(profiles, table.gpu)
        measured = list(table.points.values())
        for item in measured[:: max(len(measured) // 50, 1)]:
            call = kernel(item.op, item.dtype, item.implementation, item.regime, **dict(item.shape))
            found = prices(call)
            assert (found.us, found.how) == (item.median_us, "measured")


def test_interpolation_follows_the_work_between_points() -> None:
    """At constant utilisation, the interpolated time is the work's; in between, monotone."""
    profiles = Profiles([scores(4096, 65536, 2400.0), scores(4096, 262144, 9593.0)], GPUS)
    prices = Prices(profiles, H200)
    middle = prices(kernel("index_scores", "fp8", rows=4096, keys=131072, heads=32, dim=128))
    assert middle.how == "interpolated"
    assert middle.us == pytest.approx(4797.0, rel=2e-3)


@given(low=st.floats(0.5, 2.0), high=st.floats(0.5, 2.0), keys=st.integers(65537, 262143))
def test_interpolated_utilisation_stays_between_its_ends(low: float, high: float, keys: int) -> None:
    ends = [scores(4096, 65536, 2400.0 * low), scores(4096, 262144, 9600.0 * high)]
    prices = Prices(Profiles(ends, GPUS), H200)
    call = kernel("index_scores", "fp8", rows=4096, keys=keys, heads=32, dim=128)
    ratio = prices(call).us / floor_us(call, H200)
    ratios = sorted(
        item.median_us / floor_us(kernel(item.op, item.dtype, **dict(item.shape)), H200)
        for item in ends
        if item.median_us
    )
    assert ratios[0] * (1 - 1e-9) <= ratio <= ratios[1] * (1 + 1e-9)


def test_extrapolation_holds_utilisation_and_warns_beyond_twice() -> None:
    prices = Prices(Profiles([scores(4096, 65536, 2400.0)], GPUS), H200)
    near = prices(kernel("index_scores", "fp8", rows=4096, keys=131072, heads=32, dim=128))
    far = prices(kernel("index_scores", "fp8", rows=4096, keys=1048576, heads=32, dim=128))
    assert near.warning == ""
    assert "extrapolated 16x" in far.warning
    assert far.uncertainty > near.uncertainty
    assert far.us == pytest.approx(16 * 2400.0, rel=5e-3)


def test_more_rows_are_no_extrapolation_but_fewer_are() -> None:
    prices = Prices(Profiles([scores(4096, 65536, 2400.0)], GPUS), H200)
    assert not prices(kernel("index_scores", "fp8", rows=65536, keys=65536, heads=32, dim=128)).warning
    assert prices(kernel("index_scores", "fp8", rows=512, keys=65536, heads=32, dim=128)).warning


def test_users_points_go_first(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    mine = replace(scores(4096, 65536, 1234.5), implementation="deepgemm")
    write_profile(path, [mine])
    call = kernel("index_scores", "fp8", rows=4096, keys=65536, heads=32, dim=128)
    mine_first, shipped_alone = (Prices(load_profiles(files), H200)(call) for files in ((str(path),), ()))
    assert mine_first.us == 1234.5 != shipped_alone.us
    assert shipped_alone.us == pytest.approx(2300.0, rel=0.1)  # DeepGEMM: 2,206 to 2,410 in several sessions


def test_a_wanted_implementation_is_used_or_its_stand_in_named() -> None:
    points = [scores(4096, 65536, 2400.0), replace(scores(4096, 65536, 3600.0), implementation="other")]
    prices = Prices(Profiles(points, GPUS), H200)
    shape = {"rows": 4096, "keys": 65536, "heads": 32, "dim": 128}
    assert prices(kernel("index_scores", "fp8", "other", **shape)).us == 3600.0
    stand_in = prices(kernel("index_scores", "fp8", "cudnn", **shape))
    assert stand_in.us == 2400.0
    assert "no profile of cudnn, mine's is used" in stand_in.warning


def test_a_few_points_of_ones_own_do_not_hide_a_full_table() -> None:
    """Of two tables of one GPU, the one that reaches the shape is used; measured points still go first."""
    mine = [replace(scores(4096, 65536, 2000.0), implementation="mine")]
    full = [
        replace(scores(4096, keys, keys / 27), implementation="full") for keys in (65536, 262144, 1048576)
    ]
    prices = Prices(Profiles([*mine, *full], GPUS), H200)
    near = prices(kernel("index_scores", "fp8", rows=4096, keys=65536, heads=32, dim=128))
    far = prices(kernel("index_scores", "fp8", rows=4096, keys=524288, heads=32, dim=128))
    assert near.us == 2000.0
    assert far.us == pytest.approx(524288 / 27, rel=0.01)
    assert far.warning == ""


def test_gemm_points_of_all_libraries_share_a_table() -> None:
    ours = ProfilePoint(
        op="gemm", implementation="torch", dtype="bf16", shape=as_shape({"m": 8192, "n": 6200, "k": 6144}),
        device=H200.device, median_us=1000.0,
    )  # fmt: skip
    everything = [*(p for t in load_profiles().tables() if t.op == "gemm" for p in t.points.values()), ours]
    prices = Prices(Profiles(everything, GPUS), H200)
    assert prices(kernel("gemm", "bf16", m=8192, n=6200, k=6144)).us == 1000.0
    assert prices(kernel("gemm", "bf16", m=8192, n=6144, k=6144)).how == "measured"


def test_a_gpu_of_ones_own_may_have_profiles(tmp_path: Path) -> None:
    mine = H20.model_copy(update={"device": "NVIDIA X1", "name": "X1"})
    path = tmp_path / "x1.jsonl"
    write_profile(path, [replace(scores(4096, 65536, 777.0), device="NVIDIA X1")])
    with pytest.raises(ProfileError, match=r"x1\.jsonl:2: device = 'NVIDIA X1'; no GPU description has it"):
        load_profiles((str(path),))
    call = kernel("index_scores", "fp8", rows=4096, keys=65536, heads=32, dim=128)
    assert Prices(load_profiles((str(path),), (mine,)), mine)(call).us == 777.0


@pytest.mark.parametrize(
    ("useless", "message"),
    [
        (replace(scores(1, 1, 1.0), device="NVIDIA X100"), "device = 'NVIDIA X100'; no GPU"),
        (point(1.0, rows=4, keys=4), "index_scores: shape has no 'heads'; needed: heads, dim, rows, keys"),
        (scores(4096, 0, 1.0), "index_scores: shape.keys = 0; at least 1 is needed"),
        (replace(scores(4, 4, 1.0), dtype="fp4"), "index_scores: dtype = 'fp4'; allowed: fp32, bf16"),
        (point(1.0, "all_gather", ranks=1, bytes=8), "all_gather: shape.ranks = 1; at least 2 is needed"),
        (point(1.0, "all_gather", bytes=8), "all_gather: shape has no 'ranks'; needed: ranks, bytes"),
    ],
)
def test_a_point_that_could_price_nothing_is_refused(
    useless: ProfilePoint, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ProfileError, match=re.escape(message)):
        Profiles([useless], GPUS)
    path = tmp_path / "mine.jsonl"
    write_profile(path, [useless])
    with pytest.raises(ProfileError, match=re.escape(f"mine.jsonl:2: {message}")):
        load_profiles((str(path),))


def test_a_time_in_another_unit_or_work_that_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write_profile(path, [scores(4096, 65536, 2.4)])  # milliseconds
    with pytest.raises(ProfileError, match=r"mine\.jsonl:2: index_scores: median_us = 2\.4: at least 16"):
        load_profiles((str(path),))
    write_profile(path, [point(9.9, "attention", qk_dim=128, v_dim=128, queries=2048, keys=1024)])
    with pytest.raises(ProfileError, match=r"mine\.jsonl:2: attention: shape has no 'batch'"):
        load_profiles((str(path),))


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"schema":1}\n{"op":')
    with pytest.raises(ProfileError, match=r"broken\.jsonl:2: not JSON"):
        load_profiles((str(path),))


def test_users_points_are_credited_to_their_file_and_what_is_idle_is_named(tmp_path: Path) -> None:
    """A regime that is not said is any; what no model runs, and what prices nothing, is told."""
    shape = {"heads": 32, "dim": 128, "top_k": 2048, "rows": 4096}
    times = {262144: 9000.0, 1048576: 33000.0}
    mine = [point(us, "hytopk", "mine", keys=keys, **shape) for keys, us in times.items()]
    used, idle = tmp_path / "used.jsonl", tmp_path / "idle.jsonl"
    write_profile(used, mine)
    write_profile(idle, [point(1.0, "hytopkk", "mine", keys=4, **shape)])
    scenario = load("glm-5.1-1m-512xh20").with_(**{"selection.scoring_dtype": "fp8"})
    plain = evaluate(scenario)
    found = evaluate(scenario, profiles=(str(used), str(idle)))
    assert ("hytopk", "fp8", "projected", str(used)) in [evidence for evidence, _ in found.coverage]
    assert found.step_time_s < plain.step_time_s
    assert found.warnings == (
        f"{idle}: no model here runs hytopkk: those points are not used",
        f"{idle}: no price of this step rests on it (--coverage lists what does)",
    )
    assert plain.warnings == ()


def test_an_op_that_nobody_knows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = dict(OPS)
    ops["gemm"] = Op(ops["gemm"].cost, ops["gemm"].axes)
    monkeypatch.setattr("hyscale_simulator.durations.OPS", ops)
    prices = Prices(Profiles([], GPUS), H200)
    with pytest.raises(MissingProfileError, match=r"gemm \(bf16, H200 SXM\): neither measured nor assumed"):
        prices(kernel("gemm", "bf16", m=64, n=64, k=64))


def test_projection_to_the_same_gpu_under_the_same_load_changes_little() -> None:
    call = kernel("index_scores", "fp8", rows=4096, keys=65536, heads=32, dim=128)
    assert project_us(2410.0, call, H200, H200) == pytest.approx(2410.0, rel=0.05)


@given(
    flops=st.sampled_from([(4096, 65536), (512, 4096), (16384, 524288)]),
    slower=st.floats(1.0, 4.0),
    faster=st.floats(1.1, 4.0),
)
def test_a_better_gpu_is_never_slower(flops: tuple[int, int], slower: float, faster: float) -> None:
    rows, keys = flops
    call = kernel("index_scores", "fp8", rows=rows, keys=keys, heads=32, dim=128)
    measured = floor_us(call, H200) * slower
    better = H20.model_copy(
        update={
            "memory_tb_per_s": H20.memory_tb_per_s * faster,
            "vector_fp32_tflops": H20.vector_fp32_tflops * faster,
            "sustained_tensor_fraction": 1.0,
        }
    )
    assert project_us(measured, call, H200, better) <= project_us(measured, call, H200, H20) * (1 + 1e-12)


def test_projection_keeps_the_terms_apart() -> None:
    """A memory-bound kernel follows bandwidth (4.0 against 4.8 TB/s), a tensor-bound one the tensor rate."""
    select = kernel("index_select", "fp32", rows=4096, keys=262144, top_k=2048)
    assert terms_us(select, H200)[2] == max(terms_us(select, H200))
    assert project_us(3370.0, select, H200, H20) / 3370.0 == pytest.approx(4.8 / 4.0, rel=0.02)
    gemm = kernel("gemm", "bf16", m=8192, n=8192, k=8192)
    ratio = project_us(floor_us(gemm, H200), gemm, H200, H20) / floor_us(gemm, H200)
    assert ratio == pytest.approx(989 * 0.807 / (148 * 0.95), rel=0.05)


def test_hytopk_is_the_sum_of_its_stages_until_the_whole_is_measured() -> None:
    shape = {"rows": 4096, "keys": 65536, "heads": 32, "dim": 128, "top_k": 2048}
    call = kernel("hytopk", "fp8", **shape)
    profiles = load_profiles()
    if any(table.op == "hytopk" for table in profiles.tables()):
        assert Prices(profiles, H200)(call).how in ("measured", "interpolated")
    stages = [p for t in profiles.tables() if t.op != "hytopk" for p in t.points.values() if t.op != "gemm"]
    prices = Prices(Profiles(stages, GPUS), H200)
    parts = OPS["hytopk"].parts
    assert parts is not None
    whole = prices(call)
    assert whole.us == pytest.approx(sum(prices(part).us for part in parts(call)))
    assert sum(part.us for part in whole.parts) == pytest.approx(whole.us)


def test_skipped_keys_are_not_scanned_measured_whole_or_not() -> None:
    """Skipping half of a million keys saves about half of the time: the scan's."""
    shape = {"rows": 4096, "keys": 1048576, "heads": 32, "dim": 128, "top_k": 2048}
    whole = point(40000.0, "hytopk", **shape)
    for points in (
        [whole],
        [p for t in load_profiles().tables() for p in t.points.values() if t.op != "hytopk"],
    ):
        prices = Prices(Profiles(points, GPUS), H200)
        full, half = (prices(kernel("hytopk", "fp8", **shape, **more)) for more in ({}, {"scanned": 524288}))
        assert 0.5 < half.us / full.us < 0.6


def test_scores_of_another_kind_are_named() -> None:
    points = [point(1000.0, "index_select", "mine", "untrained", rows=4096, keys=65536, top_k=2048)]
    prices = Prices(Profiles(points, GPUS), H200)
    shape = {"rows": 4096, "keys": 65536, "top_k": 2048}
    assert prices(kernel("index_select", "fp8", "", "untrained", **shape)).warning == ""
    trained = prices(kernel("index_select", "fp8", "", "trained", **shape))
    assert "no profile on trained scores, untrained ones are used" in trained.warning


def test_provenance_is_ordered_and_uncertain_in_that_order() -> None:
    profiles = load_profiles()
    exact = Prices(profiles, H200)(kernel("gemm", "bf16", m=8192, n=6144, k=6144))
    between = Prices(profiles, H200)(kernel("gemm", "bf16", m=8192, n=6200, k=6144))
    carried = Prices(profiles, H20)(kernel("gemm", "bf16", m=8192, n=6144, k=6144))
    assumed = Prices(profiles, H20)(
        kernel("sparse_attention_bwd", "bf16", rows=4096, heads=64, qk_dim=576, v_dim=512, top_k=2048)
    )
    assert [d.how for d in (exact, between, carried)] == ["measured", "interpolated", "projected"]
    assert assumed.how in ("assumed", "projected")
    assert exact.uncertainty < between.uncertainty < carried.uncertainty < 0.5
    assert all(d.source for d in (exact, between, carried, assumed))


def test_an_empty_call_takes_no_time() -> None:
    assert Prices(load_profiles(), H20)(kernel("gemm", "bf16", m=0, n=64, k=64)).us == 0


def test_held_out_shapes_are_predicted() -> None:
    """Every table within its targets; of the large ones, next to no bias."""
    tables = load_profiles().tables()
    judged = [row for row in hold_out(tables) if row.judged]
    assert all(row.within for row in judged), [row for row in judged if not row.within]
    ops = {row.op for row in judged}
    assert {"gemm", "grouped_gemm", "index_scores", "index_select", "hytopk", "sparse_attention"} <= ops
    for table in tables:
        if len(table.rows) > 100:
            assert abs(np.mean([error for _, error in table.held_out()])) <= 0.02, (table.op, table.dtype)


def test_a_shape_is_held_out_of_the_very_lookup() -> None:
    """What is reported is what a call would get if nobody had measured it; ends of lines are not counted."""
    points = [scores(4096, keys, us) for keys, us in ((65536, 2400.0), (131072, 5555.0), (262144, 9593.0))]
    (table,) = Profiles(points, GPUS).tables()
    ((shape, error),) = table.held_out()
    call = kernel("index_scores", "fp8", rows=4096, keys=131072, heads=32, dim=128)
    assert shape == call.shape
    without = Prices(Profiles([points[0], points[2]], GPUS), H200)
    assert error == pytest.approx(without(call).us / 5555.0 - 1)


@given(fixed=st.floats(0.0, 500.0), slope=st.floats(1.0, 4.0), keys=st.integers(65537, 262143))
def test_a_fixed_part_and_one_that_grows_with_the_work_are_found_exactly(
    fixed: float, slope: float, keys: int
) -> None:
    def us(count: int) -> float:
        call = kernel("index_scores", "fp8", rows=4096, keys=count, heads=32, dim=128)
        return fixed + slope * floor_us(call, H200)

    prices = Prices(Profiles([scores(4096, end, us(end)) for end in (65536, 262144)], GPUS), H200)
    call = kernel("index_scores", "fp8", rows=4096, keys=keys, heads=32, dim=128)
    assert prices(call).us == pytest.approx(us(keys))


def test_a_fuller_line_says_how_a_shorter_one_goes_on() -> None:
    """1,024 rows are measured up to 64K keys; how the utilisation changes beyond, 4,096 rows say."""
    long = [scores(4096, 65536, 2400.0), scores(4096, 1048576, 2 * 16 * 2400.0)]
    prices = Prices(Profiles([scores(1024, 65536, 900.0), *long], GPUS), H200)
    found = prices(kernel("index_scores", "fp8", rows=1024, keys=1048576, heads=32, dim=128))
    assert found.us == pytest.approx(2 * 16 * 900.0, rel=0.01)
    assert found.warning == ""


def test_one_odd_neighbour_moves_no_jagged_table() -> None:
    def product(n: int, us: float) -> ProfilePoint:
        shape = as_shape({"m": 8192, "n": n, "k": 8192})
        return replace(point(us, "gemm"), shape=shape)

    sizes = [4096, 6144, 8192, 12288]
    even = [product(n, n / 4) for n in sizes]
    odd = [*even[:1], product(6144, 9999.0), *even[2:]]
    call = kernel("gemm", "fp8", m=8192, n=7168, k=8192)
    once, again = (Prices(Profiles(points, GPUS), H200)(call).us for points in (even, odd))
    assert once == pytest.approx(7168 / 4, rel=0.01)
    assert again == pytest.approx(once, rel=0.01)


def test_public_h20_kernels_are_projected_within_fifteen_percent() -> None:
    for figure in compare_kernels():
        assert abs(figure.error_pct) <= 15, figure


def test_windows_are_wanted_within_reach_and_scores_always() -> None:
    """A whole causal sequence's own table, unless the shape is far outside it."""
    shape = {"heads": 32, "dim": 128, "top_k": 2048}
    points = [
        point(30000.0, "hytopk", "mine", "untrained, causal", rows=65536, keys=32768, **shape),
        point(2000.0, "hytopk", "mine", "untrained", rows=4096, keys=32768, **shape),
        point(50000.0, "hytopk", "mine", "untrained", rows=4096, keys=1048576, **shape),
        point(1.0, "hytopk", "mine", "trained", rows=65536, keys=524288, **shape),
    ]
    prices = Prices(Profiles(points, GPUS), H200)

    def us(regime: str, rows: int, keys: int) -> float:
        return prices(kernel("hytopk", "fp8", "", regime, rows=rows, keys=keys, **shape)).us

    assert us("untrained, causal", 65536, 32768) == 30000.0
    assert us("untrained", 65536, 32768) == pytest.approx(16 * 2000.0, rel=0.01)
    assert us("untrained, causal", 32768, 32768) == pytest.approx(15000.0, rel=0.01)  # half of the rows
    assert us("untrained, causal", 4096, 1048576) == 50000.0

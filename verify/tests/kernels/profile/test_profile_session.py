"""A run on a pretended machine: order, budget, resumption, failures, and a device that is lost."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hyscale_kernels.profiling.ceilings import NOMINAL, Ceilings
from hyscale_kernels.profiling.machine import steady
from hyscale_kernels.profiling.measure import estimate_s, input_sets, measure, shared
from hyscale_kernels.profiling.op import Cost, Entry, interleaved_by_value
from hyscale_kernels.profiling.session import GIVE_UP, DeviceLostError, Session, planned_s
from hyscale_ref.profile import ProfileError, ProfilePoint, ProfileWriter, read_profile

CEILINGS = 5


def session(tools: Any, machine: Any, entries: Any, sink: Any, **options: Any) -> Session:
    return Session(machine, entries, sink, tiny=True, clock=machine.clock, **options)


def ops(points: list[ProfilePoint]) -> list[str]:
    return [point.op for point in points if point.op != "ceiling"]


def test_ceilings_come_first_and_every_point_is_written(tools: Any) -> None:
    machine, sink = tools.Machine(), tools.Memory()
    summary = session(tools, machine, tools.entries(tools.op()), sink).run()
    assert [point.op for point in sink.points[:CEILINGS]] == ["ceiling"] * CEILINGS
    assert {point.implementation for point in sink.points[:CEILINGS]} == {"gemm", "copy", "fma", "launch"}
    assert ops(sink.points) == ["thing"] * 3
    assert summary.points == sink.points


def test_a_point_states_its_conditions_and_spread(tools: Any) -> None:
    machine = tools.Machine()
    point = measure(tools.entries(tools.op(us=200.0))[0], machine, NOMINAL)
    assert (point.p20_us, point.median_us, point.p80_us) == pytest.approx((197.6, 200.0, 202.4))
    assert (point.samples, point.peak_extra_bytes, point.clock_mhz) == (5, 2**20, 1980.0)
    assert (point.device, point.serial, point.power_limit_w) == ("NVIDIA H200", "1234", 700.0)
    assert (point.commit, dict(point.versions)["torch"]) == ("0123456789ab", "2.11.0")
    assert point.time_utc.endswith("Z")


def test_rates_and_the_fraction_of_the_floor_follow_from_the_cost(tools: Any) -> None:
    rates = Ceilings(1e15, 2e15, 1e13, 4e12, 2e-6)
    cost = Cost(tensor_flops=1e11, lane_ops=1e8, bytes=2e8)  # 100, 10 and 50 us
    point = measure(tools.entries(tools.op(us=125.0, cost=cost))[0], tools.Machine(), rates)
    assert point.ceiling_fraction == pytest.approx(0.8)
    assert point.flops_per_s == pytest.approx((1e11 + 2e8) / 125e-6, rel=1e-4)
    assert point.bytes_per_s == pytest.approx(2e8 / 125e-6)


@pytest.mark.parametrize(
    ("cost", "dtype", "floor"),
    [
        (Cost(tensor_flops=1e12), "bf16", 1e-3),
        (Cost(tensor_flops=1e12), "fp8", 5e-4),
        (Cost(bytes=4e9), "fp32", 1e-3),
        (Cost(lane_ops=1e10), "fp32", 1e-3),
        (Cost(), "fp32", 2e-6),
        (Cost(tensor_flops=1.0), "fp32", None),  # no such ceiling is measured
    ],
)
def test_the_floor_is_the_largest_term(cost: Cost, dtype: str, floor: float | None) -> None:
    assert Ceilings(1e15, 2e15, 1e13, 4e12, 2e-6).floor_s(cost, dtype) == floor


def test_a_call_faster_than_possible_has_failed(tools: Any) -> None:
    """At 1.5 times its floor's rate it cannot have done its work."""
    rates = Ceilings(bf16_flops=1e15)
    cost = Cost(tensor_flops=1e12)  # 1,000 us
    fast = measure(tools.entries(tools.op(us=600.0, cost=cost))[0], tools.Machine(), rates)
    assert fast.status == "failed"
    assert "it did not do the work" in fast.error
    assert measure(tools.entries(tools.op(us=700.0, cost=cost))[0], tools.Machine(), rates).status == "ok"


@pytest.mark.parametrize("us", [math.nan, -1.0, 0.0, math.inf])
def test_an_impossible_time_is_a_failed_point(tools: Any, us: float) -> None:
    point = measure(tools.entries(tools.op(us=us))[0], tools.Machine(), NOMINAL)
    assert (point.status, point.median_us) == ("failed", None)
    assert "the clock says that a call took" in point.error


def test_valuable_ops_come_early(tools: Any) -> None:
    dear, cheap = tools.op("dear", value=3.0, sizes=range(6)), tools.op("cheap", sizes=range(2))
    order = [entry.op.name for entry in interleaved_by_value([cheap, dear], "tests")]
    assert order == ["cheap", "dear", "dear", "dear", "cheap", "dear", "dear", "dear"]


def test_the_budget_is_kept_and_small_points_still_fit(tools: Any) -> None:
    machine, sink = tools.Machine(), tools.Memory()
    long = tools.op("long", compile_s=1000.0, sizes=(1,))
    entries = [*tools.entries(long), *tools.entries(tools.op("short", sizes=range(100)))]
    summary = session(tools, machine, entries, sink, budget_s=30.0).run()
    assert summary.seconds <= 31.0
    assert "long" not in ops(sink.points)
    assert len(sink.points) + len(summary.left) == 101 + CEILINGS
    assert 15 <= ops(sink.points).count("short") <= 25
    assert summary.left[0].op.name == "long"


def test_time_spent_before_the_run_counts(tools: Any) -> None:
    machine, sink = tools.Machine(), tools.Memory()
    machine.clock.now = 100.0
    summary = session(tools, machine, tools.entries(tools.op()), sink, budget_s=50.0, began=0.0).run()
    assert len(summary.left) == 3


def test_a_slow_machine_is_noticed(tools: Any) -> None:
    """Expected seconds follow those that points really take, so that the last one does not overrun."""
    machine, sink = tools.Machine(seconds_a_point=0.4), tools.Memory()
    running = session(tools, machine, tools.entries(tools.op(sizes=range(60))), sink)
    before = running._expected_s(running.entries[0])
    running.run()
    assert running._expected_s(running.entries[0]) > 2 * before


def test_one_slow_point_is_no_slow_machine(tools: Any) -> None:
    class Hiccup(tools.Machine):  # type: ignore[misc]
        def time(self, works: Any, seconds: float) -> Any:
            self.clock.now += 60.0 if self.timed == CEILINGS + 3 else 0.0
            return super().time(works, seconds)

    machine, sink = Hiccup(seconds_a_point=0.1), tools.Memory()
    running = session(tools, machine, tools.entries(tools.op(sizes=range(4))), sink)
    before = running._expected_s(running.entries[0])
    running.run()
    assert machine.clock.now > 60.0
    assert running._expected_s(running.entries[0]) < 1.5 * before


def test_a_failure_is_recorded_and_the_rest_goes_on(tools: Any) -> None:
    machine, sink = tools.Machine(), tools.Memory()
    broken = tools.op("broken", raises=lambda: RuntimeError("no kernel image\nlong story"))
    summary = session(tools, machine, [*tools.entries(broken)[:1], *tools.entries(tools.op())], sink).run()
    assert ops(sink.points) == ["broken", "thing", "thing", "thing"]
    assert [point.error for point in summary.failed] == ["RuntimeError: no kernel image"]


def test_an_op_that_keeps_failing_is_left(tools: Any) -> None:
    machine, sink = tools.Machine(), tools.Memory()
    broken = tools.op("broken", raises=lambda: ValueError("never"), sizes=range(10))
    summary = session(tools, machine, tools.entries(broken), sink).run()
    assert len(summary.failed) == GIVE_UP
    assert len(summary.left) == 10 - GIVE_UP


def test_out_of_memory_frees_the_device_and_other_shapes_are_tried(tools: Any) -> None:
    machine, sink = tools.Machine(), tools.Memory()
    huge = tools.op(
        "huge", raises=lambda: torch.OutOfMemoryError("tried to allocate 300 GiB"), sizes=range(4)
    )
    summary = session(tools, machine, tools.entries(huge), sink).run()
    assert len(summary.failed) == 4
    assert machine.cleared == 8  # before the second try of each, and after it
    assert "OutOfMemoryError: tried to allocate 300 GiB" in summary.failed[0].error


def test_a_point_that_fits_after_all_is_measured(tools: Any) -> None:
    machine, sink = tools.Machine(), tools.Memory()

    def once(shape: Any) -> float:
        if not machine.cleared:
            raise torch.OutOfMemoryError("fragmented")
        return 100.0

    summary = session(tools, machine, tools.entries(tools.op(us=once, sizes=(1,))), sink).run()
    assert (summary.failed, ops(sink.points)) == ([], ["thing"])


def test_a_lost_device_stops_the_run_with_everything_on_disk(tools: Any, tmp_path: Path) -> None:
    machine, path = tools.Machine(), tmp_path / "p.jsonl"

    def die() -> BaseException:
        machine.lost = True
        return RuntimeError("CUDA error: an illegal memory access was encountered")

    entries = [
        *tools.entries(tools.op("before")), *tools.entries(tools.op("deadly", raises=die))[:1],
        *tools.entries(tools.op("after")),
    ]  # fmt: skip
    with (
        ProfileWriter(path, shared(machine)) as sink,
        pytest.raises(DeviceLostError, match="deadly/mine/bf16 size=1: RuntimeError: CUDA error"),
    ):
        session(tools, machine, entries, sink).run()
    found = read_profile(path)
    assert ops(found) == ["before", "before", "before", "deadly"]

    machine = tools.Machine()
    with ProfileWriter(path, shared(machine)) as sink:
        again = session(tools, machine, entries, sink, known=found)
        assert again.entries[-1].op.name == "deadly"  # what failed comes last
        with pytest.raises(DeviceLostError):
            again.run()
    assert ops(read_profile(path)).count("before") == 3
    assert ops(read_profile(path)).count("after") == 3


def test_resuming_measures_only_what_is_missing(tools: Any) -> None:
    entries = tools.entries(tools.op(sizes=range(8)))
    first, second = tools.Memory(), tools.Memory()
    machine = tools.Machine()
    left = session(tools, machine, entries, first, budget_s=10.0).run().left
    assert 0 < len(left) < 8
    done = session(tools, tools.Machine(), entries, second, known=first.points).run()
    assert not done.left
    assert len(ops(first.points)) + len(ops(second.points)) == 8


def test_an_op_without_its_package_is_left_out_by_name(tools: Any) -> None:
    machine, sink = tools.Machine(), tools.Memory()
    absent = tools.op("absent", needs=("nobody.has_this",))
    summary = session(tools, machine, tools.entries(absent), sink).run()
    assert summary.left_out == {"absent/mine/bf16": "needs 'nobody.has_this', which is not installed"}
    assert ops(sink.points) == []


def test_progress_counts_up_to_the_total(tools: Any) -> None:
    seen: list[tuple[int, int]] = []
    machine = tools.Machine()
    session(
        tools, machine, tools.entries(tools.op()), tools.Memory(),
        report=lambda progress: seen.append((progress.measured, progress.total)),
    ).run()  # fmt: skip
    assert seen[-1] == (3, 3)


def test_a_writer_mends_a_broken_last_line(tools: Any, tmp_path: Path) -> None:
    path, machine = tmp_path / "p.jsonl", tools.Machine()
    point = measure(tools.entries(tools.op())[0], machine, NOMINAL)
    with ProfileWriter(path, shared(machine)) as sink:
        sink.add(point)
    with path.open("a") as stream:
        stream.write('{"op":"thing","implemen')
    other = replace(point, serial="5678")
    with ProfileWriter(path, {**shared(machine), "serial": "5678"}) as sink:
        sink.add(replace(point, serial="", commit=""))  # unlike the header
        sink.add(other)
    faults: list[str] = []
    found = read_profile(path, faults=faults)
    assert found == [point, replace(point, serial="", commit=""), other]
    assert len(faults) == 1
    assert "p.jsonl:3: not JSON" in faults[0]
    with pytest.raises(ProfileError, match=r"p\.jsonl:3: not JSON"):
        read_profile(path)


def test_a_writer_refuses_gzip_and_foreign_fields(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="compress the file when it is done"):
        ProfileWriter(tmp_path / "p.jsonl.gz", {})
    with pytest.raises(ProfileError, match="unknown field 'colour'"):
        ProfileWriter(tmp_path / "p.jsonl", {"colour": "red"})


def test_each_point_is_on_disk_before_the_next(tools: Any, tmp_path: Path) -> None:
    path, machine = tmp_path / "p.jsonl", tools.Machine()
    seen = []

    def count(shape: Any) -> float:
        seen.append(len(path.read_text().splitlines()))
        return 100.0

    with ProfileWriter(path, shared(machine)) as sink:
        session(tools, machine, tools.entries(tools.op(us=count)), sink).run()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["device"] == "NVIDIA H200"
    assert sorted(set(seen)) == [1 + CEILINGS, 2 + CEILINGS, 3 + CEILINGS]


def test_sampling_stops_when_the_median_is_known() -> None:
    assert steady([1.0] * 15)
    assert not steady([1.0 + 0.03 * place for place in range(15)])
    assert steady([1.0 + 0.002 * (place % 3) for place in range(60)])


def test_large_inputs_come_in_fewer_sets() -> None:
    assert [input_sets(size) for size in (1e6, 2e9, 2e10)] == [3, 2, 1]


def test_a_plan_counts_compilation_once(tools: Any) -> None:
    entries = tools.entries(tools.op(compile_s=50.0))
    alone = planned_s(entries[:1])
    assert planned_s(entries) == pytest.approx(alone + 2 * estimate_s(entries[0]), rel=1e-6)
    assert planned_s([Entry(replace(entries[0].op, needs=("nobody.has_this",)), {"size": 1})]) < 45
    again = [Entry(replace(entry.op, recompiles=("size",)), entry.shape) for entry in entries]
    assert planned_s(again) == pytest.approx(planned_s(entries) + 2 * 50.0, rel=1e-6)


def test_an_estimate_follows_the_clocks_rules(tools: Any) -> None:
    """Twenty samples of a short call, the time allowed for a longer one, three calls of a very long one."""

    def point_s(call_s: float, **options: Any) -> float:
        op = replace(tools.op(cost=Cost(tensor_flops=call_s * 1e15)), efficiency=1.0, **options)
        return estimate_s(Entry(op, {"size": 1}), Ceilings(bf16_flops=1e15))

    assert point_s(1e-4) == pytest.approx(0.03 + 0.02 + 21 * 8e-4, rel=0.05)
    assert point_s(2e-2) == pytest.approx(0.03 + 5 * 2e-2 + 0.4, rel=0.1)
    assert point_s(2.0) == pytest.approx(8 * 2.0, rel=0.05)
    assert point_s(1e-4, timing_s=1.0) == pytest.approx(1.05, rel=0.05)

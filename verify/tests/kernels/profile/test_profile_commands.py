"""``hyscale profile run``, ``show``, ``compare``, ``trace``: what they print, write, refuse, and return."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyscale_kernels.profiling import ceilings, machine, ops, run_command, session
from hyscale_kernels.profiling.commands import profile
from hyscale_kernels.profiling.compare import Pair, compare
from hyscale_kernels.profiling.length_plot import FASTEST, floor_us, from_profile, from_race, pairs
from hyscale_kernels.profiling.op import Entry
from hyscale_kernels.profiling.ranks import (
    SAMPLES,
    Ranks,
    measure_collectives,
    measure_in_step,
    nccl_settings,
)
from hyscale_kernels.profiling.target import entries, parse_shapes
from hyscale_kernels.profiling.tracing import trace
from hyscale_ref.profile import ProfilePoint, as_shape, read_profile, write_profile

ROOT = Path(__file__).parents[4]
RACE = ROOT / "benchmarks" / "results" / "race_hytopk.jsonl"
SHIPPED = ROOT / "simulator" / "hyscale_simulator" / "data" / "profiles" / "h200-own.jsonl.gz"

POINT = ProfilePoint(
    op="gemm",
    implementation="cublas",
    dtype="bf16",
    shape=as_shape({"m": 4096, "n": 4096, "k": 4096}),
    device="NVIDIA H200",
    median_us=200.0,
    p20_us=198.0,
    p80_us=203.0,
    samples=20,
    flops_per_s=6.9e14,
    bytes_per_s=5e11,
    ceiling_fraction=0.9,
)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tools: Any) -> Callable[..., Any]:
    """Let the commands find a pretended machine with these ops."""

    def use(*found: Any, made: Any = None) -> Any:
        made = made or tools.Machine()
        quick = tuple(replace(op, shapes={"quick": op.shapes["tests"]}) for op in found)
        monkeypatch.setattr(ops, "ALL", quick)
        monkeypatch.setattr(machine, "CudaMachine", lambda commit="": made)
        monkeypatch.setattr(run_command, "need_gpu", lambda: None)
        monkeypatch.setattr(session, "ceiling_entries", lambda tiny=False: ceilings.entries(True))
        return made

    return use


def test_a_run_writes_a_profile_and_says_so(
    on_a_gpu: Callable[..., Any], tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu(tools.op(us=150.0))
    out = tmp_path / "p.jsonl"
    assert profile(["run", "--out", str(out), "--json", str(tmp_path / "r.json")]) == 0
    assert len([point for point in read_profile(out) if point.op == "thing"]) == 3
    record = json.loads((tmp_path / "r.json").read_text())
    assert (record["measured"], record["failed"], record["left"]) == (8, [], [])
    shown = capsys.readouterr()
    assert "8 points" in shown.out
    assert "3/3 points" in shown.err


def test_a_second_run_needs_resume_and_adds_nothing_twice(
    on_a_gpu: Callable[..., Any], tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = on_a_gpu(tools.op())
    out = tmp_path / "p.jsonl"
    assert profile(["run", "--out", str(out)]) == 0
    assert profile(["run", "--out", str(out)]) == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    made.timed = 0
    assert profile(["run", "--out", str(out), "--resume"]) == 0
    assert made.timed == 6  # the ceilings of this run, the first of them twice


def test_a_failing_point_makes_the_exit_code_1(
    on_a_gpu: Callable[..., Any], tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu(tools.op("bad", raises=lambda: RuntimeError("no such kernel"), sizes=(7,)), tools.op())
    assert profile(["run", "--out", str(tmp_path / "p.jsonl")]) == 1
    assert "failed: bad size=7: RuntimeError: no such kernel" in capsys.readouterr().err
    assert [point.op for point in read_profile(tmp_path / "p.jsonl")].count("thing") == 3


def test_a_lost_device_is_exit_code_3_and_the_file_is_safe(
    on_a_gpu: Callable[..., Any], tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tools.Machine()

    def die() -> BaseException:
        made.lost = True
        return RuntimeError("CUDA error: device lost")

    on_a_gpu(tools.op("a"), tools.op("deadly", raises=die), made=made)
    out = tmp_path / "p.jsonl"
    assert profile(["run", "--out", str(out), "--json", str(tmp_path / "r.json")]) == 3
    assert json.loads((tmp_path / "r.json").read_text())["failed"][0]["op"] == "deadly"
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the device was lost at deadly" in error
    assert "--resume goes on with it" in error
    assert [point.op for point in read_profile(out)][-2:] == ["a", "deadly"]


def test_an_interrupted_run_says_what_it_measured(
    on_a_gpu: Callable[..., Any], tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu(tools.op("a", sizes=(1,)), tools.op("long", raises=KeyboardInterrupt, sizes=(1,)))
    out, path = tmp_path / "p.jsonl", tmp_path / "r.json"
    assert profile(["run", "--out", str(out), "--json", str(path)]) == 130
    assert f"interrupted; {out} is safe, --resume goes on with it" in capsys.readouterr().err
    assert json.loads(path.read_text())["measured"] == 6  # the ceilings, and a
    assert [point.op for point in read_profile(out)][-1] == "a"


def test_resuming_passes_over_broken_lines_and_refuses_another_gpu(
    on_a_gpu: Callable[..., Any], tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu(tools.op())
    out = tmp_path / "p.jsonl"
    assert profile(["run", "--out", str(out)]) == 0
    whole = out.read_bytes()
    out.write_bytes(whole[:-30])  # the last point was being written
    assert profile(["run", "--out", str(out), "--resume"]) == 0
    assert f"passed over: {out}:9: not JSON" in capsys.readouterr().err
    assert len([p for p in read_profile(out, faults=[]) if p.op == "thing"]) == 3

    other = tools.Machine(conditions=replace(tools.conditions, name="NVIDIA B200"))
    on_a_gpu(tools.op(), made=other)
    assert profile(["run", "--out", str(out), "--resume"]) == 2
    assert "holds NVIDIA H200, this is NVIDIA B200" in capsys.readouterr().err
    out.write_text('{"schema":99}\n')
    assert profile(["run", "--out", str(out), "--resume"]) == 2
    assert "schema = 99" in capsys.readouterr().err


def test_the_budget_leaves_the_rest_for_resume(
    on_a_gpu: Callable[..., Any], tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu(tools.op(sizes=range(5), compile_s=500.0))
    assert profile(["run", "--out", str(tmp_path / "p.jsonl"), "--budget", "60"]) == 0
    assert "5 left for --resume" in capsys.readouterr().out


def test_a_target_is_timed_through_the_same_code(
    on_a_gpu: Callable[..., Any], tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernel_of_mine.py").write_text(
        "calls = []\n"
        "def prepare(rows, keys, seed):\n"
        "    def call():\n"
        "        calls.append((rows, keys, seed))\n"
        "    return call\n"
    )
    monkeypatch.chdir(tmp_path)
    on_a_gpu(tools.op())
    out = tmp_path / "p.jsonl"
    arguments = [
        "run",
        "--target",
        "kernel_of_mine:prepare",
        "--shapes",
        "rows=4:8,keys=16",
        "--out",
        str(out),
    ]
    assert profile([*arguments, "--implementation", "ours", "--dtype", "fp8"]) == 0
    found = [point for point in read_profile(out) if point.op != "ceiling"]
    assert [(p.op, p.implementation, p.dtype, dict(p.shape)) for p in found] == [
        ("prepare", "ours", "fp8", {"keys": 16, "rows": 4}),
        ("prepare", "ours", "fp8", {"keys": 16, "rows": 8}),
    ]
    assert {call[2] for call in sys.modules["kernel_of_mine"].calls} == {0, 1, 2}  # several sets of inputs


def test_a_target_named_as_an_op_has_its_floor() -> None:
    shape = {"rows": 2, "keys": 4, "heads": 2, "dim": 8, "top_k": 1}
    known = entries(
        "json:dumps", [shape], op="hytopk", implementation="mine", dtype="bf16", known=ops.ALL
    )  # fmt: skip
    assert known[0].op.cost(shape).tensor_flops == 2 * 2 * 4 * 2 * 8
    unknown = entries("json:dumps", [shape], op="dumps", implementation="mine", dtype="bf16", known=ops.ALL)
    assert unknown[0].op.cost(shape).flops == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--target", "json:dumps"], "is needed with --target"),
        (["run", "--shapes", "rows=4"], "goes with --target"),
        (["run", "--target", "json", "--shapes", "rows=4"], "allowed: module:function, both named"),
        (["run", "--target", "nobody_has:this", "--shapes", "rows=4"], "No module named 'nobody_has'"),
        (["run", "--target", "json:nothing", "--shapes", "rows=4"], "has no function 'nothing'"),
        (["run", "--target", "json:dumps", "--shapes", "rows"], "is not NAME=SIZE"),
        (["run", "--target", "json:dumps", "--shapes", "rows=-4"], "is not NAME=SIZE"),
        (["run", "--target", "json:dumps", "--shapes", "rows=4,rows=5"], "rows is given twice"),
        (["run", "--suite", "slow"], "no suite 'slow'"),
        (["run", "--op", "nothing"], "has no op 'nothing'"),
        (["run", "--budget", "0"], "budget"),
        (["run", "--out", "/no/such/folder/p.jsonl"], "/no/such/folder/p.jsonl; its folder does not exist"),
        (["run", "--out", "p.jsonl.gz"], "a run writes plain lines"),
        (["run", "--json", "/"], "/ is a folder"),
        (["trace", "--op", "nothing"], "no op 'nothing'; there are: adamw"),
        (["trace", "--op", "gemm", "--shape", "m"], "is not NAME=SIZE"),
        (["trace", "--op", "gemm", "--out", "/"], "/ is a folder"),
        (["trace", "--op", "gemm", "--shape", "m=1,n=2"], "allowed: one size for each of k, m, n"),
        (["trace", "--op", "gemm", "--shape", "m=1:2,n=2,k=3"], "allowed: one size for each of k, m, n"),
        (["trace", "--op", "gemm", "--shape", "m=1,n=2,k=3,l=4"], "allowed: one size for each of k, m, n"),
        (["trace", "--op", "all_gather"], "'all_gather' runs on several GPUs at once"),
        (["show", "missing.jsonl", "--context", "c.png"], "missing.jsonl: unreadable"),
        (["show"], "argument"),
        (["show", "missing.jsonl"], "missing.jsonl:1: unreadable"),
        (["compare", "missing.jsonl", "missing.jsonl"], "unreadable"),
    ],
)
def test_usage_errors_are_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split()).replace("- -", "--")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("arguments", [["run"], ["run", "--suite", "glm-5.1"], ["trace", "--op", "gemm"]])
def test_without_a_gpu_one_line_says_so(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert profile(arguments) == 3
    said = capsys.readouterr()
    assert said.err.strip() == "hyscale profile: needs a CUDA device, and PyTorch sees none on this machine"
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_in_a_line_what_is_left_out(
    tools: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "an_op_whose_name_alone_fills_most_of_what_is_taken_for_a_line"
    lacking = replace(tools.op(name, needs=("nobody_has_this",)), shapes={"quick": [{"size": 1}]})
    monkeypatch.setattr(ops, "ALL", (lacking,))
    assert profile(["run", "--dry-run"]) == 0
    left_out = f"left out: {name}/mine/bf16 needs 'nobody_has_this', which is not installed"
    assert left_out in capsys.readouterr().out.splitlines()


def test_a_dry_run_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(["run", "--dry-run", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["points"]) >= 80
    assert record["seconds"] <= 180
    assert profile(["run", "--dry-run", "--suite", "collectives"]) == 0
    assert "collectives besides, on machines of at least 2 GPUs" in capsys.readouterr().out


# show


def save(path: Path, *points: ProfilePoint) -> Path:
    write_profile(path, points)
    return path


def ceiling(what: str, dtype: str, **rates: float) -> ProfilePoint:
    return replace(
        POINT, op="ceiling", implementation=what, dtype=dtype, flops_per_s=None, bytes_per_s=None,
        ceiling_fraction=None,
    ) if not rates else replace(
        POINT, op="ceiling", implementation=what, dtype=dtype, ceiling_fraction=None,
        **{"flops_per_s": None, "bytes_per_s": None, **rates},
    )  # fmt: skip


CEILINGS = (
    ceiling("copy", "bf16", bytes_per_s=4.3e12),
    ceiling("gemm", "bf16", flops_per_s=7.9e14),
    ceiling("gemm", "fp8", flops_per_s=1.3e15),
    ceiling("fma", "fp32", flops_per_s=6e13),
)


def test_show_prints_points_and_writes_them_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = replace(
        POINT, op="sick", median_us=None, p20_us=None, p80_us=None, status="failed", error="out of memory"
    )
    path = save(tmp_path / "p.jsonl", POINT, failed)
    assert profile(["show", str(path)]) == 0
    assert "gemm" in capsys.readouterr().out
    assert profile(["show", str(path), "--points"]) == 0
    shown = capsys.readouterr().out
    assert "200.0" in shown
    assert "90%" in shown
    assert "out of" in shown
    assert profile(["show", str(path), "--op", "gemm", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [point["op"] for point in record["points"]] == ["gemm"]
    assert profile(["show", str(path), "--op", "nothing"]) == 2


def test_show_names_bad_lines_and_shows_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "p.jsonl", POINT)
    lines = [
        json.dumps(POINT.to_json() | {"median_us": -3.0}),
        json.dumps(POINT.to_json() | {"median_us": float("nan")}),
        json.dumps(POINT.to_json() | {"device": "NVIDIA B200"}),
        '{"weather": "fine"}',
        json.dumps(POINT.to_json() | {"op": "good", "shape": {"size": 1}}),
        '{"op": "ge',
    ]
    with path.open("a") as stream:
        stream.write("\n".join(lines))
    assert profile(["show", str(path), "--json", "-"]) == 1
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert [point["op"] for point in record["points"]] == ["gemm", "good"]
    for number, what in (
        (3, "median_us = -3.0"), (4, "median_us = nan"), (5, "device = 'NVIDIA B200'"),
        (6, "unknown field 'weather'"), (8, "not JSON"),
    ):  # fmt: skip
        assert f"p.jsonl:{number}: {what}" in said.err


def test_show_refuses_an_unknown_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"schema": 7}\n' + json.dumps(POINT.to_json()) + "\n")
    assert profile(["show", str(path)]) == 2
    assert "p.jsonl:1: schema = 7; this version reads schema 1" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_roofline_is_drawn(ending: str, tmp_path: Path) -> None:
    path = save(
        tmp_path / "p.jsonl", *CEILINGS, POINT, replace(POINT, op="hytopk", dtype="fp8"),
        replace(POINT, op="swiglu", flops_per_s=1e13, bytes_per_s=3.5e12),
    )  # fmt: skip
    picture = tmp_path / f"roofline.{ending}"
    assert profile(["show", str(path), "--roofline", str(picture)]) == 0
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert len(data) > 5000


def test_a_roofline_needs_ceilings_and_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = save(tmp_path / "a.jsonl", POINT)
    assert profile(["show", str(bare), "--roofline", str(tmp_path / "r.png")]) == 2
    assert "no measured copy ceiling" in capsys.readouterr().err
    empty = save(tmp_path / "b.jsonl", *CEILINGS, replace(POINT, flops_per_s=None))
    assert profile(["show", str(empty), "--roofline", str(tmp_path / "r.png")]) == 2
    assert "nothing to plot" in capsys.readouterr().err


def test_times_against_context_are_drawn_from_the_recorded_races(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "c.png"
    assert profile(["show", str(RACE), "--context", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "at 65,536 keys" in said
    records = [json.loads(line) for line in RACE.read_text().splitlines()]
    ours, rivals = pairs(from_race(records), "fp8")
    assert [mine.keys for mine in ours] == [rival.keys for rival in rivals] == sorted(r.keys for r in rivals)
    for mine, rival in zip(ours, rivals, strict=True):
        assert (mine.race, mine.rows, mine.dtype) == (rival.race, rival.rows, rival.dtype)
        assert f"{rival.ms / mine.ms:.2f}x at {mine.keys:,} keys" in said


def test_a_torn_race_is_drawn_and_its_bad_lines_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = RACE.read_bytes()
    torn = tmp_path / "race.jsonl"
    torn.write_bytes(whole + b"[1]\n\xff\n" + whole[:40])
    assert profile(["show", str(torn), "--context", str(tmp_path / "c.svg")]) == 1
    said = capsys.readouterr()
    assert "at 65,536 keys" in said.out
    last = len(whole.splitlines())
    for number in (last + 1, last + 2, last + 3):
        assert f"race.jsonl:{number}: not the record of a race" in said.err


def test_times_against_context_are_drawn_from_a_profile(tmp_path: Path) -> None:
    def timed(op: str, keys: int, us: float) -> ProfilePoint:
        shape = as_shape({"rows": 4096, "keys": keys, "heads": 32, "dim": 128, "top_k": 2048})
        return replace(
            POINT, op=op, regime="untrained", shape=shape, median_us=us, p20_us=0.98 * us, p80_us=1.02 * us
        )

    points = [
        timed(op, keys, us * keys / 65536)
        for keys in (16384, 65536, 262144)
        for op, us in (("hytopk", 5000.0), ("materialised_topk", 90000.0))
    ]
    path = save(tmp_path / "p.jsonl.gz", *CEILINGS, *points)
    assert profile(["show", str(path), "--context", str(tmp_path / "c.svg")]) == 0
    text = (tmp_path / "c.svg").read_text()
    assert "18.00" in text  # times faster
    assert "790 TFLOP/s" in text  # the floor's rate is that of the fastest product of the file
    faster = replace(POINT, shape=as_shape({"m": 1, "n": 2, "k": 3}), flops_per_s=8.1e14)
    path = save(tmp_path / "r.jsonl", *CEILINGS, faster, *points)
    assert profile(["show", str(path), "--context", str(tmp_path / "e.svg")]) == 0
    assert "810 TFLOP/s" in (tmp_path / "e.svg").read_text()
    lonely = save(tmp_path / "q.jsonl", points[0])
    assert profile(["show", str(lonely), "--context", str(tmp_path / "d.png")]) == 2


def test_a_rival_in_two_parts_is_their_sum_at_the_same_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(op: str, who: str, dtype: str, us: float, regime: str, **sizes: int) -> ProfilePoint:
        return replace(
            POINT, op=op, implementation=who, dtype=dtype, regime=regime, shape=as_shape(sizes),
            median_us=us, p20_us=us - 1, p80_us=us + 2,
        )  # fmt: skip

    indexer = {"heads": 32, "dim": 128}
    points = [
        part("hytopk", "hytopk", "fp8", 3000.0, "untrained", rows=4096, keys=65536, top_k=2048, **indexer),
        part("index_scores", "deepgemm", "fp8", 2300.0, "", rows=4096, keys=65536, **indexer),
        part("index_select", "flashinfer", "fp32", 1150.0, "untrained", rows=4096, keys=65536, top_k=2048),
        # Not its parts: told where rows start, another selection size, other rows, another scorer.
        part("index_select", "flashinfer", "fp32", 1900.0, "untrained, row starts", rows=4096, keys=65536,
             top_k=2048),
        part("index_select", "flashinfer", "fp32", 900.0, "untrained", rows=4096, keys=65536, top_k=512),
        part("index_select", "flashinfer", "fp32", 500.0, "untrained", rows=1024, keys=65536, top_k=2048),
        part("index_scores", "triton", "fp8", 2500.0, "dense pass", rows=4096, keys=65536, **indexer),
    ]  # fmt: skip
    timed, _ = from_profile(points)
    ours, (rival,) = pairs(timed, "fp8")
    assert (rival.who, rival.ms, rival.low_ms, rival.high_ms) == ("deepgemm+flashinfer", 3.45, 3.448, 3.454)
    assert [mine.ms for mine in ours] == [3.0]
    assert pairs(timed, "bf16") == ([], [])
    path = save(tmp_path / "p.jsonl", *points)
    assert profile(["show", str(path), "--context", str(tmp_path / "c.svg")]) == 0
    assert (
        "HyTopK in fp8 is, against deepgemm+flashinfer on random scores, 1.15x at 65,536 keys"
        in capsys.readouterr().out
    )
    assert "sum of two parts timed apart" in (tmp_path / "c.svg").read_text()


def test_no_product_that_was_measured_is_faster_than_the_floor_of_a_race() -> None:
    timed = from_race([json.loads(line) for line in RACE.read_text().splitlines()])
    for path in (SHIPPED, *sorted(RACE.parent.glob("profile_quick_*.jsonl"))):
        found, rates = from_profile(read_profile(path))
        assert rates.keys() == {"bf16", "fp8"}
        assert all(rates[dtype] <= FASTEST[dtype] for dtype in rates), (path, rates)
        timed += found
    ours = [item for item in timed if item.who == "hytopk" and item.dtype in FASTEST]
    assert len(ours) > 100
    for item in ours:
        assert 1e3 * item.ms > item.rows * floor_us(item.keys, item.dtype, FASTEST[item.dtype]), item


def test_plans_assume_what_an_h200_was_measured_to_do() -> None:
    for path in sorted(RACE.parent.glob("profile_quick_*.jsonl")):
        point = {(p.implementation, p.dtype): p for p in read_profile(path) if p.op == "ceiling"}
        nominal = ceilings.NOMINAL
        assert nominal.bf16_flops == pytest.approx(point["gemm", "bf16"].flops_per_s, rel=0.06)
        assert nominal.fp8_flops == pytest.approx(point["gemm", "fp8"].flops_per_s, rel=0.03)
        assert nominal.lane_ops == pytest.approx(point["fma", "fp32"].flops_per_s, rel=0.03)
        assert nominal.bytes == pytest.approx(point["copy", "bf16"].bytes_per_s, rel=0.03)
        assert nominal.launch_s == pytest.approx(1e-6 * (point["launch", "fp32"].median_us or 0), rel=0.03)


# compare


def at(us: float, spread: float = 0.0, **changes: Any) -> ProfilePoint:
    low, high = (us * (1 - spread), us * (1 + spread)) if spread else (None, None)
    return replace(POINT, median_us=us, p20_us=low, p80_us=high, **changes)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (at(100, 0.02), at(103, 0.02), "within noise"),
        (at(100, 0.01), at(103, 0.01), "differs"),
        (at(100, 0.01), at(120, 0.01), "apart"),
        (at(100, 0.01), at(80, 0.01), "apart"),
        (at(100, 0.20), at(120, 0.01), "within noise"),
        (at(100), at(100), "within noise"),
        (at(100), at(101), "differs"),  # no spread is recorded: no noise to hide in
    ],
)
def test_noise_is_what_the_spreads_say(first: ProfilePoint, second: ProfilePoint, verdict: str) -> None:
    assert Pair(first, second).verdict() == verdict
    assert Pair(second, first).noise == Pair(first, second).noise


def test_shapes_are_matched_across_sources_and_devices() -> None:
    ours = [at(100), at(50, shape=as_shape({"m": 1})), at(70, regime="skewed")]
    public = [at(110, source="a public table", device="NVIDIA H100"), at(60, implementation="deepgemm")]
    found = compare(ours, public)
    assert [pair.ratio for pair in found.pairs] == [1.1]
    assert (found.only_first, found.only_second) == (2, 1)
    public = [at(60, implementation="deepgemm")]
    assert not compare(ours, public).pairs
    assert [pair.ratio for pair in compare(ours, public, any_implementation=True).pairs] == [0.6]


def test_compare_prints_quantiles_and_can_be_a_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = [as_shape({"size": size}) for size in range(40)]
    first = save(tmp_path / "a.jsonl", *(at(100, 0.001, shape=shape) for shape in shapes))
    drift = [1.01] * 36 + [1.08] * 3 + [1.3]
    second = save(
        tmp_path / "b.jsonl",
        *(at(100 * by, 0.001, shape=shape) for shape, by in zip(shapes, drift, strict=True)),
    )
    assert profile(["compare", str(first), str(second)]) == 0
    said = capsys.readouterr().out
    assert "40 shapes in common (0 and 0 in one alone); difference: median 1.0%, p95 8.0%" in said
    assert "1 more than 15% apart" in said
    row = next(line for line in said.splitlines() if "gemm bf16" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        "gemm bf16", "40", "1.010", "1.010", "1.300", "0", "1"
    ]  # fmt: skip
    for limits, code in ((["--max-median", "3", "--max-p95", "10"], 0), (["--max-p95", "5"], 1)):
        assert (
            profile(["compare", str(first), str(second), *limits, "--json", str(tmp_path / "c.json")]) == code
        )
    record = json.loads((tmp_path / "c.json").read_text())
    assert record["median_difference"] == pytest.approx(0.01)
    assert (record["within_noise"], record["apart"], len(record["pairs"])) == (0, 1, 40)


def test_compare_says_when_nothing_coincides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(tmp_path / "a.jsonl", POINT)
    second = save(tmp_path / "b.jsonl", replace(POINT, op="other"))
    assert profile(["compare", str(first), str(second)]) == 1
    assert "have no shape in common" in capsys.readouterr().err
    assert profile(["compare", str(first), str(second), "--op", "gem"]) == 2
    assert "no op 'gem' in" in capsys.readouterr().err


def test_compare_says_whose_times_it_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(tmp_path / "a.jsonl", POINT, replace(POINT, op="own", implementation="mine"))
    second = save(tmp_path / "b.jsonl", POINT, replace(POINT, op="own", implementation="theirs"))
    assert profile(["compare", str(first), str(second), "--any-implementation"]) == 0
    said = capsys.readouterr().out
    assert "mine / theirs" in said
    assert "cublas / cublas" not in said


# trace, collectives, the installed command


def test_a_trace_holds_the_call(tmp_path: Path) -> None:
    op = next(op for op in ops.ALL if op.name == "gemm" and op.dtype == "bf16")
    out = tmp_path / "deep" / "trace.json"
    kernels = trace(Entry(op, op.tiny), torch.device("cpu"), out)
    assert any("mm" in name for name, _ in kernels)
    assert any("mm" in event.get("name", "") for event in json.loads(out.read_text())["traceEvents"])


class Group:
    """Ranks that hand over prepared points; an exception stands for ranks that stopped."""

    def __init__(self, points: list[Any]) -> None:
        self.points, self.stopped = list(points), False

    def next(self) -> Any:
        point = self.points.pop(0) if self.points else None
        if isinstance(point, BaseException):
            raise point
        return point

    def stop(self, patience_s: float = 10.0) -> None:
        self.stopped, self.patience_s = True, patience_s


def test_collectives_take_the_groups_that_fit_and_outlive_one_that_stops(tools: Any) -> None:
    op = next(op for op in ops.ALL if op.name == "all_gather")
    made = [Entry(op, {"ranks": ranks, "bytes": size}) for ranks in (2, 4, 8) for size in (1024, 2048, 4096)]
    pretended = tools.Machine(conditions=replace(tools.conditions, gpus=4))
    good = replace(POINT, op="all_gather")
    groups = {2: Group([good, TimeoutError("the ranks stopped"), good]), 4: Group([good, good])}
    sink = tools.Memory()
    found = measure_collectives(
        made, pretended, sink, starter=lambda size, store, wanted, commit: groups[size]
    )
    assert [point.status for point in found] == ["ok", "failed", "ok", "ok"]
    assert found[1].error == "the ranks stopped"
    assert dict(found[1].shape) == {"ranks": 2, "bytes": 2048}
    assert sink.points == found
    assert all(group.stopped for group in groups.values())
    late = measure_collectives(made, pretended, sink, time_left=lambda: 0.0, starter=lambda *_: Group([]))
    assert late == []
    left = iter([1.0, 1.0, 0.0, 0.0])  # time for one point, then none: the ranks are not waited for
    short = Group([good, good])
    found = measure_collectives(
        made[:2], pretended, sink, time_left=lambda: next(left), starter=lambda *_: short
    )
    assert len(found) == 1
    assert short.patience_s == 0.0
    cut = Group([good, KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        measure_collectives(made[:2], pretended, sink, starter=lambda *_: cut)
    assert cut.stopped
    assert cut.patience_s == 0.0


def test_a_rank_measures_its_points_in_order(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank alone, through gloo: every collective runs, and a failure ends the rank's share."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    pretended = tools.Machine()
    pretended.sample = lambda work: [float(work.call() is None) + 1.0]
    rank = Ranks(pretended, {"nccl": "2.28.9", **nccl_settings()})
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    wanted: list[tuple[str, dict[str, int]]] = [
        *((f"{name}/nccl/bf16", {"ranks": 1, "bytes": 256}) for name in names),
        ("all_gather/nccl/bf16", {"ranks": 2, "bytes": 256}),
        ("all_gather/nccl/bf16", {"ranks": 1, "bytes": 512}),
    ]
    points: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.distributed, about itself
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            measure_in_step(wanted, rank, points.append)
        finally:
            dist.destroy_process_group()
    assert [point.op for point in points[:-1]] == [*names, "all_gather"]
    assert [point.status for point in points[:-1]] == ["ok"] * 4 + ["failed"]
    assert "ranks = 2; this run has 1" in points[4].error
    assert points[5] is None
    assert points[0].samples == SAMPLES
    versions = dict(points[0].versions)
    assert (versions["nccl"], versions["NCCL_NVLS_ENABLE"]) == ("2.28.9", "0")


def test_collectives_are_left_out_on_one_gpu(
    on_a_gpu: Callable[..., Any], tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gather = replace(tools.op("all_gather"), family="collectives")
    on_a_gpu(tools.op(), gather)
    assert profile(["run", "--out", str(tmp_path / "p.jsonl")]) == 0
    said = capsys.readouterr().err
    assert "collectives are left out: this machine has 1 GPU, and they take at least 2" in said


def test_shapes_multiply() -> None:
    assert parse_shapes(["rows=1:2,keys=3", "rows=9"]) == [
        {"rows": 1, "keys": 3}, {"rows": 2, "keys": 3}, {"rows": 9}
    ]  # fmt: skip


def test_the_installed_command_answers() -> None:
    """Through the dispatcher, in a process of its own: exit code and one line."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "hyscale"), "profile", "show", "nothing.jsonl"],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip().startswith("hyscale profile: nothing.jsonl:1: unreadable")

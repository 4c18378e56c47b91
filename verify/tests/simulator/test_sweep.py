"""Sweeps: any field, the same rows whatever runs them, resumable, and clear about what is wrong."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyscale_simulator.descriptions import DescriptionError
from hyscale_simulator.executors import Executor, ExecutorError, executor
from hyscale_simulator.explain_commands import sweep as command
from hyscale_simulator.scenario import load
from hyscale_simulator.sweep import (
    METRICS,
    OBJECTIVES,
    Journal,
    Vary,
    check_field,
    grid,
    pareto,
    ranked,
    sweep,
    write,
)

T = TypeVar("T")
R = TypeVar("R")
BASE = load("glm-5.1-1m-512xh20")
NEEDS_DASK = "needs dask distributed: pip install 'hyscale[dask]'"
VARIED = [Vary.parse("layout.context_parallel=32,64"), Vary.parse("selection.skipped_fraction=0.0,0.5")]


class Counting(Executor):
    """Runs here, counts, and stops after some."""

    def __init__(self, stop_after: int | None = None, backwards: bool = False) -> None:
        self.ran = 0
        self.stop_after, self.backwards = stop_after, backwards

    def run(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R]]:
        order = range(len(items))
        for index in reversed(order) if self.backwards else order:
            if self.ran == self.stop_after:
                raise KeyboardInterrupt
            self.ran += 1
            yield index, function(items[index])


def test_an_interrupted_sweep_goes_on_without_repeating(tmp_path: Path) -> None:
    points, path = grid(BASE, VARIED), tmp_path / "cache.jsonl"
    first = Counting(stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        sweep(points, first, Journal(path))
    second = Counting()
    rows = sweep(points, second, Journal(path))
    assert (first.ran, second.ran) == (3, 1)
    assert rows == sweep(points, Counting(), Journal(None))


def test_an_interrupted_command_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    arguments = ["--preset", BASE.name, "--vary", "layout.context_parallel=32,64", "--out", str(out)]
    monkeypatch.setattr("hyscale_simulator.executors.executor", lambda name, items: Counting(stop_after=1))
    assert command(arguments) == 130
    assert "1 finished points are kept in" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
    monkeypatch.undo()
    assert command(arguments) == 0
    assert out.exists()


def test_order_and_processes_change_nothing(tmp_path: Path) -> None:
    points = grid(BASE, [*VARIED, Vary.parse("precision.linear=bf16,fp8")])
    local = executor("local:2", len(points))
    try:
        runs = [sweep(points, run, Journal(None)) for run in (Counting(), Counting(backwards=True), local)]
    finally:
        local.close()
    files = []
    for at, rows in enumerate(runs):
        write(rows, tmp_path / f"{at}.csv")
        files.append((tmp_path / f"{at}.csv").read_bytes())
    assert files[0] == files[1] == files[2]


def test_dask_gives_the_same_rows() -> None:
    distributed = pytest.importorskip("distributed", reason=NEEDS_DASK)
    points = grid(BASE, VARIED)
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        run = executor(f"dask:{cluster.scheduler_address}", len(points))
        try:
            assert sweep(points, run, Journal(None)) == sweep(points, Counting(), Journal(None))
        finally:
            run.close()


def test_equal_scenarios_run_once() -> None:
    run = Counting()
    points = grid(BASE, [Vary("precision.linear", ("bf16", "bf16", "fp8"))])
    rows = sweep(points, run, Journal(None))
    assert run.ran == 2
    assert rows[0] == rows[1] != rows[2]


def test_the_cache_knows_profiles_and_scenarios_apart(tmp_path: Path) -> None:
    profile = tmp_path / "mine.jsonl"
    profile.write_text("one", encoding="utf-8")
    keys = {Journal(None).key(BASE), Journal(None, (str(profile),)).key(BASE)}
    profile.write_text("two", encoding="utf-8")
    keys.add(Journal(None, (str(profile),)).key(BASE))
    keys.add(Journal(None).key(BASE.with_(**{"precision.linear": "fp8"})))
    assert len(keys) == 4


@pytest.mark.parametrize("line", ["not json", "[]", '{"key": 1, "row": {}}', '{"key": "a", "row": {"x": 1}}'])
def test_a_corrupt_entry_is_named_before_any_work(tmp_path: Path, line: str) -> None:
    path = tmp_path / "cache.jsonl"
    points = grid(BASE, VARIED[:1])
    sweep(points, Counting(), Journal(path))
    good = path.read_text(encoding="utf-8")
    path.write_text(good + line + "\n", encoding="utf-8")
    with pytest.raises(DescriptionError, match="line 3 is corrupt"):
        Journal(path)


def test_an_entry_cut_off_is_computed_again(tmp_path: Path) -> None:
    path, points = tmp_path / "cache.jsonl", grid(BASE, VARIED[:1])
    sweep(points, Counting(), Journal(path))
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[:-20], encoding="utf-8")
    journal, run = Journal(path), Counting()
    assert journal.torn == 1
    sweep(points, run, journal)
    assert run.ran == 1
    assert path.read_text(encoding="utf-8") == whole


def test_refused_points_are_rows_that_say_why() -> None:
    rows = sweep(grid(BASE, [Vary.parse("layout.context_parallel=64,48")]), Counting(), Journal(None))
    assert rows[0]["refused"] == ""
    assert "must be a multiple of tensor x context x pipeline" in rows[1]["refused"]
    assert rows[1]["step_time_s"] is None


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=1,2", (1, 2)), ("a=bf16,fp8", ("bf16", "fp8")), ("a=0.5", (0.5,)), ("a=true", (True,)),
        ("a=[1,2],[3]", ((1, 2), (3,))), ("a='x,y',z", ("'x", "y'", "z")), ("a=none, 3", ("none", 3)),
    ],
)  # fmt: skip
def test_values_are_toml_or_bare_words(text: str, values: tuple[object, ...]) -> None:
    assert Vary.parse(text).values == values


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layout.context_parallel", 64),
        ("model.indexer.top_k", 2048),
        ("cluster.nic_gbit_per_s", 400.0),
        ("cluster.gpu.sms", 78),
        ("model", "glm-5.1"),
    ],
)
def test_fields_of_scenario_model_cluster_and_gpu_are_found(field: str, value: object) -> None:
    assert check_field(BASE, field) == value


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ("layout.context=1", "no such field; layout has tensor_parallel"),
        ("model.indexer.topk=1", "no such field; model.indexer has heads"),
        ("name.x=1", "no fields inside"),
        ("layout.context_parallel", "field=v1,v2 is wanted"),
        ("layout.context_parallel=64,many", "many"),
        ("selection.skipped_fraction=0.5,2.0", "less than or equal to 1"),
    ],
)
def test_a_bad_vary_is_an_error_before_any_work(
    vary: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    assert command(["--preset", BASE.name, "--vary", vary, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--executor", "ray"], "allowed are local"),
        (["--executor", "local:0"], "at least one process"),
        (["--objective", "beauty"], "allowed are step_time"),
        (["--objective", "cost"], "has no price"),
        (["--constraint", "cheap"], "allowed is fits"),
        (["--out", "x.xls"], "has to end in .csv"),
        (["--out", "missing/x.csv"], "does not exist"),
    ],
)
def test_bad_options_are_errors_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--preset", BASE.name, "--vary", "precision.linear=bf16", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_unreachable_dask_is_an_error() -> None:
    pytest.importorskip("distributed", reason=NEEDS_DASK)
    with pytest.raises(ExecutorError, match="unreachable"):
        executor("dask:nowhere", 1)


def test_the_command_writes_every_point_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [
        "--preset", BASE.name, "--vary", "selection.skipped_fraction=0.0,0.5", "--vary",
        "model.indexer.top_k=1024,2048", "--out", str(out), "--constraint", "fits",
        "--set", "cluster.dollars_per_gpu_hour=2.5", "--objective", "cost",
    ]  # fmt: skip
    assert command(arguments) == 0
    first, shown = out.read_bytes(), capsys.readouterr().out
    assert "Pareto front" in shown
    rows = [json.loads(line) for line in first.splitlines()]
    assert [(r["selection.skipped_fraction"], r["model.indexer.top_k"]) for r in rows] == [
        (0.0, 1024), (0.0, 2048), (0.5, 1024), (0.5, 2048),
    ]  # fmt: skip
    for row in rows:
        per_token = 2.5 / 3600 / row["tokens_per_s_per_gpu"]
        assert row["dollars_per_million_tokens"] == pytest.approx(1e6 * per_token)
    out.unlink()
    assert command(arguments) == 0
    assert out.read_bytes() == first
    assert len((tmp_path / "out.jsonl.cache.jsonl").read_text(encoding="utf-8").splitlines()) == 4


def test_a_csv_holds_what_the_rows_hold(tmp_path: Path) -> None:
    rows = sweep(grid(BASE, VARIED[:1]), Counting(), Journal(None))
    write(rows, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as stream:
        read = list(csv.DictReader(stream))
    assert [float(row["step_time_s"]) for row in read] == [row["step_time_s"] for row in rows]
    assert list(read[0]) == ["layout.context_parallel", *METRICS]


def test_a_parquet_file_holds_what_the_rows_hold(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
    import pandas as pd

    rows = sweep(grid(BASE, VARIED[:1]), Counting(), Journal(None))
    write(rows, tmp_path / "t.parquet")
    assert pd.read_parquet(tmp_path / "t.parquet")["step_time_s"].tolist() == [r["step_time_s"] for r in rows]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=12))
def test_the_pareto_front_is_what_nothing_beats(points: list[tuple[int, int, int]]) -> None:
    rows = [
        {"step_time_s": float(a), "peak_gib": float(b), "gpus": c, "fits": True} for a, b, c in points
    ]  # fmt: skip
    front = {(r["step_time_s"], r["peak_gib"], r["gpus"]) for r in pareto(rows, OBJECTIVES["step_time"])}
    expected = {
        p for p in set(points)
        if not any(q != p and all(x <= y for x, y in zip(q, p, strict=True)) for q in points)
    }  # fmt: skip
    assert front == {(float(a), float(b), c) for a, b, c in expected}


def test_more_is_better_where_the_objective_says_so() -> None:
    rows = [{"tokens_per_s_per_gpu": v, "fits": v != 3.0} for v in (1.0, 3.0, 2.0, None)]
    best = ranked(rows, OBJECTIVES["tokens_per_gpu_s"], fits=False)
    assert [r["tokens_per_s_per_gpu"] for r in best] == [3.0, 2.0, 1.0]
    assert len(ranked(rows[:3], OBJECTIVES["tokens_per_gpu_s"], fits=True)) == 2

"""The trace, read back by a parser that holds it to what trace viewers need."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyscale_simulator.commands import simulate as simulate_command
from hyscale_simulator.critical_path import stream_use
from hyscale_simulator.engine import simulate
from hyscale_simulator.graph import Graph, GraphBuilder, Timeline
from hyscale_simulator.perturb import jitter
from hyscale_simulator.schedules import PassTimes, one_f_one_b, pipeline_graph
from hyscale_simulator.trace import chrome_trace, write_trace

Graphs = Callable[..., st.SearchStrategy[Graph]]


@dataclass
class Parsed:
    """Spans and arrows by track name, in nanoseconds."""

    spans: dict[tuple[str, str], list[tuple[int, int, dict[str, Any]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    arrows: list[tuple[tuple[str, str], int, tuple[str, str], int]] = field(default_factory=list)
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))


def nanoseconds(us: float) -> int:
    ns = round(us * 1000)
    assert abs(us * 1000 - ns) < 1e-3, f"{us} us is not a whole number of nanoseconds"
    return ns


def parse(trace: dict[str, Any]) -> Parsed:
    """Read a Chrome trace, refusing what a viewer would draw wrongly.

    Tracks have names; spans of a track nest or follow each other; an arrow starts no later than it ends, each
    end inside a span of its track, the target at the span's start.
    """
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_name":
            assert event["pid"] not in processes
            processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]

    def track(event: dict[str, Any]) -> tuple[str, str]:
        return processes[event["pid"]], threads[event["pid"], event["tid"]]

    parsed = Parsed()
    leaving: dict[int, dict[str, Any]] = {}
    arriving: dict[int, dict[str, Any]] = {}
    for event in trace["traceEvents"]:
        match event["ph"]:
            case "X":
                start, length = nanoseconds(event["ts"]), nanoseconds(event["dur"])
                assert length >= 0
                parsed.spans[track(event)].append((start, start + length, event))
            case "s":
                assert event["id"] not in leaving
                leaving[event["id"]] = event
            case "f":
                assert event["id"] not in arriving
                arriving[event["id"]] = event
            case "C":
                assert event["pid"] in processes
                parsed.counters[event["name"]].append((nanoseconds(event["ts"]), event["args"]["value"]))
            case "M":
                pass
            case other:
                raise AssertionError(f"unknown phase {other!r}")
    for name, spans in parsed.spans.items():
        open_until: list[int] = []
        for start, end, _ in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"spans of track {name} overlap without nesting"
            open_until.append(end)
    assert leaving.keys() == arriving.keys()
    for number, source in leaving.items():
        target = arriving[number]
        leave, arrive = nanoseconds(source["ts"]), nanoseconds(target["ts"])
        assert leave <= arrive
        assert target["bp"] == "e"
        assert any(start <= leave <= end for start, end, _ in parsed.spans[track(source)])
        assert any(start == arrive for start, _, _ in parsed.spans[track(target)])
        parsed.arrows.append((track(source), leave, track(target), arrive))
    return parsed


def pipeline() -> Timeline:
    return simulate(pipeline_graph(one_f_one_b(3, 4), [[PassTimes(300, 200, 100)]] * 3, hop_ns=11))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_every_trace_parses_and_holds_every_task(
    graphs: Graphs, data: st.DataObject, contended: bool
) -> None:
    timeline = simulate(data.draw(graphs(contended=contended)))
    graph = timeline.graph
    parsed = parse(json.loads(json.dumps(chrome_trace(timeline))))
    shown = defaultdict(list)
    for track, spans in parsed.spans.items():
        for start, end, event in spans:
            if track[0] != "critical path":
                shown[event["args"]["task"]].append((start, end, event["name"], event["cat"]))
    for number in range(len(graph)):
        task = graph.task(number)
        span = (int(timeline.start_ns[number]), int(timeline.end_ns[number]), task.name, task.kind)
        assert shown[number] == [span] * max(1, len(task.streams))
    for use in stream_use(timeline):
        process, thread = use.stream.split("/")
        assert sum(end - start for start, end, _ in parsed.spans[process, thread]) == use.busy_ns


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_critical_path_is_a_track_without_gaps(graphs: Graphs, data: st.DataObject) -> None:
    timeline = simulate(data.draw(graphs()))
    path = parse(chrome_trace(timeline)).spans["critical path", "tasks"]
    assert path[0][0] == 0
    assert path[-1][1] == timeline.makespan_ns
    assert [end for _, end, _ in path[:-1]] == [start for start, _, _ in path[1:]]


@pytest.mark.parametrize("arguments", [[], ["--layer", "40"], ["--set", "faults.jitter_fraction=0.05"]])
def test_the_preset_s_trace_is_read_back_whole(arguments: list[str], tmp_path: Path) -> None:
    """As the command writes it: every stage or stream a track, and the critical path as long as the step."""
    path, record = tmp_path / "trace.json.gz", tmp_path / "step.json"
    preset = ["--preset", "glm-5.1-1m-512xh20"]
    assert simulate_command([*preset, *arguments, "--trace", str(path), "--json", str(record)]) == 0
    parsed = parse(json.loads(gzip.decompress(path.read_bytes())))
    on_path = parsed.spans["critical path", "tasks"]
    if "--layer" in arguments:
        assert {"compute", "network.context", "network.expert"} <= {thread for _, thread in parsed.spans}
    else:
        assert {f"stage{stage}" for stage in range(8)} <= {process for process, _ in parsed.spans}
        assert on_path[-1][1] == round(json.loads(record.read_text())["step_time_s"] * 1e9)
    assert [end for _, end, _ in on_path[:-1]] == [start for start, _, _ in on_path[1:]]


def test_streams_become_threads_of_their_process() -> None:
    parsed = parse(chrome_trace(pipeline()))
    assert ("stage0", "compute") in parsed.spans
    assert ("stage0", "send.next") in parsed.spans
    assert ("stage2", "send.prev") in parsed.spans


def test_messages_are_arrows_between_stages() -> None:
    parsed = parse(chrome_trace(pipeline()))
    ways = {(source, target) for source, _, target, _ in parsed.arrows}
    assert ways == {
        ((f"stage{a}", f"send.{way}"), (f"stage{b}", "compute"))
        for a, b, way in ((0, 1, "next"), (1, 2, "next"), (1, 0, "prev"), (2, 1, "prev"))
    }
    assert len(parsed.arrows) == 4 * 2 * 2, "four microbatches, two boundaries, both ways"


def test_overlapping_tasks_on_no_stream_get_tracks_of_their_own() -> None:
    builder = GraphBuilder()
    for start, length in ((0, 10), (0, 5), (5, 10), (3, 1)):
        before = [builder.add("wait", "x", f"s{len(builder)}", start)] if start else []
        builder.add("loose", "x", (), length, before)
    parsed = parse(chrome_trace(simulate(builder.build())))
    lanes = {
        thread: [span[:2] for span in spans]
        for (process, thread), spans in parsed.spans.items()
        if process == "no stream"
    }
    assert lanes == {"lane 0": [(0, 5), (5, 15)], "lane 1": [(0, 10)], "lane 2": [(3, 4)]}


def test_spans_say_what_released_them_and_what_contention_cost() -> None:
    builder = GraphBuilder()
    builder.add("gather", "all-gather", "rank0/comm", 1000, sm_taken={"rank0/compute": 0.25})
    builder.add("gemm", "linear", "rank0/compute", 3000)
    builder.add("next", "linear", "rank0/compute", 5)
    spans = parse(chrome_trace(simulate(builder.build()))).spans["rank0", "compute"]
    assert [span[2]["args"] for span in spans] == [
        {"task": 1, "name": "gemm", "contention_ns": 250, "critical": True},
        {"task": 2, "name": "next", "released_by": "gemm", "critical": True},
    ]


def test_counters_have_a_track_each() -> None:
    parsed = parse(chrome_trace(pipeline(), {"memory, GiB": [(0, 1.5), (500, 2.0)]}))
    assert parsed.counters == {"memory, GiB": [(0, 1.5), (500, 2.0)]}


def test_files_are_json_packed_or_not_and_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    graph = pipeline().graph
    written = []
    for name, seed in (("a.json.gz", 1), ("b.json.gz", 1), ("c.json.gz", 2), ("plain.json", 1)):
        write_trace(simulate(jitter(graph, 0.1, seed)), tmp_path / name)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1] != written[2]
    assert gzip.decompress(written[0]) == written[3]
    parse(json.loads(written[3]))

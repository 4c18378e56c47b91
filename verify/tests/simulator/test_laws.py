"""Laws that hold for every graph: conservation, bounds, and what a change must or must not do."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyscale_simulator.critical_path import critical_path, slack_ns, stream_use, time_on_path, waiting_for
from hyscale_simulator.engine import simulate
from hyscale_simulator.graph import Graph, GraphBuilder, Transfer
from hyscale_simulator.longest_path import longest_path
from hyscale_simulator.perturb import degrade_links, jitter, slow_streams
from hyscale_simulator.schedules import PassTimes, gpipe, one_f_one_b, pipeline_graph

Graphs = Callable[..., st.SearchStrategy[Graph]]
quick = settings(max_examples=150, deadline=None)


def rebuilt(graph: Graph, *, drop_edge: int | None = None, rename: dict[str, str] | None = None) -> Graph:
    """The same tasks again, without one explicit edge or under other stream names."""
    rename = rename or {}
    builder = GraphBuilder()
    edge = 0
    for number in range(len(graph)):
        task = graph.task(number)
        after = [pred for at, pred in enumerate(task.after) if edge + at != drop_edge]
        edge += len(task.after)
        streams = [rename.get(stream, stream) for stream in task.streams]
        builder.add(task.name, task.kind, streams, task.duration_ns, after)
    return builder.build()


# Conservation: parts sum to the whole, exactly.


@quick
@given(st.data(), st.booleans())
def test_time_on_the_critical_path_sums_to_the_makespan(
    graphs: Graphs, data: st.DataObject, contended: bool
) -> None:
    timeline = simulate(data.draw(graphs(contended=contended)))
    path = critical_path(timeline)
    assert timeline.start_ns[path[0]] == 0
    assert timeline.end_ns[path[:-1]].tolist() == timeline.start_ns[path[1:]].tolist(), "no gap"
    assert timeline.end_ns[path[-1]] == timeline.makespan_ns
    assert sum(time_on_path(timeline).values()) == timeline.makespan_ns


@quick
@given(st.data(), st.booleans())
def test_busy_and_idle_time_of_each_stream_sum_to_the_makespan(
    graphs: Graphs, data: st.DataObject, contended: bool
) -> None:
    graph = data.draw(graphs(contended=contended))
    timeline = simulate(graph)
    for use in stream_use(timeline):
        assert use.busy_ns + use.idle_ns == timeline.makespan_ns
        assert 0 <= use.busy_ns <= timeline.makespan_ns
        assert sum(use.by_kind.values()) == use.busy_ns
        assert sum(waiting_for(timeline, use.stream).values()) == use.idle_ns
        if not contended:
            on_stream = [t for t in map(graph.task, range(len(graph))) if use.stream in t.streams]
            assert use.busy_ns == sum(task.duration_ns for task in on_stream)


@quick
@given(st.data(), st.booleans())
def test_tasks_of_a_stream_never_overlap_and_keep_their_order(
    graphs: Graphs, data: st.DataObject, contended: bool
) -> None:
    graph = data.draw(graphs(contended=contended))
    timeline = simulate(graph)
    free: dict[str, int] = {}
    for number in range(len(graph)):
        for stream in graph.task(number).streams:
            assert timeline.start_ns[number] >= free.get(stream, 0)
            free[stream] = int(timeline.end_ns[number])


@quick
@given(st.data())
def test_links_carry_all_bytes_and_never_more_than_their_capacity(
    graphs: Graphs, data: st.DataObject
) -> None:
    graph = data.draw(graphs(contended=True))
    timeline = simulate(graph)
    for link, capacity in graph.links.items():
        crossing = [task for task, transfer in graph.transfers.items() if link in transfer.links]
        num_bytes = sum(graph.transfers[task].num_bytes for task in crossing)
        if num_bytes:
            begins = min(int(timeline.start_ns[task] + graph.duration_ns[task]) for task in crossing)
            open_ns = max(int(timeline.end_ns[task]) for task in crossing) - begins
            assert num_bytes * 10**9 <= capacity * open_ns


# Bounds.


@quick
@given(st.data(), st.booleans())
def test_makespan_lies_between_the_busiest_stream_and_doing_all_in_turn(
    graphs: Graphs, data: st.DataObject, contended: bool
) -> None:
    graph = data.draw(graphs(contended=contended))
    timeline = simulate(graph)
    busiest = max((use.busy_ns for use in stream_use(timeline)), default=0)
    # Contended ends are rounded up to the next nanosecond, at most once each.
    assert busiest <= timeline.makespan_ns <= int(graph.alone_ns.sum()) + contended * len(graph)


@quick
@given(st.data())
def test_contention_only_ever_adds(graphs: Graphs, data: st.DataObject) -> None:
    graph = data.draw(graphs(contended=True))
    timeline = simulate(graph)
    assert ((timeline.end_ns - timeline.start_ns) >= graph.alone_ns).all()
    alone = rebuilt(graph).with_durations(graph.alone_ns)
    assert (timeline.end_ns >= longest_path(alone).end_ns).all()


# Changes, where nothing contends: the order of each stream is fixed, so every end is monotone.


@quick
@given(st.data(), st.integers(0, 5))
def test_scaling_all_durations_scales_every_time(graphs: Graphs, data: st.DataObject, factor: int) -> None:
    graph = data.draw(graphs())
    once, scaled = simulate(graph), simulate(graph.with_durations(factor * graph.duration_ns))
    assert scaled.end_ns.tolist() == (factor * once.end_ns).tolist()


@quick
@given(st.data())
def test_a_longer_task_never_makes_another_earlier(graphs: Graphs, data: st.DataObject) -> None:
    graph = data.draw(graphs())
    longer = graph.duration_ns.copy()
    longer[data.draw(st.integers(0, len(graph) - 1))] += data.draw(st.integers(1, 500))
    assert (simulate(graph.with_durations(longer)).end_ns >= simulate(graph).end_ns).all()


@quick
@given(st.data())
def test_removing_an_edge_never_delays_anything(graphs: Graphs, data: st.DataObject) -> None:
    graph = data.draw(graphs())
    if not len(graph.pred_idx):
        return
    freed = rebuilt(graph, drop_edge=data.draw(st.integers(0, len(graph.pred_idx) - 1)))
    assert (simulate(freed).end_ns <= simulate(graph).end_ns).all()


@quick
@given(st.data())
def test_names_of_streams_do_not_matter(graphs: Graphs, data: st.DataObject) -> None:
    graph = data.draw(graphs())
    names = data.draw(st.permutations(graph.streams))
    permuted = rebuilt(graph, rename=dict(zip(graph.streams, names, strict=True)))
    assert simulate(permuted).end_ns.tolist() == simulate(graph).end_ns.tolist()


@quick
@given(st.data())
def test_slack_is_what_a_task_may_grow_and_not_a_nanosecond_more(graphs: Graphs, data: st.DataObject) -> None:
    graph = data.draw(graphs(max_size=12))
    timeline = longest_path(graph)
    slack = slack_ns(timeline)
    assert (slack >= 0).all()
    assert (slack[critical_path(timeline)] == 0).all()
    task = data.draw(st.integers(0, len(graph) - 1))
    for more, grows in ((int(slack[task]), 0), (int(slack[task]) + 1, 1)):
        longer = graph.duration_ns.copy()
        longer[task] += more
        assert longest_path(graph.with_durations(longer)).makespan_ns == timeline.makespan_ns + grows


@quick
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3000)), min_size=1, max_size=8), st.integers(2, 5)
)
def test_a_faster_link_never_slows_messages_in_fixed_order(
    messages: list[tuple[int, int]], faster: int
) -> None:
    """Messages of one stream after another on one link, each waiting for a kernel: nothing contends."""
    builder = GraphBuilder()
    builder.link("nic", 10**9)
    for number, (kernel, num_bytes) in enumerate(messages):
        ready = builder.add(f"kernel{number}", "x", "compute", kernel)
        builder.add(f"send{number}", "p2p", "comm", 5, [ready], transfer=Transfer(("nic",), num_bytes))
    graph = builder.build()
    slow, fast = simulate(graph), simulate(graph.with_links({"nic": faster * 10**9}))
    assert (fast.end_ns <= slow.end_ns).all()
    assert longest_path(graph).end_ns.tolist() == slow.end_ns.tolist()


def test_replicas_run_alike_until_something_breaks_their_symmetry() -> None:
    """Data-parallel copies of a layer, then a gradient collective over all."""
    layer = GraphBuilder()
    norm = layer.add("norm", "x", "compute", 11)
    layer.add("gather", "all-gather", "comm", 23, [norm])
    layer.add("gemm", "x", "compute", 31)
    builder = GraphBuilder()
    for rank in range(4):
        builder.include(layer.build(), rename={s: f"rank{rank}/{s}" for s in ("compute", "comm")})
    builder.add("reduce", "all-reduce", [f"rank{rank}/comm" for rank in range(4)], 7, range(2, 12, 3))
    graph = builder.build()
    ends = simulate(graph).end_ns[:12].reshape(4, 3)
    assert (ends == ends[0]).all()
    straggling = simulate(slow_streams(graph, {"rank2/compute": 2.0}))
    assert straggling.makespan_ns == simulate(graph).makespan_ns + 11 + 31
    assert straggling.released_by[12] == 8, "the straggler's gemm releases the collective"


def test_many_microbatches_tend_to_the_bottleneck() -> None:
    stages = [[PassTimes(f, b, 0)] for f, b in ((30, 50), (45, 70), (20, 110))]
    for m in (50, 51):
        longer, shorter = (
            simulate(pipeline_graph(gpipe(3, count), stages)).makespan_ns for count in (m + 1, m)
        )
        assert longer - shorter == 45 + 110
    uniform = [[PassTimes(30, 20, 10)]] * 4
    longer, shorter = (
        simulate(pipeline_graph(one_f_one_b(4, count), uniform)).makespan_ns for count in (51, 50)
    )
    assert longer - shorter == 60


def test_messages_that_take_nothing_leave_compute_alone() -> None:
    stages = [[PassTimes(30, 20, 10)]] * 4
    graph = pipeline_graph(one_f_one_b(4, 8), stages, hop_ns=5)
    messages = np.array([graph.task(i).kind == "p2p" for i in range(len(graph))])
    free = graph.with_durations(np.where(messages, 0, graph.duration_ns))
    assert simulate(free).makespan_ns == simulate(pipeline_graph(one_f_one_b(4, 8), stages)).makespan_ns


def test_what_a_stage_waits_for_is_told_apart() -> None:
    """The last stage of a pipeline waits for its neighbour's work and then for the message."""
    graph = pipeline_graph(gpipe(2, 1), [[PassTimes(100, 0, 0)], [PassTimes(50, 30, 0)]], hop_ns=7)
    timeline = simulate(graph)
    assert timeline.makespan_ns == 100 + 7 + 50 + 30 + 7
    assert waiting_for(timeline, "stage1/compute") == {"forward": 100, "p2p": 7 + 7}
    assert waiting_for(timeline, "stage0/compute") == {"forward": 50, "backward": 30, "p2p": 7 + 7}
    with pytest.raises(ValueError, match="no 'stage9/compute'"):
        waiting_for(timeline, "stage9/compute")


def test_contention_on_the_path_is_listed_apart() -> None:
    builder = GraphBuilder()
    builder.add("gather", "all-gather", "comm", 1000, sm_taken={"compute": 0.25})
    builder.add("gemm", "linear", "compute", 3000)
    assert time_on_path(simulate(builder.build())) == {"linear": 3000, "linear (contention)": 250}


# Perturbations.


@quick
@given(st.data(), st.integers(0, 2**32), st.floats(0, 0.5))
def test_equal_seeds_give_equal_timelines(
    graphs: Graphs, data: st.DataObject, seed: int, relative_std: float
) -> None:
    graph = data.draw(graphs(contended=True))
    once, again = (simulate(jitter(graph, relative_std, seed)) for _ in range(2))
    assert once.end_ns.tolist() == again.end_ns.tolist()
    assert once.released_by.tolist() == again.released_by.tolist()


def test_jitter_has_the_mean_and_spread_it_states() -> None:
    builder = GraphBuilder()
    for _ in range(20_000):
        builder.add("gemm", "linear", "s", 10**9)
    builder.add("send", "p2p", "s", 10**9)
    graph = builder.build()
    shaken = jitter(graph, 0.1, seed=7)
    factor = shaken.duration_ns / graph.duration_ns
    assert factor.mean() == pytest.approx(1.0, abs=0.003)
    assert factor.std() == pytest.approx(0.1, abs=0.003)
    assert jitter(graph, 0.0, seed=7).duration_ns.tolist() == graph.duration_ns.tolist()
    assert jitter(graph, 0.1, seed=8).duration_ns.tolist() != shaken.duration_ns.tolist()
    only = jitter(graph, 0.1, seed=7, kinds=frozenset({"p2p"}))
    assert only.duration_ns[-1] == shaken.duration_ns[-1]
    assert only.duration_ns[:-1].tolist() == graph.duration_ns[:-1].tolist()


def test_stragglers_and_slow_links_change_what_they_name_alone() -> None:
    builder = GraphBuilder()
    builder.link("nic", 1000)
    builder.add("a", "x", "stage0/compute", 100)
    builder.add("b", "x", "stage1/compute", 100)
    builder.add("both", "x", ("stage0/comm", "stage1/comm"), 100)
    builder.add("milestone", "x", (), 100)
    graph = builder.build()
    assert slow_streams(graph, {"stage1/": 1.5}).duration_ns.tolist() == [100, 150, 150, 100]
    assert slow_streams(graph, {"stage1/": 0.5}).duration_ns.tolist() == [100, 50, 100, 100]
    assert degrade_links(graph, {"nic": 0.25}).links == {"nic": 250}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: jitter(graph, -0.1, 0), r"relative_std: -0\.1"),
        (lambda graph: jitter(graph, 0.1, 0, frozenset({"y"})), r"kinds: \['y'\]"),
        (lambda graph: slow_streams(graph, {"stage9": 2.0}), "no stream starts with 'stage9'"),
        (lambda graph: slow_streams(graph, {"s": 0.0}), r"0\.0 for 's'"),
        (lambda graph: degrade_links(graph, {"nic": 0.5}), "no link 'nic'"),
    ],
)
def test_bad_perturbations_are_refused(change: Callable[[Graph], Graph], message: str) -> None:
    builder = GraphBuilder()
    builder.add("a", "x", "s", 1)
    with pytest.raises(ValueError, match=message):
        change(builder.build())


def test_the_strategy_reaches_what_the_laws_are_about(graphs: Graphs) -> None:
    """Random graphs do contend, wait for collectives and slow kernels; laws about none of it prove
    nothing."""
    seen: Counter[str] = Counter()

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(graphs(contended=True))
    def look(graph: Graph) -> None:
        timeline = simulate(graph)
        stretched = np.flatnonzero(timeline.end_ns - timeline.start_ns > graph.alone_ns)
        seen["flow shared a link"] += any(task in graph.transfers for task in stretched)
        seen["kernel lost SMs"] += any(task not in graph.transfers for task in stretched)
        seen["collective waited"] += any(
            len(graph.task(t).streams) > 1 and timeline.start_ns[t] > 0 for t in range(len(graph))
        )
        seen["milestone"] += any(not graph.task(t).streams for t in range(len(graph)))

    look()
    assert len(seen) == 4
    assert min(seen.values()) >= 10, seen

"""The engine against two independent passes, and its fluids against arithmetic done by hand."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyscale_simulator.engine import simulate
from hyscale_simulator.graph import Graph, GraphBuilder, Timeline, Transfer
from hyscale_simulator.longest_path import ContentionError, LongestPath, longest_path

Graphs = Callable[..., st.SearchStrategy[Graph]]


def same(one: Timeline, other: Timeline) -> None:
    assert one.start_ns.tolist() == other.start_ns.tolist()
    assert one.end_ns.tolist() == other.end_ns.tolist()
    assert one.released_by.tolist() == other.released_by.tolist()


def by_definition(graph: Graph) -> tuple[list[int], list[int], list[int]]:
    """Start, end and releaser of each task, one after the other, from the records alone."""
    last_on: dict[str, int] = {}
    start: list[int] = []
    end: list[int] = []
    released_by: list[int] = []
    for number in range(len(graph)):
        task = graph.task(number)
        before = {*task.after, *(last_on[s] for s in task.streams if s in last_on)}
        start.append(max((end[p] for p in before), default=0))
        end.append(start[-1] + task.duration_ns)
        released_by.append(min((p for p in before if end[p] == start[-1]), default=-1))
        last_on.update(dict.fromkeys(task.streams, number))
    return start, end, released_by


@settings(max_examples=1200, deadline=None)
@given(st.data())
def test_engine_and_longest_path_agree_to_the_nanosecond(graphs: Graphs, data: st.DataObject) -> None:
    graph = data.draw(graphs())
    events, arrays = simulate(graph), longest_path(graph)
    same(events, arrays)
    assert by_definition(graph) == (
        events.start_ns.tolist(),
        events.end_ns.tolist(),
        events.released_by.tolist(),
    )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_where_longest_path_answers_nothing_contended(graphs: Graphs, data: st.DataObject) -> None:
    graph = data.draw(graphs(contended=True, max_size=8))
    try:
        arrays = longest_path(graph)
    except ContentionError:
        return
    events = simulate(graph)
    same(events, arrays)
    assert (events.end_ns - events.start_ns).tolist() == graph.alone_ns.tolist()


def test_claims_that_only_touch_do_not_contend() -> None:
    builder = GraphBuilder()
    builder.link("nic", 10**9)
    builder.add("gemm", "x", "compute", 100)
    builder.add("wait", "x", "comm", 100)
    builder.add("send", "p2p", "comm", 10, transfer=Transfer(("nic",), 50), sm_taken={"compute": 0.5})
    builder.add("idle", "x", "other", 160)
    builder.add("send", "p2p", "other", 0, transfer=Transfer(("nic",), 50), sm_taken={"compute": 0.5})
    graph = builder.build()
    same(longest_path(graph), simulate(graph))


def test_order_of_numbering_does_not_matter_to_either_pass() -> None:
    """Tasks added against the direction of their dependencies."""
    builder = GraphBuilder()
    builder.add("last", "x", "a", 5, [1])
    builder.add("middle", "x", "b", 7, [2])
    builder.add("first", "x", "c", 3)
    graph = builder.build()
    same(simulate(graph), longest_path(graph))
    assert longest_path(graph).start_ns.tolist() == [10, 3, 0]


def test_a_collective_starts_with_its_last_member_and_ends_on_all_at_once() -> None:
    builder = GraphBuilder()
    for rank, late in enumerate([5, 60, 20]):
        builder.add(f"compute{rank}", "x", f"rank{rank}", late)
    gather = builder.add("gather", "all-gather", [f"rank{rank}" for rank in range(3)], 10)
    builder.add("next", "x", "rank0", 1)
    timeline = simulate(builder.build())
    assert timeline.start_ns.tolist() == [0, 0, 0, 60, 70]
    assert timeline.released_by[gather] == 1


def test_a_collective_may_open_a_stream_that_was_named_earlier() -> None:
    builder = GraphBuilder()
    builder.add("message", "p2p", "b", 5, sm_taken={"a": 0.1})
    builder.add("gather", "all-gather", ("a", "b"), 7, sm_sensitivity=0.0)
    builder.add("next", "x", "a", 3, sm_sensitivity=0.0)
    graph = builder.build()
    assert longest_path(graph).start_ns.tolist() == simulate(graph).start_ns.tolist() == [0, 5, 12]


def test_a_large_collective_costs_each_member_a_constant() -> None:
    """1,024 ranks, 50 collectives: quadratic bookkeeping would need 50 million steps."""
    builder = GraphBuilder()
    ranks = [f"rank{rank}" for rank in range(1024)]
    for _ in range(50):
        builder.add("gather", "all-gather", ranks, 7)
    assert simulate(builder.build()).makespan_ns == 350


def flows(arrivals: list[tuple[int, int, tuple[str, ...]]], links: dict[str, int]) -> list[int]:
    """Ends of flows of (latency, bytes, links) that share nothing else."""
    builder = GraphBuilder()
    for name, capacity in links.items():
        builder.link(name, capacity)
    for number, (latency, num_bytes, through) in enumerate(arrivals):
        builder.add(f"f{number}", "p2p", f"s{number}", latency, transfer=Transfer(through, num_bytes))
    return list(simulate(builder.build()).end_ns.tolist())


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10_000), st.integers(0, 500))
def test_n_equal_flows_take_n_times_as_long(count: int, num_bytes: int, latency: int) -> None:
    ends = flows([(latency, count * num_bytes, ("nic",))] * count, {"nic": count * 10**9})
    assert ends == [latency + count * num_bytes] * count


def test_a_flow_that_leaves_gives_its_share_to_the_others() -> None:
    # Alone 0..500 (500 bytes), two share 500..1500, the second alone again.
    nic = {"nic": 10**9}
    assert flows([(0, 1000, ("nic",)), (500, 1000, ("nic",))], nic) == [1500, 2000]


def test_rates_are_max_min_fair_across_links() -> None:
    """The textbook case: a long flow over two links, one short flow on each.

    The narrow link gives 1 to either of its flows, so the wide one has 3 left for its own.
    """
    links = {"narrow": 2 * 10**9, "wide": 4 * 10**9}
    arrivals = [(0, 1000, ("narrow", "wide")), (0, 1000, ("narrow",)), (0, 3000, ("wide",))]
    assert flows(arrivals, links) == [1000, 1000, 1000]


def test_no_bytes_cost_the_latency_alone() -> None:
    assert flows([(40, 0, ("nic",)), (0, 100, ("nic",))], {"nic": 10**9}) == [40, 100]


def contended_kernel(fraction: float, sensitivity: float, kernel_ns: int, comm: list[tuple[int, int]]) -> int:
    """End of a kernel on a stream of which messages, at (start, duration), hold that fraction of the SMs."""
    builder = GraphBuilder()
    kernel = builder.add("kernel", "x", "compute", kernel_ns, sm_sensitivity=sensitivity)
    for number, (start, duration) in enumerate(comm):
        wait = builder.add("wait", "x", f"comm{number}", start)
        builder.add("message", "p2p", f"comm{number}", duration, [wait], sm_taken={"compute": fraction})
    return int(simulate(builder.build()).end_ns[kernel])


def test_sms_that_are_taken_slow_the_kernel_by_the_stated_factor() -> None:
    assert contended_kernel(0.25, 1.0, 3000, [(0, 10_000)]) == 4000
    assert contended_kernel(0.25, 0.5, 3500, [(0, 10_000)]) == 4000
    assert contended_kernel(0.25, 0.0, 3000, [(0, 10_000)]) == 3000
    assert contended_kernel(0.25, 1.0, 3000, [(1000, 1000)]) == 3250, "only while the message runs"
    assert contended_kernel(0.25, 1.0, 3000, [(0, 2000), (1000, 1000)]) == 3750, "fractions add up"
    assert contended_kernel(0.25, 1.0, 3000, [(3000, 1000)]) == 3000, "it had ended"


def test_taking_all_sms_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"stream 'compute': \['message', 'message'\] together"):
        contended_kernel(0.5, 1.0, 10, [(0, 10), (0, 10)])


def test_contention_is_refused_naming_both_tasks_and_the_cause() -> None:
    builder = GraphBuilder()
    builder.link("nic", 10**9)
    builder.add("send", "p2p", "a", 0, transfer=Transfer(("nic",), 10))
    builder.add("recv", "p2p", "b", 9, transfer=Transfer(("nic",), 10))
    with pytest.raises(ContentionError, match=r"'send' \(task 0\) and 'recv' \(task 1\) share link 'nic'"):
        longest_path(builder.build())

    builder = GraphBuilder()
    builder.add("gather", "comm", "b", 10, sm_taken={"a": 0.1})
    builder.add("norm", "x", "a", 5, sm_sensitivity=0.0)
    builder.add("gemm", "x", "a", 5)
    with pytest.raises(ContentionError, match=r"'gather' .* and 'gemm' .* share the SMs of stream 'a'"):
        longest_path(builder.build())


def test_a_faster_task_may_slow_a_contended_graph() -> None:
    """Why monotony is promised only where nothing contends (the cousin of Graham's anomaly)."""

    def makespan(before: int) -> int:
        builder = GraphBuilder()
        builder.link("nic", 10**9)
        early = builder.add("early", "p2p", "a", 0, transfer=Transfer(("nic",), 1000))
        builder.add("long", "x", "c", 5000, [early])
        builder.add("before", "x", "b", before)
        builder.add("late", "p2p", "b", 0, transfer=Transfer(("nic",), 1000))
        return simulate(builder.build()).makespan_ns

    assert makespan(before=1000) == 6000
    assert makespan(before=0) == 7000


def test_a_plan_serves_every_repricing_and_nothing_else() -> None:
    builder = GraphBuilder()
    for number in range(50):
        builder.add(
            f"t{number}",
            "x",
            f"s{number % 3}",
            number,
            [number - 7] if number % 5 == 3 and number > 7 else [],
        )
    graph = builder.build()
    plan = LongestPath(graph)
    for seed in range(5):
        repriced = graph.with_durations(np.random.default_rng(seed).integers(0, 1000, len(graph)))
        same(plan.run(repriced), simulate(repriced))
    with pytest.raises(ValueError, match="not of the structure"):
        plan.run(builder.build())

"""The task graph: what the builder promises, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyscale_simulator.graph import Graph, GraphBuilder, Transfer, transfer_ns


def layer() -> Graph:
    """Compute, a message that overlaps with more compute, and compute that waits for both."""
    builder = GraphBuilder()
    builder.link("nic", 10**9)
    first = builder.add("norm", "vector", "compute", 5, op=0)
    sent = builder.add(
        "send", "p2p", "comm", 3, [first], transfer=Transfer(("nic",), 40), sm_taken={"compute": 0.25}, op=1
    )
    builder.add("router", "linear", "compute", 7, op=2, sm_sensitivity=0.5)
    builder.add("experts", "linear", "compute", 11, [sent], op=3)
    return builder.build()


def test_a_task_reads_back_as_it_was_added() -> None:
    task = layer().task(1)
    assert (task.name, task.kind, task.streams, task.duration_ns) == ("send", "p2p", ("comm",), 3)
    assert (task.after, task.transfer, task.op) == ((0,), Transfer(("nic",), 40), 1)
    assert dict(task.sm_taken) == {"compute": 0.25}
    assert layer().task(2).sm_sensitivity == 0.5
    with pytest.raises(IndexError, match=r"4 is outside 0\.\.3"):
        layer().task(4)


def test_edges_are_the_explicit_ones_and_the_stream_order() -> None:
    graph = layer()
    ptr, idx = graph.edges
    preds = [sorted(idx[ptr[i] : ptr[i + 1]].tolist()) for i in range(len(graph))]
    assert preds == [[], [0], [0], [1, 2]]
    assert graph.entries.tolist() == [0]
    assert graph.exits.tolist() == [3]


def test_alone_adds_the_transfer_at_the_narrowest_link() -> None:
    assert layer().alone_ns.tolist() == [5, 3 + 40, 7, 11]
    assert layer().with_links({"nic": 3 * 10**9}).alone_ns.tolist() == [5, 3 + 14, 7, 11]  # 13.3 rounds up
    assert transfer_ns(0, 7) == 0


def test_include_equals_adding_each_task_by_hand() -> None:
    builder = GraphBuilder()
    start = builder.add("start", "milestone", "host", 0)
    first = builder.include(
        layer(), label="mb0", rename={"compute": "s1/compute", "nic": "s1/nic"}, after=[start]
    )
    second = builder.include(layer(), label="mb1", rename={"nic": "s1/nic"}, after=[first])
    graph = builder.build()
    assert (first, second) == (1, 5)
    assert graph.name(2) == "mb0/send"
    assert graph.task(1).after == (0,)
    assert graph.task(2).after == (1,)
    assert graph.task(2).transfer == Transfer(("s1/nic",), 40)
    assert dict(graph.task(2).sm_taken) == {"s1/compute": 0.25}
    assert graph.task(6).streams == ("comm",)
    assert dict(graph.task(6).sm_taken) == {"compute": 0.25}
    assert graph.task(7).sm_sensitivity == 0.5
    assert graph.op.tolist() == [-1, 0, 1, 2, 3, 0, 1, 2, 3]
    ptr, idx = graph.edges
    assert sorted(idx[ptr[6] : ptr[7]].tolist()) == [2, 5], (
        "the second message follows the first on its stream"
    )


def test_labels_nest() -> None:
    inner = GraphBuilder()
    inner.include(layer(), label="layer0")
    outer = GraphBuilder()
    outer.include(inner.build(), label="mb3")
    assert outer.build().name(3) == "mb3/layer0/experts"


def test_include_refuses_to_merge_two_streams() -> None:
    with pytest.raises(ValueError, match=r"two streams of .* would become one"):
        GraphBuilder().include(layer(), rename={"comm": "compute"})


def test_repricing_keeps_structure_and_changes_durations() -> None:
    graph = layer()
    derived = graph.edges, graph.order
    price = np.array([100, 200, 300, 400])
    repriced = graph.with_durations(price[graph.op])
    assert repriced.duration_ns.tolist() == [100, 200, 300, 400]
    assert repriced.alone_ns.tolist() == [100, 240, 300, 400]
    assert repriced.edges is derived[0]
    assert repriced.order is derived[1]
    assert graph.duration_ns.tolist() == [5, 3, 7, 11], "the first graph is untouched"


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        (np.zeros(3, np.int64), r"int64 \(3,\)"),
        (np.zeros(4), "float64"),
        (np.array([1, 2, -3, 4]), "'router'.*-3"),
    ],
)
def test_bad_durations_are_refused(durations: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer().with_durations(durations)


def test_bad_tasks_are_refused_by_name() -> None:
    builder = GraphBuilder()
    with pytest.raises(ValueError, match=r"'gemm'.*-1"):
        builder.add("gemm", "linear", "s", -1)
    with pytest.raises(TypeError, match=r"'gemm'.*whole nanoseconds"):
        builder.add("gemm", "linear", "s", 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'gather'.*twice"):
        builder.add("gather", "comm", ("s", "s"), 1)
    with pytest.raises(ValueError, match=r"'gather'.*takes 1\.5"):
        builder.add("gather", "comm", "n", 1, sm_taken={"s": 1.5})
    with pytest.raises(ValueError, match=r"'gather'.*own stream"):
        builder.add("gather", "comm", "s", 1, sm_taken={"s": 0.5})
    with pytest.raises(ValueError, match=r"'gemm'.*sm_sensitivity is 2"):
        builder.add("gemm", "linear", "s", 1, sm_sensitivity=2)
    with pytest.raises(ValueError, match=r"'send'.*at least one link"):
        builder.add("send", "p2p", "s", 1, transfer=Transfer((), 1))
    assert len(builder) == 0, "a refused task leaves nothing behind"
    with pytest.raises(ValueError, match="graph: 0 tasks; at least one is wanted"):
        builder.build()


def test_links_have_one_positive_capacity() -> None:
    builder = GraphBuilder()
    with pytest.raises(ValueError, match=r"'nic'.*0"):
        builder.link("nic", 0)
    builder.link("nic", 5)
    with pytest.raises(ValueError, match="declared with 5 and 6"):
        builder.link("nic", 6)
    builder.add("send", "p2p", "s", 1, transfer=Transfer(("spine",), 1))
    with pytest.raises(ValueError, match=r"'send'.*'spine' was not declared"):
        builder.build()
    with pytest.raises(ValueError, match="no link 'spine'"):
        layer().with_links({"spine": 1})


@pytest.mark.parametrize("unknown", [7, -1])
def test_an_unknown_predecessor_is_named(unknown: int) -> None:
    builder = GraphBuilder()
    builder.add("gemm", "linear", "s", 1)
    builder.add("norm", "vector", "s", 1, [0, unknown])
    with pytest.raises(
        ValueError, match=rf"'norm': comes after task {unknown}, but the graph has tasks 0\.\.1"
    ):
        builder.build()


def test_a_cycle_through_the_stream_order_is_named() -> None:
    builder = GraphBuilder()
    builder.add("before", "linear", "t", 1)
    builder.add("early", "linear", "s", 1, [0, 3])
    builder.add("late", "linear", "s", 1)
    builder.add("other", "linear", "t", 1, [2])
    with pytest.raises(ValueError, match=r"cycle.*'early'.*'late'.*'other'.*'early'") as raised:
        builder.build()
    assert "before" not in str(raised.value)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_order_is_topological_whatever_the_numbering(data: st.DataObject) -> None:
    """Streams named per task, so that any numbering of an acyclic relation is legal."""
    size = data.draw(st.integers(1, 12))
    rank = data.draw(st.permutations(range(size)))
    builder = GraphBuilder()
    for task in range(size):
        earlier = [other for other in range(size) if rank[other] < rank[task]]
        after = data.draw(st.lists(st.sampled_from(earlier), unique=True)) if earlier else []
        builder.add(f"t{task}", "x", f"s{task}", 1, after)
    graph = builder.build()
    position = np.empty(size, np.int64)
    position[graph.order] = np.arange(size)
    assert sorted(graph.order.tolist()) == list(range(size))
    for task in range(size):
        assert all(position[pred] < position[task] for pred in graph.task(task).after)

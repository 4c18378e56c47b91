"""Collectives against their closed forms, against measurements on H200, and against published fits."""

import math
from collections.abc import Callable
from importlib.resources import files
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyscale_simulator.collectives import (
    Cost,
    Routing,
    all_gather,
    all_reduce,
    all_to_all,
    expected_distinct,
    expert_exchange,
    point_to_point,
    reduce_scatter,
)
from hyscale_simulator.network import CopyKernel, Fabric, InSwitchReduction, Level, read_tables

MIB = 1 << 20
A0, B0, A1, B1 = 3.7, 330.0, 9.3, 48.5
"""Node: H200, 26 us over 7 ring steps. Network: NCCL's low-latency ring step and a 400G port (SimAI's
figures)."""

NODE = Level("node", 8, A0, B0, 8)
FABRIC = Fabric((NODE, Level("leaf", 1024, A1, B1, 8)))
MEASURED = Fabric(
    FABRIC.levels,
    tables=read_tables(Path(str(files("hyscale_simulator") / "data/profiles/h200-nccl.csv.gz"))),
)
OPERATIONS: dict[str, Callable[[Fabric, int, float], Cost]] = {
    "all_gather": lambda fabric, n, size: all_gather(fabric, fabric.group(n), size),
    "reduce_scatter": lambda fabric, n, size: reduce_scatter(fabric, fabric.group(n), size),
    "alltoall": lambda fabric, n, size: all_to_all(fabric, fabric.group(n), size),
    "all_reduce": lambda fabric, n, size: all_reduce(fabric, fabric.group(n), size),
}
sizes = st.integers(0, 1 << 34)


def us(num_bytes: float, gbytes_per_s: float) -> float:
    return num_bytes / gbytes_per_s / 1e3


@given(st.sampled_from([2, 3, 4, 8]), sizes)
def test_within_a_node_the_closed_forms_are_exact(n: int, size: int) -> None:
    group = FABRIC.group(n)
    ring = (n - 1) * A0 + us((n - 1) / n * size, B0)
    tree = 2 * math.ceil(math.log2(n)) * A0 + us(2 * size, B0)
    assert all_gather(FABRIC, group, size).time_us == pytest.approx(ring)
    assert reduce_scatter(FABRIC, group, size).time_us == pytest.approx(ring)
    assert all_reduce(FABRIC, group, size, "ring").time_us == pytest.approx(2 * ring)
    assert all_reduce(FABRIC, group, size, "tree").time_us == pytest.approx(tree)
    assert all_reduce(FABRIC, group, size).time_us == pytest.approx(min(2 * ring, tree))
    assert all_to_all(FABRIC, group, size).time_us == pytest.approx(ring)
    assert point_to_point(FABRIC, group, size).time_us == pytest.approx(A0 + us(size, B0))


@given(st.sampled_from([2, 4, 16, 64]), sizes)
def test_one_rank_a_node_the_closed_forms_are_exact(n: int, size: int) -> None:
    group = FABRIC.group(n, 8)
    assert all_gather(FABRIC, group, size).time_us == pytest.approx((n - 1) * A1 + us((n - 1) / n * size, B1))
    assert all_to_all(FABRIC, group, size).time_us == pytest.approx((n - 1) * A1 + us((n - 1) / n * size, B1))
    assert point_to_point(FABRIC, group, size).time_us == pytest.approx(A1 + us(size, B1))


@given(st.sampled_from([2, 4, 8, 64]), sizes)
def test_across_nodes_the_hierarchical_form_is_exact(nodes: int, size: int) -> None:
    group = FABRIC.group(8 * nodes)
    inter = (nodes - 1) * A1 + us((nodes - 1) / nodes * size / 8, B1)
    intra = 7 * A0 + us(7 / 8 * size, B0)
    for collective in (all_gather, reduce_scatter):
        assert collective(FABRIC, group, size, "hierarchical").time_us == pytest.approx(inter + intra)
        assert collective(FABRIC, group, size, "pipelined").time_us == pytest.approx(max(inter, intra))
    assert all_reduce(FABRIC, group, size, "hierarchical").time_us == pytest.approx(2 * (inter + intra))


def test_a_ring_over_nodes_sums_the_latency_of_its_hops() -> None:
    """16 ranks on 2 nodes: 14 hops within nodes and 2 between; a chunk passes all but the cheapest one."""
    cost = all_gather(FABRIC, FABRIC.group(16), 16 * MIB)
    assert cost.alpha_us == pytest.approx(13 * A0 + 2 * A1)
    assert cost.time_us == pytest.approx(cost.alpha_us + us(15 * MIB, B0)), "8 ports outrun one NVLink"


def test_a_ring_crosses_each_level_as_often_as_it_has_units() -> None:
    fabric = Fabric((NODE, Level("leaf", 256, 5.0, B1, 8), Level("core", 1024, 9.0, B1, 8)))
    cost = all_gather(fabric, fabric.group(512), 0)
    assert cost.time_us == pytest.approx((512 - 64 - 1) * A0 + (64 - 2) * 5.0 + 2 * 9.0)


def test_fewer_ports_than_ranks_bound_a_ring_over_nodes() -> None:
    shared = Fabric((NODE, Level("leaf", 1024, A1, B1, 4)))
    cost = all_gather(shared, shared.group(64), 1 << 30)
    assert cost.time_us - cost.alpha_us == pytest.approx(us(63 / 64 * (1 << 30), 4 * B1))


def test_siblings_that_communicate_at_once_share_the_ports() -> None:
    lone = all_gather(FABRIC, FABRIC.group(64, 4, active_per_node=2), 1 << 30)
    crowd = all_gather(FABRIC, FABRIC.group(64, 4), 1 << 30)
    assert lone.time_us == pytest.approx(crowd.time_us), "a port for each rank: nothing to share"
    few = Fabric((NODE, Level("leaf", 1024, A1, B1, 2)))
    lone = all_gather(few, few.group(64, 4, active_per_node=2), 1 << 30)
    crowd = all_gather(few, few.group(64, 4), 1 << 30)
    assert crowd.time_us - crowd.alpha_us == pytest.approx(4 * (lone.time_us - lone.alpha_us))


def test_all_to_all_across_nodes_does_not_pool_ports() -> None:
    """SimAI: bus bandwidth = nic·nics/g·(n-1)/((N-1)g), where bus counts (n-1)/n of the bytes."""
    n, nodes, size = 64, 8, 1 << 30
    cost = all_to_all(FABRIC, FABRIC.group(n), size)
    bus = B1 * 8 / 8 * (n - 1) / ((nodes - 1) * 8)
    assert cost.time_us - cost.alpha_us == pytest.approx(us((n - 1) / n * size, bus))
    assert cost.alpha_us == pytest.approx(7 * A0 + 56 * A1)


def test_in_switch_reduction_serves_whole_nodes_only() -> None:
    fabric = Fabric(FABRIC.levels, InSwitchReduction(63, 468))
    size = 1 << 29
    assert all_reduce(fabric, fabric.group(8), size).time_us == pytest.approx(63 + us(2 * 7 / 8 * size, 468))
    assert all_reduce(fabric, fabric.group(8), size).algorithm == "nvls"
    assert all_reduce(fabric, fabric.group(4), size).algorithm == "ring"
    across = all_reduce(fabric, fabric.group(16), size, "nvls")
    assert across.time_us == pytest.approx(63 + 2 * A1 + us(2 * size, 8 * B1))
    with pytest.raises(
        ValueError, match=r"algorithm: 'nvls'; one of \['hierarchical', 'pipelined', 'ring', 'tree'\]"
    ):
        all_reduce(fabric, fabric.group(4), size, "nvls")
    with pytest.raises(ValueError, match="algorithm: 'tree'"):
        all_gather(fabric, fabric.group(4), size, "tree")


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_measured_sizes_cost_what_was_measured(op: str, ranks: int) -> None:
    table = MEASURED.table(op, ranks)
    assert table is not None
    for size, latency in zip(table.num_bytes, table.latency_us, strict=True):
        cost = OPERATIONS[op](MEASURED, ranks, size)
        assert (cost.time_us, cost.how) == (latency, "measured")


@pytest.mark.parametrize(
    ("op", "alpha", "bus", "mape"),
    [
        ("all_gather", 26, 332, 0.030),
        ("reduce_scatter", 26, 341, 0.005),
        ("alltoall", 28, 313, 0.013),
        ("all_reduce", 63, 468, 0.021),
    ],
)
def test_alpha_beta_fits_the_large_messages_of_h200_as_published(
    op: str, alpha: float, bus: float, mape: float
) -> None:
    """Level and in-switch figures set from the fit reproduce the measured tail to the fit's own error."""
    node = Level("node", 8, alpha / 7, bus, 8)
    fabric = Fabric((node,), InSwitchReduction(alpha, bus) if op == "all_reduce" else None)
    table = MEASURED.table(op, 8)
    assert table is not None
    tail = [(s, t) for s, t in zip(table.num_bytes, table.latency_us, strict=True) if s >= 16 * MIB]
    assert len(tail) == 6
    errors = [abs(OPERATIONS[op](fabric, 8, s).time_us / t - 1) for s, t in tail]
    assert np.mean(errors) == pytest.approx(mape, abs=0.002)


def test_bus_bandwidths_of_h200_are_those_published() -> None:
    published = {
        "all_gather": (54, 219, 285, 324, 337),
        "reduce_scatter": (64, 211, 295, 328, 337),
        "alltoall": (57, 200, 268, 305, 311),
        "all_reduce": (70, 241, 367, 446, 460),
    }
    for op, expected in published.items():
        passes = 2 if op == "all_reduce" else 1
        for mib, bus in zip((1, 16, 64, 256, 512), expected, strict=True):
            time = OPERATIONS[op](MEASURED, 8, mib * MIB).time_us
            assert us(passes * 7 / 8 * mib * MIB, 1) / time == pytest.approx(bus, abs=0.6), (op, mib)


def test_ring_latency_over_many_nodes_meets_simais_tables() -> None:
    """Latency in us that a fit to SimAI's efficiency tables gives. Nothing here was fitted to them: the
    node's step is H200's, the network's step and the bandwidths are SimAI's constants."""
    fabric = Fabric((Level("node", 8, A0, 370.8, 8), FABRIC.levels[1]))
    published = {32: 134, 64: 274, 128: 667, 256: 1177, 512: 2298, 1024: 4678}
    errors = []
    for ranks, alpha in published.items():
        errors.append(all_gather(fabric, fabric.group(ranks), 0).time_us / alpha - 1)
    assert max(map(abs, errors)) < 0.17
    assert np.mean(np.abs(errors)) < 0.06
    for size, published_ms in ((16 * MIB, 2.06), (1 << 30, 4.9)):
        took = all_gather(fabric, fabric.group(512), size).time_us / 1e3
        assert took == pytest.approx(published_ms, rel=0.12)


@pytest.mark.parametrize(
    ("nodes", "expected"), [(2, 1.99), (4, 3.61), (8, 5.29), (16, 6.52), (32, 7.27), (64, 7.68)]
)
def test_expected_distinct_nodes_are_the_published_ones(nodes: int, expected: float) -> None:
    assert expected_distinct(Routing(256, 8), nodes, nodes) == pytest.approx(expected, abs=0.005)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(1, 2), (2, 2), (2, 4), (3, 3), (4, 4)]), st.integers(1, 4), st.integers(1, 4))
def test_expected_distinct_counts_every_choice(layout: tuple[int, int], k: int, limit: int) -> None:
    """By enumeration: every draw of nodes within the limit, every draw of experts on them."""
    nodes, units = layout
    experts = 12
    limit = min(limit, nodes)
    routing = Routing(experts, k, max_nodes=limit)
    if experts // nodes * limit < k:
        with pytest.raises(ValueError, match="fewer than top_k"):
            expected_distinct(routing, units, nodes)
        return
    hits = []
    for allowed in combinations(range(nodes), limit):
        pool = [e for e in range(experts) if e * nodes // experts in allowed]
        hits += [len({e * units // experts for e in chosen}) for chosen in combinations(pool, k)]
    assert expected_distinct(routing, units, nodes) == pytest.approx(np.mean(hits))


def test_experts_spread_unevenly_are_refused() -> None:
    with pytest.raises(ValueError, match="units: 3 on 1 nodes; a divisor of the 256 experts"):
        expected_distinct(Routing(256, 8), 3)
    with pytest.raises(ValueError, match="top_k: 9"):
        Routing(8, 9)
    with pytest.raises(ValueError, match=r"imbalance: 0\.5"):
        Routing(8, 2, imbalance=0.5)
    with pytest.raises(ValueError, match="max_nodes: 0"):
        Routing(8, 2, max_nodes=0)


def exchange_us(hidden: int, nodes: int, bytes_per_value: float, sms: int | None = None) -> float:
    fabric = Fabric((NODE, Level("leaf", 64, A1, B1, 8)), copy_kernel=CopyKernel(28.0, 326.0, 17.0))
    group = fabric.group(8 * nodes)
    return expert_exchange(fabric, group, 4096, hidden * bytes_per_value, Routing(256, 8), sms).time_us


FP8 = 1 + 4 / 128  # a scale of four bytes for 128 values
BF16 = 2.0


@pytest.mark.parametrize(
    ("hidden", "nodes", "kind", "measured_us", "error"),
    [
        (7168, 1, FP8, 491, 0.10),
        (7168, 1, BF16, 973, 0.10),
        (6144, 1, FP8, 437, 0.10),
        (6144, 1, BF16, 833, 0.10),
        (7168, 2, FP8, 749, 0.15),
        (7168, 2, BF16, 1777, 0.32),  # the one row this misses, 30 % too fast: NVLink is not hidden here
        (7168, 4, FP8, 1791, 0.10),
        (7168, 4, BF16, 3522, 0.10),
    ],
)
def test_expert_exchange_meets_deepep_on_h200(
    hidden: int, nodes: int, kind: float, measured_us: float, error: float
) -> None:
    """4,096 tokens, top-8 of 256, at the best number of SMs; floor and copy rate are of one node."""
    assert exchange_us(hidden, nodes, kind) == pytest.approx(measured_us, rel=error)


@pytest.mark.parametrize(("sms", "measured_us"), [(4, 1877), (8, 989), (12, 676), (16, 526), (20, 437)])
def test_few_sms_slow_an_exchange_in_proportion(sms: int, measured_us: float) -> None:
    assert exchange_us(6144, 1, FP8, sms) == pytest.approx(measured_us, rel=0.10)


def test_node_limited_routing_and_imbalance_scale_the_exchange() -> None:
    fabric = Fabric((NODE, Level("leaf", 64, A1, B1, 8)))
    group = fabric.group(64)
    free = expert_exchange(fabric, group, 4096, 7168, Routing(256, 8))
    limited = expert_exchange(fabric, group, 4096, 7168, Routing(256, 8, max_nodes=4))
    skewed = expert_exchange(fabric, group, 4096, 7168, Routing(256, 8, imbalance=1.5))
    assert free.alpha_us == pytest.approx(A0 + A1)
    ratio = (limited.time_us - limited.alpha_us) / (free.time_us - free.alpha_us)
    assert ratio == pytest.approx(
        expected_distinct(Routing(256, 8, 4), 8, 8) / expected_distinct(Routing(256, 8), 8, 8)
    )
    assert skewed.time_us - skewed.alpha_us == pytest.approx(1.5 * (free.time_us - free.alpha_us))


@given(st.sampled_from([*OPERATIONS]), st.sampled_from([2, 4, 8, 16, 64]))
def test_no_bytes_cost_the_latency_alone(op: str, ranks: int) -> None:
    for fabric in (FABRIC, MEASURED):
        cost = OPERATIONS[op](fabric, ranks, 0)
        assert cost.time_us == cost.alpha_us > 0


def test_a_group_of_one_costs_nothing() -> None:
    for fabric in (FABRIC, MEASURED):
        one = fabric.group(1)
        costs = [operation(fabric, 1, 1 << 30) for operation in OPERATIONS.values()]
        costs += [point_to_point(fabric, one, 1 << 30), expert_exchange(fabric, one, 9, 9, Routing(8, 2))]
        assert {cost.ns for cost in costs} == {0}


@given(
    st.sampled_from([*OPERATIONS]), st.sampled_from([2, 8, 16, 64]), sizes, st.floats(1, 10), st.floats(0, 1)
)
def test_a_better_network_is_never_slower(op: str, n: int, size: int, wider: float, sooner: float) -> None:
    better = Fabric(
        (Level("node", 8, A0 * sooner, B0 * wider, 8), Level("leaf", 1024, A1 * sooner, B1 * wider, 8))
    )
    assert OPERATIONS[op](better, n, size).time_us <= OPERATIONS[op](FABRIC, n, size).time_us * (1 + 1e-12)


@given(st.sampled_from([*OPERATIONS]), st.sampled_from([2, 8, 16, 64]), sizes, sizes)
def test_more_bytes_are_never_faster(op: str, n: int, one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert OPERATIONS[op](FABRIC, n, low).time_us <= OPERATIONS[op](FABRIC, n, high).time_us


def test_sizes_below_zero_are_refused() -> None:
    for operation in OPERATIONS.values():
        for size in (-1, float("nan")):
            with pytest.raises(ValueError, match="num_bytes: "):
                operation(FABRIC, 8, size)

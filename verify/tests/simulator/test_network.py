"""Tables, levels, and how groups of ranks lie on them."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyscale_simulator.network import CopyKernel, Fabric, Level, Table, read_tables
from hyscale_simulator.perturb import degrade_level

NODE = Level("node", 8, 3.7, 330.0, 8)


def cluster(nics: int = 8, oversubscription: float = 1.0) -> Fabric:
    """128 nodes of 8, 32 to a leaf."""
    leaf = Level("leaf", 256, 9.3, 48.5, nics)
    return Fabric((NODE, leaf, Level("core", 1024, 11.0, 48.5, nics, oversubscription)))


TABLE = Table("all_gather", 8, (1024, 4096, 1 << 20), (10.0, 12.0, 20.0), "made up")


def test_measured_points_come_back_exactly() -> None:
    assert [TABLE.lookup(size) for size in TABLE.num_bytes] == [
        (10.0, "measured"),
        (12.0, "measured"),
        (20.0, "measured"),
    ]


def test_between_points_the_table_is_straight_in_log_space() -> None:
    time, how = TABLE.lookup(2048)  # the geometric middle of 1024 and 4096
    assert how == "interpolated"
    assert time == pytest.approx((10 * 12) ** 0.5)


def test_beyond_the_table_the_bus_bandwidth_is_held_and_below_it_the_latency() -> None:
    assert TABLE.lookup(3 << 20) == (60.0, "interpolated")
    assert TABLE.lookup(1) == TABLE.lookup(0) == (10.0, "interpolated")


def test_another_gpu_s_table_projects() -> None:
    carried = replace(TABLE, carried=True)
    for size in (1, 1 << 20, 1 << 30):
        assert carried.lookup(size) == (TABLE.lookup(size)[0], "projected")


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_more_bytes_never_take_less_where_the_measurements_ascend(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert TABLE.lookup(low)[0] <= TABLE.lookup(high)[0] * (1 + 1e-12)


@pytest.mark.parametrize(
    ("sizes", "latencies", "message"),
    [
        ((), (), "at least one"),
        ((1, 2), (1.0,), "2 sizes and 1 latencies"),
        ((2, 2), (1.0, 1.0), "ascend strictly"),
        ((0, 2), (1.0, 1.0), "at least 1"),
        ((1, 2), (1.0, float("nan")), "above 0"),
    ],
)
def test_bad_tables_are_refused(sizes: tuple[int, ...], latencies: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Table("all_gather", 8, sizes, latencies, "made up")


def test_a_table_file_is_read_and_its_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "nccl.csv"
    path.write_text("op,dtype,num_gpus,bytes,latency_us\nall_gather,half,8,2,5\nall_gather,half,8,1,4\n")
    assert read_tables(path) == (Table("all_gather", 8, (1, 2), (4.0, 5.0), "nccl.csv"),)
    packed = tmp_path / "nccl.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_tables(packed)[0].latency_us == (4.0, 5.0)
    with pytest.raises(ValueError, match=r"nccl\.csv: no rows of dtype 'int8'"):
        read_tables(path, "int8")
    path.write_text("op,dtype,num_gpus,bytes,latency_us\nall_gather,half,8,many,5\n")
    with pytest.raises(ValueError, match=r"nccl\.csv, line 2: .*'many'"):
        read_tables(path)
    path.write_text("op,bytes\n")
    with pytest.raises(ValueError, match=r"columns \['dtype', 'latency_us', 'num_gpus'\] are missing"):
        read_tables(path)


@pytest.mark.parametrize(
    ("ranks", "stride", "nodes", "per_node", "level"),
    [
        (8, 1, 1, 8, 0),
        (4, 2, 1, 4, 0),
        (1, 1, 1, 1, 0),
        (3, 1, 1, 3, 0),
        (64, 1, 8, 8, 1),
        (64, 4, 32, 2, 1),
        (16, 8, 16, 1, 1),
        (64, 8, 64, 1, 2),
        (512, 1, 64, 8, 2),
        (4, 256, 4, 1, 2),
    ],
)
def test_groups_know_their_nodes_and_their_outermost_level(
    ranks: int, stride: int, nodes: int, per_node: int, level: int
) -> None:
    group = cluster().group(ranks, stride)
    assert (group.nodes, group.per_node, group.level) == (nodes, per_node, level)


def test_groups_count_their_units_at_each_level() -> None:
    assert cluster().group(512).units == (64, 2, 1)
    assert cluster().group(64, 8).units == (64, 2, 1)
    assert cluster().group(4, 256).units == (4, 4, 1)


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="spans 2048 ranks, but the cluster has 1024"):
        cluster().group(2048)
    with pytest.raises(ValueError, match="does not fill nodes of 8 evenly"):
        cluster().group(12)
    with pytest.raises(ValueError, match="does not fill nodes of 8 evenly"):
        cluster().group(16, 3)
    with pytest.raises(ValueError, match="at least 1"):
        cluster().group(0)
    with pytest.raises(ValueError, match="active_per_node: 4; 8"):
        cluster().group(16, active_per_node=4)


def test_ports_are_shared_by_the_ranks_that_use_them() -> None:
    whole, lone = cluster().group(16), cluster().group(2, 8)
    assert cluster().node_bandwidth(whole) == 8 * 48.5
    assert cluster().rank_bandwidth(lone) == 48.5
    assert cluster(nics=4).node_bandwidth(whole) == 4 * 48.5
    assert cluster(nics=4).rank_bandwidth(lone) == 48.5 / 2, "all eight ranks of the node are taken to send"
    assert cluster(nics=16).rank_bandwidth(lone) == 2 * 48.5


def test_a_rank_alone_uses_its_own_ports_and_no_more() -> None:
    for nics, own in ((4, 1), (8, 1), (16, 2)):
        fabric = cluster(nics=nics)
        assert fabric.rank_bandwidth(fabric.group(2, 8, active_per_node=1)) == own * 48.5


def test_oversubscription_applies_to_its_level_alone() -> None:
    fabric = cluster(oversubscription=3)
    assert fabric.rank_bandwidth(fabric.group(16)) == 48.5
    assert fabric.rank_bandwidth(fabric.group(512)) == pytest.approx(48.5 / 3)


def test_bad_levels_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="level 'leaf': alpha_us is -1"):
        Level("leaf", 8, -1, 1, 1)
    with pytest.raises(ValueError, match="level 'leaf': bandwidth_gbytes_per_s is 0"):
        Level("leaf", 8, 1, 0, 1)
    with pytest.raises(ValueError, match=r"level 'leaf': oversubscription is 0\.5"):
        Level("leaf", 8, 1, 1, 1, 0.5)
    with pytest.raises(ValueError, match="level 'leaf': 12 ranks; a larger multiple of the 8 of 'node'"):
        Fabric((NODE, Level("leaf", 12, 1, 1, 1)))
    with pytest.raises(ValueError, match="levels: empty"):
        Fabric(())
    with pytest.raises(ValueError, match="within a node each rank has its own"):
        Fabric((Level("node", 8, 1, 1, 4),))


def test_copying_is_bound_by_sms_until_the_wires_are_full() -> None:
    kernel = CopyKernel(28.0, 326.0, 17.5)
    assert kernel.bandwidth(8) == 140
    assert kernel.bandwidth(24) == 326


def test_a_degraded_level_loses_bandwidth_or_ports_and_what_was_measured_on_it() -> None:
    healthy = Fabric(cluster().levels, tables=(TABLE,))
    slow = degrade_level(healthy, "node", bandwidth_factor=0.5)
    assert slow.levels[0].bandwidth_gbytes_per_s == 165
    assert slow.tables == ()
    broken = degrade_level(healthy, "leaf", ports_lost=2)
    assert broken.node_bandwidth(broken.group(16)) == 6 * 48.5
    assert broken.tables == (TABLE,)
    with pytest.raises(ValueError, match="no 'rack'"):
        degrade_level(healthy, "rack")
    with pytest.raises(ValueError, match="ports_lost = 8: at most 7 of the 8"):
        degrade_level(healthy, "leaf", ports_lost=8)
    with pytest.raises(ValueError, match="bandwidth_factor: 0"):
        degrade_level(healthy, "leaf", bandwidth_factor=0)

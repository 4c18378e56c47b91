"""The network as plain figures: levels, ports, measured tables, and how a group of ranks lies on them.

Ranks are numbered node by node. A *level* is one tier of connection, innermost first: NVLink within a node,
then leaf switch, spine and so on. Two ranks talk at the first level whose unit holds both. Bandwidths are
what one port achieves in one direction (not a data sheet's sum of both); bytes are bytes, never elements.

`collectives.py` turns these into times. Everything here is immutable, so prices may be memoised by value.
"""

from __future__ import annotations

import csv
import gzip
import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

__all__ = ["CopyKernel", "Fabric", "Group", "InSwitchReduction", "Level", "Table", "read_tables"]


@dataclass(frozen=True)
class Level:
    """One tier of the network.

    Between two ranks whose closest common unit is of this level, a step costs `alpha_us` (of the library that
    takes it: an NCCL step over the network costs several times a bare RDMA write) and bytes flow at
    `bandwidth_gbytes_per_s` (1e9 bytes per second, one direction, one port). A node has `ports_per_node`
    ports to this level, shared by its ranks: 8 for NVLink in a node of 8, 4 where two GPUs share a NIC.
    `oversubscription` is how many times a unit's ports outnumber its uplinks (1: full bisection).
    """

    name: str
    ranks: int
    """Ranks in one unit of this level: 8 in a node, 256 under a leaf of 32 such nodes."""
    alpha_us: float
    bandwidth_gbytes_per_s: float
    ports_per_node: int
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ports_per_node < 1:
            raise ValueError(
                f"level {self.name!r}: ranks {self.ranks}, ports_per_node {self.ports_per_node}; "
                "at least 1 is wanted"
            )
        if not (math.isfinite(self.alpha_us) and self.alpha_us >= 0):
            raise ValueError(f"level {self.name!r}: alpha_us is {self.alpha_us}; at least 0 is wanted")
        if not self.bandwidth_gbytes_per_s > 0:
            raise ValueError(
                f"level {self.name!r}: bandwidth_gbytes_per_s is {self.bandwidth_gbytes_per_s}; "
                "more than 0 is wanted"
            )
        if not self.oversubscription >= 1:
            raise ValueError(
                f"level {self.name!r}: oversubscription is {self.oversubscription}; at least 1 is wanted"
            )


@dataclass(frozen=True)
class InSwitchReduction:
    """All-reduce done by the NVLink switch (NVLS): a latency, and the bus bandwidth it reaches.

    Bus bandwidth is NCCL's: 2(n-1)/n times the bytes, over the time. The switch halves the traffic, so it may
    exceed what a port carries.
    """

    alpha_us: float
    bus_gbytes_per_s: float


@dataclass(frozen=True)
class CopyKernel:
    """What an expert dispatch or combine kernel (DeepEP-like) adds to the wires.

    `alpha_us` is its floor for no tokens; `gbytes_per_s` the most it copies per rank with all the SMs it can
    use, counting copies that stay on the rank, as DeepEP counts; `gbytes_per_s_per_sm` the same for one SM.
    """

    alpha_us: float
    gbytes_per_s: float
    gbytes_per_s_per_sm: float

    def bandwidth(self, sms: int) -> float:
        """GB/s with that many SMs."""
        return min(self.gbytes_per_s, sms * self.gbytes_per_s_per_sm)


@dataclass(frozen=True)
class Table:
    """Measured times of one collective on `ranks` ranks of one node.

    `num_bytes` ascend strictly; they count the whole result (what is gathered, reduced or exchanged per
    rank).
    """

    op: str
    ranks: int
    num_bytes: tuple[int, ...]
    latency_us: tuple[float, ...]
    source: str
    carried: bool = False
    """Measured on another GPU with the same links."""

    def __post_init__(self) -> None:
        where = f"table {self.op!r} of {self.ranks} ranks"
        if not self.num_bytes or len(self.num_bytes) != len(self.latency_us):
            raise ValueError(
                f"{where}: {len(self.num_bytes)} sizes and {len(self.latency_us)} latencies; "
                "as many of both, and at least one, are wanted"
            )
        if self.num_bytes[0] < 1 or any(a >= b for a, b in pairwise(self.num_bytes)):
            raise ValueError(
                f"{where}: num_bytes have to be at least 1 and to ascend strictly: {self.num_bytes}"
            )
        if not all(math.isfinite(t) and t > 0 for t in self.latency_us):
            raise ValueError(f"{where}: latencies have to be above 0: {self.latency_us}")

    @cached_property
    def _log(self) -> tuple[np.ndarray, np.ndarray]:
        return np.log(self.num_bytes), np.log(self.latency_us)

    def lookup(self, num_bytes: float) -> tuple[float, str]:
        """(latency_us, how): a measured point exactly; between two, straight in log-log space.

        Beyond the last the bus bandwidth is held, so time grows with bytes; below the first the latency is
        held, which is the floor of launching and synchronising. `how` is "measured", "interpolated" (beyond
        the ends too), or, of another GPU's table, "projected".
        """
        sizes = self.num_bytes
        at = int(np.searchsorted(sizes, num_bytes))
        exact = at < len(sizes) and sizes[at] == num_bytes
        how = "projected" if self.carried else "measured" if exact else "interpolated"
        if exact or at == 0:
            return self.latency_us[at], how
        if at == len(sizes):
            return self.latency_us[-1] * num_bytes / sizes[-1], how
        return float(np.exp(np.interp(math.log(num_bytes), *self._log))), how


@dataclass(frozen=True)
class Group:
    """How the ranks of one communicator lie on the network. Made by `Fabric.group`."""

    ranks: int
    units: tuple[int, ...]
    """How many units of each level hold its ranks, innermost first; 1 from the level on that holds them
    all."""
    active_per_node: int
    """Ranks of a node that communicate at the same time and share its ports: this group's and its siblings'
    (eight data-parallel groups, one on each GPU)."""

    @property
    def nodes(self) -> int:
        return self.units[0]

    @property
    def per_node(self) -> int:
        return self.ranks // self.units[0]

    @property
    def level(self) -> int:
        """Number of the outermost level that its messages cross; 0 within one node."""
        return self.units.index(1)


@dataclass(frozen=True)
class Fabric:
    """A cluster's network. `levels[0]` is the node; a further level's unit is a multiple of the one
    before."""

    levels: tuple[Level, ...]
    in_switch_reduction: InSwitchReduction | None = None
    copy_kernel: CopyKernel | None = None
    tables: tuple[Table, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError("levels: empty; at least the node's level is wanted")
        for inner, outer in pairwise(self.levels):
            if outer.ranks <= inner.ranks or outer.ranks % inner.ranks:
                raise ValueError(
                    f"level {outer.name!r}: {outer.ranks} ranks; a larger multiple of the "
                    f"{inner.ranks} of {inner.name!r} is wanted"
                )
        if self.levels[0].ports_per_node != self.levels[0].ranks:
            raise ValueError(
                f"level {self.levels[0].name!r}: {self.levels[0].ports_per_node} ports for "
                f"{self.levels[0].ranks} ranks; within a node each rank has its own"
            )

    @property
    def ranks_per_node(self) -> int:
        return self.levels[0].ranks

    @property
    def ranks(self) -> int:
        """Ranks of the whole cluster."""
        return self.levels[-1].ranks

    def group(self, ranks: int, stride: int = 1, *, active_per_node: int | None = None) -> Group:
        """The group of ranks 0, stride, 2·stride, …, aligned as parallel layouts place it.

        By default every rank of a node is taken to communicate at once, each in its own such group.
        ValueError if the group does not fill nodes evenly or is larger than the cluster.
        """
        node = self.ranks_per_node
        span = ranks * stride
        which = f"group of {ranks} ranks with stride {stride}"
        if ranks < 1 or stride < 1:
            raise ValueError(f"{which}: both have to be at least 1")
        if span > self.ranks:
            raise ValueError(f"{which}: spans {span} ranks, but the cluster has {self.ranks}")
        fits = span <= node or (span % node == 0 and (node % stride == 0 or stride % node == 0))
        if not fits:
            raise ValueError(f"{which}: does not fill nodes of {node} evenly")
        units = tuple(min(ranks, -(-span // level.ranks)) for level in self.levels)
        active = node if active_per_node is None else active_per_node
        if not ranks // units[0] <= active <= node:
            raise ValueError(
                f"active_per_node: {active}; {ranks // units[0]} (the group's own) to {node} is wanted"
            )
        return Group(ranks, units, active)

    def table(self, op: str, ranks: int) -> Table | None:
        """The measured table of that collective on that many ranks of a node, if there is one."""
        return next((t for t in self.tables if (t.op, t.ranks) == (op, ranks)), None)

    def node_bandwidth(self, group: Group) -> float:
        """GB/s, one direction, at which the group's ranks of one node together reach other nodes.

        The node's ports are shared among its active ranks; no rank drives more ports than are its own.
        """
        level = self.levels[group.level]
        own_ports = max(1.0, level.ports_per_node / self.ranks_per_node)
        ports = min(level.ports_per_node / group.active_per_node, own_ports) * group.per_node
        return level.bandwidth_gbytes_per_s * ports / level.oversubscription

    def rank_bandwidth(self, group: Group) -> float:
        """GB/s, one direction, of one rank towards the outermost level of the group."""
        if group.level == 0:
            return self.levels[0].bandwidth_gbytes_per_s
        return self.node_bandwidth(group) / group.per_node


def read_tables(path: Path, dtype: str = "half") -> tuple[Table, ...]:
    """The tables of a CSV (plain or .gz) with the columns op, dtype, num_gpus, bytes and latency_us.

    Of its rows only those of `dtype`. ValueError naming the file if columns or rows are missing or wrong.
    """
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    reader = csv.DictReader(text.splitlines())
    missing = {"op", "dtype", "num_gpus", "bytes", "latency_us"} - set(reader.fieldnames or ())
    if missing:
        raise ValueError(f"{path}: columns {sorted(missing)} are missing; it has {reader.fieldnames}")
    rows: dict[tuple[str, int], dict[int, float]] = {}
    for row in reader:
        if row["dtype"] == dtype:
            try:
                points = rows.setdefault((row["op"], int(row["num_gpus"])), {})
                points[int(row["bytes"])] = float(row["latency_us"])
            except ValueError as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    if not rows:
        raise ValueError(f"{path}: no rows of dtype {dtype!r}")
    return tuple(
        Table(op, ranks, tuple(sorted(points)), tuple(points[size] for size in sorted(points)), path.name)
        for (op, ranks), points in rows.items()
    )

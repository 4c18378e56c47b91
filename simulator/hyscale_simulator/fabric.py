"""From a cluster description to the fabric that collectives are priced on, and the groups of a layout."""

from dataclasses import replace
from functools import cache
from importlib import resources

from hyscale_simulator import collectives
from hyscale_simulator.collectives import Cost
from hyscale_simulator.descriptions import DATA
from hyscale_simulator.hardware import Cluster, Gpu
from hyscale_simulator.layout import LayoutError, Plan
from hyscale_simulator.network import CopyKernel, Fabric, Group, InSwitchReduction, Level, Table, read_tables
from hyscale_simulator.perturb import degrade_level
from hyscale_simulator.scenario import Scenario
from hyscale_simulator.work import Communicate
from hyscale_simulator.work.items import GroupName

__all__ = ["Network", "fabric_of"]

TABLES_OF = "NVIDIA H200"
"""The GPU that the shipped tables of collectives were measured on."""


@cache
def _tables(name: str, carried: bool) -> tuple[Table, ...]:
    """Measured collectives of one H200 node; of two-byte types (sizes are in bytes, whatever the type)."""
    source = "NVIDIA AIConfigurator, H200, NCCL 2.29.2 (Apache-2.0)"
    with resources.as_file(DATA / "profiles" / f"{name}.csv.gz") as path:
        return tuple(replace(table, source=source, carried=carried) for table in read_tables(path))


@cache
def fabric_of(cluster: Cluster, gpu: Gpu, measured: tuple[Table, ...] = ()) -> Fabric:
    """Levels: the node's NVLink, nodes under one leaf switch, the whole cluster.

    measured: tables of collectives that go before those that the GPU's description names.
    """
    node, link = cluster.gpus_per_node, gpu.nvlink
    nic = cluster.nic_gbit_per_s / 8 * cluster.nic_efficiency
    levels = [Level("nvlink", node, link.step_us, link.bus_gb_per_s, node)]
    leaf = node * min(cluster.nodes_per_leaf, cluster.nodes)
    for name, ranks, latency in (
        ("leaf", leaf, cluster.leaf_latency_us),
        ("spine", cluster.gpus, cluster.core_latency_us),
    ):
        if ranks > levels[-1].ranks:
            levels.append(Level(name, ranks, latency, nic, cluster.nics_per_node))
    reduction = None
    if link.reduction_bus_gb_per_s is not None:
        reduction = InSwitchReduction(link.reduction_us, link.reduction_bus_gb_per_s)
    copies = None
    if link.dispatch_gb_per_s is not None:
        # Time falls as 1 / SMs below about 20 of them (AIConfigurator's DeepEP tables).
        copies = CopyKernel(link.dispatch_us, link.dispatch_gb_per_s, link.dispatch_gb_per_s / 20)
    public = _tables(link.table, gpu.device != TABLES_OF) if link.table else ()
    return Fabric(tuple(levels), reduction, copies, (*measured, *public))


def _damaged(scenario: Scenario, measured: tuple[Table, ...]) -> Fabric:
    fabric = fabric_of(scenario.cluster_description, scenario.gpu_description, measured)
    faults = scenario.faults
    if faults.network_bandwidth_fraction == 1 and not faults.ports_lost:
        return fabric
    try:
        return degrade_level(
            fabric,
            faults.network_level,
            bandwidth_factor=faults.network_bandwidth_fraction,
            ports_lost=faults.ports_lost,
        )
    except ValueError as error:
        raise LayoutError(f"scenario {scenario.name}: faults: {error}") from None


class Network:
    """Prices the collectives of one layout.

    Ranks are numbered tensor first, then context, data, pipeline; expert groups are runs of ranks across the
    first three (Megatron-LM's order).  measured: collectives of the very GPU, from profiles.
    """

    def __init__(
        self, scenario: Scenario, plan: Plan, imbalance: float, measured: tuple[Table, ...] = ()
    ) -> None:
        self._name = scenario.name
        self.fabric = _damaged(scenario, measured)
        self._host_gb_per_s = scenario.gpu_description.host_link_gb_per_s
        experts = scenario.model_description.experts
        self._routing = (
            collectives.Routing(experts.experts, experts.top_k, scenario.routing.max_nodes or None, imbalance)
            if experts
            else None
        )
        inner = plan.tensor * plan.context
        self._shape: dict[GroupName, tuple[int, int]] = {
            "tensor": (plan.tensor, 1),
            "context": (plan.context, plan.tensor),
            "data": (plan.context * plan.data, plan.tensor),
            "expert": (plan.expert, 1),
            "expert_data": (plan.expert_data, plan.expert),
            "pipeline": (plan.pipeline, inner * plan.data),
            "host": (1, 1),
        }
        self._groups: dict[GroupName, Group] = {}
        self.key = (self.fabric, tuple(self._shape.items()), self._routing, self._host_gb_per_s)

    def ranks(self, group: GroupName) -> int:
        """Size of a group."""
        return self._shape[group][0]

    def group(self, name: GroupName) -> Group:
        """Where the group's ranks lie."""
        if name not in self._groups:
            try:
                self._groups[name] = self.fabric.group(*self._shape[name])
            except ValueError as error:
                raise LayoutError(f"scenario {self._name}: the {name} ranks: {error}") from None
        return self._groups[name]

    def cost(self, item: Communicate) -> Cost:
        """Time of one collective."""
        if item.collective == "host":
            us = item.num_bytes / (self._host_gb_per_s * 1e3)
            return Cost(us, 0.0, "host link", "assumed")
        group = self.group(item.group)
        if item.collective in ("dispatch", "combine"):
            assert self._routing is not None
            try:
                return collectives.expert_exchange(
                    self.fabric, group, item.tokens, item.num_bytes, self._routing
                )
            except ValueError as error:
                raise LayoutError(f"scenario {self._name}: expert exchange: {error}") from None
        price = {
            "all_gather": collectives.all_gather,
            "reduce_scatter": collectives.reduce_scatter,
            "all_reduce": collectives.all_reduce,
            "all_to_all": collectives.all_to_all,
            "point_to_point": collectives.point_to_point,
        }[item.collective]
        return price(self.fabric, group, item.num_bytes)

"""How long a collective takes on a fabric: measured tables where there are some, else alpha-beta closed
forms.

n ranks, S bytes, a the latency of a step, B a bandwidth; sizes count the whole: what is gathered, reduced, or
(all-to-all) held by each rank. Within one node a measured table decides; elsewhere the fastest of the
algorithms that the libraries have. Every function is pure. A message of no bytes costs its latency; a group
of one, nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from hyscale_simulator.network import Fabric, Group

__all__ = [
    "Cost",
    "Routing",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "expected_distinct",
    "expert_exchange",
    "point_to_point",
    "reduce_scatter",
]


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of one communication step, and how it is known."""

    time_us: float
    alpha_us: float
    """The part that no bandwidth removes: what no bytes would take."""
    algorithm: str
    """"ring", "tree", "nvls", "hierarchical", "pairwise", "p2p", "exchange", or "none" for one rank."""
    how: str
    """"measured", "interpolated" or "projected" from a table, or "assumed": a closed form."""
    source: str = ""
    """Of the table."""

    @property
    def ns(self) -> int:
        """Whole nanoseconds, for the task graph."""
        return round(self.time_us * 1000)


_NOTHING = Cost(0.0, 0.0, "none", "assumed")
_BYTES_PER_US = 1e3  # of a GB/s


def all_gather(fabric: Fabric, group: Group, num_bytes: float, algorithm: str = "auto") -> Cost:
    """Every rank ends with all S bytes, S/n from each. "auto", "ring", "hierarchical" or "pipelined".

    Ring: (n-1)a + (n-1)/n·S/B. Across nodes a is the outermost level's and B the narrower of a rank's
    NVLink and the group's share of the node's ports (NCCL's rings use them all). Hierarchical: along rails
    between nodes, (N-1)a_x + (N-1)/N·(S/g)/B_x, then within the node, (g-1)a_0 + (g-1)/g·S/B_0; "pipelined"
    overlaps the two and takes the longer. NCCL itself has only the ring, which "auto" therefore means.
    """
    return _gather_like("all_gather", fabric, group, num_bytes, algorithm)


def reduce_scatter(fabric: Fabric, group: Group, num_bytes: float, algorithm: str = "auto") -> Cost:
    """Each rank ends with the sum of its S/n bytes; an all-gather run backwards, priced alike."""
    return _gather_like("reduce_scatter", fabric, group, num_bytes, algorithm)


def all_reduce(fabric: Fabric, group: Group, num_bytes: float, algorithm: str = "auto") -> Cost:
    """Every rank ends with the sum of all S bytes. "auto", "ring", "tree", "nvls", "hierarchical",
    "pipelined".

    Ring: twice the all-gather. Tree: 2·ceil(log2)a + 2S/B, the steps of the nodes between them and of the
    ranks within. NVLS, for groups of whole nodes where the fabric has it: the switch's a + 2(n-1)/n·S/B
    within the node, overlapped with a tree over the nodes. "auto" is the fastest of ring, tree and NVLS.
    """
    if found := _known("all_reduce", fabric, group, num_bytes, algorithm):
        return found
    nvls = fabric.in_switch_reduction
    candidates: dict[str, Callable[[], Cost]] = {
        "ring": lambda: _scaled(2, _ring(fabric, group, num_bytes)),
        "tree": lambda: _tree(fabric, group, num_bytes),
    }
    if nvls is not None and group.per_node == fabric.ranks_per_node:
        candidates["nvls"] = lambda: _nvls(fabric, group, num_bytes)
    if algorithm == "auto":
        return min((price() for price in candidates.values()), key=lambda cost: cost.time_us)
    for staged in ("hierarchical", "pipelined"):
        candidates[staged] = lambda: _scaled(2, _hierarchical(fabric, group, num_bytes, algorithm))
    return _choose(algorithm, candidates)()


def all_to_all(fabric: Fabric, group: Group, num_bytes: float) -> Cost:
    """Each rank sends S/n of its S bytes to each rank, pairwise: (n-1)a + what the slower of the two ways
    takes.

    (g-1)/n·S goes over NVLink to peers of the node, (n-g)/n·S over the rank's own share of the ports to
    others; ports are not pooled (nccl-tests issue 267).
    """
    if found := _known("alltoall", fabric, group, num_bytes, "auto"):
        return found
    n, g = group.ranks, group.per_node
    peers = [n / here - 1 for here in group.units]  # in the same unit of each level
    alpha = sum(
        (reached - nearer) * level.alpha_us
        for level, reached, nearer in zip(fabric.levels, peers, [0.0, *peers], strict=False)
    )
    inside = _us((g - 1) / n * num_bytes, fabric.levels[0].bandwidth_gbytes_per_s)
    across = _us((n - g) / n * num_bytes, fabric.rank_bandwidth(group)) if n > g else 0.0
    return Cost(alpha + max(inside, across), alpha, "pairwise", "assumed")


def point_to_point(fabric: Fabric, group: Group, num_bytes: float) -> Cost:
    """One rank sends S bytes to its neighbour in the group: a + S/B at the group's outermost level."""
    if group.ranks == 1:
        return _NOTHING
    alpha = fabric.levels[group.level].alpha_us
    return Cost(alpha + _us(num_bytes, fabric.rank_bandwidth(group)), alpha, "p2p", "assumed")


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token picks its experts: `top_k` of `num_experts`, all alike, on at most `max_nodes` nodes.

    `imbalance` is the load of the busiest rank over the mean: 1 for forced balance.
    """

    num_experts: int
    top_k: int
    max_nodes: int | None = None
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k: {self.top_k}; 1 to the {self.num_experts} experts is wanted")
        if self.max_nodes is not None and self.max_nodes < 1:
            raise ValueError(f"max_nodes: {self.max_nodes}; at least 1 is wanted")
        if not self.imbalance >= 1.0:
            raise ValueError(f"imbalance: {self.imbalance}; at least 1 is wanted")


def expected_distinct(routing: Routing, units: int, nodes: int = 1) -> float:
    """Expected number of units (nodes, or ranks on `nodes` nodes) that one token's experts lie on.

    With E/U experts on each of U units: U·(1 - C(E - E/U, k) / C(E, k)). Where `max_nodes` binds, a token
    first draws that many nodes and the form holds within them. ValueError unless the units divide the
    experts.
    """
    experts, k = routing.num_experts, routing.top_k
    if units < 1 or experts % units or units % nodes:
        raise ValueError(f"units: {units} on {nodes} nodes; a divisor of the {experts} experts is wanted")
    on_unit = experts // units
    if routing.max_nodes is not None and routing.max_nodes < nodes:
        experts = experts // nodes * routing.max_nodes
        units = units // nodes * routing.max_nodes
        if experts < k:
            raise ValueError(
                f"max_nodes: {routing.max_nodes} nodes hold {experts} experts, fewer than top_k {k}"
            )
    return units * (1 - math.comb(experts - on_unit, k) / math.comb(experts, k))


def expert_exchange(
    fabric: Fabric,
    group: Group,
    tokens: int,
    token_bytes: float,
    routing: Routing,
    sms: int | None = None,
) -> Cost:
    """Dispatch of a rank's `tokens` to their experts' ranks, or the combine that brings the results back.

    As DeepEP does it: one copy to each distinct node over the rail, spread to each distinct rank of that
    node over NVLink. The slowest of three stages of one pipeline decides: the network ports, NVLink, and
    (where the fabric describes the kernel) copying with `sms` SMs, None for as many as help. A combine
    moves the same copies, usually in bf16 where the dispatch sends fp8.
    """
    if group.ranks == 1:
        return _NOTHING
    nodes = group.nodes
    load = tokens * token_bytes * routing.imbalance
    copies = load * expected_distinct(routing, group.ranks, nodes)
    stages = [_us(copies * (group.per_node - 1) / group.per_node, fabric.levels[0].bandwidth_gbytes_per_s)]
    alpha = fabric.levels[0].alpha_us
    if kernel := fabric.copy_kernel:
        stages.append(_us(copies, kernel.gbytes_per_s if sms is None else kernel.bandwidth(sms)))
        alpha = kernel.alpha_us
    if nodes > 1:
        remote = load * expected_distinct(routing, nodes, nodes) * (nodes - 1) / nodes
        stages.append(_us(remote, fabric.rank_bandwidth(group)))
        alpha += fabric.levels[group.level].alpha_us
    return Cost(alpha + max(stages), alpha, "exchange", "assumed")


def _us(num_bytes: float, gbytes_per_s: float) -> float:
    return num_bytes / (gbytes_per_s * _BYTES_PER_US)


def _known(op: str, fabric: Fabric, group: Group, num_bytes: float, algorithm: str) -> Cost | None:
    """What needs no formula: bad sizes (ValueError), one rank, a table."""
    if not num_bytes >= 0:
        raise ValueError(f"num_bytes: {num_bytes}; at least 0 is wanted")
    if group.ranks == 1:
        return _NOTHING
    table = fabric.table(op, group.ranks) if group.level == 0 and algorithm == "auto" else None
    if table is None:
        return None
    time, how = table.lookup(num_bytes)
    return Cost(time, min(time, table.latency_us[0]), "table", how, table.source)


def _gather_like(op: str, fabric: Fabric, group: Group, num_bytes: float, algorithm: str) -> Cost:
    if found := _known(op, fabric, group, num_bytes, algorithm):
        return found
    staged = {
        name: (lambda: _hierarchical(fabric, group, num_bytes, algorithm))
        for name in ("hierarchical", "pipelined")
    }
    ring = {name: (lambda: _ring(fabric, group, num_bytes)) for name in ("auto", "ring")}
    return _choose(algorithm, {**ring, **staged})()


def _choose(algorithm: str, candidates: dict[str, Callable[[], Cost]]) -> Callable[[], Cost]:
    if algorithm not in candidates:
        raise ValueError(f"algorithm: {algorithm!r}; one of {sorted(candidates)} is wanted here")
    return candidates[algorithm]


def _scaled(times: int, cost: Cost) -> Cost:
    return Cost(times * cost.time_us, times * cost.alpha_us, cost.algorithm, cost.how)


def _ring_bandwidth(fabric: Fabric, group: Group) -> float:
    inside = fabric.levels[0].bandwidth_gbytes_per_s
    if group.nodes == 1:
        return inside
    across = fabric.node_bandwidth(group)
    return across if group.per_node == 1 else min(inside, across)


def _ring_alpha(fabric: Fabric, units: tuple[int, ...]) -> float:
    """Latency along a ring but for its cheapest hop; `units[l]` units of level l-1 (or ranks) are visited."""
    hops = [a - b for a, b in pairwise(units)]
    closing = next(level for level, left in enumerate(units[1:]) if left == 1)
    hops[closing] += 1
    alphas = [level.alpha_us for level in fabric.levels]
    around = sum(count * alpha for count, alpha in zip(hops, alphas, strict=True))
    return around - min(alpha for count, alpha in zip(hops, alphas, strict=True) if count)


def _ring(fabric: Fabric, group: Group, num_bytes: float) -> Cost:
    n = group.ranks
    alpha = _ring_alpha(fabric, (n, *group.units))
    time = alpha + _us((n - 1) / n * num_bytes, _ring_bandwidth(fabric, group))
    return Cost(time, alpha, "ring", "assumed")


def _tree_alpha(fabric: Fabric, units: tuple[int, ...]) -> float:
    """Up a tree and down again: within each level, over its sub-units."""
    steps = [math.ceil(math.log2(a / b)) for a, b in pairwise(units)]
    return 2 * sum(count * level.alpha_us for count, level in zip(steps, fabric.levels, strict=True))


def _tree(fabric: Fabric, group: Group, num_bytes: float) -> Cost:
    alpha = _tree_alpha(fabric, (group.ranks, *group.units))
    return Cost(alpha + _us(2 * num_bytes, _ring_bandwidth(fabric, group)), alpha, "tree", "assumed")


def _nvls(fabric: Fabric, group: Group, num_bytes: float) -> Cost:
    nvls = fabric.in_switch_reduction
    assert nvls is not None
    g = group.per_node
    alpha = nvls.alpha_us + _tree_alpha(fabric, (group.nodes, *group.units))
    time = _us(2 * (g - 1) / g * num_bytes, nvls.bus_gbytes_per_s)
    if group.nodes > 1:
        time = max(time, _us(2 * num_bytes, fabric.node_bandwidth(group)))
    return Cost(alpha + time, alpha, "nvls", "assumed")


def _hierarchical(fabric: Fabric, group: Group, num_bytes: float, algorithm: str) -> Cost:
    g, nodes = group.per_node, group.nodes
    inside = fabric.levels[0]
    across = _ring_alpha(fabric, (nodes, *group.units)) if nodes > 1 else 0.0
    alphas = (across, (g - 1) * inside.alpha_us)
    moves = (
        _us((nodes - 1) / nodes * num_bytes / g, fabric.rank_bandwidth(group)) if nodes > 1 else 0.0,
        _us((g - 1) / g * num_bytes, inside.bandwidth_gbytes_per_s),
    )
    stages = [alpha + move for alpha, move in zip(alphas, moves, strict=True)]
    combine = max if algorithm == "pipelined" else sum
    return Cost(combine(stages), combine(alphas), "hierarchical", "assumed")

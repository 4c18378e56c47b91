"""What goes wrong in a real cluster, as seeded changes to a graph or a fabric: jitter, stragglers, slow
links.

Each function returns a changed copy. Equal seeds give equal graphs, and so equal timelines and traces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hyscale_simulator.graph import Graph, rows
from hyscale_simulator.network import Fabric

__all__ = ["degrade_level", "degrade_links", "jitter", "slow_streams"]


def jitter(graph: Graph, relative_std: float, seed: int, kinds: frozenset[str] | None = None) -> Graph:
    """Each task's duration times an independent log-normal factor of mean 1 and that standard deviation.

    Mean 1, so that jitter adds waiting but, on average, no work. `kinds` restricts it. A task's factor
    depends on the seed and its number alone, so restricting the kinds changes no other factor.
    """
    if not relative_std >= 0:
        raise ValueError(f"relative_std: {relative_std}; at least 0 is wanted")
    spread = math.sqrt(math.log1p(relative_std**2))
    factor = np.random.default_rng(seed).lognormal(-(spread**2) / 2, spread, len(graph))
    if kinds is not None:
        if unknown := kinds - set(graph.kinds):
            raise ValueError(f"kinds: {sorted(unknown)} are not among the graph's {sorted(graph.kinds)}")
        chosen = np.array([kind in kinds for kind in graph.kinds], bool)
        factor = np.where(chosen[graph.kind], factor, 1.0)
    return graph.with_durations(np.rint(graph.duration_ns * factor).astype(np.int64))


def slow_streams(graph: Graph, factors: Mapping[str, float]) -> Graph:
    """Stragglers: tasks on streams whose name starts with a key take that many times as long.

    A task on several slow streams (a collective) takes the largest factor. ValueError if a key matches no
    stream or a factor is not above 0.
    """
    of_stream = np.ones(len(graph.streams))
    for prefix, factor in factors.items():
        matches = [i for i, name in enumerate(graph.streams) if name.startswith(prefix)]
        if not matches:
            raise ValueError(f"factors: no stream starts with {prefix!r}; known: {[*graph.streams]}")
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"factors: {factor} for {prefix!r}; more than 0 is wanted")
        of_stream[matches] = factor
    slowest = np.full(len(graph), -np.inf)
    np.maximum.at(slowest, rows(graph.stream_ptr), of_stream[graph.stream_idx])
    of_task = np.where(np.isfinite(slowest), slowest, 1.0)
    return graph.with_durations(np.rint(graph.duration_ns * of_task).astype(np.int64))


def degrade_links(graph: Graph, factors: Mapping[str, float]) -> Graph:
    """Shared links at that fraction of their capacity, each in (0, 1]; at least one byte per second stays."""
    degraded = {}
    for link, factor in factors.items():
        if link not in graph.links:
            raise ValueError(f"factors: no link {link!r}; the graph has {list(graph.links)}")
        if not 0 < factor <= 1:
            raise ValueError(f"factors: {factor} for {link!r}; (0, 1] is wanted")
        degraded[link] = max(1, int(graph.links[link] * factor))
    return graph.with_links(degraded)


def degrade_level(
    fabric: Fabric, level: str, *, bandwidth_factor: float = 1.0, ports_lost: int = 0
) -> Fabric:
    """A level at a fraction of its bandwidth, or with failed ports on every node.

    A bulk-synchronous step waits for its slowest node, so one bad node costs about what all of them would.
    ValueError if no port would be left, or ports of the innermost level are taken.
    """
    names = [one.name for one in fabric.levels]
    if level not in names:
        raise ValueError(f"level: no {level!r}; the fabric has {names}")
    if not 0 < bandwidth_factor <= 1:
        raise ValueError(f"bandwidth_factor: {bandwidth_factor}; (0, 1] is wanted")
    at = names.index(level)
    old = fabric.levels[at]
    if not 0 <= ports_lost < old.ports_per_node or (at == 0 and ports_lost):
        raise ValueError(
            f"ports_lost = {ports_lost}: at most {(old.ports_per_node - 1) * (at > 0)} of the "
            f"{old.ports_per_node} ports of level {level!r}"
        )
    new = replace(
        old,
        bandwidth_gbytes_per_s=old.bandwidth_gbytes_per_s * bandwidth_factor,
        ports_per_node=old.ports_per_node - ports_lost,
    )
    # Measured tables and in-switch reduction describe the healthy node, and hold only for that.
    intact = at > 0 or bandwidth_factor == 1
    return replace(
        fabric,
        levels=(*fabric.levels[:at], new, *fabric.levels[at + 1 :]),
        tables=fabric.tables if intact else (),
        in_switch_reduction=fabric.in_switch_reduction if intact else None,
    )

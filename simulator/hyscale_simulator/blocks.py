"""A block: the items of one layer's pass, placed on the streams of a rank and run once; then reused.

The compute stream runs the kernels in order.  Each group has a communication stream; a collective starts
after the kernels before it (or with the block, if prefetched) and holds back the first kernel that needs it.
While it runs beneath a kernel it takes SMs from it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from hyscale_simulator.critical_path import waiting_for
from hyscale_simulator.durations import HOWS, How, Prices
from hyscale_simulator.engine import simulate
from hyscale_simulator.fabric import Network
from hyscale_simulator.graph import Graph, GraphBuilder, Timeline
from hyscale_simulator.layout import MOST_SMS
from hyscale_simulator.longest_path import longest_path
from hyscale_simulator.work import Communicate, Compute, Item

__all__ = ["EMPTY", "Block", "Pricing", "Scale", "joined"]

COMPUTE = "compute"
NETWORK_UNCERTAINTY = 0.15
"""Relative standard error of a collective: one alpha-beta fit of an NCCL table misses by 7 to 21 %."""

KEPT_BLOCKS = 4096

Scale = tuple[tuple[str, float], ...]
"""(op, kind or collective, factor): durations multiplied for what-if questions and error propagation."""


Evidence = tuple[str, str, How, str]
"""(op or collective, dtype or "", how its price is known, from where)."""


@dataclass(frozen=True)
class Block:
    """One pass of one layer (or several, joined).

    ns: from start to end.  parts: nanoseconds by "phase/kind", adding up to ``ns`` exactly.
    known: nanoseconds of kernels and exposed communication by how they are known.  ops, sigma: nanoseconds
    of kernels by op, and one standard error of them.  compute_ns, expert_ns: busy time of the kernels, and of
    the expert exchange.
    """

    ns: int
    parts: tuple[tuple[str, int], ...]
    known: tuple[tuple[How, int], ...] = ()
    sigma: tuple[tuple[str, float], ...] = ()
    warnings: tuple[str, ...] = ()
    compute_ns: int = 0
    expert_ns: int = 0
    flops: float = 0.0
    ops: tuple[tuple[str, int], ...] = ()
    coverage: tuple[tuple[Evidence, int], ...] = ()
    """Nanoseconds of kernels and exposed communication by what their price rests on."""


EMPTY = Block(0, ())


def joined(blocks: Iterable[tuple[Block, int]]) -> Block:
    """Blocks one after another, each ``count`` times."""
    parts: dict[str, int] = {}
    known: dict[How, int] = {}
    sigma: dict[str, float] = {}
    warnings: dict[str, None] = {}
    ops: dict[str, int] = {}
    coverage: dict[Evidence, int] = {}
    ns = compute = expert = 0
    flops = 0.0
    for block, count in blocks:
        ns += block.ns * count
        compute += block.compute_ns * count
        expert += block.expert_ns * count
        flops += block.flops * count
        for kind, spent in block.parts:
            parts[kind] = parts.get(kind, 0) + spent * count
        for how, spent in block.known:
            known[how] = known.get(how, 0) + spent * count
        for op, error in block.sigma:
            sigma[op] = sigma.get(op, 0.0) + error * count
        for op, spent in block.ops:
            ops[op] = ops.get(op, 0) + spent * count
        for evidence, spent in block.coverage:
            coverage[evidence] = coverage.get(evidence, 0) + spent * count
        warnings.update(dict.fromkeys(block.warnings))
    return Block(
        ns,
        tuple(parts.items()),
        tuple(known.items()),
        tuple(sigma.items()),
        tuple(warnings),
        compute,
        expert,
        flops,
        tuple(ops.items()),
        tuple(coverage.items()),
    )


class Pricing:
    """Prices blocks on one GPU and network, each distinct one once."""

    def __init__(self, prices: Prices, network: Network, communication_sms: int, scale: Scale = ()) -> None:
        self.prices = prices
        self.network = network
        self.sm_share = communication_sms / prices.gpu.sms
        self._scale = dict(scale)
        self._blocks: dict[tuple[Item, ...], Block] = {}

    def block(self, items: Sequence[Item]) -> Block:
        """The block of these items."""
        key = self._running(items)
        if not key:
            return EMPTY
        found = self._blocks.get(key)
        if found is None:
            if len(self._blocks) >= KEPT_BLOCKS:
                self._blocks.clear()
            found = self._blocks[key] = self._run(key)
        return found

    def timeline(self, items: Sequence[Item]) -> Timeline:
        """When each item of a block runs."""
        graph, _, contended = self._graph(self._running(items))
        return simulate(graph) if contended else longest_path(graph)

    def _running(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """Without collectives of one rank."""
        return tuple(
            item
            for item in items
            if isinstance(item, Compute) or item.collective == "host" or self.network.ranks(item.group) > 1
        )

    def communication_ns(self, item: Communicate) -> int:
        """Nanoseconds of one collective, scaled."""
        ns = self.network.cost(item).time_us * 1e3
        kind = item.kind.rsplit("/", 1)[-1]
        return round(ns * self._scale.get(kind, 1.0) * self._scale.get(item.collective, 1.0))

    def kernel_ns(self, item: Compute) -> tuple[int, int]:
        """Nanoseconds of ``count`` calls: on the slowest rank, and on average."""
        kind = item.kind.rsplit("/", 1)[-1]
        factor = self._scale.get(kind, 1.0) * self._scale.get(item.call.op, 1.0) * item.count
        slow = round(self.prices(item.call).us * 1e3 * factor)
        mean = slow if item.mean is None else round(self.prices(item.mean).us * 1e3 * factor)
        return max(slow, mean), mean

    def _run(self, items: tuple[Item, ...]) -> Block:
        graph, imbalance, contended = self._graph(items)
        timeline = simulate(graph) if contended else longest_path(graph)
        parts: dict[str, int] = {}
        for task in range(len(graph)):
            name = graph.kinds[graph.kind[task]]
            if graph.op[task] >= 0:
                spent = int(timeline.end_ns[task] - timeline.start_ns[task])
                lost = imbalance.get(task, 0)
                parts[name] = parts.get(name, 0) + spent - lost
                if lost:
                    phase = name.split("/", 1)[0]
                    parts[f"{phase}/imbalance"] = parts.get(f"{phase}/imbalance", 0) + lost
        if COMPUTE in graph.streams:
            waits = waiting_for(timeline, COMPUTE)
        else:
            waits = {graph.kinds[graph.kind[0]]: timeline.makespan_ns}
        for name, spent in waits.items():
            parts[name] = parts.get(name, 0) + spent
        assert sum(parts.values()) == timeline.makespan_ns, "a block's parts add up to its time"
        return self._summarise(items, parts, waits, timeline)

    def _summarise(
        self,
        items: tuple[Item, ...],
        parts: dict[str, int],
        waits: dict[str, int],
        timeline: Timeline,
    ) -> Block:
        known: dict[How, int] = dict.fromkeys(HOWS, 0)
        sigma: dict[str, float] = {}
        warnings: dict[str, None] = {}
        coverage: dict[Evidence, int] = {}
        ops: dict[str, int] = {}
        compute = expert = 0
        flops = 0.0
        for item in items:
            if isinstance(item, Compute):
                duration = self.prices(item.call)
                ns, _ = self.kernel_ns(item)
                for part in duration.parts or (duration,):
                    share = round(ns * part.us / duration.us) if duration.us else 0
                    known[part.how] += share
                    evidence = (item.call.op, item.call.dtype, part.how, part.source)
                    coverage[evidence] = coverage.get(evidence, 0) + share
                compute += ns
                ops[item.call.op] = ops.get(item.call.op, 0) + ns
                sigma[item.call.op] = sigma.get(item.call.op, 0.0) + ns * duration.uncertainty
                if duration.warning:
                    warnings[duration.warning] = None
                flops += (item.mean or item.call).cost.tensor_flops * item.count
            elif item.group == "expert":
                expert += self.communication_ns(item)
        for evidence, spent in self._exposed(items, waits):
            known[evidence[2]] += spent
            coverage[evidence] = coverage.get(evidence, 0) + spent
        sigma["network"] = sum(waits.values()) * NETWORK_UNCERTAINTY
        return Block(
            timeline.makespan_ns,
            tuple(parts.items()),
            tuple((how, ns) for how, ns in known.items() if ns),
            tuple(sigma.items()),
            tuple(warnings),
            compute,
            expert,
            flops,
            tuple(ops.items()),
            tuple(coverage.items()),
        )

    def _exposed(self, items: tuple[Item, ...], waits: dict[str, int]) -> Iterator[tuple[Evidence, int]]:
        """What exposed communication rests on: each kind's wait, shared out as its collectives take time."""
        alone = {item: self.communication_ns(item) for item in items if isinstance(item, Communicate)}
        for kind, spent in waits.items():
            same = {item: ns for item, ns in alone.items() if item.kind == kind}
            for item, ns in same.items():
                cost = self.network.cost(item)
                source = cost.source or f"closed form: {cost.algorithm}"
                share = round(spent * ns / sum(same.values())) if ns else 0
                yield (item.collective, "", cast(How, cost.how), source), share

    def _graph(self, items: tuple[Item, ...]) -> tuple[Graph, dict[int, int], bool]:
        """(graph, imbalance wait by task, whether anything may contend)."""
        builder = GraphBuilder()
        waiting: list[tuple[str, int]] = []  # (until, task) of collectives that nobody has waited for yet
        due: list[int] = []  # what the next kernel waits for
        imbalance: dict[int, int] = {}
        last = -1
        contended = False
        beneath = {item.group for item in items if isinstance(item, Communicate) and item.until}
        # However many collectives run at once, the kernels keep a tenth of the SMs.
        share = min(self.sm_share, MOST_SMS / max(len(beneath), 1))
        for item in items:
            before = [last] if last >= 0 else []
            if isinstance(item, Communicate):
                exposed = item.until == ""
                hidden = not exposed and item.collective != "host" and self.sm_share > 0
                contended |= hidden
                task = builder.add(
                    item.name, item.kind, f"network.{item.group}", self.communication_ns(item),
                    [] if item.start == "block" else before + due,
                    sm_taken={COMPUTE: share} if hidden else None,
                )  # fmt: skip
                (due.append(task) if exposed else waiting.append((item.until, task)))
                continue
            due += [task for until, task in waiting if _needs(item.name, until)]
            waiting = [(until, task) for until, task in waiting if not _needs(item.name, until)]
            slow, mean = self.kernel_ns(item)
            last = builder.add(item.name, item.kind, COMPUTE, slow, [*before, *due], op=0)
            if slow > mean:
                imbalance[last] = slow - mean
            due = [task for until, task in waiting if until == f">{item.name}"]
            waiting = [(until, task) for until, task in waiting if until != f">{item.name}"]
        return builder.build(), imbalance, contended


def _needs(name: str, until: str) -> bool:
    return name == until or name.startswith(f"{until}.")

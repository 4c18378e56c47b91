"""One training step: blocks of layers placed on a pipeline schedule, then gradients, optimizer and weights.

Each stage is one process (all its ranks meet in every layer's collectives, so one stands for all; where their
loads differ the slowest sets the pace and the difference is shown as imbalance).  A slot of the schedule is
one task; the first forward and the last backward of a chunk are placed layer by layer where weight gathers
or gradient reductions run beneath them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hyscale_simulator.blocks import EMPTY, Block, Pricing, joined
from hyscale_simulator.graph import Graph, GraphBuilder
from hyscale_simulator.kernels import kernel
from hyscale_simulator.layout import Plan
from hyscale_simulator.memory import kept_bytes, parameters_of
from hyscale_simulator.scenario import Scenario
from hyscale_simulator.schedules import Op, Step
from hyscale_simulator.work import (
    Communicate,
    Compute,
    Item,
    LayerKind,
    Rank,
    backward,
    embedding,
    embedding_backward,
    forward,
    head,
    head_backward,
    layer_kind,
)
from hyscale_simulator.work.eager import bucket_copies, update
from hyscale_simulator.work.items import Collective, GroupName

__all__ = ["StepGraph", "compose", "step_items"]


@dataclass(frozen=True)
class StepGraph:
    """The graph of a step, the block behind each of its tasks (by the graph's ``op`` column), and counts.

    totals: every block of the step with how often it runs, over all stages.
    """

    graph: Graph
    blocks: tuple[Block, ...]
    totals: tuple[tuple[Block, int], ...]


End = Callable[[Rank], list[Item]]


@dataclass(frozen=True)
class _Pass:
    """One pass of one piece: its layers' blocks in the order they run."""

    layers: tuple[Block, ...]
    whole: Block


class _Composer:
    def __init__(self, scenario: Scenario, cut: Plan, pricing: Pricing) -> None:
        self.scenario, self.cut, self.pricing = scenario, cut, pricing
        self.rank = Rank(scenario, cut)
        self.builder = GraphBuilder()
        self.blocks: list[Block] = []
        self.numbers: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.layers: dict[tuple[str, LayerKind], Block] = {}
        self.passes: dict[tuple[str, int], _Pass] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.messages: dict[tuple[int, int, Op], int] = {}
        self.reductions: dict[int, list[int]] = {stage: [] for stage in range(cut.pipeline)}
        self.gathers: dict[tuple[int, int], list[int]] = {}
        self.first: set[tuple[int, int]] = set()
        self.overlapped: dict[tuple[int, int], Block] = {}
        self.hop = self._hop()

    # Blocks.

    def run_pass(self, way: str, piece: int) -> _Pass:
        """F, B, D or W of one piece of the model."""
        key = (way, piece)
        if key not in self.passes:
            layers = [self._layer(way, layer_kind(self.rank, layer)) for layer in self.cut.pieces[piece]]
            first, last = piece == 0, piece == len(self.cut.pieces) - 1
            if last:
                extra = [
                    self._layer(way, layer_kind(self.rank, self.rank.scenario.model_description.layers + i))
                    for i in range(self.scenario.mtp_layers)
                ]
                heads = self._ends(way, head, head_backward)
                layers += [heads, *(block for more in extra for block in (more, heads))]
            if first:
                layers.insert(0, self._ends(way, embedding, embedding_backward))
            if way != "F":
                layers.reverse()
            self.passes[key] = _Pass(tuple(layers), joined((block, 1) for block in layers))
        return self.passes[key]

    def _layer(self, way: str, kind: LayerKind) -> Block:
        key = (way, kind)
        if key not in self.layers:
            items = forward(self.rank, kind) if way == "F" else _half(backward(self.rank, kind), way)
            beneath = self._sharded(self._beneath(items), kind, way)
            self.layers[key] = self.pricing.block([*self._offloaded(kind, way), *beneath])
        return self.layers[key]

    def _ends(self, way: str, ahead: End, back: End) -> Block:
        items = ahead(self.rank) if way == "F" else _half(back(self.rank), way)
        return self.pricing.block(items) if items else EMPTY

    def _beneath(self, items: list[Item]) -> list[Item]:
        """Expert exchange beneath another microbatch's kernels, where the framework pairs them."""
        if not self.scenario.overlap.expert or self.scenario.layout.schedule == "dualpipe":
            return items
        return [
            Communicate(
                item.name, item.kind, item.collective, item.group, item.num_bytes, item.tokens, "end", "block"
            )
            if isinstance(item, Communicate) and item.group == "expert"
            else item
            for item in items
        ]

    def _offloaded(self, kind: LayerKind, way: str) -> list[Item]:
        """Kept activations on their way to the host, or back for the backward pass, beneath the kernels."""
        share = self.scenario.offload.activations
        if not share or way == "W":
            return []
        size = share * kept_bytes(self.rank, kind)
        name, phase = ("store", "forward") if way == "F" else ("load", "backward")
        return [
            Communicate(
                f"activations.{name}",
                f"{phase}/host copies",
                "host",
                "host",
                size,
                until="end",
                start="block",
            )
        ]

    def _sharded(self, items: list[Item], kind: LayerKind, way: str) -> list[Item]:
        """ZeRO-3: weights gathered a layer ahead in both passes; gradients reduced in one (ZeRO-2 too)."""
        zero = self.scenario.layout.zero_stage
        if zero < 2 or (zero == 2 and way == "F"):
            return items
        model, precision = self.scenario.model_description, self.scenario.precision
        layer = next(at for at in range(model.layers) if layer_kind(self.rank, at) == kind)
        sizes: dict[GroupName, float] = {
            "data": model.dense_parameters(layer) / self.cut.tensor,
            "expert_data": model.expert_parameters(layer) / self.cut.expert,
        }
        phase = "forward" if way == "F" else "backward"
        extra: list[Item] = []
        for group, size in sizes.items():
            if not size:
                continue
            until = "end" if self.scenario.overlap.parameters else ""
            if zero == 3:
                whole = size * precision.weight_bytes
                extra.append(
                    Communicate(
                        f"gather.{group}", f"{phase}/parameter comm", "all_gather", group, whole,
                        until=until, start="block",
                    )
                )  # fmt: skip
            if way in ("B", "W"):
                whole = size * precision.gradient_reduce_bytes
                extra.append(
                    Communicate(
                        f"reduce.{group}", f"{phase}/gradient comm", "reduce_scatter", group, whole,
                        until="end" if self.scenario.overlap.gradients else "", start="block",
                    )
                )  # fmt: skip
        return [*extra, *items]

    def _hop(self) -> Block:
        """A message to the next stage."""
        layout, model = self.scenario.layout, self.scenario.model_description
        if self.cut.pipeline == 1:
            return EMPTY
        size = 2.0 * self.rank.rows * model.hidden
        if layout.scatter_gather and not self.rank.sequence_parallel:
            size /= self.cut.tensor
        send = Communicate("message", "pipeline comm", "point_to_point", "pipeline", size)
        ns = self.pricing.communication_ns(send)
        if layout.scatter_gather and not self.rank.sequence_parallel and self.cut.tensor > 1:
            whole = Communicate("gather", "pipeline comm", "all_gather", "tensor", size * self.cut.tensor)
            ns += self.pricing.communication_ns(whole)
        return Block(ns, (("step/pipeline comm", ns),))

    # Tasks.

    def add(
        self, name: str, kind: str, stream: str | Sequence[str], block: Block, after: Sequence[int]
    ) -> int:
        """A task that runs ``block``."""
        number = self.numbers.get(id(block))
        if number is None:
            number = self.numbers[id(block)] = len(self.blocks)
            self.blocks.append(block)
        self.counts[number] = self.counts.get(number, 0) + 1
        return self.builder.add(name, kind, stream, block.ns, after, op=number)

    def place(self, step: Step) -> None:
        """One slot of one stage, and the messages it sends."""
        after = [
            self.messages.get((given.stage, given.slot, given.op), self.slots[given.stage, given.slot])
            for given in step.inputs
        ]
        self._run(step, after)
        for op in step.ops:
            self._send(step, op)

    def _run(self, step: Step, after: Sequence[int]) -> None:
        stage = step.stage
        name = "+".join(map(str, step.ops))
        if len(step.ops) == 2:
            block = self._together(stage, step.ops[0], step.ops[1])
            self.slots[stage, step.slot] = self.add(name, "pass", _compute(stage), block, after)
            return
        op = step.ops[0]
        piece = self.cut.piece(stage, op.chunk)
        done = self.run_pass(op.kind, piece)
        gathers = self.gathers.get((stage, op.chunk), [])
        if op.kind == "F" and (stage, op.chunk) not in self.first and gathers:
            self.slots[stage, step.slot] = self._layer_by_layer(name, stage, done, after, gathers)
        elif op.kind in "BW" and self._is_last(stage, op) and self.scenario.overlap.gradients:
            self.slots[stage, step.slot] = self._reducing(name, stage, piece, done, after)
        else:
            self.slots[stage, step.slot] = self.add(name, "pass", _compute(stage), done.whole, after)
        if op.kind == "F":
            self.first.add((stage, op.chunk))

    def _is_last(self, stage: int, op: Op) -> bool:
        return self.last[stage, op.chunk] == op

    def find_last(self) -> None:
        """The pass of each chunk after which its gradients are complete."""
        self.last: dict[tuple[int, int], Op] = {}
        for stage, program in enumerate(self.cut.schedule.programs):
            for ops in program:
                for op in ops:
                    if op.kind in "BW":
                        self.last[stage, op.chunk] = op

    def _layer_by_layer(
        self, name: str, stage: int, done: _Pass, after: Sequence[int], gathers: Sequence[int]
    ) -> int:
        last, waits = -1, list(after)
        for index, block in enumerate(done.layers):
            gather = gathers[min(index, len(gathers) - 1)]
            last = self.add(f"{name}.{index}", "pass", _compute(stage), block, [*waits, gather])
            waits = []
        return last

    def _reducing(self, name: str, stage: int, piece: int, done: _Pass, after: Sequence[int]) -> int:
        last, waits = -1, list(after)
        reductions = self._gradient_blocks(stage, len(done.layers))
        for index, block in enumerate(done.layers):
            last = self.add(f"{name}.{index}", "pass", _compute(stage), block, waits)
            waits = []
            if reductions is not None:
                self.reductions[stage].append(
                    self.add(f"reduce {piece}.{index}", "gradient comm", _data(stage), reductions, [last])
                )
        return last

    def _send(self, step: Step, op: Op) -> None:
        """The message to the stage that goes on with the microbatch; where the framework does not overlap it,
        the sender's kernels wait."""
        route = self.cut.schedule.route(op.microbatch)
        at = route.index((step.stage, op.chunk)) + (1 if op.kind == "F" else -1)
        if op.kind == "W" or not 0 <= at < len(route) or route[at][0] == step.stage:
            return
        way = "next" if op.kind == "F" else "prev"
        streams = [f"stage{step.stage}/send.{way}"]
        if not self.scenario.overlap.pipeline:
            streams.append(_compute(step.stage))
        task = self.slots[step.stage, step.slot]
        self.messages[step.stage, step.slot, op] = self.add(
            f"{op} to stage {route[at][0]}", "pipeline comm", streams, self.hop, [task]
        )

    def _together(self, stage: int, ahead: Op, back: Op) -> Block:
        """A forward and a backward pass of different microbatches, the expert exchange of each beneath the
        kernels of the other (DualPipe): the longer of all kernels and all exchange.

        The exchange's SMs are set aside throughout (DeepSeek-V3 report, section 3.2.2), so the kernels run on
        the others; what that costs them is shown as expert communication.
        """
        key = (self.cut.piece(stage, ahead.chunk), self.cut.piece(stage, back.chunk))
        if key not in self.overlapped:
            one, two = self.run_pass("F", key[0]).whole, self.run_pass("B", key[1]).whole
            both = joined([(one, 1), (two, 1)])
            exposed = {kind: ns for kind, ns in both.parts if kind.endswith("/expert comm")}
            other = {kind: ns for kind, ns in both.parts if kind not in exposed}
            compute, exchange = sum(other.values()), both.expert_ns
            ns = max(round(compute / (1 - self.pricing.sm_share)), exchange)
            parts = [*other.items(), ("backward/expert comm", ns - compute)]
            self.overlapped[key] = Block(
                ns, tuple(parts), both.known, both.sigma, both.warnings, both.compute_ns, both.expert_ns,
                both.flops, both.ops, both.coverage,
            )  # fmt: skip
        return self.overlapped[key]

    # Gradients, optimizer, weights.

    def _sizes(self, stage: int) -> dict[GroupName, float]:
        dense, expert = parameters_of(self.rank, stage)
        return {"data": dense, "expert_data": expert}

    def _gradient_blocks(self, stage: int, pieces: int) -> Block | None:
        """One of ``pieces`` equal reductions of a chunk's gradients, or None where there is none."""
        if self.scenario.layout.zero_stage >= 2:
            return None
        way: Collective = "reduce_scatter" if self.scenario.layout.zero_stage else "all_reduce"
        size = self.scenario.precision.gradient_reduce_bytes
        pieces *= self.cut.schedule.num_chunks
        block = self._collectives(stage, way, "gradient comm", size, pieces)
        copies = bucket_copies(self.rank, round(sum(parameters_of(self.rank, stage)) / pieces))
        if block is None or not copies:
            return block
        return joined([(block, 1), (self.pricing.block(in_step(copies)), 1)])

    def _collectives(self, stage: int, way: Collective, kind: str, size: float, pieces: int) -> Block | None:
        ns = sum(map(self.pricing.communication_ns, self._exchanged(stage, way, kind, size, pieces)))
        return Block(ns, ((f"step/{kind}", ns),)) if ns else None

    def _exchanged(
        self, stage: int, way: Collective, kind: str, size: float, pieces: int
    ) -> list[Communicate]:
        return [
            Communicate(kind, kind, way, group, parameters * size / pieces)
            for group, parameters in self._sizes(stage).items()
            if parameters and self.pricing.network.ranks(group) > 1
        ]

    def gather_weights(self) -> None:
        """ZeRO-1 and 2: the updated weights, gathered layer by layer beneath the first forward pass."""
        layout = self.scenario.layout
        if layout.zero_stage not in (1, 2) or not self.scenario.overlap.parameters:
            return
        for stage in range(self.cut.pipeline):
            for chunk in range(self.cut.schedule.num_chunks):
                count = len(self.cut.pieces[self.cut.piece(stage, chunk)]) or 1
                pieces = count * self.cut.schedule.num_chunks
                block = self._collectives(
                    stage, "all_gather", "parameter comm", self.scenario.precision.weight_bytes, pieces
                )
                if block is not None:
                    self.gathers[stage, chunk] = [
                        self.add(f"gather {chunk}.{i}", "parameter comm", _data(stage), block, [])
                        for i in range(count)
                    ]

    def finish(self) -> None:
        """What follows the last backward pass of each stage."""
        layout, precision = self.scenario.layout, self.scenario.precision
        norms = []
        for stage in range(self.cut.pipeline):
            last = self.slots[stage, len(self.cut.schedule.programs[stage]) - 1]
            ready = [last, *self.reductions[stage]]
            if not self.scenario.overlap.gradients and (block := self._gradient_blocks(stage, 1)):
                for _ in range(self.cut.schedule.num_chunks):
                    ready = [self.add("reduce", "gradient comm", _data(stage), block, ready)]
            norms.append(self.add("gradient norm", "pass", _compute(stage), self._norm(stage), ready))
        for stage in range(self.cut.pipeline):
            update = self.add("optimizer", "pass", _compute(stage), self._optimizer(stage), norms)
            if layout.zero_stage in (1, 2) and not self.scenario.overlap.parameters:
                block = self._collectives(stage, "all_gather", "parameter comm", precision.weight_bytes, 1)
                if block is not None:
                    self.add("gather", "parameter comm", _data(stage), block, [update])

    def _shard(self, stage: int) -> float:
        """Parameters whose optimizer state one rank holds."""
        cut, zero = self.cut, self.scenario.layout.zero_stage
        dense, expert = parameters_of(self.rank, stage)
        if zero == 0:
            return dense + expert
        return dense / (cut.context * cut.data) + expert / cut.expert_data

    def _norm(self, stage: int) -> Block:
        return self.pricing.block(in_step([gradient_norm(self._shard(stage))]))

    def _optimizer(self, stage: int) -> Block:
        return self.pricing.block(in_step(update(self.rank, max(round(self._shard(stage)), 1))))

    def items(self) -> list[Item]:
        """See :func:`step_items`."""
        kinds = [layer_kind(self.rank, layer) for layer in self.cut.pieces[0]]
        zero, size = self.scenario.layout.zero_stage, self.scenario.precision.gradient_reduce_bytes
        way: Collective = "reduce_scatter" if zero else "all_reduce"
        parameters, shard = round(sum(parameters_of(self.rank, 0))), self._shard(0)
        reduced = self._exchanged(0, way, "gradient comm", size, 1)
        return [
            *embedding(self.rank),
            *(item for kind in kinds for item in forward(self.rank, kind)),
            *head(self.rank),
            *head_backward(self.rank),
            *(item for kind in reversed(kinds) for item in backward(self.rank, kind)),
            *embedding_backward(self.rank),
            *in_step([*reduced, *(bucket_copies(self.rank, parameters) if reduced else [])]),
            *in_step([gradient_norm(shard), *update(self.rank, max(round(shard), 1))]),
        ]


def step_items(scenario: Scenario, cut: Plan, pricing: Pricing) -> list[Item]:
    """Kernels and collectives of one rank's step in the order of the pass: one stage, one microbatch, no
    gathered weights."""
    return _Composer(scenario, cut, pricing).items()


def gradient_norm(parameters: float) -> Compute:
    """Norm of so many gradients."""
    call = kernel("grad_norm", "fp32", rows=max(round(parameters), 1), width=1)
    return Compute("gradient norm", "optimizer", call)


def in_step(items: Sequence[Item]) -> list[Item]:
    """Items that belong to the step, not to a pass of a layer."""
    return [replace(item, kind=f"step/{item.kind}") for item in items]


def compose(scenario: Scenario, cut: Plan, pricing: Pricing) -> StepGraph:
    """The graph of one step of ``scenario``."""
    composer = _Composer(scenario, cut, pricing)
    composer.find_last()
    composer.gather_weights()
    for step in cut.schedule.steps():
        composer.place(step)
    composer.finish()
    totals = tuple((composer.blocks[number], count) for number, count in composer.counts.items())
    return StepGraph(composer.builder.build(), tuple(composer.blocks), totals)


def _half(items: list[Item], way: str) -> list[Item]:
    """The whole backward pass (B), or its halves: D without, W with nothing but, the weight gradients."""
    if way == "B":
        return items
    if way == "W":
        return [item for item in items if isinstance(item, Compute) and item.weights]
    return [item for item in items if not (isinstance(item, Compute) and item.weights)]


def _compute(stage: int) -> str:
    return f"stage{stage}/compute"


def _data(stage: int) -> str:
    return f"stage{stage}/data"

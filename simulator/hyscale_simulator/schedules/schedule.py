"""A pipeline schedule: for each stage, which pass of which microbatch it runs, in order.

Passes: F forward, B whole backward, or its two halves D (gradient of the inputs, "dgrad") and W (of the
weights, "wgrad"). A stage may hold several *chunks* of the model. A microbatch travels a *route* of (stage,
chunk) places; DualPipe has two routes, one each way. Everything else (dependencies, activations held)
follows from the orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Input", "Op", "Place", "Schedule", "Slot", "Step"]

Place = tuple[int, int]
"""(stage, chunk)."""


@dataclass(frozen=True, slots=True)
class Op:
    """One pass (F, B, D or W) of one microbatch through one chunk of a stage."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Slot = tuple[Op, ...]
"""What a stage runs at a time: one pass, or a forward and a backward pass overlapped (DualPipe)."""


@dataclass(frozen=True, slots=True)
class Input:
    """A pass that another one waits for: `slot` is its position in the program of `stage`."""

    op: Op
    stage: int
    slot: int


@dataclass(frozen=True, slots=True)
class Step:
    """One slot of one stage, with what has to be done before it besides the stage's earlier slots."""

    stage: int
    slot: int
    ops: Slot
    inputs: tuple[Input, ...]


@dataclass(frozen=True)
class Schedule:
    """The programs of all stages. Made by `gpipe`, `one_f_one_b`, `interleaved`, `zb_h1` or `dualpipe`."""

    name: str
    num_microbatches: int
    routes: tuple[tuple[Place, ...], ...]
    """Microbatches are dealt to the routes in equal runs: the first half to the first of two."""
    programs: tuple[tuple[Slot, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.programs)

    @property
    def num_chunks(self) -> int:
        """Chunks on each stage."""
        return 1 + max(chunk for route in self.routes for _, chunk in route)

    def route(self, microbatch: int) -> tuple[Place, ...]:
        return self.routes[microbatch * len(self.routes) // self.num_microbatches]

    def steps(self) -> Iterator[Step]:
        """Every slot of every stage, each after all that it waits for; the order of each stage is kept.

        ValueError if the programs wait for each other in a circle, or for a pass that no stage runs.
        """
        where = {
            (op.kind, op.microbatch, stage, op.chunk): Input(op, stage, slot)
            for stage, program in enumerate(self.programs)
            for slot, ops in enumerate(program)
            for op in ops
        }
        reached = [0] * self.num_stages
        left = sum(map(len, self.programs))
        while left:
            before = left
            for stage, program in enumerate(self.programs):
                while reached[stage] < len(program):
                    ops = program[reached[stage]]
                    inputs = [i for op in ops for i in self._inputs(stage, op, where)]
                    if any(i.slot >= reached[i.stage] for i in inputs):
                        break
                    yield Step(stage, reached[stage], ops, tuple(inputs))
                    reached[stage] += 1
                    left -= 1
            if left == before:
                stuck = [
                    f"{program[at][0]} on stage {stage}"
                    for stage, (program, at) in enumerate(zip(self.programs, reached, strict=True))
                    if at < len(program)
                ]
                raise ValueError(f"schedule {self.name!r}: deadlock at {', '.join(stuck)}")

    def _inputs(self, stage: int, op: Op, where: dict[tuple[str, int, int, int], Input]) -> Iterator[Input]:
        def find(kinds: str, place: Place) -> Input:
            for kind in kinds:
                if found := where.get((kind, op.microbatch, *place)):
                    return found
            raise ValueError(
                f"schedule {self.name!r}: {op} on stage {stage} waits for {' or '.join(kinds)} of microbatch "
                f"{op.microbatch} at (stage, chunk) {place}, which is not in the programs"
            )

        route = self.route(op.microbatch)
        here = (stage, op.chunk)
        at = route.index(here)
        if op.kind == "F":
            if at > 0:
                yield find("F", route[at - 1])
        elif op.kind == "W":
            yield find("D", here)
        else:
            yield find("F", here)
            if at + 1 < len(route):
                yield find("BD", route[at + 1])

    def activations_in_flight(self, stage: int, *, until: str = "W") -> int:
        """Most activations that `stage` holds at a time, in microbatches through one of its chunks.

        One is held from its forward pass to its whole backward pass, or, where that is split, to its `until`
        half: "W" (both halves need it) or "D". An overlapped forward allocates before its partner frees.
        """
        if until not in ("D", "W"):
            raise ValueError(f"until: {until!r}; 'D' or 'W' is wanted")
        held = peak = 0
        for ops in self.programs[stage]:
            held += sum(op.kind == "F" for op in ops)
            peak = max(peak, held)
            held -= sum(op.kind in ("B", until) for op in ops)
        return peak

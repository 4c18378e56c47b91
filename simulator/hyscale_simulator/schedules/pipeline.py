"""A schedule and the time of its passes, laid out as a task graph: the plain pipeline, one task per slot.

The step composition places whole layers where this places one task; both walk `Schedule.steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyscale_simulator.graph import Graph, GraphBuilder
from hyscale_simulator.schedules.schedule import Input, Schedule, Slot

__all__ = ["PassTimes", "pipeline_graph"]

KINDS = {"F": "forward", "B": "backward", "D": "dgrad", "W": "wgrad"}


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Nanoseconds of one chunk's passes. A whole backward pass takes `dgrad_ns + wgrad_ns`.

    `overlapped_ns` is a forward of this chunk run together with a backward of another (DualPipe); None: the
    sum.
    """

    forward_ns: int
    dgrad_ns: int
    wgrad_ns: int
    overlapped_ns: int | None = None

    @property
    def backward_ns(self) -> int:
        return self.dgrad_ns + self.wgrad_ns


def pipeline_graph(schedule: Schedule, times: Sequence[Sequence[PassTimes]], hop_ns: int = 0) -> Graph:
    """The graph of a schedule with `times[stage][chunk]`; each message to another stage takes `hop_ns`.

    Streams are "stage3/compute" and, for the messages, "stage3/send.next" and "stage3/send.prev". A message
    leaves when its pass ends and delays nothing but the pass that waits for it. Kinds are "forward",
    "backward", "dgrad", "wgrad", "overlapped" and "p2p". ValueError if `times` does not cover every stage
    and chunk.
    """
    if [len(chunks) for chunks in times] != [schedule.num_chunks] * schedule.num_stages:
        raise ValueError(
            f"times: chunks by stage {[len(chunks) for chunks in times]}; {schedule.num_chunks} on each of "
            f"{schedule.num_stages} stages are wanted"
        )
    builder = GraphBuilder()
    tasks: dict[tuple[int, int], int] = {}
    for step in schedule.steps():
        after = [
            _message(builder, given, step.stage, tasks[given.stage, given.slot], hop_ns)
            for given in step.inputs
        ]
        tasks[step.stage, step.slot] = builder.add(
            "+".join(map(str, step.ops)),
            KINDS[step.ops[0].kind] if len(step.ops) == 1 else "overlapped",
            f"stage{step.stage}/compute",
            _slot_ns(step.ops, times[step.stage]),
            after,
        )
    return builder.build()


def _slot_ns(ops: Slot, chunks: Sequence[PassTimes]) -> int:
    if len(ops) == 2 and (together := chunks[ops[0].chunk].overlapped_ns) is not None:
        return together
    spent = 0
    for op in ops:
        times = chunks[op.chunk]
        spent += {
            "F": times.forward_ns,
            "B": times.backward_ns,
            "D": times.dgrad_ns,
            "W": times.wgrad_ns,
        }[op.kind]
    return spent


def _message(builder: GraphBuilder, given: Input, to_stage: int, task: int, hop_ns: int) -> int:
    if given.stage == to_stage or not hop_ns:
        return task
    way = "next" if given.op.kind == "F" else "prev"
    return builder.add(
        f"{given.op} to stage {to_stage}", "p2p", f"stage{given.stage}/send.{way}", hop_ns, [task]
    )

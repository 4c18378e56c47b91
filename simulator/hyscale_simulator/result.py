"""What an evaluation returns: the step, its parts, memory, how it is known, and how to read it further."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hyscale_simulator.blocks import Evidence
from hyscale_simulator.critical_path import critical_path, waiting_for
from hyscale_simulator.durations import HOWS
from hyscale_simulator.graph import Timeline
from hyscale_simulator.memory import GIB, Memory, memory, what_would_fit
from hyscale_simulator.scenario import Scenario
from hyscale_simulator.step import StepGraph

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Result", "compare"]

SCHEMA = 1
Z_90 = 1.645
"""The band is 90 %: plus or minus 1.645 standard errors."""


@dataclass(frozen=True)
class Result:
    """One evaluated scenario.  Times of the breakdown are means over the pipeline stages."""

    scenario: Scenario
    step: StepGraph = field(repr=False)
    timeline: Timeline = field(repr=False)
    model_flops: float
    extra_warnings: tuple[str, ...] = ()

    @property
    def step_ns(self) -> int:
        """Length of the step, whole nanoseconds."""
        return self.timeline.makespan_ns

    @property
    def step_time_s(self) -> float:
        """Length of the step."""
        return self.step_ns / 1e9

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step consumes."""
        return self.scenario.batch.sequence_tokens * self.scenario.batch.sequences_per_step

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput of one GPU."""
        return self.tokens_per_step / self.step_time_s / self.scenario.gpus

    @property
    def model_tflops_per_gpu(self) -> float:
        """Model FLOPs (see :mod:`hyscale_simulator.flops`) per second and GPU, in 10^12."""
        return self.model_flops / self.step_time_s / self.scenario.gpus / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs over the bf16 peak of all GPUs for the length of the step."""
        return self.model_tflops_per_gpu / self.scenario.gpu_description.tensor_tflops.bf16

    @cached_property
    def stage_parts_ns(self) -> tuple[dict[str, int], ...]:
        """For each stage, nanoseconds by "phase/kind"; each adds up to the step exactly."""
        graph = self.timeline.graph
        stages: list[dict[str, int]] = [{} for _ in range(self.scenario.layout.pipeline_parallel)]
        streams = {name: number for number, name in enumerate(graph.streams)}
        for stage, parts in enumerate(stages):
            stream = streams[f"stage{stage}/compute"]
            for task in _tasks_on(self.timeline, stream):
                for kind, ns in self._parts_of(task):
                    parts[kind] = parts.get(kind, 0) + ns
            for kind, ns in waiting_for(self.timeline, f"stage{stage}/compute").items():
                name = "step/bubble" if kind == "pass" else f"step/{kind}"
                parts[name] = parts.get(name, 0) + ns
        return tuple(stages)

    def _parts_of(self, task: int) -> list[tuple[str, int]]:
        """What a task's time went to; of a perturbed task, what its parts do not explain is jitter."""
        graph = self.timeline.graph
        block = self.step.blocks[int(graph.op[task])]
        spent = int(self.timeline.end_ns[task] - self.timeline.start_ns[task])
        if spent == block.ns:
            return list(block.parts)
        if not block.ns or spent < block.ns:
            scaled = [(kind, ns * spent // block.ns) for kind, ns in block.parts] if block.ns else []
        else:
            scaled = list(block.parts)
        return [*scaled, ("step/jitter", spent - sum(ns for _, ns in scaled))]

    @cached_property
    def parts_ns(self) -> dict[str, int]:
        """Nanoseconds by "phase/kind", summed over stages: stages x step in all."""
        total: dict[str, int] = {}
        for parts in self.stage_parts_ns:
            for kind, ns in parts.items():
                total[kind] = total.get(kind, 0) + ns
        return {kind: ns for kind, ns in sorted(total.items(), key=lambda item: -item[1]) if ns}

    @cached_property
    def breakdown(self) -> tuple[tuple[str, float], ...]:
        """(name, seconds), largest first; the seconds add up to the step."""
        total: dict[str, int] = {}
        for kind, ns in self.parts_ns.items():
            name = kind.split("/", 1)[1]
            total[name] = total.get(name, 0) + ns
        stages = len(self.stage_parts_ns)
        return tuple(
            (name, ns / stages / 1e9) for name, ns in sorted(total.items(), key=lambda item: -item[1])
        )

    @cached_property
    def critical_path(self) -> tuple[tuple[str, float], ...]:
        """(name, seconds) along the exact critical path, largest first; they add up to the step."""
        total: dict[str, int] = {}
        for task in critical_path(self.timeline):
            for kind, ns in self._parts_of(task):
                name = kind.split("/", 1)[1]
                total[name] = total.get(name, 0) + ns
        return tuple((name, ns / 1e9) for name, ns in sorted(total.items(), key=lambda item: -item[1]) if ns)

    @cached_property
    def memory(self) -> Memory:
        """The fullest rank."""
        return memory(self.scenario)

    @cached_property
    def provenance(self) -> dict[str, float]:
        """Share of kernel and communication time by how it is known."""
        total = dict.fromkeys(HOWS, 0)
        for block, count in self.step.totals:
            for how, ns in block.known:
                total[how] += ns * count
        whole = sum(total.values()) or 1
        return {how: ns / whole for how, ns in total.items()}

    @cached_property
    def coverage(self) -> tuple[tuple[Evidence, float], ...]:
        """((op, dtype, how its price is known, from where), seconds of all stages), largest first."""
        total: dict[Evidence, int] = {}
        for block, count in self.step.totals:
            for evidence, ns in block.coverage:
                total[evidence] = total.get(evidence, 0) + ns * count
        return tuple((key, ns / 1e9) for key, ns in sorted(total.items(), key=lambda item: -item[1]))

    @cached_property
    def uncertainty_s(self) -> tuple[float, float]:
        """90 % band of the step: errors of one op are fully correlated, of different ops independent."""
        stages = len(self.stage_parts_ns)
        by_op: dict[str, float] = {}
        for block, count in self.step.totals:
            for op, sigma in block.sigma:
                by_op[op] = by_op.get(op, 0.0) + sigma * count
        busy = sum(ns for kind, ns in self.parts_ns.items() if kind != "step/bubble") or 1
        # Bubbles and waits scale with the work that they wait for.
        scale = self.step_ns * stages / busy
        error = Z_90 * scale * math.sqrt(sum(sigma**2 for sigma in by_op.values())) / stages / 1e9
        return max(self.step_time_s - error, 0.0), self.step_time_s + error

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What to be careful about, each once."""
        found = dict.fromkeys(self.extra_warnings)
        for block, _ in self.step.totals:
            found.update(dict.fromkeys(block.warnings))
        if not self.memory.fits:
            found[
                f"does not fit: {self.memory.peak_bytes / GIB:.1f} GiB of "
                f"{self.memory.capacity_bytes / GIB:.1f} GiB on stage {self.memory.stage}"
            ] = None
        return tuple(found)

    @cached_property
    def remedies(self) -> tuple[str, ...]:
        """What would make it fit; empty if it does, or if nothing tried suffices."""
        return () if self.memory.fits else what_would_fit(self.scenario)

    def to_json(self) -> dict[str, Any]:
        """The record that ``hyscale simulate --json`` writes."""
        low, high = self.uncertainty_s
        return {
            "schema": SCHEMA,
            "scenario": self.scenario.name,
            "scenario_hash": self.scenario.hash,
            "step_time_s": self.step_time_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "breakdown": [{"name": name, "seconds": seconds} for name, seconds in self.breakdown],
            "critical_path": [{"name": name, "seconds": seconds} for name, seconds in self.critical_path],
            "memory": {
                "peak_gib": self.memory.peak_bytes / GIB,
                "capacity_gib": self.memory.capacity_bytes / GIB,
                "fits": self.memory.fits,
                "stage": self.memory.stage,
                "items": [{"name": name, "gib": size / GIB} for name, size in self.memory.items],
                "remedies": list(self.remedies),
            },
            "provenance": self.provenance,
            "coverage": [
                {"op": op, "dtype": dtype, "how": how, "source": source, "seconds": seconds}
                for (op, dtype, how, source), seconds in self.coverage
            ],
            "uncertainty": {"low_s": low, "high_s": high},
            "warnings": list(self.warnings),
        }

    def frame(self) -> "pd.DataFrame":
        """The breakdown by stage, phase and kind, in seconds."""
        import pandas as pd

        rows = [
            {
                "stage": stage,
                "phase": kind.split("/", 1)[0],
                "kind": kind.split("/", 1)[1],
                "seconds": ns / 1e9,
            }
            for stage, parts in enumerate(self.stage_parts_ns)
            for kind, ns in parts.items()
        ]
        return pd.DataFrame(rows, columns=["stage", "phase", "kind", "seconds"])


def compare(*results: Result) -> "pd.DataFrame":
    """Seconds by kind, one column a result (named by its scenario, numbered where names repeat)."""
    import pandas as pd

    columns: dict[str, dict[str, float]] = {}
    for number, result in enumerate(results):
        name = result.scenario.name
        columns[name if name not in columns else f"{name} ({number + 1})"] = {
            **dict(result.breakdown),
            "step": result.step_time_s,
        }
    return pd.DataFrame(columns).fillna(0.0).sort_values(next(iter(columns)), ascending=False)


def _tasks_on(timeline: Timeline, stream: int) -> list[int]:
    graph = timeline.graph
    occupant = np.repeat(np.arange(len(graph)), np.diff(graph.stream_ptr))
    return [int(task) for task in occupant[graph.stream_idx == stream]]

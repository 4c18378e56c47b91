"""Held against training steps that this project measured: one JSON line a mode, as the trainer writes them.

``{"schema": 1, "commit", "gpu", "gpus", "sequence", "mode", "step_ms", "parts", "peak_bytes", "loss",
"config"}``.  ``config.scenario`` is the run as a scenario (its model given whole), so that the prediction is
of what ran; the mode is checked against it.  Predictions come from kernel profiles alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hyscale_simulator.descriptions import DescriptionError, Positive, Rate, parse
from hyscale_simulator.evaluate import evaluator
from hyscale_simulator.scenario import Scenario

__all__ = [
    "SPEEDUP_PCT",
    "STEP_PCT",
    "MeasuredComparison",
    "MeasuredStep",
    "compare_measured",
    "read_steps",
    "speedups",
    "within",
]

STEP_PCT, SPEEDUP_PCT = 10.0, 5.0
"""What is demanded of each step, and of each speed-up."""

Mode = Literal["materialised", "hytopk", "hytopk+replay"]


class _Config(BaseModel):
    """Whatever the trainer records, and the scenario."""

    model_config = ConfigDict(frozen=True, extra="allow")
    scenario: Mapping[str, Any]


class MeasuredStep(BaseModel):
    """One measured mode."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_: Literal[1] = Field(alias="schema")
    commit: str
    gpu: str
    gpus: Positive
    sequence: Positive
    mode: Mode
    step_ms: Rate
    parts: Mapping[str, float]
    peak_bytes: Positive
    loss: float
    config: _Config


@dataclass(frozen=True)
class MeasuredComparison:
    """A measured step and its prediction."""

    step: MeasuredStep
    scenario: Scenario
    predicted_s: float

    @property
    def error_pct(self) -> float:
        """Predicted over measured, minus one, in per cent."""
        return (self.predicted_s / (self.step.step_ms / 1e3) - 1) * 100


def read_steps(path: Path) -> list[tuple[MeasuredStep, Scenario]]:
    """The records of a file with their scenarios; :class:`DescriptionError` names line and field."""
    found = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DescriptionError(f"{path}: unreadable: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            found.append(_record(line, f"{path}: line {number}"))
    return found


def _record(line: str, origin: str) -> tuple[MeasuredStep, Scenario]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DescriptionError(f"{origin}: not JSON: {error}") from None
    try:
        step = MeasuredStep.model_validate(fields)
    except ValueError as error:
        raise DescriptionError(f"{origin}: {error}") from None
    scenario = parse(Scenario, step.config.scenario, f"{origin}: config.scenario")
    gpu = scenario.gpu_description
    replay, table = scenario.recompute.replay, scenario.selection.table
    mode = "materialised" if table else "hytopk+replay" if replay else "hytopk"
    for name, stated, meant in (
        ("gpus", step.gpus, scenario.gpus),
        ("sequence", step.sequence, scenario.batch.sequence_tokens),
        ("mode", step.mode, mode),
        ("gpu", step.gpu, gpu.device),
    ):
        if stated != meant:
            raise DescriptionError(f"{origin}: {name} = {stated!r}, but config.scenario means {meant!r}")
    return step, scenario


def compare_measured(path: Path, profiles: tuple[str, ...] = ()) -> list[MeasuredComparison]:
    """Predict every record of a file."""
    evaluate = evaluator(profiles)
    return [
        MeasuredComparison(step, scenario, evaluate(scenario).step_time_s)
        for step, scenario in read_steps(path)
    ]


def speedups(rows: Sequence[MeasuredComparison]) -> list[tuple[MeasuredComparison, float, float]]:
    """(row, measured, predicted) speed-up of each row over the materialised one of its GPUs, length and
    split."""

    def kind(row: MeasuredComparison) -> tuple[int, int, Any]:
        layout = row.step.config.scenario.get("layout", {})
        return row.step.gpus, row.step.sequence, layout.get("context_split")

    base = {kind(row): row for row in rows if row.step.mode == "materialised"}
    found = []
    for row in rows:
        start = base.get(kind(row))
        if start is not None and row is not start:
            measured = start.step.step_ms / row.step.step_ms
            found.append((row, measured, start.predicted_s / row.predicted_s))
    return found


def within(rows: Sequence[MeasuredComparison]) -> bool:
    """Whether every step and every speed-up is predicted within its target."""
    return all(abs(row.error_pct) <= STEP_PCT for row in rows) and all(
        abs(predicted / measured - 1) * 100 <= SPEEDUP_PCT for _, measured, predicted in speedups(rows)
    )

"""Held against training steps that this project measured: one JSON line a mode, as the trainer writes them.

``{"schema": 1, "commit", "gpu", "gpus", "sequence", "mode", "step_ms", "parts", "peak_bytes", "loss",
"config"}``, and a ``note`` where a reader should know something.  ``config.scenario`` is the run as a
scenario (its model given whole), so that the prediction is of what ran; the mode is checked against it.
``config.run``, where the trainer wrote it, says how the work was executed (:func:`executed`).  Predictions
come from kernel profiles alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyscale_simulator.descriptions import DescriptionError, Positive, Rate, explain, parse
from hyscale_simulator.evaluate import Evaluator, evaluator
from hyscale_simulator.memory import CONTEXT_BYTES
from hyscale_simulator.scenario import Scenario
from hyscale_simulator.work import Communicate, Item

__all__ = [
    "MEMORY_PCT",
    "SPEEDUP_PCT",
    "STEP_PCT",
    "MeasuredComparison",
    "MeasuredStep",
    "compare_measured",
    "part_of",
    "read_steps",
    "speedups",
    "within",
]

STEP_PCT, SPEEDUP_PCT, MEMORY_PCT = 10.0, 5.0, 10.0
"""What is demanded of each step, of each speed-up and of each peak of memory."""

PARTS_TOLERANCE = 0.01
"""How far a record's parts may add up to something else than its step."""

Mode = Literal["materialised", "hytopk", "hytopk+replay"]

PARTS: tuple[tuple[str, str], ...] = (
    ("index.", "indexer projections"),
    ("select.quantise", "indexer projections"),
    ("select.order", "ordering"),
    ("select.", "selection"),
    ("loss.", "indexer loss"),
    ("core", "attention"),
    ("head", "head"),
    ("cross_entropy", "head"),
    ("embedding", "head"),
    ("attention.norm", "norms"),
    ("feed_forward.norm", "norms"),
    ("up", "mlp"),
    ("activation", "mlp"),
    ("down", "mlp"),
    ("attention.residual", "residuals"),
    ("feed_forward.residual", "residuals"),
    ("", "linears"),
)
"""Which part of the trainer's timer an item belongs to, by the first of these that its name begins with."""

RESIDUALS = {"forward": "other", "recompute": "mlp.backward", "backward": "norms.backward"}
"""Additions stand between the timer's parts and count to the one before: the recomputation starts where the
feed-forward's gradient asks for it, and two branches' gradients meet after the norm's."""


class _Config(BaseModel):
    """Whatever the trainer records, the scenario, and how it ran."""

    model_config = ConfigDict(frozen=True, extra="allow")
    scenario: Mapping[str, Any]
    run: Mapping[str, Any] | None = None


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
    note: str = ""
    """What a reader should know of this record."""


@dataclass(frozen=True)
class MeasuredComparison:
    """A measured step and its prediction.

    predicted_parts: milliseconds by part as the trainer's timer names them; they add up to the prediction.
    predicted_bytes: allocated at most, as PyTorch counts: without the CUDA context.
    """

    step: MeasuredStep
    scenario: Scenario
    predicted_s: float
    predicted_parts: Mapping[str, float]
    predicted_bytes: float
    warnings: tuple[str, ...]

    @property
    def error_pct(self) -> float:
        """Predicted over measured, minus one, in per cent."""
        return (self.predicted_s / (self.step.step_ms / 1e3) - 1) * 100

    @property
    def memory_error_pct(self) -> float:
        """The same of the peak of memory."""
        return (self.predicted_bytes / self.step.peak_bytes - 1) * 100

    def parts(self) -> list[tuple[str, float, float]]:
        """(part, measured ms, predicted ms): every part that either has, the largest first."""
        names = dict.fromkeys([*self.step.parts, *self.predicted_parts])
        rows = [(name, self.step.parts.get(name, 0.0), self.predicted_parts.get(name, 0.0)) for name in names]
        return sorted(rows, key=lambda row: -max(row[1:]))


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
    if not found:
        raise DescriptionError(f"{path}: holds no measured step; allowed: one record a line, or more")
    return found


def _record(line: str, origin: str) -> tuple[MeasuredStep, Scenario]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DescriptionError(f"{origin}: not JSON: {error}") from None
    try:
        step = MeasuredStep.model_validate(fields)
    except ValidationError as error:
        raise DescriptionError(explain(error, origin)) from None
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
    total = sum(step.parts.values())
    if step.parts and abs(total / step.step_ms - 1) > PARTS_TOLERANCE:
        raise DescriptionError(f"{origin}: parts add up to {total:.1f} ms, but step_ms = {step.step_ms:.1f}")
    return step, executed(scenario, step.config.run)


def executed(scenario: Scenario, run: Mapping[str, Any] | None) -> Scenario:
    """The scenario with what the trainer's configuration says of how it ran; unchanged without one.

    ``hyscale_kernels.training`` runs PyTorch's operators one by one over float32 parameters, products in
    blocks of ``row_block`` rows, this project's attention kernels, and non-reentrant checkpointing.
    """
    if run is None:
        return scenario
    changes: dict[str, Any] = {
        "kernels.framework": "eager",
        "kernels.product_rows": run.get("row_block") or 0,
        "kernels.attention_implementation": "hyscale",
        "kernels.fused_cross_entropy": False,
        "recompute.reentrant": False,
    }
    return scenario.with_(**changes)


def compare_measured(path: Path, profiles: tuple[str, ...] = ()) -> list[MeasuredComparison]:
    """Predict every record of a file."""
    evaluate = evaluator(profiles)
    return [_compared(evaluate, step, scenario) for step, scenario in read_steps(path)]


def _compared(evaluate: Evaluator, step: MeasuredStep, scenario: Scenario) -> MeasuredComparison:
    result = evaluate(scenario)
    parts: dict[str, float] = {}
    for item, ns in evaluate.items(scenario):
        name = part_of(item)
        parts[name] = parts.get(name, 0.0) + ns / 1e6
    rest = result.step_ns / 1e6 - sum(parts.values())  # overlap and waiting, where the layout has any
    parts["other"] = parts.get("other", 0.0) + rest
    allocated = result.memory.peak_bytes - CONTEXT_BYTES
    return MeasuredComparison(step, scenario, result.step_time_s, parts, allocated, result.warnings)


def part_of(item: Item) -> str:
    """The part of the trainer's timer that an item belongs to: "attention.backward", "optimizer"."""
    phase, kind = item.kind.split("/", 1)
    if isinstance(item, Communicate) or kind == "gradient comm":
        return "communication.backward" if phase == "step" else f"communication.{phase}"
    if phase == "step":
        return kind
    part = next(part for start, part in PARTS if item.name.startswith(start))
    return RESIDUALS[phase] if part == "residuals" else f"{part}.{phase}"


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
    """Whether every step, every peak of memory and every speed-up is predicted within its target."""
    return (
        all(abs(row.error_pct) <= STEP_PCT for row in rows)
        and all(abs(row.memory_error_pct) <= MEMORY_PCT for row in rows)
        and all(
            abs(predicted / measured - 1) * 100 <= SPEEDUP_PCT for _, measured, predicted in speedups(rows)
        )
    )

"""Published steps: every case of ``data/validation`` as a scenario, and its figure as the time of a step.

A file is one source.  Its shared scenario holds what the source leaves open, set once for all its cases; a
case sets only what its row states.
"""

import tomllib
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from pydantic import Field

from hyscale_simulator.descriptions import DATA, Description, Rate, Several, parse
from hyscale_simulator.model import Model
from hyscale_simulator.scenario import Scenario

__all__ = ["Case", "Source", "published_seconds", "sources"]

Unit = Literal["s", "TFLOPS per GPU", "tokens/s/GPU"]


class Case(Description):
    """One published row."""

    name: str
    published: Rate | None = None
    compared: bool = True
    """Whether it counts in the summary."""
    note: str = ""
    """What a miss suggests, of a case beside the summary."""
    activations_gib: Rate | None = None
    peak_gib: Rate | None = None
    set: dict[str, Any] = Field(default_factory=dict)


class Source(Description):
    """One publication."""

    source: str
    url: str
    left_open: str
    """What it does not say, and what is assumed for all its rows."""
    unit: Unit
    formula: Literal["", "megatron-2021", "causal", "nemo"] = ""
    """How it counts the FLOPs of a step, for TFLOPS rows."""
    scenario: dict[str, Any]
    cases: Several[Case]

    def scenario_of(self, case: Case) -> Scenario:
        """The case as a scenario."""
        shared = parse(Scenario, {"name": case.name, "source": self.source, **self.scenario}, self.source)
        return shared.with_(**case.set)


@cache
def sources() -> tuple[Source, ...]:
    """All shipped sources."""
    files = sorted((DATA / "validation").iterdir(), key=lambda item: item.name)
    return tuple(
        parse(Source, tomllib.loads(item.read_text(encoding="utf-8")), f"data/validation/{item.name}")
        for item in files
        if item.name.endswith(".toml")
    )


def _megatron(model: Model, length: int, sequences: int) -> float:
    """96 B s l h^2 (1 + s/6h + V/16lh): forward, backward, full recomputation (Narayanan et al., eq. 3)."""
    layers, hidden = model.layers, model.hidden
    factor = 1 + length / (6 * hidden) + model.vocabulary / (16 * layers * hidden)
    return 96.0 * sequences * length * layers * hidden**2 * factor


def _linear(model: Model) -> float:
    return 6.0 * (model.parameters - model.embedding_parameters)


def _causal(model: Model, length: int, sequences: int) -> float:
    """6 N + 6 l h s for each token: attention counted for its causal half."""
    return (_linear(model) + 6.0 * model.layers * model.hidden * length) * length * sequences


def _nemo(model: Model, length: int, sequences: int) -> float:
    """NeMo's llama2 formula (nemo/utils/flops_formulas.py): attention counted in full."""
    return (_linear(model) + 12.0 * model.layers * model.hidden * length) * length * sequences


FORMULAS: dict[str, Callable[[Model, int, int], float]] = {
    "megatron-2021": _megatron,
    "causal": _causal,
    "nemo": _nemo,
}


def published_seconds(source: Source, case: Case, scenario: Scenario) -> float:
    """The published figure as the time of one step."""
    assert case.published is not None
    batch = scenario.batch
    if source.unit == "s":
        return case.published
    if source.unit == "tokens/s/GPU":
        return batch.sequence_tokens * batch.sequences_per_step / case.published / scenario.gpus
    flops = FORMULAS[source.formula](
        scenario.model_description, batch.sequence_tokens, batch.sequences_per_step
    )
    return flops / (case.published * 1e12 * scenario.gpus)

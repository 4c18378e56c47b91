"""Named switches: what differs between two scenarios, one named difference at a time; and the baselines.

A switch sets some fields to their value in the improved scenario.  Fields that only make sense together are
one switch; what no name covers becomes a switch named after its field, so that a set of switches always
leads from the baseline to the improved scenario exactly.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyscale_simulator.descriptions import DescriptionError
from hyscale_simulator.scenario import Scenario, load

__all__ = ["BASELINES", "Baseline", "Switch", "SwitchError", "apply", "between"]

Changes = tuple[tuple[str, Any], ...]


class SwitchError(DescriptionError):
    """Switches that contradict each other, or do not lead from one scenario to the other."""


@dataclass(frozen=True)
class Switch:
    """One difference.

    changes: (field, value) in the order in which they are set; a later switch's value wins.
    needs: switches without which this one does nothing (a record needs a replay to be read).
    """

    name: str
    title: str
    changes: Changes
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Named:
    """A switch of the catalogue: its name, what it is, and the fields it covers."""

    name: str
    title: str
    fields: tuple[str, ...]


_CATALOGUE: tuple[_Named, ...] = (
    # In the order in which an engineer would make the changes: a waterfall follows it.
    _Named("layout", "parallel layout", (
        "gpus", "layout.tensor_parallel", "layout.context_parallel", "layout.pipeline_parallel",
        "layout.expert_parallel", "layout.virtual_stages", "layout.stage_layers", "layout.schedule",
        "layout.sequence_parallel", "layout.context_exchange", "batch.sequences_per_step",
    )),
    _Named("causal_half", "only the causal half of the table", ("selection.square", "selection.mask_pass")),
    _Named("selector", "selector", ("selection.selector", "selection.row_starts")),
    _Named("scoring_dtype", "scoring precision", ("selection.scoring_dtype",)),
    _Named("score_table", "no score table (HyTopK)", (
        "selection.table", "selection.table_rows", "selection.scorer",
    )),
    _Named("pruning", "keys skipped by a bound", ("selection.skipped_fraction", "selection.scores")),
    _Named("zigzag", "context split", ("layout.context_split",)),
    _Named("recompute", "recomputation", (
        "recompute.policy", "recompute.layers_fraction", "recompute.modules", "recompute.reentrant",
    )),
    _Named("replay", "selection replay", ("recompute.replay",)),
    _Named("record", "packed selection record", ("selection.record",)),
    _Named("offload", "selection record on the host", ("offload.selection",)),
    _Named("microbatch", "sequences a microbatch", ("batch.sequences_per_microbatch",)),
    _Named("linear_precision", "precision of linear layers", ("precision.linear",)),
)  # fmt: skip

RADIX = "flashinfer"
"""The radix selector: the best of those that read a table."""


def between(baseline: Scenario, improved: Scenario) -> tuple[Switch, ...]:
    """The switches that lead from ``baseline`` to ``improved``, in catalogue order.

    Where the improved scenario writes no table, the table is first improved as far as a table goes (causal
    half only, a radix selector) and then removed, so that each is credited with its own part.
    """
    old, new = _flat(baseline), _flat(improved)
    differs = {field for field in new if old.get(field) != new[field]} - {"name", "description", "source"}
    switches: list[Switch] = []
    taken: set[str] = set()
    removed = baseline.selection.table and not improved.selection.table
    for named in _CATALOGUE:
        fields = [field for field in named.fields if field in differs]
        taken.update(named.fields)
        values: dict[str, Any] = {field: new[field] for field in fields}
        if named.name == "selector" and removed:
            values = {} if baseline.selection.selector == RADIX else {"selection.selector": RADIX}
        if named.name == "score_table" and removed:
            values |= {field: new[field] for field in ("selection.table", "selection.selector")}
            values |= {"selection.square": False, "selection.mask_pass": new["selection.mask_pass"]}
        if values:
            switches.append(Switch(named.name, _title(named, values, old), tuple(values.items())))
    for field in sorted(differs - taken):
        switches.append(Switch(field, f"{field}: {old.get(field)} → {new[field]}", ((field, new[field]),)))
    present = {switch.name for switch in switches}
    return tuple(
        Switch(
            s.name, s.title, s.changes, tuple(n for n in _needs(s.name, baseline, improved) if n in present)
        )
        for s in switches
    )


def _needs(name: str, baseline: Scenario, improved: Scenario) -> tuple[str, ...]:
    if name == "score_table" and baseline.selection.scoring_dtype == "fp32":
        return ("scoring_dtype",)  # HyTopK takes bf16, fp16 or fp8
    if name == "pruning" and baseline.selection.table:
        return ("score_table",)
    if name in ("record", "offload") and not baseline.recompute.replay:
        return ("replay",)
    if name == "replay" and improved.recompute.replay and baseline.recompute.policy != "full":
        return ("recompute",)
    if name == "recompute" and baseline.recompute.replay and improved.recompute.policy != "full":
        return ("replay",)
    return ()


def _title(named: _Named, values: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    if named.name in ("score_table", "causal_half", "replay", "record", "offload"):
        return named.title
    if len(values) == 1:
        ((field, value),) = values.items()
        return f"{named.title}: {old.get(field)} → {value}"
    return f"{named.title}: " + ", ".join(
        f"{field.rsplit('.', 1)[-1]} {old.get(field)} → {value}" for field, value in values.items()
    )


def _flat(scenario: Scenario) -> dict[str, Any]:
    """Every field of a scenario by dotted path; a model or cluster held whole counts as one."""
    found: dict[str, Any] = {}
    for name, value in scenario.model_dump().items():
        if isinstance(value, dict) and name not in ("model", "cluster"):
            found.update({f"{name}.{inner}": item for inner, item in value.items()})
        else:
            found[name] = value
    return found


def apply(baseline: Scenario, switches: Sequence[Switch], on: Collection[str]) -> Scenario:
    """``baseline`` with the switches named in ``on``, those aside whose needs are not on.

    :class:`SwitchError` names switches that do not exist, or that together make no legal scenario.
    """
    by_name = {switch.name: switch for switch in switches}
    unknown = set(on) - set(by_name)
    if unknown:
        raise SwitchError(f"switch {sorted(unknown)[0]!r}: there are: {', '.join(by_name) or 'none'}")
    effective = _closed(by_name, set(on))
    changes: dict[str, Any] = {}
    for switch in switches:
        if switch.name in effective:
            changes.update(switch.changes)
    try:
        return baseline.with_(**changes) if changes else baseline
    except DescriptionError as error:
        raise SwitchError(f"switches {', '.join(sorted(effective))} contradict each other: {error}") from None


def _closed(by_name: Mapping[str, Switch], on: set[str]) -> set[str]:
    """The largest subset of ``on`` in which every switch's needs are met."""
    while True:
        kept = {name for name in on if all(need in on for need in by_name[name].needs)}
        if kept == on:
            return kept
        on = kept


@dataclass(frozen=True)
class Baseline:
    """How a framework selects today, on the headline's model, cluster and layout."""

    letter: str
    title: str
    source: str
    changes: Changes
    left_out: str = ""
    """What the price does not include: it is then a lower bound."""

    def scenario(self) -> Scenario:
        """The baseline as a scenario."""
        base = load("glm-5.1-1m-512xh20-baseline")
        changed = base.with_(**dict(self.changes)) if self.changes else base
        return changed.model_copy(
            update={"name": f"baseline-{self.letter}", "description": self.title, "source": self.source}
        )

    def improved(self) -> Scenario:
        """HyTopK and replay in its place, all else equal (fp32 scores become bf16: HyTopK takes no fp32)."""
        dtype = self.scenario().selection.scoring_dtype
        best = load("glm-5.1-1m-512xh20")
        return best.with_(**{"selection.scoring_dtype": "bf16" if dtype == "fp32" else dtype})


_FULL_WIDTH = (
    ("selection.selector", "torch.topk"),
    ("selection.mask_pass", True),
    ("selection.table_rows", 8192),
)

BASELINES: tuple[Baseline, ...] = (
    Baseline(
        "A", "unfused torch: fp32 einsum over the whole square, torch.topk",
        "Megatron-LM, dsa_kernel_backend = none",
        (
            ("selection.scoring_dtype", "fp32"), ("selection.selector", "torch.topk"),
            ("selection.square", True), ("selection.table_rows", 16384),
        ),
        "passes over a table for each head (32 times the score table) and the dense indexer loss",
    ),
    Baseline(
        "B", "TileLang bf16 scores in 8,192-row chunks, -inf pass, torch.topk over the full width",
        "Megatron-LM, dsa_kernel_backend = tilelang", _FULL_WIDTH,
    ),
    Baseline(
        "C", "cuDNN bf16 scores in 1 GiB chunks, radix top-k",
        "Megatron-LM, dsa_kernel_backend = cudnn: its recommended path", (),
    ),
    Baseline(
        "D", "fp8 scores in 8,192-row chunks, torch.topk over the full width",
        "slime and prime-rl", (("selection.scoring_dtype", "fp8"), *_FULL_WIDTH),
    ),
    Baseline(
        "E", "DeepGEMM fp8 scores, FlashInfer top-k",
        "the FlashTopK README's kernel baseline, in chunks of the size at which it was measured fastest",
        (
            ("selection.scoring_dtype", "fp8"), ("selection.scorer", "deepgemm"),
            ("selection.table_rows", 2048),
        ),
    ),
)  # fmt: skip
"""A to E: the paper does not name its baseline in public."""

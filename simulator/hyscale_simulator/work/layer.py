"""A whole layer in each pass, under the recomputation policy."""

from dataclasses import dataclass

from hyscale_simulator.work.attention import attention, attention_backward
from hyscale_simulator.work.eager import as_run
from hyscale_simulator.work.feed_forward import feed_forward, feed_forward_backward
from hyscale_simulator.work.items import Item, in_phase
from hyscale_simulator.work.rank import Rank

__all__ = ["LayerKind", "backward", "forward", "layer_kind"]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What distinguishes layers: routed experts or not, own selection or not, recomputed or not."""

    experts: bool
    selects: bool
    recomputed: bool


def layer_kind(rank: Rank, layer: int) -> LayerKind:
    """The kind of one layer (MTP layers come after the model's own and are like its last)."""
    model = rank.scenario.model_description
    recompute = rank.scenario.recompute
    known = min(layer, model.layers - 1)
    recomputed = recompute.policy == "full" and known < round(recompute.layers_fraction * model.layers)
    return LayerKind(
        experts=model.has_experts(known),
        selects=model.selects(known) or (layer >= model.layers and model.indexer is not None),
        recomputed=recomputed,
    )


def forward(rank: Rank, kind: LayerKind) -> list[Item]:
    """The forward pass.

    Reentrant checkpointing runs that of a recomputed layer without gradients, so that its indexer computes
    no loss; non-reentrant checkpointing runs all of it.
    """
    trains = not (kind.recomputed and rank.scenario.recompute.reentrant)
    return in_phase(_forward(rank, kind, again=False, trains=trains), "forward")


def backward(rank: Rank, kind: LayerKind) -> list[Item]:
    """Recomputation, if any, then the backward pass."""
    items: list[Item] = []
    if kind.recomputed:
        items += in_phase(_forward(rank, kind, again=True, trains=True), "recompute")
    ahead = [
        *feed_forward_backward(rank, experts=kind.experts),
        *attention_backward(rank, selects=kind.selects),
    ]
    return [*items, *in_phase(as_run(rank, ahead, backward=True), "backward")]


def _forward(rank: Rank, kind: LayerKind, *, again: bool, trains: bool) -> list[Item]:
    items = [
        *attention(rank, selects=kind.selects, recomputed=kind.recomputed, again=again, trains=trains),
        *feed_forward(rank, experts=kind.experts),
    ]
    return as_run(rank, items)

"""A whole layer in each pass, under the recomputation policy."""

from dataclasses import dataclass

from hyscale_simulator.work.attention import attention, attention_backward
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
    """The forward pass.  A recomputed layer runs it without gradients, so its indexer computes no loss."""
    return in_phase(_forward(rank, kind, again=False, trains=not kind.recomputed), "forward")


def backward(rank: Rank, kind: LayerKind) -> list[Item]:
    """Recomputation, if any, then the backward pass."""
    items: list[Item] = []
    if kind.recomputed:
        items += in_phase(_forward(rank, kind, again=True, trains=True), "recompute")
    items += in_phase(feed_forward_backward(rank, experts=kind.experts), "backward")
    items += in_phase(attention_backward(rank, selects=kind.selects), "backward")
    return items


def _forward(rank: Rank, kind: LayerKind, *, again: bool, trains: bool) -> list[Item]:
    return [
        *attention(rank, selects=kind.selects, again=again, trains=trains),
        *feed_forward(rank, experts=kind.experts),
    ]

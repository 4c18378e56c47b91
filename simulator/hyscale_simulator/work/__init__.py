"""The work of one rank: what each layer computes and communicates, in order, in each pass."""

from .ends import embedding, embedding_backward, head, head_backward
from .items import Communicate, Compute, Item, Phase
from .layer import LayerKind, backward, forward, layer_kind
from .rank import Rank

__all__ = [
    "Communicate",
    "Compute",
    "Item",
    "LayerKind",
    "Phase",
    "Rank",
    "backward",
    "embedding",
    "embedding_backward",
    "forward",
    "head",
    "head_backward",
    "layer_kind",
]

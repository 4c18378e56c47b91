"""Rivals of HyTopK in plain PyTorch: both write scores to memory, a chunk of rows at a time."""

from .materialised import materialised_topk
from .scoring import Selected
from .slab import slab_topk

__all__ = ["Selected", "materialised_topk", "slab_topk"]

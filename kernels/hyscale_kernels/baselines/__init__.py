"""Rivals of HyTopK: they write scores to memory, a chunk of rows at a time.

Here those in plain PyTorch; rivals.py calls public packages, where they are installed.
"""

from .materialised import materialised_topk
from .scoring import Selected
from .slab import slab_topk

__all__ = ["Selected", "materialised_topk", "slab_topk"]

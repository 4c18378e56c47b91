"""Sparse latent attention (MLA in absorbed form) over selected keys, forward and backward."""

from .api import SparseAttention, attention_mass, backward_workspace_bytes, sparse_mla
from .plan import AttentionPlan

__all__ = [
    "AttentionPlan",
    "SparseAttention",
    "attention_mass",
    "backward_workspace_bytes",
    "sparse_mla",
]

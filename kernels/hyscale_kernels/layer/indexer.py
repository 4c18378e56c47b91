"""The indexer's projections: what is scored, and what its loss sees.

    q = rotary(W_q qn)              from the layer's normalised query latent qn
    k = rotary(LayerNorm(W_k x))    from the hidden state; of a mean over ``ratio`` positions if compressed
    w = W_w x / sqrt(H D)

Its inputs are detached: the indexer learns from its own loss alone, and the loss moves nothing else.

Shape letters: T rows, S keys, H indexer heads, D indexer head size.
"""

from typing import NamedTuple

import torch
from torch import nn

from ..quantize import head_weights, quantize
from .config import LayerConfig
from .linear import LayerNorm, Linear
from .rotary import rotary_table, rotate_first
from .rows import Rows

LAYER_NORM_EPS = 1e-6


class Projections(NamedTuple):
    """q [T, H, D] and k [S, D] in the layer's dtype, w [T, H] float32."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor


class Scored(NamedTuple):
    """Operands of ``hytopk`` and ``indexer_loss``; for fp8 with scales and what was quantised."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    k_scale: torch.Tensor | None = None
    q_source: torch.Tensor | None = None
    k_source: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None


class Indexer(nn.Module):
    """Projections of one layer's indexer."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        shape, indexer, block = config.shape, config.shape.indexer, config.row_block
        self.config = config
        self.q = Linear(shape.q_lora_rank, indexer.heads * indexer.head_dim, block)
        self.k = Linear(shape.hidden, indexer.head_dim, block)
        self.k_norm = LayerNorm(indexer.head_dim, LAYER_NORM_EPS)
        self.w = Linear(shape.hidden, indexer.heads, block)

    def forward(self, x: torch.Tensor, q_latent: torch.Tensor, rows: Rows) -> Projections:
        """From x [T, hidden] and the normalised query latent [T, q_lora_rank]; k of these rows alone."""
        shape, indexer = self.config.shape, self.config.shape.indexer
        x, q_latent = x.detach(), q_latent.detach()
        cos, sin = rotary_table(rows.rotary, indexer.rope_dim, shape.rope_theta)
        q = self.q(q_latent).unflatten(1, (indexer.heads, indexer.head_dim))
        k = self.k_norm(pooled(self.k(x), rows.ratio))
        return Projections(
            q=rotate_first(q, cos, sin),
            k=rotate_first(k, cos[:: rows.ratio], sin[:: rows.ratio]),
            w=head_weights(self.w(x), indexer.head_dim),
        )


def pooled(x: torch.Tensor, ratio: int) -> torch.Tensor:
    """Means of ``ratio`` neighbouring rows of x [T, D]: [T / ratio, D]."""
    return x if ratio == 1 else x.unflatten(0, (-1, ratio)).mean(dim=1)


def scored(config: LayerConfig, projections: Projections) -> Scored:
    """The projections as the selection and the sparse loss take them."""
    q, k, w = projections
    if config.indexer_dtype != "fp8":
        return Scored(q.contiguous(), k.contiguous(), w)
    q8, q_scale = quantize(q)
    k8, k_scale = quantize(k)
    return Scored(q8, k8, w * q_scale, k_scale, q, k, q_scale)

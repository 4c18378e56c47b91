"""Model descriptions: shapes of a transformer, and the exact parameter counts that follow from them."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hyscale_simulator.descriptions import Count, Description, Positive, Several

__all__ = ["Experts", "Grouped", "Indexer", "Latent", "Model"]


class Grouped(Description):
    """Multi-head or grouped-query attention."""

    kind: Literal["grouped"] = "grouped"
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    qk_norm: bool = False
    """RMSNorm over each head of q and k (Qwen3)."""

    @property
    def qk_dim(self) -> int:
        """Width of one query or key head."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements per token that other ranks need: keys and values."""
        return 2 * self.kv_heads * self.head_dim

    def parameters(self, hidden: int, bias: bool) -> int:
        """Weights of q, k, v and output projections."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = hidden * (q + 2 * kv) + q * hidden
        return weights + (q + 2 * kv + hidden) * bias + 2 * self.head_dim * self.qk_norm


class Latent(Description):
    """Multi-head latent attention (DeepSeek-V2 and after)."""

    kind: Literal["latent"] = "latent"
    heads: Positive
    q_rank: Positive
    kv_rank: Positive
    nope_dim: Positive
    rope_dim: Positive
    value_dim: Positive

    @property
    def qk_dim(self) -> int:
        """Width of one query head, as trained without absorption."""
        return self.nope_dim + self.rope_dim

    @property
    def kv_width(self) -> int:
        """Elements per token that other ranks need: the latent and its rotary key."""
        return self.kv_rank + self.rope_dim

    def parameters(self, hidden: int, bias: bool) -> int:
        """Down and up projections with their norms, and the output projection."""
        del bias  # none of these models has one
        return (
            hidden * self.q_rank + self.q_rank
            + self.q_rank * self.heads * self.qk_dim
            + hidden * self.kv_width + self.kv_rank
            + self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
            + self.heads * self.value_dim * hidden
        )  # fmt: skip


class Indexer(Description):
    """The scorer of learned sparse attention: score = sum over heads of weight * relu(q.k)."""

    heads: Positive
    head_dim: Positive
    top_k: Positive
    computing_layers: Several[Count] = ()
    """Layers that select; the others reuse the last selection before them. Empty: every layer selects."""
    key_ratio: Positive = 1
    """Tokens a scored key stands for (4 where keys are compressed, as in CSA)."""
    window: Count = 0
    """Recent tokens attended to besides the selected ones."""
    dense_ratio: Count = 0
    """Above 0: layers that do not select attend densely to keys that stand for so many tokens (HCA)."""

    def parameters(self, hidden: int, q_rank: int) -> int:
        """Query projection, key projection, its LayerNorm (weight and bias), head weights."""
        width = self.heads * self.head_dim
        return q_rank * width + hidden * self.head_dim + 2 * self.head_dim + hidden * self.heads


class Experts(Description):
    """A mixture-of-experts feed-forward."""

    experts: Positive
    top_k: Positive
    width: Positive
    shared_experts: Count = 0
    first_dense_layers: Count = 0
    """The first layers that keep a dense feed-forward."""

    @model_validator(mode="after")
    def _top_k_fits(self) -> "Experts":
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k}; at most experts = {self.experts}")
        return self


class Model(Description):
    """One transformer, as far as its cost depends on it."""

    name: str
    source: str
    layers: Positive
    hidden: Positive
    vocabulary: Positive
    feed_forward: Count
    """Width of the dense feed-forward; 0 when every layer has experts."""
    attention: Annotated[Grouped | Latent, Field(discriminator="kind")]
    indexer: Indexer | None = None
    experts: Experts | None = None
    gated: bool = True
    """SwiGLU (three matrices); otherwise GeLU (two)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    bias: bool = False
    tied_head: bool = False
    learned_positions: Count = 0
    mtp_layers: Count = 0
    """Extra multi-token-prediction layers (not counted by ``parameters``)."""

    @model_validator(mode="after")
    def _layers_exist(self) -> "Model":
        if self.indexer is not None:
            if not isinstance(self.attention, Latent):
                raise ValueError("indexer: needs attention.kind = 'latent'")
            for layer in self.indexer.computing_layers:
                if layer >= self.layers:
                    raise ValueError(f"indexer.computing_layers: {layer}; below layers = {self.layers}")
            if self.indexer.computing_layers and self.indexer.computing_layers[0] != 0:
                raise ValueError("indexer.computing_layers: must begin with layer 0")
        if self.experts is None and not self.feed_forward:
            raise ValueError("feed_forward = 0; a model without experts needs a width above 0")
        if self.experts is not None and self.experts.first_dense_layers and not self.feed_forward:
            raise ValueError("feed_forward = 0; the first dense layers need a width above 0")
        return self

    def has_experts(self, layer: int) -> bool:
        """Whether that layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer >= self.experts.first_dense_layers

    def selects(self, layer: int) -> bool:
        """Whether that layer runs its own selection."""
        if self.indexer is None:
            return False
        return not self.indexer.computing_layers or layer in self.indexer.computing_layers

    @property
    def matrices(self) -> int:
        """Matrices in one feed-forward: three when gated."""
        return 3 if self.gated else 2

    def _feed_forward_parameters(self, width: int) -> int:
        bias = (width * (self.matrices - 1) + self.hidden) * self.bias
        return self.matrices * self.hidden * width + bias

    def attention_parameters(self, layer: int) -> int:
        """Attention, its indexer if it has one, and both norms of the layer."""
        count = self.attention.parameters(self.hidden, self.bias)
        if self.indexer is not None and self.selects(layer) and isinstance(self.attention, Latent):
            count += self.indexer.parameters(self.hidden, self.attention.q_rank)
        return count + 2 * self.norm_parameters

    def expert_parameters(self, layer: int) -> int:
        """Routed experts of the layer, all of them."""
        if self.experts is None or not self.has_experts(layer):
            return 0
        return self.experts.experts * self._feed_forward_parameters(self.experts.width)

    def dense_parameters(self, layer: int) -> int:
        """The layer without its routed experts: attention, norms, feed-forward or shared expert, router."""
        count = self.attention_parameters(layer)
        if self.experts is not None and self.has_experts(layer):
            shared = self.experts.shared_experts * self.experts.width
            router = self.hidden * self.experts.experts
            return count + router + (self._feed_forward_parameters(shared) if shared else 0)
        return count + self._feed_forward_parameters(self.feed_forward)

    @property
    def norm_parameters(self) -> int:
        """Weights of one normalisation."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def embedding_parameters(self) -> int:
        """Token and position embeddings."""
        return (self.vocabulary + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """The output projection; 0 when tied to the embedding."""
        return 0 if self.tied_head else self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All parameters: embeddings, layers, final norm, head; no MTP layers, no router biases (buffers)."""
        layers = sum(
            self.dense_parameters(layer) + self.expert_parameters(layer) for layer in range(self.layers)
        )
        return self.embedding_parameters + layers + self.norm_parameters + self.head_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token meets: all of it but the experts it is not routed to."""
        if self.experts is None:
            return self.parameters
        idle = sum(self.expert_parameters(layer) for layer in range(self.layers))
        return self.parameters - idle + idle * self.experts.top_k // self.experts.experts

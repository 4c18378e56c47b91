"""A sparse-attention layer of the DSA family: projections, indexer, selection, attention, the indexer's loss.

README.md beside this file has the shapes, the derivation of absorption, and what is simplified.

Shape letters: T rows here, S keys, K = top_k, Hq query heads, C latent size (the key), V its value part.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ..attention import SparseAttention, attention_mass, sparse_mla
from ..indexer import indexer_loss
from .config import LayerConfig, Step
from .indexer import Indexer, Projections, Scored, pooled, scored
from .linear import Absorb, HeadLinear, Linear, RMSNorm
from .rotary import rotary_table, rotate_last
from .rows import Rows
from .selection import Carrier, indices_of, select
from .timer import part, region
from .warmup import Dense, dense_warmup


class LayerOutput(NamedTuple):
    """What a layer computed.

    out         [T, hidden]
    loss        the indexer's loss of these rows, already divided by the rows of the whole sequence, float32
                scalar; zero for a layer that shares a selection
    selection   to hand to layers that share it; None in the warm-up stage
    """

    out: torch.Tensor
    loss: torch.Tensor
    selection: Carrier | None


@dataclass(frozen=True)
class Observation:
    """What a layer that selects computed in the sparse stage, without gradients.

    q [T, Hq, C] and latent [S, C] as attention sees them, indices int32 [T, K], log_sum_exp [T, Hq]; what the
    indexer scored, with the keys of the whole sequence; the rows, and the factor of the logits.
    """

    layer: int
    q: torch.Tensor
    latent: torch.Tensor
    indices: torch.Tensor
    log_sum_exp: torch.Tensor
    index: Scored
    rows: Rows
    scale: float


class DsaAttention(nn.Module):
    """One layer's attention over x [T, hidden], the rows of a rank.

    ``number`` is its place in the model (default: the first layer that selects). A layer that is not in
    ``shape.selecting_layers`` has no indexer and attends to the keys that its source layer selected. The
    module holds parameters and nothing else: all that belongs to a microbatch comes with the call and leaves
    with its result.
    """

    def __init__(self, config: LayerConfig, number: int | None = None) -> None:
        super().__init__()
        shape, block = config.shape, config.row_block
        self.config = config
        self.number = shape.selecting_layers[0] if number is None else number
        self.source = shape.source_layer(self.number)
        self.q_down = Linear(shape.hidden, shape.q_lora_rank, block)
        self.q_norm = RMSNorm(shape.q_lora_rank, shape.norm_eps)
        self.q_up = Linear(shape.q_lora_rank, shape.heads * config.query_dim, block)
        self.kv_down = Linear(shape.hidden, shape.latent_dim, block)
        self.kv_norm = RMSNorm(shape.value_dim, shape.norm_eps)
        if shape.qk_nope_dim is not None and shape.v_dim is not None:
            self.key_up = Absorb(shape.heads, shape.qk_nope_dim, shape.value_dim, block)
            self.value_up = HeadLinear(shape.heads, shape.value_dim, shape.v_dim, block)
            self.out = Linear(shape.heads * shape.v_dim, shape.hidden, block)
        else:
            assert shape.output_groups is not None
            assert shape.output_lora_rank is not None
            width = shape.heads // shape.output_groups * shape.value_dim
            self.out_down = HeadLinear(shape.output_groups, width, shape.output_lora_rank, block)
            self.out = Linear(shape.output_groups * shape.output_lora_rank, shape.hidden, block)
        self.indexer = Indexer(config) if self.selects else None
        self.sink = nn.Parameter(torch.zeros(shape.heads)) if config.sink else None

    @property
    def selects(self) -> bool:
        """Whether the layer selects for itself."""
        return self.source == self.number

    def forward(self, x: torch.Tensor, step: Step, shared: Carrier | None = None) -> LayerOutput:
        """``shared`` is the selection of the source layer, for a layer that does not select.

        In the warm-up stage the output carries no gradient, and the loss one in the indexer alone.

        Raises TypeError or ValueError for x of another shape or dtype, and for a selection that is missing or
        not wanted.
        """
        self._check(x, step, shared)
        warmup, timer = step.stage == "warmup", step.timer
        train = torch.is_grad_enabled() and not warmup  # all but the indexer
        with torch.set_grad_enabled(train):
            q_latent, latent = region(timer, "linears", self._down, x, step.rows)
            gathering = None if step.context is None else step.context.start_gather(latent)
        index = None
        if self.indexer is not None:
            index = region(timer, "indexer projections", self.indexer, x, q_latent, step.rows)
            if step.context is not None:
                index = index._replace(k=step.context.start_gather(index.k).wait(timer))
        carrier, operands = shared, None
        if index is not None and not warmup:
            operands = region(timer, "indexer projections", scored, self.config, index)
            with part(timer, "selection"):
                carrier = select(self.config, operands, step.rows, timer)
        with torch.set_grad_enabled(train):
            q = region(timer, "linears", self._queries, q_latent, step.rows)
            latent = latent if gathering is None else gathering.wait(timer)
        if warmup:
            attended, loss = self._dense(q, latent, index, step)
        else:
            assert carrier is not None
            attended, loss = self._sparse(q, latent, operands, carrier, step)
        with torch.set_grad_enabled(train):
            out = region(timer, "linears", self._project, attended)
        return LayerOutput(out, loss, carrier)

    def _down(self, x: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised query latent [T, q_lora_rank] and the keys [T / ratio, C] of these rows."""
        shape = self.config.shape
        cos, sin = rotary_table(rows.rotary[:: rows.ratio], shape.rope_dim, shape.rope_theta)
        kv = pooled(self.kv_down(x), rows.ratio)
        latent = torch.cat([self.kv_norm(kv[:, : shape.value_dim]), kv[:, shape.value_dim :]], dim=1)
        return self.q_norm(self.q_down(x)), rotate_last(latent, cos, sin)

    def _queries(self, q_latent: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Queries in the latent's space [T, Hq, C]."""
        shape = self.config.shape
        cos, sin = rotary_table(rows.rotary, shape.rope_dim, shape.rope_theta)
        q = self.q_up(q_latent).unflatten(1, (shape.heads, self.config.query_dim))
        if not self.config.absorbed:
            return rotate_last(q, cos, sin)
        absorbed: torch.Tensor = self.key_up(q, cos, sin)
        return absorbed

    def _project(self, attended: torch.Tensor) -> torch.Tensor:
        """[T, Hq, V] to [T, hidden]."""
        if self.config.absorbed:
            up = self.value_up(attended)
        else:
            groups = self.config.shape.output_groups
            assert groups is not None
            up = self.out_down(attended.reshape(attended.shape[0], groups, -1))
        projected: torch.Tensor = self.out(up.flatten(1))
        return projected

    def _sparse(
        self, q: torch.Tensor, latent: torch.Tensor, index: Scored | None, carrier: Carrier, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the selected keys, and the indexer's loss over them."""
        config, rows, sink = self.config, step.rows, self.sink
        with part(step.timer, "selection"):
            indices = indices_of(carrier, rows)

        def attend() -> SparseAttention:
            return sparse_mla(
                q, latent, indices, scale=config.scale, value_dim=config.shape.value_dim, sink=sink
            )

        attended, log_sum_exp = region(step.timer, "attention", attend)
        if index is None:
            return attended, torch.zeros((), device=q.device)
        if step.observer is not None:
            step.observer(
                Observation(self.number, q, latent, indices, log_sum_exp, index, rows, config.scale)
            )
            return attended, torch.zeros((), device=q.device)  # who looks on asks for no loss

        def learn() -> torch.Tensor:
            mass = attention_mass(
                q.detach(), latent.detach(), indices, log_sum_exp, scale=config.scale,
                sink=None if sink is None else sink.detach(),
            )  # fmt: skip
            whole = mass.sum(dim=1, keepdim=True)
            target = mass.div_(whole.masked_fill_(whole == 0, 1))
            loss = indexer_loss(
                index.q, index.k, index.w, indices, target,
                coefficient=config.kl_coefficient / rows.num_positions, temperature=config.temperature,
                k_scale=index.k_scale, q_source=index.q_source, k_source=index.k_source,
                q_scale=index.q_scale,
            )  # fmt: skip
            return loss.sum()

        return attended, region(step.timer, "indexer loss", learn)

    def _dense(
        self, q: torch.Tensor, latent: torch.Tensor, index: Projections | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over all visible keys, and the indexer's loss over them."""
        config = self.config

        def attend() -> Dense:
            return dense_warmup(
                q, latent, index, step.rows, scale=config.scale, value_dim=config.shape.value_dim,
                sink=self.sink, coefficient=config.kl_coefficient / step.rows.num_positions,
                temperature=config.temperature, tile_bytes=config.tile_bytes,
            )  # fmt: skip

        return region(step.timer, "attention", attend)

    def _check(self, x: torch.Tensor, step: Step, shared: Carrier | None) -> None:
        shape, rows = self.config.shape, step.rows
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x: {type(x).__name__}; allowed: torch.Tensor")
        if x.dtype != self.config.dtype:
            raise TypeError(f"x: dtype {x.dtype}; allowed: {self.config.dtype}, the layer's")
        if x.shape != (rows.num_rows, shape.hidden):
            raise ValueError(f"x: shape {list(x.shape)}; allowed: [{rows.num_rows}, {shape.hidden}]")
        if x.device != rows.positions.device:
            raise ValueError(f"x: on {x.device}; allowed: {rows.positions.device}, where the rows are")
        if rows.ratio != shape.indexer.key_ratio:
            raise ValueError(
                f"rows: with ratio {rows.ratio}; allowed for {shape.name}: {shape.indexer.key_ratio}"
            )
        block = self.config.row_block
        if block is not None and any(len(span) % block for span in rows.spans) and rows.num_ranks > 1:
            raise ValueError(
                f"row_block: {block} with shares of {len(rows.spans[0])} rows; allowed: a divisor of that, "
                "or a row's result could depend on the number of ranks"
            )
        if step.stage == "sparse" and self.selects != (shared is None):
            what = "given" if self.selects else "None"
            raise ValueError(
                f"shared: {what}; allowed for layer {self.number} of {shape.name}: "
                + ("None, it selects for itself" if self.selects else f"the selection of layer {self.source}")
            )

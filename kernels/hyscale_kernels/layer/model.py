"""A small decoder of sparse-attention layers: what the trainer trains.

    x = embedding[tokens]
    x = x + attention(norm(x));  x = x + mlp(norm(x))          in each layer, recomputed as configured
    loss = cross entropy of head(norm(x)), in blocks of rows

Shape letters: T rows here, S positions of the whole sequence, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .attention import DsaAttention, Observation
from .config import LayerConfig, Recompute, Step
from .linear import Linear, RMSNorm
from .recompute import recomputed
from .selection import Carrier
from .timer import region

IGNORED = -100  # a target that does not count


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder: ``layer.shape.layers`` layers, all of them sparse.

    vocabulary   number of tokens
    mlp          inner size of each layer's SwiGLU
    head_rows    rows whose logits exist at a time
    """

    layer: LayerConfig
    vocabulary: int
    mlp: int
    head_rows: int = 4096

    def __post_init__(self) -> None:
        if not isinstance(self.layer, LayerConfig):
            raise TypeError(f"layer: {type(self.layer).__name__}; allowed: LayerConfig")
        for name in ("vocabulary", "mlp", "head_rows"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {value!r}; allowed: an integer, 1 or more")
        shape = self.layer.shape
        if shape.sparse_layers != tuple(range(shape.layers)):
            raise ValueError(
                f"layer.shape: {shape.name}, of whose {shape.layers} layers {len(shape.sparse_layers)} are "
                "sparse; allowed: shapes all of whose layers are (take a part with dataclasses.replace)"
            )


class Losses(NamedTuple):
    """Of these rows, divided by the S rows of the whole sequence, so that the losses of ranks add up.

    total     what to call ``backward`` on: language + indexer.sum(); in the warm-up stage indexer.sum() alone
    language  cross entropy: the sum over targets that count, divided by S
    indexer   [L], each layer's KL divergence times its coefficient, a mean over rows; 0 where a layer shares
    """

    total: torch.Tensor
    language: torch.Tensor
    indexer: torch.Tensor


class SwiGlu(nn.Module):
    """x [T, hidden] -> down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, row_block: int | None) -> None:
        super().__init__()
        self.gate = Linear(hidden, inner, row_block)
        self.up = Linear(hidden, inner, row_block)
        self.down = Linear(inner, hidden, row_block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer, residual connections included."""

    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        layer = config.layer
        shape = layer.shape
        self.attention_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.attention = DsaAttention(layer, number)
        self.mlp_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = SwiGlu(shape.hidden, config.mlp, layer.row_block)

    def forward(
        self, x: torch.Tensor, step: Step, shared: Carrier | None
    ) -> tuple[torch.Tensor, torch.Tensor, Carrier | None]:
        """(x [T, hidden], the indexer's loss, the selection to hand on)."""
        train = torch.is_grad_enabled() and step.stage == "sparse"
        with torch.set_grad_enabled(train):
            normed = region(step.timer, "norms", self.attention_norm, x)
        out, loss, selection = self.attention(normed, step, shared)
        with torch.set_grad_enabled(train):
            x = x + out
            normed = region(step.timer, "norms", self.mlp_norm, x)
            return x + region(step.timer, "mlp", self.mlp, normed), loss, selection


class Decoder(nn.Module):
    """The model. Parameters are float32 and are drawn from torch's generator: seed it first."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        shape = config.layer.shape
        self.config = config
        self.embedding = nn.Parameter(torch.randn(config.vocabulary, shape.hidden))
        self.blocks = nn.ModuleList(Block(config, number) for number in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.head = Linear(shape.hidden, config.vocabulary)
        with torch.no_grad():  # residual branches add up to a variance of about one
            for block in self.layers():
                block.attention.out.weight.mul_((2 * shape.layers) ** -0.5)
                block.mlp.down.weight.mul_((2 * shape.layers) ** -0.5)

    def layers(self) -> list[Block]:
        """The layers, in order."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def indexer_parameters(self) -> list[nn.Parameter]:
        """What the warm-up stage trains; give the optimizer these alone there."""
        return [each for name, each in self.named_parameters() if ".indexer." in name]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, step: Step) -> Losses:
        """Losses of the rows ``step.rows``, given their tokens and targets, int64 [T].

        A target of -100 does not count. ``total`` alone carries a gradient.
        """
        self._check(tokens, targets, step)
        train = torch.is_grad_enabled() and step.stage == "sparse"
        with torch.set_grad_enabled(train):
            x = region(step.timer, "head", self._embed, tokens)
        losses = []
        how: Recompute = "none" if step.stage == "warmup" else self.config.layer.recompute
        selection: Carrier | None = None
        for number, block in enumerate(self.layers()):
            selection = None if block.attention.selects else selection
            x, loss, selection = recomputed(how, f"layer {number}", block, x, step, selection)
            losses.append(loss)
        indexer = torch.stack(losses)
        with torch.set_grad_enabled(train):
            language = region(step.timer, "head", self._language_loss, x, targets, step.rows.num_positions)
        total = indexer.sum() if step.stage == "warmup" else language + indexer.sum()
        return Losses(total, language.detach(), indexer.detach())

    @torch.no_grad()
    def observe(self, tokens: torch.Tensor, step: Step, observer: Callable[[Observation], None]) -> None:
        """Run the layers without gradients and call ``observer`` with what each that selects computed.

        For statistics and for capturing an indexer's inputs. What is observed is of the sparse stage; hold on
        to as little of it as needed. Every rank of a context-parallel group must call it.
        """
        step = replace(step, observer=observer, stage="sparse")
        self._check(tokens, None, step)
        x, selection = self._embed(tokens), None
        for block in self.layers():
            x, _, selection = block(x, step, None if block.attention.selects else selection)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.embedding).to(self.config.layer.dtype)

    def _language_loss(self, x: torch.Tensor, targets: torch.Tensor, num_positions: int) -> torch.Tensor:
        """Sum of the cross entropies divided by ``num_positions``; logits of a block of rows at a time."""
        total = torch.zeros((), device=x.device)
        blocks = zip(x.split(self.config.head_rows), targets.split(self.config.head_rows), strict=True)
        for block in blocks:
            total = total + checkpoint(
                self._cross_entropy, *block, use_reentrant=False, preserve_rng_state=False
            )
        return total / num_positions

    def _cross_entropy(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    def _check(self, tokens: torch.Tensor, targets: torch.Tensor | None, step: Step) -> None:
        for name, value in (("tokens", tokens), ("targets", targets)):
            if value is None:
                continue
            if not isinstance(value, torch.Tensor) or value.dtype != torch.int64:
                found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
                raise TypeError(f"{name}: {found}; allowed: int64 tensors")
            if value.shape != (step.rows.num_rows,):
                raise ValueError(f"{name}: shape {list(value.shape)}; allowed: [{step.rows.num_rows}]")


def next_tokens(tokens: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Targets of a whole sequence: each position's next token; -100 at the end, and of each document.

    Take them before the sequence is split: ``rows.of_sequence(next_tokens(tokens))``.
    """
    targets = tokens.roll(-1)
    targets[-1] = IGNORED
    if cu_seqlens is not None:
        last = cu_seqlens[1:].long() - 1
        targets[last.clamp(min=0)] = IGNORED
    return targets

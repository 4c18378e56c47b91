"""The warm-up stage: dense attention, and the indexer's loss over all visible keys, in tiles.

The main attention is a constant teacher here. Its distribution over the keys j that row t sees, summed over
heads and made to sum to 1, is the target; the softmax of the indexer's scores is the prediction:

    p[t, j] = sum_h exp(a[t, h, j] - A[t, h]) / M[t]       a: logits, A: their log-sum-exp with the sink
    loss    = sum_t sum_j p[t, j] (log p[t, j] - s[t, j] / temperature + L[t])

with L[t] the log-sum-exp of s[t] / temperature, and M[t] what the sinks leave to the keys (the number of
heads, without sinks). A first pass over the keys finds the output, A and M, a second one L, and a third makes
the logits again and adds up the loss and its gradients in q, k and w. So the largest thing that ever exists
is one tile, rows x heads x keys logits, never S x S anything. The gradients of a sum need not wait for the
backward pass: they are kept, [T, H, Di] + [S, Di] + [T, H], and scaled there.

Shape letters: T rows, S keys, Hq query heads, D their key size, Dv value size, H indexer heads, Di their
size, R rows and N keys of a tile.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .indexer import Projections
from .rows import Rows

NEVER = float("-inf")

# Rows of a tile at most: enough to fill a GPU, few enough that a causal block wastes little.
MOST_ROWS = 512


class Dense(NamedTuple):
    """out [T, Hq, Dv] without a gradient; loss, the sum over rows, float32 scalar."""

    out: torch.Tensor
    loss: torch.Tensor


@dataclass(frozen=True)
class Dimensions:
    """Everything but tensors."""

    rows: Rows
    scale: float
    value_dim: int
    coefficient: float
    temperature: float
    tile_bytes: int


def dense_warmup(
    q: torch.Tensor,
    latent: torch.Tensor,
    index: Projections | None,
    rows: Rows,
    *,
    scale: float,
    value_dim: int,
    sink: torch.Tensor | None = None,
    coefficient: float = 1.0,
    temperature: float = 1.0,
    tile_bytes: int = 256 * 2**20,
) -> Dense:
    """Dense latent attention of q [T, Hq, D] over latent [S, D], and coefficient * the indexer's loss.

    The loss is differentiable in ``index`` (q [T, H, Di], k [S, Di], w [T, H], not quantised) and in nothing
    else; it is zero without one. A row that sees no key gives zeros and no loss. Products take the tensors'
    dtype and add in float32; the rest is float32.
    """
    sizes = Dimensions(rows, scale, value_dim, coefficient, temperature, tile_bytes)
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _DenseWarmup.apply
    given = (None, None, None) if index is None else index
    ground = None if sink is None else sink.detach()
    return Dense(*apply(*given, q.detach(), latent.detach(), ground, sizes))


class _DenseWarmup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        index_q: torch.Tensor | None,
        index_k: torch.Tensor | None,
        index_w: torch.Tensor | None,
        q: torch.Tensor,
        latent: torch.Tensor,
        sink: torch.Tensor | None,
        sizes: Dimensions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)  # or the output, which takes none, would get one of zeros
        if index_q is None or index_k is None or index_w is None:
            teacher = _Teacher(q, latent, sink, sizes)
            for block, tiles in teacher.blocks():
                teacher.attend(block, tiles)
            loss = torch.zeros((), device=q.device)
            ctx.mark_non_differentiable(teacher.out, loss)
            return teacher.out, loss
        student = _Student(q, latent, sink, sizes, Projections(index_q, index_k, index_w))
        for block, tiles in student.blocks():
            student.learn(block, tiles, *student.attend(block, tiles))
        ctx.save_for_backward(student.dq.to(index_q.dtype), student.dk.to(index_k.dtype), student.dw)
        ctx.mark_non_differentiable(student.out)
        return student.out, student.loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad = gradients[1]
        if grad is None:
            return (None,) * 7
        dq, dk, dw = ctx.saved_tensors
        return (*((each * grad).to(each.dtype) for each in (dq, dk, dw)), None, None, None, None)


class _Teacher:
    """Dense attention, a block of rows after the other, a tile of keys after the other."""

    def __init__(
        self, q: torch.Tensor, latent: torch.Tensor, sink: torch.Tensor | None, sizes: Dimensions
    ) -> None:
        self.q, self.latent, self.sink, self.sizes = q, latent, sink, sizes
        self.start, self.end = sizes.rows.windows
        self.widest = q.shape[1]  # heads of the widest products of a tile
        self.out = q.new_zeros((*q.shape[:2], sizes.value_dim))

    def blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Blocks of rows, each with the tiles of keys that some of its rows see."""
        elements = max(1, self.sizes.tile_bytes // (4 * self.widest))
        R = min(MOST_ROWS, max(1, math.isqrt(elements)))
        N = max(1, elements // R)
        for block, keys in self.sizes.rows.blocks(R):
            yield block, [slice(low, min(low + N, keys)) for low in range(0, keys, N)]

    def attend(self, block: slice, tiles: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the block's output; gives A [R, Hq] (anything where a row sees no key) and M [R]."""
        R, Hq, _ = self.q[block].shape
        device = self.q.device
        top = torch.full((R, Hq), NEVER, device=device)
        total = torch.zeros((R, Hq), device=device)
        out = torch.zeros((R, Hq, self.sizes.value_dim), device=device)
        for tile in tiles:
            logits = self.logits(block, tile, self.seen(block, tile))
            higher = torch.maximum(top, logits.amax(dim=2))
            ground = _finite(higher)
            shrink = (top - ground).exp()
            weight = logits.sub_(ground[..., None]).exp_()
            total = total * shrink + weight.sum(dim=2)
            values = self.latent[tile, : self.sizes.value_dim]
            out = out * shrink[..., None] + _mm(weight.to(self.q.dtype).flatten(0, 1), values).view_as(out)
            top = higher
        ground = _finite(top)
        whole = total if self.sink is None else total + (self.sink - ground).exp()
        whole = whole.masked_fill(whole == 0, 1)
        self.out[block] = (out / whole[..., None]).to(self.out.dtype)
        return ground + whole.log(), (total / whole).sum(dim=1)

    def seen(self, block: slice, tile: slice) -> torch.Tensor:
        """Which keys of the tile each row sees, bool [R, N]."""
        key = torch.arange(tile.start, tile.stop, dtype=torch.int32, device=self.q.device)
        return (key >= self.start[block, None]) & (key < self.end[block, None])

    def logits(self, block: slice, tile: slice, seen: torch.Tensor) -> torch.Tensor:
        """a [R, Hq, N], -inf where not seen."""
        q = self.q[block]
        logits = _mm(q.flatten(0, 1), self.latent[tile].T).view(*q.shape[:2], -1).mul_(self.sizes.scale)
        return logits.masked_fill_(~seen[:, None], NEVER)


class _Student(_Teacher):
    """The indexer that learns from it."""

    def __init__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        sink: torch.Tensor | None,
        sizes: Dimensions,
        index: Projections,
    ) -> None:
        super().__init__(q, latent, sink, sizes)
        self.index = index
        self.widest = max(self.widest, index.q.shape[1])
        self.loss = torch.zeros((), dtype=torch.float32, device=q.device)
        self.dq = torch.zeros_like(index.q, dtype=torch.float32)
        self.dk = torch.zeros_like(index.k, dtype=torch.float32)
        self.dw = torch.zeros_like(index.w)

    def learn(self, block: slice, tiles: list[slice], log_sum: torch.Tensor, mass: torch.Tensor) -> None:
        """Adds the block's loss and its gradients."""
        index, sizes = self.index, self.sizes
        log_scores = torch.full((log_sum.shape[0],), NEVER, device=self.q.device)
        for tile in tiles:
            scores = (self.products(block, tile)[1] / sizes.temperature).masked_fill_(
                ~self.seen(block, tile), NEVER
            )
            log_scores = torch.logaddexp(log_scores, scores.logsumexp(dim=1))
        log_scores = _finite(log_scores)
        mass = mass.masked_fill(mass == 0, 1)[:, None]
        for tile in tiles:
            seen = self.seen(block, tile)
            target = self.logits(block, tile, seen).sub_(log_sum[..., None]).exp_().sum(dim=1) / mass
            products, scores = self.products(block, tile)
            log_p = scores / sizes.temperature - log_scores[:, None]
            ratio = target.clamp(min=torch.finfo(torch.float32).tiny).log() - log_p
            self.loss += sizes.coefficient * (target * ratio).masked_fill_(~seen, 0).sum()
            grad = (log_p.exp() - target).masked_fill_(~seen, 0).mul_(sizes.coefficient / sizes.temperature)
            self.dw[block] += torch.bmm(products, grad[..., None])[..., 0]
            dproducts = ((products > 0) * index.w[block][..., None] * grad[:, None]).to(index.q.dtype)
            flat = dproducts.flatten(0, 1)
            self.dq[block] += _mm(flat, index.k[tile]).view_as(self.dq[block])
            self.dk[tile] += _mm(flat.T, index.q[block].flatten(0, 1))

    def products(self, block: slice, tile: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """relu(q . k) [R, H, N] and the scores [R, N]."""
        q = self.index.q[block]
        products = _mm(q.flatten(0, 1), self.index.k[tile].T).relu_().view(*q.shape[:2], -1)
        return products, torch.bmm(self.index.w[block][:, None], products)[:, 0]


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, float32."""
    if a.dtype == torch.float32:
        return a @ b
    if a.device.type == "cpu":
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x == NEVER, 0)

"""Context parallelism: every rank holds some rows of a sequence, and all its keys.

Index keys and latents are all-gathered into the order of the whole sequence, so that a row selects what it
would select on one rank, bit for bit; no selection crosses ranks. Their gradients, which every rank has a
part of, are summed in float32 and scattered back. Parameters are replicated; ``sum_gradients`` adds theirs.

Every rank runs the same collectives in the same order: forward, recomputation and backward of each layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, get_args

import torch
from torch import distributed

from .rows import Rows, Split
from .timer import PartTimer, part

BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share each sequence, and how; make it with :meth:`over`."""

    group: distributed.ProcessGroup
    split: Split
    size: int
    rank: int

    @classmethod
    def over(cls, group: distributed.ProcessGroup | None = None, split: Split = "zigzag") -> Self:
        """All ranks of ``group`` (default: the world).

        RuntimeError if torch.distributed has no process group yet; ValueError for another split, or if this
        process is not in the group.
        """
        if split not in get_args(Split):
            raise ValueError(f"split: {split!r}; allowed: {', '.join(map(repr, get_args(Split)))}")
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group first (torchrun sets what it "
                "needs), or pass context=None for one rank"
            )
        group = distributed.group.WORLD if group is None else group
        assert group is not None
        rank = distributed.get_rank(group)
        if rank < 0:
            raise ValueError(f"group: without this process, rank {distributed.get_rank()}; allowed: with it")
        return cls(group, split, distributed.get_world_size(group), rank)

    def rows(
        self,
        num_positions: int,
        *,
        cu_seqlens: torch.Tensor | None = None,
        ratio: int = 1,
        device: torch.device | str | None = None,
    ) -> Rows:
        """The rows of this rank; see ``Rows.of``, also for what raises."""
        return Rows.of(
            num_positions, cu_seqlens=cu_seqlens, ratio=ratio, num_ranks=self.size, rank=self.rank,
            split=self.split, device=device,
        )  # fmt: skip

    def start_gather(self, local: torch.Tensor) -> "Gathering":
        """Begin to gather ``local`` [n, ...], as many keys as on every other rank."""
        mine = local.detach().contiguous()
        parts = mine.new_empty((self.size * mine.shape[0], *mine.shape[1:]))
        work = _all_gather(parts, mine, group=self.group, async_op=True)
        return Gathering(self, local, parts, work)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of ``values`` over ranks, without a gradient: for losses that are reported."""
        total = values.detach().clone()
        distributed.all_reduce(total, group=self.group)
        return total

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter], timer: PartTimer | None = None) -> None:
        """Replace each gradient by its sum over ranks, in place, in buckets; None is skipped.

        Losses are sums over rows divided by the whole sequence's rows, so the sum is the single-rank
        gradient.
        """
        bucket: list[torch.Tensor] = []
        size = 0
        with part(timer, "communication", "backward"):
            for parameter in parameters:
                if parameter.grad is None:
                    continue
                if bucket and (
                    size + parameter.grad.nbytes > BUCKET_BYTES or bucket[0].dtype != parameter.grad.dtype
                ):
                    self._reduce(bucket)
                    bucket, size = [], 0
                bucket.append(parameter.grad)
                size += parameter.grad.nbytes
            if bucket:
                self._reduce(bucket)

    def _reduce(self, gradients: list[torch.Tensor]) -> None:
        flat = torch.cat([each.reshape(-1) for each in gradients])
        distributed.all_reduce(flat, group=self.group)
        for each, total in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            each.copy_(total.view_as(each))

    def to_sequence_order(self, parts: torch.Tensor) -> torch.Tensor:
        """Keys of rank 0, of rank 1, ... put in the order of the sequence; [S, ...]."""
        if self.split == "contiguous":
            return parts
        halves = parts.view(self.size, 2, -1, *parts.shape[1:])
        return torch.cat([halves[:, 0], halves[:, 1].flip(0)]).flatten(0, 1)

    def to_rank_order(self, keys: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`to_sequence_order`."""
        if self.split == "contiguous":
            return keys
        shares = keys.view(2 * self.size, -1, *keys.shape[1:])
        low, high = shares[: self.size], shares[self.size :].flip(0)
        return torch.stack([low, high], dim=1).flatten(0, 2)

    def reduce_scatter(self, gradient: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of ``gradient`` [S, ...], of which this rank's keys; float32 inside."""
        parts = self.to_rank_order(gradient.float()).contiguous()
        mine = parts.new_empty((parts.shape[0] // self.size, *parts.shape[1:]))
        _reduce_scatter(mine, parts, group=self.group)
        return mine.to(gradient.dtype)


@dataclass
class Gathering:
    """A gather under way."""

    context: ContextParallel
    local: torch.Tensor
    parts: torch.Tensor
    work: Any

    def wait(self, timer: PartTimer | None = None) -> torch.Tensor:
        """Keys of the whole sequence, in its order; the gradient is reduced over ranks and scattered."""
        with part(timer, "communication"):
            self.work.wait()
        gathered: torch.Tensor = _Gathered.apply(self.local, self.context, self.parts, timer)
        return gathered


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, context: ContextParallel, parts: torch.Tensor, timer: PartTimer | None
    ) -> torch.Tensor:
        ctx.context, ctx.timer = context, timer
        return context.to_sequence_order(parts).view_as(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        with part(ctx.timer, "communication", "backward"):
            return ctx.context.reduce_scatter(gradients[0]), None, None, None


# The names before and since torch 2.13.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor

"""What the attention kernels share: sizes of a call, loads of tiles, products, and softmax's denominator.

A key is kept in two tiles, the value (its first Dv elements, padded to a power of two) and the rest: 512 + 64
in GLM-5.1. The value tile serves both products, so that a key is gathered once.

Logits are in base 2: exp2 is one instruction.

Interpreter branches: operands are upcast to float32 right after the load and never narrowed, because Triton's
interpreter is wrong for bfloat16; products are ``hytopk.score.dot``'s.

Shape letters: T queries, S keys, K places of a row, Hq query heads, D key size, Dv value size; N keys of one
step.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..hytopk.plan import ceil_div, next_power_of_2
from ..hytopk.score import INTERPRET, dot, operand

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Narrowest side of a tile that tensor cores take.
LEAST_SIDE = 16

# Indices that one step looks at to find a row's end.
SEARCH = 1024


@dataclass(frozen=True, slots=True)
class Call:
    """One call's tensors and what the kernels are specialised on."""

    q: torch.Tensor
    latent: torch.Tensor
    indices: torch.Tensor
    sink: torch.Tensor | None
    scale: float
    value_dim: int

    @property
    def empty(self) -> bool:
        """Whether no row can have a key."""
        return 0 in (self.q.shape[0], self.latent.shape[0], self.indices.shape[1])

    def programs(self, heads: int) -> int:
        """Programs that share a row, ``heads`` heads each."""
        return ceil_div(self.q.shape[1], heads)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """q, latent, indices, sink (or a stand-in that is not read)."""
        return self.q, self.latent, self.indices, self.q if self.sink is None else self.sink

    def numbers(self) -> tuple[Any, ...]:
        """K, S, scale, and the strides of q and latent."""
        K, S = self.indices.shape[1], self.latent.shape[0]
        return K, S, self.scale, self.q.stride(0), self.q.stride(1), self.latent.stride(0)

    def constants(self) -> dict[str, Any]:
        Dv = self.value_dim
        rest = self.q.shape[2] - Dv
        return {
            "HAS_SINK": self.sink is not None,
            "HQ": self.q.shape[1],
            "VALUE": Dv,
            "REST": rest,
            "V_PAD": max(2 * LEAST_SIDE, next_power_of_2(Dv)),
            "R_PAD": max(LEAST_SIDE, next_power_of_2(max(rest, 1))),
            "SEARCH": SEARCH,
        }

    def stored(self) -> torch.dtype:
        """The dtype results are stored in: q's, but float32 under the interpreter, which truncates."""
        return torch.float32 if INTERPRET else self.q.dtype


@triton.jit
def add_dot(acc, a, b):
    """acc + a [M, D] times b [D, N], float32."""
    if INTERPRET:
        return acc + dot(a, b)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def narrowed(x, pointer):
    """float32 ``x`` as an operand beside the tensor behind ``pointer``."""
    if INTERPRET:
        return x
    else:
        return x.to(pointer.dtype.element_ty)


@triton.jit
def load_tile(ptr, rows, stride, live, FIRST: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Elements FIRST .. FIRST + WIDTH - 1 of ``rows`` [N] (int64) as [N, PAD]; zero beyond, and where not
    live."""
    o = tl.arange(0, PAD)
    pointers = ptr + rows[:, None] * stride + FIRST + o[None, :]
    if PAD == WIDTH:
        mask = live[:, None]
    else:
        mask = live[:, None] & (o < WIDTH)[None, :]
    return operand(tl.load(pointers, mask=mask, other=0.0))


@triton.jit
def load_index(p_index, place, K):
    """A row's indices at ``place`` [N], -1 past its end."""
    return tl.load(p_index + place, mask=place < K, other=-1)


@triton.jit
def keys_of(index, S):
    """(keys int64, used) of indices [N]: unused places yield key 0."""
    used = (index >= 0) & (index < S)
    return tl.where(used, index, 0).to(tl.int64), used


@triton.jit
def load_places(p_index, place, K, S):
    """(keys int64, used, beyond) of ``place`` [N] of a row: unused places yield key 0, ``beyond`` are no
    keys."""
    index = load_index(p_index, place, K)
    keys, used = keys_of(index, S)
    return keys, used, index >= S


@triton.jit
def row_end(p_index, K, SEARCH: tl.constexpr):
    """One past the last place of a row that is not negative: a short row costs what it holds."""
    o = tl.arange(0, SEARCH)
    end = tl.zeros((SEARCH,), tl.int32)
    for i in tl.range(0, K, SEARCH, num_stages=1):
        index = tl.load(p_index + i + o, mask=i + o < K, other=-1)
        end = tl.maximum(end, tl.where(index >= 0, i + o + 1, 0))
    return tl.max(end, axis=0)


@triton.jit
def log2_total(lse_ptr, sink_ptr, at, heads, live, HAS_SINK: tl.constexpr):
    """log2 of softmax's denominator, for the log-sum-exp at ``at`` of ``heads``; 0 for a row without keys."""
    total = tl.load(lse_ptr + at, mask=live, other=0.0) * LOG2_E
    if HAS_SINK:
        sink = tl.load(sink_ptr + heads, mask=live, other=0.0) * LOG2_E
        top = tl.maximum(total, sink)
        both = top + tl.log2(tl.exp2(total - top) + tl.exp2(sink - top))
        total = tl.where(total == float("-inf"), sink, both)
    return tl.where(total == float("-inf"), 0.0, total)

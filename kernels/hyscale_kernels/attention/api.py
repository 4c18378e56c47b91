"""Sparse latent attention over selected keys: the contract.

README.md beside this file says how the gradient of the keys is added up, what that costs, and what the
kernels should reach.

Shape letters: T queries, S keys, K places of a row, Hq query heads, D key size, Dv value size.
"""

import warnings
from typing import Any, Literal, NamedTuple

import torch

from ..hytopk.api import NAMESPACE
from .backward import empty_gradients, launch_backward
from .forward import launch_forward
from .inputs import (
    MAX_VALUE,
    check_attention,
    check_device,
    check_indices,
    check_plan,
    check_shape,
    check_value_dim,
)
from .mass import launch_mass
from .plan import ROWS, AttentionPlan, chunk_rows
from .tiles import Call

KeyGradient = Literal["auto", "atomic", "fixed_point"]
Optional = torch.Tensor | None


class SparseAttention(NamedTuple):
    """out [T, Hq, Dv] in q's dtype; log_sum_exp float32 [T, Hq], the sink left out, -inf where no key is."""

    out: torch.Tensor
    log_sum_exp: torch.Tensor


def sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    value_dim: int = 512,
    sink: Optional = None,
    dkv: KeyGradient = "auto",
    plan: AttentionPlan | None = None,
) -> SparseAttention:
    """Attention of q over the selected latent keys, differentiable in q, latent and sink.

        a[t, h, j] = scale * q[t, h] . latent[j]
        p = softmax of a over the row's selected keys; with a sink, exp(sink[h]) joins the denominator
        out[t, h] = sum_j p[t, h, j] latent[j, :value_dim]

    A row that selected nothing gives zeros, a log-sum-exp of -inf, and zero gradients.

    Args:
        q: [T, Hq, D], bfloat16 or float16 (float32 under Triton's interpreter), last axis contiguous;
            1 <= Hq <= 128. Programs take 64 heads: fewer cost as much as 64.
        latent: [S, D], as q. GLM-5.1 and DeepSeek-V3.2 have D = 576 = 512 + 64 rotary elements.
        indices: int32 [T, K], contiguous, any K, in any order; negative places are unused. A key named twice
            counts twice. An index beyond the keys is an error on the CPU; on a GPU its row becomes NaN.
        scale: factor of the products, usually (key size before absorption) ** -0.5.
        value_dim: how many leading elements of a key are its value; at most 512, and D - value_dim <= 64.
        sink: float32 [Hq], or None.
        dkv: how the gradient of the latent keys is added up. "atomic": float32, in any order. "fixed_point":
            in an order that does not matter, the same bits on every run; slower, error bound in README.md.
            "auto": fixed_point under ``torch.use_deterministic_algorithms``, else atomic.
        plan: sizes of tiles. Default: AttentionPlan.default.

    Probabilities and their gradients are rounded to q's dtype before they are multiplied; sums are float32.
    A row's out, log_sum_exp and gradient of q depend on that row's inputs alone, bit for bit on every run.
    No gradient flows through log_sum_exp. The workspace of the backward pass is ``backward_workspace_bytes``.

    Raises TypeError or ValueError for arguments outside the contract, RuntimeError for "atomic" under
    ``torch.use_deterministic_algorithms`` (a warning where only warnings are asked for).
    """
    check_attention(q, latent, indices, sink, scale)
    check_value_dim(value_dim, q.shape[2])
    fixed = _fixed_point(dkv)
    sizes = check_plan(plan, q.shape[1], q.device).as_ints()
    return SparseAttention(*_sparse_mla(q, latent, indices, sink, float(scale), value_dim, fixed, sizes))


@torch.no_grad()
def attention_mass(
    q: torch.Tensor,
    latent: torch.Tensor,
    indices: torch.Tensor,
    log_sum_exp: torch.Tensor,
    *,
    scale: float,
    sink: Optional = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attention probabilities at the selected places, summed over heads: float32 [T, K], 0 where unused.

    What the indexer's loss is trained on, once each row is divided by its sum (``indexer_loss`` takes the
    quotient as ``target``). ``log_sum_exp`` is the one that ``sparse_mla`` returned for the same arguments;
    give the same ``sink``. No gradient flows: the result is a constant. Repeatable bit for bit.

    Raises TypeError or ValueError for arguments outside the contract, which is that of ``sparse_mla``.
    """
    check_attention(q, latent, indices, sink, scale)
    shape = (q.shape[0], q.shape[1])
    check_device({"log_sum_exp": check_shape("log_sum_exp", log_sum_exp, shape, torch.float32)}, q.device)
    sizes = check_plan(plan, q.shape[1], q.device).as_ints()
    result: torch.Tensor = _attention_mass(q, latent, indices, log_sum_exp, sink, float(scale), sizes)
    return result


def backward_workspace_bytes(T: int, S: int, Hq: int, D: int, top_k: int, *, fixed_point: bool) -> int:
    """Peak bytes that a backward pass allocates beside its results, for 16-bit q and a contiguous gradient.

    The gradient of the keys in 32 bits; probabilities and logit gradients of a chunk of rows, 256 MiB at most
    (or one row's); three numbers a row and head. Fixed point adds two numbers a row and head, 8 bytes a key,
    and a float32 gradient of the keys if there is more than one pass of 8192 rows.
    """
    weights = 4 * top_k * Hq * chunk_rows(min(T, ROWS), Hq, top_k, 2)
    if not fixed_point:
        return weights + 12 * T * Hq + 4 * S * D
    passes = 4 * S * D if T > ROWS else 0
    return weights + 20 * T * Hq + 4 * S * (D + D % 2) + 8 * S + passes


@torch.library.custom_op(f"{NAMESPACE}::sparse_mla", mutates_args=())
def _sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    indices: torch.Tensor,
    sink: Optional,
    scale: float,
    value_dim: int,
    fixed: bool,
    plan: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    check_indices(indices, latent.shape[0])
    with torch.cuda.device_of(q):
        call = Call(q, latent, indices, sink, scale, value_dim)
        return launch_forward(call, AttentionPlan.from_ints(plan))


@_sparse_mla.register_fake
def _(
    q: torch.Tensor,
    latent: torch.Tensor,
    indices: torch.Tensor,
    sink: Optional,
    scale: float,
    value_dim: int,
    fixed: bool,
    plan: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    T, Hq, _ = q.shape
    return q.new_empty((T, Hq, value_dim)), q.new_empty((T, Hq), dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::sparse_mla_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    indices: torch.Tensor,
    sink: Optional,
    out: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scale: float,
    value_dim: int,
    want_dq: bool,
    want_dkv: bool,
    fixed: bool,
    plan: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.cuda.device_of(q):
        call = Call(q, latent, indices, sink, scale, value_dim)
        sizes = AttentionPlan.from_ints(plan)
        return launch_backward(call, grad.contiguous(), out, log_sum_exp, want_dq, want_dkv, fixed, sizes)


@_backward.register_fake
def _(
    grad: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    indices: torch.Tensor,
    sink: Optional,
    out: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scale: float,
    value_dim: int,
    want_dq: bool,
    want_dkv: bool,
    fixed: bool,
    plan: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return empty_gradients(q, latent, sink, want_dq, want_dkv, q.dtype)


@torch.library.custom_op(f"{NAMESPACE}::attention_mass", mutates_args=())
def _attention_mass(
    q: torch.Tensor,
    latent: torch.Tensor,
    indices: torch.Tensor,
    log_sum_exp: torch.Tensor,
    sink: Optional,
    scale: float,
    plan: list[int],
) -> torch.Tensor:
    check_indices(indices, latent.shape[0])
    with torch.cuda.device_of(q):
        # Without a value of its own, the key splits where tiles fit best.
        call = Call(q, latent, indices, sink, scale, min(q.shape[2], MAX_VALUE))
        return launch_mass(call, log_sum_exp, AttentionPlan.from_ints(plan))


@_attention_mass.register_fake
def _(
    q: torch.Tensor,
    latent: torch.Tensor,
    indices: torch.Tensor,
    log_sum_exp: torch.Tensor,
    sink: Optional,
    scale: float,
    plan: list[int],
) -> torch.Tensor:
    return q.new_empty(indices.shape, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, latent, indices, sink, scale, value_dim, fixed, plan = inputs
    out, log_sum_exp = output
    ctx.save_for_backward(q, latent, indices, sink, out, log_sum_exp)
    ctx.mark_non_differentiable(log_sum_exp)
    ctx.scale, ctx.value_dim, ctx.fixed, ctx.plan = scale, value_dim, fixed, plan


def _sparse_mla_backward(
    ctx: Any, grad: torch.Tensor, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    q, latent, indices, sink, out, log_sum_exp = ctx.saved_tensors
    need = ctx.needs_input_grad
    dq, dlatent, dsink = _backward(
        grad, q, latent, indices, sink, out, log_sum_exp, ctx.scale, ctx.value_dim,
        need[0], need[1], ctx.fixed, ctx.plan,
    )  # fmt: skip
    return (
        dq if need[0] else None, dlatent if need[1] else None, None, dsink if need[3] else None,
        None, None, None, None,
    )  # fmt: skip


_sparse_mla.register_autograd(_sparse_mla_backward, setup_context=_setup)


def _fixed_point(dkv: KeyGradient) -> bool:
    if dkv not in ("auto", "atomic", "fixed_point"):
        raise ValueError(f"dkv is {dkv!r}; allowed: 'auto', 'atomic', 'fixed_point'")
    deterministic = torch.are_deterministic_algorithms_enabled()
    if dkv == "atomic" and deterministic:
        message = (
            "dkv is 'atomic', whose additions come in any order, but deterministic algorithms are asked for; "
            "allowed then: 'auto', 'fixed_point'"
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=3)
    return dkv == "fixed_point" or (dkv == "auto" and deterministic)

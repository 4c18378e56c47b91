"""Training the indexer on the selected keys: their scores with gradients, and the loss that trains it.

The contracts are in the docstrings of ``selected_scores`` and ``indexer_loss``; README.md beside this file
says how dk is added up, what that costs, and how exact it is.

Shape letters: T queries, S keys, H heads, D head size, K places of a row.
"""

import math
import warnings
from typing import Any, Literal

import torch

from ..hytopk.api import NAMESPACE, check_inputs
from ..hytopk.plan import ceil_div, next_power_of_2
from ..hytopk.problem import Problem
from ..hytopk.score import INTERPRET
from .loss import launch_loss
from .plan import ROWS, IndexerPlan
from .rows import launch_rows
from .scatter import launch_grid, launch_scatter, launch_settle
from .selected import launch_selected

KeyGradient = Literal["auto", "atomic", "fixed_point"]
Optional = torch.Tensor | None


def selected_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    indices: torch.Tensor,
    *,
    k_scale: Optional = None,
    q_source: Optional = None,
    k_source: Optional = None,
    q_scale: Optional = None,
    dk: KeyGradient = "auto",
    plan: IndexerPlan | None = None,
) -> torch.Tensor:
    """Indexer scores at the selected keys, float32 [T, K], differentiable in q, k and w.

    The scores are HyTopK's, bit for bit: ``hytopk(...).scores`` of the same selection. Unused places are -inf
    and pass no gradient. A place that does not belong in a selection (an index beyond the keys, or not
    ascending) scores NaN; CPU tensors are refused instead.

    Args:
        q, k, w, k_scale: as for ``hytopk``.
        indices: int32 [T, K], contiguous; rows ascend strictly, then hold -1.
        q_source, k_source: for float8 q and k only, the tensors [T, H, D] and [S, D] that were quantised.
            They receive the gradients of the *dequantised* values q * q_scale and k * k_scale: rounding
            counts as the identity, scales as constants. float8 tensors themselves take no gradient.
        q_scale: float32 [T, H], the scale that was folded into w; needed with q_source.
        dk: how the gradients of k are added up. "atomic": float32, in any order. "fixed_point": in an order
            that does not matter, the same bits on every run; slower, error bound in README.md. "auto":
            fixed_point under ``torch.use_deterministic_algorithms``, else atomic.
        plan: sizes of tiles. Default: IndexerPlan.default.

    relu has the gradient 0 at 0. Gradients come in the dtype of the tensor they belong to, from float32 sums;
    those of q and w do not depend on anything but their row. The workspace of the backward pass is
    ``backward_workspace_bytes``.

    Raises TypeError or ValueError for arguments outside the contract, RuntimeError for "atomic" under
    ``torch.use_deterministic_algorithms`` (a warning where only warnings are asked for).
    """
    _check(q, k, w, k_scale, indices)
    _check_sources(q, k, q_source, k_source, q_scale)
    fixed = _fixed_point(dk)
    sizes = _check_plan(k, plan)
    result: torch.Tensor = _selected_scores(
        q, k, w, indices, k_scale, q_source, k_source, q_scale, fixed, sizes
    )
    return result


def indexer_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    indices: torch.Tensor,
    target: torch.Tensor,
    *,
    coefficient: float = 1.0,
    temperature: float = 1.0,
    k_scale: Optional = None,
    q_source: Optional = None,
    k_source: Optional = None,
    q_scale: Optional = None,
    dk: KeyGradient = "auto",
    plan: IndexerPlan | None = None,
) -> torch.Tensor:
    """coefficient * KL(target || softmax(scores / temperature)) of each row's selected keys, float32 [T].

    ``target`` [T, K] float32, >= 0, is the main attention's distribution over the selected keys (summed over
    heads, each row summing to 1); it is a constant and takes no gradient. What it holds at unused places is
    ignored. A row with no key, or without a target, gives 0. Sum the rows for the loss of a sequence.

    One pass over the selected keys computes scores, loss and the gradient in the scores, which is kept for
    the backward pass [T, K]. The other arguments and errors are those of ``selected_scores``.
    """
    _check(q, k, w, k_scale, indices)
    _check_sources(q, k, q_source, k_source, q_scale)
    _check_like("target", target, indices, torch.float32)
    for name, value in (("coefficient", coefficient), ("temperature", temperature)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature is {temperature}; it must be positive and finite")
    if not math.isfinite(coefficient):
        raise ValueError(f"coefficient is {coefficient}; it must be finite")
    fixed = _fixed_point(dk)
    sizes = _check_plan(k, plan)
    loss, _ = _indexer_loss(
        q, k, w, indices, target.detach(), k_scale, q_source, k_source, q_scale,
        float(coefficient), float(temperature), fixed, sizes,
    )  # fmt: skip
    result: torch.Tensor = loss
    return result


def backward_workspace_bytes(
    T: int, S: int, H: int, D: int, top_k: int, *, fixed_point: bool, device: str = "cuda"
) -> int:
    """Most bytes that a backward pass allocates beside its results, for any dtype.

    For one pass of at most 8192 rows: the signs of T K H products, the spans of the rows, q in 16 bits (fp8
    only), and dk in 32 bits; fixed point adds 8 bytes a key, and float32 dk if there is more than one pass.
    """
    rows = min(T, ROWS)
    plan = IndexerPlan.default(S, H, D, device)
    signs = 4 * rows * top_k * max(1, max(16, next_power_of_2(H)) // 32)
    spans = 4 * rows * (plan.chunks(S) + 1)
    queries = 2 * rows * H * D
    keys = 4 * S * D + ((8 * S + (4 * S * D if T > ROWS else 0)) if fixed_point else 0)
    return signs + spans + queries + keys


@torch.library.custom_op(f"{NAMESPACE}::selected_scores", mutates_args=())
def _selected_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    indices: torch.Tensor,
    k_scale: Optional,
    q_source: Optional,
    k_source: Optional,
    q_scale: Optional,
    fixed: bool,
    plan: list[int],
) -> torch.Tensor:
    check_selection(indices, k.shape[0])
    with torch.cuda.device_of(q):
        return launch_selected(_problem(q, k, w, k_scale), indices, _sizes(plan, q, k))


@_selected_scores.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    indices: torch.Tensor,
    k_scale: Optional,
    q_source: Optional,
    k_source: Optional,
    q_scale: Optional,
    fixed: bool,
    plan: list[int],
) -> torch.Tensor:
    return indices.new_empty(indices.shape, dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::indexer_loss", mutates_args=())
def _indexer_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    indices: torch.Tensor,
    target: torch.Tensor,
    k_scale: Optional,
    q_source: Optional,
    k_source: Optional,
    q_scale: Optional,
    coefficient: float,
    temperature: float,
    fixed: bool,
    plan: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    check_selection(indices, k.shape[0])
    with torch.cuda.device_of(q):
        problem = _problem(q, k, w, k_scale)
        sizes = _sizes(plan, q, k)
        return launch_loss(problem, indices, target, coefficient, temperature, sizes)


@_indexer_loss.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    indices: torch.Tensor,
    target: torch.Tensor,
    k_scale: Optional,
    q_source: Optional,
    k_source: Optional,
    q_scale: Optional,
    coefficient: float,
    temperature: float,
    fixed: bool,
    plan: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    grad = indices.new_empty(indices.shape, dtype=torch.float32)
    return grad.new_empty(indices.shape[:1]), grad


@torch.library.custom_op(f"{NAMESPACE}::selected_scores_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    indices: torch.Tensor,
    k_scale: Optional,
    want_dk: bool,
    fixed: bool,
    plan: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = _sizes(plan, q, k)
    T, S, K = q.shape[0], k.shape[0], indices.shape[1]
    problem = _problem(q, k, w, k_scale)
    if T == 0 or S == 0 or K == 0:
        dq, dk, dw = _gradients(q, k, w, want_dk)
        return dq.zero_(), dk.zero_(), dw.zero_()
    # dk of one fixed-point pass is written as it is returned; everything else is added up in float32.
    summed = torch.float32 if not fixed or T > ROWS else None
    dq, dk, dw = _gradients(q, k, w, want_dk, summed)
    if want_dk and not fixed:
        dk.zero_()
    grad = grad.contiguous()
    with torch.cuda.device_of(q):
        for row0 in range(0, T, ROWS):
            rows = min(ROWS, T - row0)
            added = launch_rows(problem, indices, grad, dq, dw, row0, rows, want_dk, fixed, sizes)
            if want_dk and not fixed:
                launch_scatter(problem, indices, grad, added.signs, None, dk, row0, sizes)
            elif want_dk:
                grid = launch_grid(added)
                steps = torch.zeros_like(dk, dtype=torch.int32)
                launch_scatter(problem, indices, grad, added.signs, grid, steps, row0, sizes)
                launch_settle(steps, grid, dk, add=row0 > 0)
    return dq, dk.to(dq.dtype), dw


@_backward.register_fake
def _(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    indices: torch.Tensor,
    k_scale: Optional,
    want_dk: bool,
    fixed: bool,
    plan: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _gradients(q, k, w, want_dk)


def _gradients(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, want_dk: bool, dk_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unwritten dq, dk and dw. dq, and dk if ``dk_dtype`` does not say otherwise, are float32 for float8, and
    under the interpreter, which truncates."""
    dtype = torch.float32 if INTERPRET or q.dtype == torch.float8_e4m3fn else q.dtype
    dq = q.new_empty(q.shape, dtype=dtype)
    dk = k.new_empty(k.shape if want_dk else (0, k.shape[1]), dtype=dk_dtype or dtype)
    return dq, dk, w.new_empty(w.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], extra: torch.Tensor | None) -> None:
    q, k, w, indices, k_scale, q_source, k_source, q_scale, fixed, plan = inputs
    ctx.save_for_backward(q, k, w, indices, k_scale, q_scale, extra)
    ctx.fixed, ctx.plan = fixed, plan
    ctx.sources = [None if each is None else each.dtype for each in (q_source, k_source)]


def _input_gradients(ctx: Any, grad: torch.Tensor, first: int) -> dict[str, torch.Tensor]:
    """Gradients of q, k, w, q_source, k_source that are asked for; sources follow from input ``first``.

    ``grad`` [T, K] is in the scores, or [T] where those of the loss were kept.
    """
    # Once only: under checkpointing, the first look recomputes and the second is refused.
    q, k, w, indices, k_scale, q_scale, kept = ctx.saved_tensors
    if kept is not None:
        grad = kept * grad[:, None]
    need = ctx.needs_input_grad
    want_dk = need[1] or need[first + 1]
    dq, dk, dw = _backward(grad, q, k, w, indices, k_scale, want_dk, ctx.fixed, ctx.plan)
    result = {"w": dw}
    if need[0]:
        result["q"] = dq.to(q.dtype)
    if need[1]:
        result["k"] = dk.to(k.dtype)
    if need[first]:
        result["q_source"] = (dq / q_scale[..., None]).to(ctx.sources[0])
    if need[first + 1]:
        result["k_source"] = (dk / k_scale[:, None]).to(ctx.sources[1])
    return result


def _setup_scores(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _save(ctx, inputs, None)


def _scores_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    found = _input_gradients(ctx, grad, 5)
    return (
        found.get("q"), found.get("k"), found["w"], None, None,
        found.get("q_source"), found.get("k_source"), None, None, None,
    )  # fmt: skip


_selected_scores.register_autograd(_scores_backward, setup_context=_setup_scores)


def _setup_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _save(ctx, (*inputs[:4], *inputs[5:9], *inputs[11:]), output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # or the scores' gradient, which takes none, would get one of zeros


def _loss_backward(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 13
    found = _input_gradients(ctx, grad, 6)
    return (
        found.get("q"), found.get("k"), found["w"], None, None, None,
        found.get("q_source"), found.get("k_source"), None, None, None, None, None,
    )  # fmt: skip


_indexer_loss.register_autograd(_loss_backward, setup_context=_setup_loss)


def _problem(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, k_scale: Optional) -> Problem:
    """The call's tensors; windows play no part once keys are selected."""
    return Problem(q, k, w, k_scale, q.new_empty(0, dtype=torch.int32), q.new_empty(0, dtype=torch.int32))


def check_selection(indices: torch.Tensor, num_keys: int) -> None:
    """Raise ValueError naming the first place of a CPU selection that is not ascending keys, then -1."""
    if indices.device.type != "cpu" or indices.numel() == 0:
        return
    left = torch.nn.functional.pad(indices[:, :-1], (1, 0), value=-1)
    first = torch.arange(indices.shape[1]) == 0
    sound = (indices >= 0) & (indices < num_keys) & (indices > left) & (first | (left >= 0))
    bad = (~(sound | (indices == -1))).nonzero()
    if bad.numel():
        row, place = (int(each) for each in bad[0])
        raise ValueError(
            f"indices[{row}, {place}] is {int(indices[row, place])}; a row holds keys below {num_keys}, "
            "strictly ascending, then -1"
        )


def _check(q: Any, k: Any, w: Any, k_scale: Any, indices: Any) -> None:
    check_inputs(q, k, w, k_scale)
    if not isinstance(indices, torch.Tensor):
        raise TypeError(f"indices must be a torch.Tensor [T, K], got {type(indices).__name__}")
    if indices.dim() != 2 or indices.shape[0] != q.shape[0]:
        raise ValueError(
            f"indices has shape {list(indices.shape)}; with q {list(q.shape)} it must be [{q.shape[0]}, K]"
        )
    _check_like("indices", indices, indices, torch.int32)
    if indices.device != q.device:
        raise ValueError(f"indices is on {indices.device} and q is on {q.device}; they must be on one device")
    if q.dtype == torch.float8_e4m3fn and (q.requires_grad or k.requires_grad):
        raise TypeError(
            "q or k is float8 and requires grad; float8 takes no gradient: pass what was quantised as "
            "q_source and k_source"
        )


def _check_like(name: str, value: Any, like: torch.Tensor, dtype: torch.dtype) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != dtype:
        raise TypeError(f"{name} is {str(value.dtype).removeprefix('torch.')}; allowed: {dtype}")
    if value.shape != like.shape:
        raise ValueError(f"{name} has shape {list(value.shape)}; it must be {list(like.shape)}")
    if not value.is_contiguous():
        raise ValueError(f"{name} has strides {list(value.stride())}; it must be contiguous")
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device}; it must be on {like.device}")


def _check_sources(q: torch.Tensor, k: torch.Tensor, q_source: Any, k_source: Any, q_scale: Any) -> None:
    given = {
        "q_source": (q_source, q.shape),
        "k_source": (k_source, k.shape),
        "q_scale": (q_scale, q.shape[:2]),
    }
    for name, (value, shape) in given.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(value).__name__}")
        if q.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} is for float8 q and k only; they are {q.dtype}")
        if value.shape != shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; it must be {list(shape)}")
        if value.device != q.device:
            raise ValueError(
                f"{name} is on {value.device} and q is on {q.device}; they must be on one device"
            )
    if q_source is not None and q_scale is None:
        raise ValueError("q_scale is missing; q_source needs the scale of q that was folded into w")
    if q_scale is not None and q_scale.dtype != torch.float32:
        raise TypeError(f"q_scale is {str(q_scale.dtype).removeprefix('torch.')}; allowed: float32")


def _fixed_point(dk: KeyGradient) -> bool:
    if dk not in ("auto", "atomic", "fixed_point"):
        raise ValueError(f"dk is {dk!r}; allowed: 'auto', 'atomic', 'fixed_point'")
    deterministic = torch.are_deterministic_algorithms_enabled()
    if dk == "atomic" and deterministic:
        message = (
            "dk is 'atomic', whose additions come in any order, but deterministic algorithms are asked for; "
            "allowed then: 'auto', 'fixed_point'"
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=3)
    return dk == "fixed_point" or (dk == "auto" and deterministic)


def _check_plan(k: torch.Tensor, plan: IndexerPlan | None) -> list[int]:
    """``plan`` as the operators take it. Without one they plan themselves: their arithmetic is not traced."""
    if plan is None:
        return []
    if not isinstance(plan, IndexerPlan):
        raise TypeError(f"plan must be an IndexerPlan or None, got {type(plan).__name__}")
    if ceil_div(k.shape[0], plan.chunk_keys) > 65535:
        raise ValueError(f"plan.chunk_keys is {plan.chunk_keys}; for {k.shape[0]} keys it must be larger")
    return plan.as_ints()


def _sizes(plan: list[int], q: torch.Tensor, k: torch.Tensor) -> IndexerPlan:
    """The plan that an operator was given, or the default."""
    if plan:
        return IndexerPlan.from_ints(plan)
    return IndexerPlan.default(k.shape[0], q.shape[1], q.shape[2], q.device)

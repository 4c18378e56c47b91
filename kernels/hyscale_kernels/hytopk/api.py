"""HyTopK: the exact top-k keys of each query of a learned sparse attention, without the score table.

The contract is in ``hytopk``'s docstring; README.md beside this file says why it holds.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import triton

from .compact import launch_compact
from .filter import launch_filter
from .hopper import consumers, obstacle
from .plan import MAX_TOP_K, Pass, Plan, ceil_div, passes, workspace_bound
from .plateau import launch_plateau
from .prepare import launch_prepare
from .problem import Problem, Results
from .prune import launch_prune
from .repair import launch_repair
from .rescore import launch_rescore
from .scan import launch_scan
from .score import INTERPRET, launch_dense
from .select import launch_select
from .selection import Selection, Stats, check_scales, check_windows
from .threshold import launch_threshold

# The operator lives under the name of the package that defines it, so that a copy of the package
# (a planted bug, a second version to compare with) registers its own.
NAMESPACE = __name__.partition(".")[0]

LOW_PRECISION = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
MAX_HEADS = 128
MAX_HEAD_SIZE = 256
MAX_KEYS = 2**31 - 1


def hytopk(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    top_k: int,
    *,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    return_scores: bool = False,
    validate: bool = False,
    plan: Plan | None = None,
) -> Selection:
    """The ``top_k`` best keys of every query row, exactly, in ascending order.

    Row t ranks the keys j in [start[t], end[t]) by
    ``s[t, j] = k_scale[j] * sum_h w[t, h] * relu(q[t, h] . k[j])``, computed in float32 by one fixed
    routine (score.py), higher first, then smaller j. -0 equals +0, infinities are ordinary, and NaN is
    never selected and is counted.

    Args:
        q: [T, H, D], bfloat16, float16 or float8_e4m3fn, contiguous last axis; H <= 128, D <= 256.
            float32 under Triton's interpreter only.
        k: [S, D], dtype and device of q, contiguous last axis.
        w: [T, H] float32, contiguous last axis; q's fp8 scale and any constant factor folded in.
        top_k: K, 1 to 8192. More than the window holds is allowed: the row then selects every key.
        start, end: int32 [T], contiguous, the window of each row; empty windows are allowed. Neither
            given: causal, for T == S. One given: the other is 0 or S. A row whose window is not
            0 <= start <= end <= S selects nothing and is flagged in ``stats.invalid``.
        k_scale: float32 [S], contiguous, for float8 keys and only for them. A key whose scale is not
            positive and finite scores NaN.
        return_scores: also return the selected scores.
        validate: wait for the device and raise on an invalid window or scale. CPU tensors always are
            checked.
        plan: sizes of tiles and buffers; they never change the result. Default: a plan for each pass over
            some rows, for as many keys as these can see, with Hopper's scan (hopper.py) where that can run.

    Returns:
        Selection. A row's result depends on that row's inputs alone, bit for bit: not on the run, the
        stream, the grid, the chunking of T or the plan. Workspace beside the outputs is at most
        16 * T * K bytes + 64 MiB, whatever S is.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, rank, shape, stride or device, or
            top_k is out of range; the message names it, what came and what is allowed.
    """
    check_call(q, k, w, start, end, k_scale)
    top_k = check_top_k(top_k)
    if plan is not None:
        _check_plan(plan, top_k, q, k)
    sizes = [] if plan is None else plan.as_ints()  # the operator plans: its arithmetic is not traced
    indices, count, scores, nans, rescored, candidates, invalid = _hytopk(
        q.detach(), k.detach(), w.detach(), top_k, start, end, k_scale, return_scores, sizes
    )
    selection = Selection(
        indices=indices,
        count=count,
        scores=scores if return_scores else None,
        stats=Stats(nan_scores=nans, rescored=rescored, candidates=candidates, invalid=invalid),
        _start=start,
        _end=end,
        _k_scale=k_scale,
        _num_keys=k.shape[0],
    )
    if validate:
        selection.check()
    return selection


def dense_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    *,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """The scores HyTopK ranks, bit for bit, as a table: float32 [T, S], -inf outside the windows.

    For verification and small problems; arguments and errors as ``hytopk``. NaN is kept, -0 is +0.
    """
    check_call(q, k, w, start, end, k_scale)
    T, S, D = q.shape[0], *k.shape
    if plan is None:
        plan = Plan.default(T, S, D, 1, q.dtype, q.device)
    _check_plan(plan, 1, q, k)
    if q.device.type == "cpu":
        check_windows(start, end, k.shape[0])
        check_scales(k_scale)
    with torch.cuda.device_of(q):
        lo, hi = launch_prepare(start, end, S, q.new_empty(T, dtype=torch.int32))
        problem = Problem(q.detach(), k.detach(), w.detach(), k_scale, lo, hi)
        return launch_dense(problem, 0, T, plan)


def workspace_bytes(
    T: int, S: int, H: int, D: int, top_k: int, dtype: torch.dtype, device: str = "cuda"
) -> int:
    """Peak bytes that ``hytopk`` allocates beside its outputs; at most 16 * T * top_k + 64 MiB.

    TypeError or ValueError for sizes or a dtype that ``hytopk`` would refuse.
    """
    check_top_k(top_k)
    for name, size, least, most in (
        ("T", T, 0, None), ("S", S, 0, MAX_KEYS), ("H", H, 1, MAX_HEADS), ("D", D, 1, MAX_HEAD_SIZE)
    ):  # fmt: skip
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} is {size!r}; it must be an int")
        if size < least or (most is not None and size > most):
            raise ValueError(f"{name} is {size}; allowed: {least} or more{f', up to {most}' if most else ''}")
    allowed = (*LOW_PRECISION, *([torch.float32] if torch.device(device).type == "cpu" else []))
    if dtype not in allowed:
        names = ", ".join(str(each).removeprefix("torch.") for each in allowed)
        raise TypeError(f"dtype is {dtype!r}; allowed on {device}: torch's {names}")
    peak = max(
        (
            each.plan.workspace_bytes(T, each.keys, D)
            for causal in (False, True)[: 1 + (T == S)]
            for each in passes(T, S, D, top_k, dtype, device, causal=causal)
        ),
        default=0,
    )
    assert peak <= workspace_bound(T, top_k), (peak, workspace_bound(T, top_k))
    return peak


def default_plan(q: torch.Tensor, k: torch.Tensor, top_k: int) -> Plan:
    """The plan that ``hytopk`` makes for q and k when every row may see every key: what to vary a size of.

    A causal call without windows has a plan for each of its passes.
    """
    T, S, D = q.shape[0], *k.shape
    return Plan.default(T, S, D, check_top_k(top_k), q.dtype, q.device, consumers=consumers(q, k))


def warm_up(H: int, D: int, dtype: torch.dtype, device: torch.device | str = "cuda") -> tuple[int, float]:
    """Compile every kernel variant that ``hytopk`` takes for contiguous tensors: (variants, seconds).

    Calls with these H, D and dtype compile nothing afterwards, whatever T, S, top_k and the windows are.
    Variants that were ready are not counted; under Triton's interpreter there are none. Errors as
    ``hytopk``'s.
    """
    q, k = (torch.zeros(shape, device=device).to(dtype) for shape in ((1, H, D), (1, D)))
    w = torch.zeros((1, H), device=device)
    scale = torch.ones(1, device=device) if dtype == torch.float8_e4m3fn else None
    bound = torch.zeros(1, dtype=torch.int32, device=device)
    plan = default_plan(q, k, 1)
    begin = time.perf_counter()
    with _compilations() as compiled:
        for start, end, scores, (table_keys, prune_keys) in itertools.product(
            (None, bound), (None, bound), (False, True), ((0, 0), (0, 1), (1, 0))
        ):
            hytopk(
                q, k, w, 1, start=start, end=end, k_scale=scale, return_scores=scores,
                plan=replace(plan, table_keys=table_keys, prune_keys=prune_keys),
            )  # fmt: skip
    return len(compiled), time.perf_counter() - begin


@contextmanager
def _compilations() -> Iterator[list[Any]]:
    """Notes every kernel variant that Triton makes ready meanwhile."""
    compiled: list[Any] = []
    previous = triton.knobs.runtime.jit_post_compile_hook

    def note(**given: Any) -> Any:
        compiled.append(given["fn"])
        return previous(**given) if previous is not None else None

    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        yield compiled
    finally:
        triton.knobs.runtime.jit_post_compile_hook = previous


@torch.library.custom_op(f"{NAMESPACE}::hytopk", mutates_args=())
def _hytopk(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    top_k: int,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    return_scores: bool,
    plan: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    T, S, D = q.shape[0], *k.shape
    if q.device.type == "cpu":
        check_windows(start, end, S)
        check_scales(k_scale)
    indices, count, scores, nans, pending, filled, invalid = _outputs(q, top_k, return_scores)
    results = Results(indices, count, scores if return_scores else None, nans, pending, filled)
    causal = start is None and end is None
    sizes = Plan.from_ints(plan) if plan else None
    with torch.cuda.device_of(q):
        lo, hi = launch_prepare(start, end, S, invalid)
        problem = Problem(q, k, w, k_scale, lo, hi)
        for part in passes(
            T, S, D, top_k, q.dtype, q.device, causal=causal, plan=sizes, consumers=consumers(q, k)
        ):
            _select_rows(problem.first_keys(part.keys), results, part, top_k)
    return indices, count, scores, nans, pending, filled, invalid


def _select_rows(problem: Problem, results: Results, part: Pass, top_k: int) -> None:
    """All stages of one pass; ``problem`` has the keys that its rows see."""
    row0, R, plan = part.row0, part.rows, part.plan
    filled = results.filled[row0 : row0 + R]
    if plan.table_keys >= part.keys:
        table = launch_dense(problem, row0, R, plan, as_ordered=True)
        scan_hi, threshold, plateau = launch_threshold(problem, filled, row0, top_k, plan, table)
        candidates, keys = launch_filter(problem, table, scan_hi, threshold, filled, row0, plan)
        del table
    else:
        scan_hi, threshold, plateau = launch_threshold(problem, filled, row0, top_k, plan)
        candidates = _scan(problem, scan_hi, threshold, filled, part)
        keys = launch_rescore(problem, candidates, filled, row0, plan)
    launch_select(problem, candidates, keys, filled, threshold, results, row0, top_k, plan)
    launch_plateau(problem, candidates, keys, filled, plateau, results, row0, top_k, plan)
    launch_repair(problem, candidates, keys, results, row0, R, top_k, plan)


def _scan(
    problem: Problem, scan_hi: torch.Tensor, threshold: torch.Tensor, filled: torch.Tensor, part: Pass
) -> torch.Tensor:
    """The keys that reach the threshold, int32 [buffers, capacity], ascending; their number in filled."""
    row0, R, S, plan = part.row0, part.rows, part.keys, part.plan
    shape = (plan.buffers(R), plan.capacity)
    candidates = torch.empty(shape, dtype=torch.int32, device=problem.device)
    bitmap = torch.empty((R, ceil_div(min(plan.key_chunk, S), 32)), dtype=torch.int32, device=problem.device)
    for key0 in range(0, S, plan.key_chunk):
        key1 = min(key0 + plan.key_chunk, S)
        chunk = (problem, scan_hi, threshold, bitmap, row0, key0, key1, plan)
        launch_scan(*chunk, launch_prune(*chunk) if plan.prunes(S) else None)
        launch_compact(problem, bitmap, scan_hi, filled, candidates, row0, key0, key1, plan)
    return candidates


@_hytopk.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    top_k: int,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    return_scores: bool,
    plan: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _outputs(q, top_k, return_scores)


def _outputs(
    q: torch.Tensor, top_k: int, return_scores: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unwritten results: indices, count, scores, and the four per-row statistics."""
    T = q.shape[0]
    indices = q.new_empty((T, top_k), dtype=torch.int32)
    scores = q.new_empty((T, top_k if return_scores else 0), dtype=torch.float32)
    count, nans, pending, filled, invalid = (q.new_empty((T,), dtype=torch.int32) for _ in range(5))
    return indices, count, scores, nans, pending, filled, invalid


def check_top_k(top_k: int) -> int:
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise TypeError(f"top_k must be an int, got {type(top_k).__name__}")
    if not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"top_k is {top_k}; it must be from 1 to {MAX_TOP_K}")
    return top_k


def _check_plan(plan: Plan, top_k: int, q: torch.Tensor, k: torch.Tensor) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan or None, got {type(plan).__name__}")
    plan.check(top_k)
    if plan.consumers and (why := obstacle(q, k)):
        raise ValueError(f"plan.consumers is {plan.consumers}, but Hopper's scan cannot run here: {why}")


def _tensor(name: str, value: object, axes: str, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    """``value`` as a tensor with the axes and one of the dtypes wanted; else TypeError or ValueError."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor [{axes}], got {type(value).__name__}")
    if value.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} is {str(value.dtype).removeprefix('torch.')}; allowed: {allowed}")
    rank = len(axes.split(", "))
    if value.dim() != rank:
        raise ValueError(f"{name} has shape {list(value.shape)}; it must have {rank} axes [{axes}]")
    if value.numel() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name} has strides {list(value.stride())}; its last axis must be contiguous")
    return value


def check_inputs(q: object, k: object, w: object, k_scale: object) -> dict[str, torch.Tensor]:
    """The tensors of a scoring call by name; TypeError or ValueError unless they meet the contract.

    Values are not looked at.
    """
    q = _tensor("q", q, "T, H, D", (*LOW_PRECISION, torch.float32))
    k = _tensor("k", k, "S, D", (*LOW_PRECISION, torch.float32))
    w = _tensor("w", w, "T, H", (torch.float32,))
    (T, H, D), S = q.shape, k.shape[0]
    if q.device.type not in ("cuda", "cpu"):
        raise ValueError(f"q is on {q.device}; HyTopK runs on cuda, or on cpu under Triton's interpreter")
    if q.device.type == "cpu" and not INTERPRET:
        raise ValueError(
            "q is on cpu; HyTopK's kernels run there only under Triton's interpreter: set "
            "TRITON_INTERPRET=1 before hyscale_kernels is imported"
        )
    if q.device.type == "cuda" and INTERPRET:
        raise ValueError(
            f"q is on {q.device}, but TRITON_INTERPRET=1 was set when hyscale_kernels was imported; "
            "unset it to run on the GPU"
        )
    if q.dtype == torch.float32 and q.device.type == "cuda":
        raise TypeError("q is float32; on cuda it must be bfloat16, float16 or float8_e4m3fn")
    if k.dtype != q.dtype:
        raise TypeError(f"k is {k.dtype} and q is {q.dtype}; they must have the same dtype")
    if not 1 <= H <= MAX_HEADS:
        raise ValueError(f"q has {H} heads (shape {list(q.shape)}); allowed: 1 to {MAX_HEADS}")
    if not 1 <= D <= MAX_HEAD_SIZE:
        raise ValueError(f"q has head size {D} (shape {list(q.shape)}); allowed: 1 to {MAX_HEAD_SIZE}")
    if k.shape[1] != D:
        raise ValueError(f"k has shape {list(k.shape)}; with q {list(q.shape)} it must be [S, {D}]")
    if tuple(w.shape) != (T, H):
        raise ValueError(f"w has shape {list(w.shape)}; with q {list(q.shape)} it must be [{T}, {H}]")
    if S > MAX_KEYS:
        raise ValueError(f"k has {S} keys; at most {MAX_KEYS} are allowed")
    given: dict[str, torch.Tensor] = {"q": q, "k": k, "w": w}
    if q.dtype == torch.float8_e4m3fn:
        if k_scale is None:
            raise ValueError("k_scale is missing; float8 keys need their scales, float32 [S]")
        scale = given["k_scale"] = _tensor("k_scale", k_scale, "S", (torch.float32,))
        if scale.shape[0] != S:
            raise ValueError(f"k_scale has shape {list(scale.shape)}; with {S} keys it must be [{S}]")
    elif k_scale is not None:
        raise ValueError(f"k_scale is for float8 keys only; q and k are {q.dtype}")
    _check_device(given, q.device)
    return given


def check_call(q: object, k: object, w: object, start: object, end: object, k_scale: object) -> None:
    """Raise TypeError or ValueError unless the arguments meet the contract (values are not looked at)."""
    inputs = check_inputs(q, k, w, k_scale)
    T, S = inputs["q"].shape[0], inputs["k"].shape[0]
    given: dict[str, torch.Tensor] = {}
    for name, value in (("start", start), ("end", end)):
        if value is not None:
            bound = given[name] = _tensor(name, value, "T", (torch.int32,))
            if bound.shape[0] != T:
                raise ValueError(
                    f"{name} has shape {list(bound.shape)}; with {T} query rows it must be [{T}]"
                )
    if start is None and end is None and T != S:
        raise ValueError(
            "start and end are missing; the causal default needs as many queries as keys, "
            f"got T = {T}, S = {S}"
        )
    _check_device(given, inputs["q"].device)


def _check_device(given: dict[str, torch.Tensor], device: torch.device) -> None:
    for name, value in given.items():
        if value.device != device:
            raise ValueError(f"{name} is on {value.device} and q is on {device}; they must be on one device")

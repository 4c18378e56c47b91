"""What the baselines share: checks, float32 scores of some rows, and an integer that orders them.

Shape letters: T queries, S keys, H heads, D head size, K = top_k; R rows of a chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32)

# A row's products with one head are made this many bytes at a time, so that they stay in a GPU's L2 cache.
SCRATCH_BYTES = 16 * 2**20

# The ordered key of a score that is not to be selected: NaN, or outside its row's window.
NEVER = -(2**31)


@dataclass(frozen=True)
class Selected:
    """Selected keys: indices int32 [T, K], ascending, -1 at the tail; count int32 [T]."""

    indices: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    """Checked arguments of a selection; the windows are those of the caller, or causal if ``causal``."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    top_k: int
    start: torch.Tensor
    end: torch.Tensor
    causal: bool
    k_scale: torch.Tensor | None


def select_in_chunks(
    inputs: Inputs,
    chunk_bytes: int,
    bytes_per_score: int,
    best: Callable[[torch.Tensor, int], torch.Tensor],
) -> Selected:
    """Score as many rows at a time as ``chunk_bytes`` holds (at least one) and select from each chunk.

    ``best(keys, K)`` gets ordered keys int32 [R, N] and returns the indices of the K <= N best, int64 [R, K]
    in any order; keys equal to NEVER among them are dropped here.
    """
    T, S = inputs.q.shape[0], inputs.k.shape[0]
    indices = torch.full((T, inputs.top_k), -1, dtype=torch.int32, device=inputs.q.device)
    count = torch.zeros(T, dtype=torch.int32, device=inputs.q.device)
    for rows in _chunks(T, max(1, chunk_bytes // max(1, bytes_per_score * S))):
        num_keys = min(rows.stop, S) if inputs.causal else S
        K = min(inputs.top_k, num_keys)
        if K == 0:
            continue
        keys = ordered_keys(score_rows(inputs, rows, num_keys), inputs.start[rows], inputs.end[rows])
        chosen = best(keys, K)
        chosen = chosen.masked_fill(keys.gather(1, chosen) == NEVER, S).sort(dim=1).values
        count[rows] = (chosen < S).sum(dim=1).to(torch.int32)
        indices[rows, :K] = chosen.masked_fill(chosen == S, -1).to(torch.int32)
    return Selected(indices, count)


def score_rows(inputs: Inputs, rows: slice, num_keys: int) -> torch.Tensor:
    """float32 scores [R, num_keys] of some rows with the first keys; +0 for -0; nothing masked.

    Dot products accumulate in float32: bf16 and fp16 operands go to the tensor cores as they are, e4m3
    widened to fp16 (exactly), and everything is float32 on the CPU. Heads are added in order, rounded each
    time.
    """
    q, w = inputs.q[rows], inputs.w[rows]
    R, H, _ = q.shape
    scores = torch.zeros((R, num_keys), dtype=torch.float32, device=q.device)
    for columns in _chunks(num_keys, max(1, SCRATCH_BYTES // 4 // R)):
        keys = _operand(inputs.k[columns]).T
        for h in range(H):
            product = _product(_operand(q[:, h]), keys).relu_()
            scores[:, columns].addcmul_(product, w[:, h, None])
    if inputs.k_scale is not None:
        scores.mul_(inputs.k_scale[:num_keys])
    return scores.add_(0.0)  # -0 becomes +0


def ordered_keys(scores: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """int32 [R, N] that order as float32 ``scores`` do; NEVER for NaN and outside the window."""
    bits = scores.view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    position = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    outside = (position < start[:, None]) | (position >= end[:, None])
    return keys.masked_fill_(outside.logical_or_(scores.isnan()), NEVER)


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    top_k: int,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    k_scale: torch.Tensor | None,
) -> Inputs:
    """The arguments of ``hytopk``, checked and completed; TypeError or ValueError naming the wrong one."""
    _check("q", q, "T, H, D", DTYPES, q)
    _check("k", k, f"S, {q.shape[2]}", (q.dtype,), q)
    T, S = q.shape[0], k.shape[0]
    if q.shape[1] == 0 or q.shape[2] == 0:
        raise ValueError(f"q: shape {list(q.shape)}; allowed: at least one head and one element a head")
    _check("w", w, f"{T}, {q.shape[1]}", (torch.float32,), q)
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise TypeError(f"top_k: {top_k!r} is a {type(top_k).__name__}; allowed: an integer")
    if top_k < 1:
        raise ValueError(f"top_k: {top_k}; allowed: 1 or more")
    causal = start is None and end is None
    if causal and T != S:
        raise ValueError(f"start, end: None with {T} queries and {S} keys; allowed: None if they are equal")
    for name, bound in (("start", start), ("end", end)):
        if bound is not None:
            _check(name, bound, f"{T}", (torch.int32,), q)
    position = torch.arange(T, dtype=torch.int32, device=q.device)
    low = torch.zeros_like(position) if start is None else start
    high = (position + 1 if causal else torch.full_like(position, S)) if end is None else end
    if k_scale is not None:
        _check("k_scale", k_scale, f"{S}", (torch.float32,), q)
    if (k_scale is None) == (q.dtype == torch.float8_e4m3fn):
        raise ValueError(
            f"k_scale: {'None' if k_scale is None else 'given'} with q {q.dtype}; allowed: with float8, only"
        )
    bad_row = (low < 0) | (high > S) | (low > high)
    bad_key = None if k_scale is None else ~((k_scale > 0) & k_scale.isfinite())
    if q.device.type == "cpu":
        if bad_row.any():
            row = int(bad_row.nonzero()[0])
            window = f"[{int(low[row])}, {int(high[row])})"
            raise ValueError(f"start, end: row {row} has the window {window}; allowed: within [0, {S}]")
        if bad_key is not None and k_scale is not None and bad_key.any():
            key = int(bad_key.nonzero()[0])
            raise ValueError(f"k_scale[{key}]: {float(k_scale[key])}; allowed: positive and finite")
    return Inputs(
        q=q.detach(),
        k=k.detach(),
        w=w.detach(),
        top_k=top_k,
        start=low,
        end=high.masked_fill(bad_row, 0),
        causal=causal,
        k_scale=None if k_scale is None or bad_key is None else k_scale.masked_fill(bad_key, torch.nan),
    )


def _chunks(size: int, step: int) -> Iterator[slice]:
    for low in range(0, size, step):
        yield slice(low, min(low + step, size))


def _operand(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        return x.float()
    return x.half() if x.dtype == torch.float8_e4m3fn else x


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float32."""
    return torch.mm(a, b) if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


def _check(
    name: str, value: torch.Tensor, shape: str, dtypes: tuple[torch.dtype, ...], like: torch.Tensor
) -> None:
    """``shape`` names each axis by its size or a letter."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {type(value).__name__}; allowed: torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: dtype {value.dtype}; allowed: {', '.join(map(str, dtypes))}")
    axes = shape.split(", ")
    fits = value.dim() == len(axes) and all(
        not axis.isdigit() or int(axis) == size for axis, size in zip(axes, value.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: shape {list(value.shape)}; allowed: [{shape}]")
    if value.device != like.device:
        raise ValueError(f"{name}: on {value.device}; allowed: {like.device}, where q is")

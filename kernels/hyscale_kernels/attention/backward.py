"""Backward: chunks of rows through the kernels, in passes of rows where the sum is in fixed point.

Shape letters: T queries, S keys, K places of a row, Hq query heads, D key size, Dv value size.
"""

from typing import NamedTuple

import torch

from ..indexer.rows import Contributions
from ..indexer.scatter import launch_grid
from . import plan as sizes
from .keys import launch_keys, launch_settle, new_sums
from .plan import AttentionPlan
from .prepare import launch_prepare
from .queries import launch_queries
from .recompute import Weights, launch_bounds, launch_weights
from .tiles import Call


class Gradients(NamedTuple):
    """Of q, of latent (in their dtype) and of the sink (float32); without elements where not wanted."""

    q: torch.Tensor
    latent: torch.Tensor
    sink: torch.Tensor


def empty_gradients(
    q: torch.Tensor,
    latent: torch.Tensor,
    sink: torch.Tensor | None,
    want_dq: bool,
    want_dkv: bool,
    dtype: torch.dtype,
) -> Gradients:
    """Unwritten gradients, those of q and latent in ``dtype``."""
    return Gradients(
        q.new_empty(q.shape if want_dq else (0, *q.shape[1:]), dtype=dtype),
        latent.new_empty(latent.shape if want_dkv else (0, latent.shape[1]), dtype=dtype),
        q.new_empty((0 if sink is None else q.shape[1],), dtype=torch.float32),
    )


def launch_backward(
    call: Call,
    grad: torch.Tensor,
    out: torch.Tensor,
    log_sum_exp: torch.Tensor,
    want_dq: bool,
    want_dkv: bool,
    fixed: bool,
    plan: AttentionPlan,
) -> Gradients:
    """Gradients for ``grad`` and ``out`` [T, Hq, Dv], contiguous, and log_sum_exp [T, Hq]."""
    T, Hq, _ = call.q.shape
    K = call.indices.shape[1]
    if call.empty:
        gradients = empty_gradients(call.q, call.latent, call.sink, want_dq, want_dkv, call.q.dtype)
        return Gradients(*(each.zero_() for each in gradients))
    fixed = fixed and want_dkv
    wide = want_dkv and (T > sizes.ROWS or not fixed)  # the gradient of the keys is added up in float32
    dq, total, dsink = empty_gradients(
        call.q, call.latent, call.sink, want_dq, want_dkv and not wide, call.stored()
    )
    prepared = launch_prepare(call, out, log_sum_exp, grad, peaks=fixed)
    if wide:
        create = call.latent.new_empty if fixed else call.latent.new_zeros
        total = create(call.latent.shape, dtype=torch.float32)
    chunk = sizes.chunk_rows(min(T, plan.rows), Hq, K, call.stored().itemsize)
    weights = Weights(*(call.q.new_empty((chunk, K, Hq), dtype=call.stored()) for _ in range(2)))
    sums = new_sums(call) if fixed else total
    for pass0 in range(0, T, sizes.ROWS if fixed else T):
        end = min(T, pass0 + sizes.ROWS) if fixed else T
        grid = None
        if fixed:
            if pass0:
                sums.zero_()
            announced = launch_bounds(call, grad, prepared, pass0, end - pass0, plan)
            grid = launch_grid(Contributions(weights.p, *announced))
        for row0 in range(pass0, end, chunk):
            rows = min(chunk, end - row0)
            if want_dq or want_dkv:
                launch_weights(call, grad, prepared, weights, row0, rows, plan)
            if want_dq:
                launch_queries(call, weights.da, dq, row0, rows, plan)
            if want_dkv:
                launch_keys(call, grad, weights, grid, sums, row0, rows, plan)
        if grid is not None:
            launch_settle(sums, grid, total, add=pass0 > 0)
    dsink = dsink if prepared.dsink is None else prepared.dsink
    return Gradients(dq.to(call.q.dtype), total.to(call.q.dtype), dsink)

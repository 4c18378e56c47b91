"""Materialised scores and torch.topk: what training frameworks do, chunked so that it runs at all.

Its ties at the K-th score are torch.topk's, which are arbitrary: they differ between devices and releases,
and even with the number of columns, so with the chunk size. The selection is that of HyTopK only where the
K-th and the next score differ.
"""

import torch

from .scoring import Selected, check_inputs, select_in_chunks

BYTES_PER_SCORE = 12  # the score, its ordered key, and masks or torch.topk's own scratch


def materialised_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    top_k: int,
    *,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    chunk_bytes: int = 2 * 2**30,
) -> Selected:
    """Arguments, windows and result as ``hytopk``'s (float32 operands too, any top_k, any device).

    NaN is never selected; -0 equals +0; *ties at the K-th score are broken arbitrarily*. About
    ``chunk_bytes`` of memory are used for scores, those of at least one row. Deterministic as far as
    torch.topk is. Raises TypeError or ValueError for wrong arguments; wrong values of windows and scales
    raise on the CPU and select nothing elsewhere.
    """
    inputs = check_inputs(q, k, w, top_k, start, end, k_scale)

    def best(keys: torch.Tensor, K: int) -> torch.Tensor:
        return keys.topk(K, dim=1, sorted=False).indices

    return select_in_chunks(inputs, chunk_bytes, BYTES_PER_SCORE, best)

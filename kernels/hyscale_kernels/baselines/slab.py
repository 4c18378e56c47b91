"""A bounded slab of scores with the exact tie rule: HyTopK's contract in a page of plain PyTorch.

Scores of as many rows as fit a small slab are written, then selected through a 64-bit key that joins score
and index, so that no two keys of a row are equal and torch.topk has no tie to break.
"""

import torch

from .scoring import Selected, check_inputs, select_in_chunks

BYTES_PER_SCORE = 24  # score 4, ordered key 4, joint key 8, masks or torch.topk's own scratch


def slab_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    top_k: int,
    *,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    slab_bytes: int = 256 * 2**20,
) -> Selected:
    """Arguments, windows and result as ``hytopk``'s (float32 operands too, any top_k, any device).

    Exact, ties and NaN included, for the float32 scores that it computes itself (those of
    :func:`~hyscale_kernels.baselines.scoring.score_rows`). About ``slab_bytes`` of memory beside the result,
    but at least one row's scores. Raises TypeError or ValueError for wrong arguments; wrong values of windows
    and scales raise on the CPU and select nothing elsewhere.
    """
    inputs = check_inputs(q, k, w, top_k, start, end, k_scale)

    def best(keys: torch.Tensor, K: int) -> torch.Tensor:
        last = keys.shape[1] - 1
        joint = keys.to(torch.int64).bitwise_left_shift_(32)
        # Of equal scores the smaller index makes the larger key.
        joint.bitwise_or_(last - torch.arange(last + 1, device=keys.device))
        return last - (joint.topk(K, dim=1, sorted=False).values & 0xFFFFFFFF)

    return select_in_chunks(inputs, slab_bytes, BYTES_PER_SCORE, best)

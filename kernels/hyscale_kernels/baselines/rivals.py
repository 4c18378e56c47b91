"""Public packages that write scores to memory and select from them, called as they run well.

DeepGEMM writes fp8 scores, FlashInfer selects. Neither is a dependency: ModuleNotFoundError where it is
missing.

Shape letters: T rows, S keys, H heads, D head size, K = top_k.
"""

import importlib

import torch

# The largest table of float32 scores that the two were seen to run well with.
TABLE_BYTES = 9 * 10**9


def with_spare_row(values: torch.Tensor) -> torch.Tensor:
    """``values`` [T, ...] and a row of zeros, which sees no key."""
    if values.dtype == torch.float8_e4m3fn:  # by its bytes, because not every device joins fp8
        return with_spare_row(values.view(torch.uint8)).view(values.dtype)
    return torch.cat([values, torch.zeros_like(values[:1])])


def deepgemm_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    w: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
) -> torch.Tensor:
    """DeepGEMM's scores, float32 [T, S] or wider, contiguous, unwritten outside the windows.

    q [T + 1, H, D], w [T + 1, H], start and end [T + 1] come ``with_spare_row``: DeepGEMM returns a view
    without the padding of its last row, and without that row the others are contiguous, at no cost.
    """
    deep_gemm = importlib.import_module("deep_gemm")
    scores = deep_gemm.fp8_mqa_logits(q, (k, k_scale), w, start, end, clean_logits=False)
    table: torch.Tensor = scores.as_strided((scores.shape[0] - 1, scores.stride(0)), (scores.stride(0), 1))
    return table


def flashinfer_top_k(
    scores: torch.Tensor, start: torch.Tensor, length: torch.Tensor, top_k: int, *, from_zero: bool
) -> torch.Tensor:
    """FlashInfer's deterministic top-k, ties by smaller key: int32 [T, K] in no order, -1 at unused places.

    scores: contiguous float32 [T, S or more]; row t ranks the ``length`` keys from ``start`` on.
    from_zero: every row starts at key 0. Told where rows start, FlashInfer loads one score at a time, so it
    is told only otherwise.
    """
    flashinfer = importlib.import_module("flashinfer")
    chosen: torch.Tensor = flashinfer.top_k_ragged_transform(
        scores, start, length, top_k, deterministic=True, tie_break=1,
        row_starts=None if from_zero else start,
    )  # fmt: skip
    return chosen


def ascending(chosen: torch.Tensor) -> torch.Tensor:
    """Rows of selected keys, int32 [T, K] in any order, in order: -1 at the tail."""
    last = torch.iinfo(torch.int32).max
    ordered = chosen.masked_fill(chosen < 0, last).sort(dim=1).values
    return ordered.masked_fill(ordered == last, -1)

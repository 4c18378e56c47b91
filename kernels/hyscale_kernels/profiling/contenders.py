"""What can enter a race of selections: ours, and rivals as thin adapters over public packages.

A contender says why it cannot run before anything is timed, and never runs something else instead.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..baselines import materialised_topk, slab_topk
from ..hytopk import hytopk
from .cases import Case

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """name; what it is; dtypes it takes; packages it needs; prepare(case) -> call returning indices [T, K].

    exact: it claims the exact set by its own scores (ties aside).
    """

    name: str
    description: str
    dtypes: tuple[str, ...]
    packages: tuple[str, ...]
    prepare: Callable[[Case], Call]

    def obstacle(self, case: Case) -> str | None:
        """Why it cannot run ``case`` here, or None."""
        if case.dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}, not {case.dtype}"
        missing = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if missing:
            return f"needs the package {missing[0]!r}, which is not installed"
        return None


def _arguments(case: Case) -> dict[str, Any]:
    return {"start": case.start, "end": case.end, "k_scale": case.k_scale}


def _hytopk(case: Case) -> Call:
    return lambda: hytopk(case.q, case.k, case.w, case.top_k, **_arguments(case)).indices


def _torch(case: Case) -> Call:
    return lambda: materialised_topk(case.q, case.k, case.w, case.top_k, **_arguments(case)).indices


def _slab(case: Case) -> Call:
    return lambda: slab_topk(case.q, case.k, case.w, case.top_k, **_arguments(case)).indices


def _deepgemm_flashinfer(case: Case) -> Call:
    """fp8 scores by DeepGEMM, deterministic smallest-index top-k by FlashInfer, in chunks of rows.

    A chunk's float32 table is at most 9 GB, the largest that the two were seen to run well with. DeepGEMM
    returns a view without the padding of its last row, and FlashInfer wants contiguous rows: one spare row
    with an empty window makes the view of the others contiguous, at no cost. Told where rows
    start, FlashInfer loads one score at a time: it is told only if some do not start at key 0.
    """
    import deep_gemm  # type: ignore[import-not-found,unused-ignore]
    import flashinfer  # type: ignore[import-not-found,unused-ignore]

    def spare(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.zeros_like(tensor[:1])])

    rows = max(1, min(case.rows, int(9e9 / (4 * case.keys))))
    from_zero = not bool(case.start.any())
    parts = []
    for first in range(0, case.rows, rows):
        part = slice(first, min(first + rows, case.rows))
        q = spare(case.q[part].view(torch.uint8)).view(case.q.dtype)
        parts.append((part, q, spare(case.w[part]), spare(case.start[part]), spare(case.end[part])))
    out = torch.empty(case.rows, case.top_k, dtype=torch.int32, device=case.q.device)

    def call() -> torch.Tensor:
        for part, q, w, start, end in parts:
            scores = deep_gemm.fp8_mqa_logits(q, (case.k, case.k_scale), w, start, end, clean_logits=False)
            full = scores.as_strided((scores.shape[0] - 1, scores.stride(0)), (scores.stride(0), 1))
            first, last = start[:-1], end[:-1]
            out[part] = flashinfer.top_k_ragged_transform(
                full, first, last - first, case.top_k, deterministic=True, tie_break=1,
                row_starts=None if from_zero else first,
            )  # fmt: skip
        return out

    return call


def _cudnn(case: Case) -> Call:
    """bf16 scores and deterministic top-k by the cuDNN frontend, the whole table at once."""
    from cudnn import DSA  # type: ignore[import-not-found,unused-ignore]

    q, k, w = case.q[None], case.k[None, :, None, :], case.w[None]
    lengths = case.end - case.start

    def call() -> torch.Tensor:
        scores = DSA.indexer_forward_wrapper(q, k, w, ratio=1, sm_scale=1.0, precision="bf16")["scores"]
        flat = scores.view(-1, case.keys).contiguous()
        chosen: torch.Tensor = DSA.indexer_top_k_wrapper(
            flat, lengths, case.top_k, next_n=1, return_val=False, tie_break=1, deterministic=True
        )["indices"]
        return chosen.view(case.rows, case.top_k)

    return call


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("hytopk", "this project's fused kernel", ("bf16", "fp16", "fp8"), (), _hytopk),
        Contender("torch", "materialised scores in PyTorch, torch.topk", ("bf16", "fp16", "fp8"), (), _torch),
        Contender(
            "slab", "scores of a bounded slab in PyTorch, exact selection", ("bf16", "fp16", "fp8"), (), _slab
        ),
        Contender(
            "deepgemm+flashinfer",
            "DeepGEMM fp8_mqa_logits, FlashInfer deterministic top-k",
            ("fp8",),
            ("deep_gemm", "flashinfer"),
            _deepgemm_flashinfer,
        ),
        Contender("cudnn", "cuDNN frontend scoring and top-k", ("bf16",), ("cudnn",), _cudnn),
    )
}

"""What can enter a race of selections: ours, and rivals as thin adapters over public packages.

A contender says why it cannot run before anything is timed, and never runs something else instead.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..baselines import materialised_topk, slab_topk
from ..baselines.rivals import TABLE_BYTES, deepgemm_scores, flashinfer_top_k, with_spare_row
from ..hytopk import default_plan, dense_scores, hytopk
from .cases import DTYPES, Case

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """name; dtypes it takes; packages it needs; prepare(case) -> call returning indices [T, K]."""

    name: str
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
    given = _arguments(case)
    if case.windows == "causal" and case.rows == case.keys:
        given = {"k_scale": case.k_scale}  # its default, by which the host plans the passes
    return lambda: hytopk(case.q, case.k, case.w, case.top_k, **given).indices


def _unpruned(case: Case) -> Call:
    plan = replace(default_plan(case.q, case.k, case.top_k), prune_keys=0)
    return lambda: hytopk(case.q, case.k, case.w, case.top_k, plan=plan, **_arguments(case)).indices


def _torch(case: Case) -> Call:
    return lambda: materialised_topk(case.q, case.k, case.w, case.top_k, **_arguments(case)).indices


def _slab(case: Case) -> Call:
    return lambda: slab_topk(case.q, case.k, case.w, case.top_k, **_arguments(case)).indices


def _chunks(case: Case) -> list[slice]:
    """Rows of a table of at most TABLE_BYTES each."""
    rows = max(1, min(case.rows, int(TABLE_BYTES / (4 * case.keys))))
    return [slice(first, min(first + rows, case.rows)) for first in range(0, case.rows, rows)]


def _flashinfer(case: Case) -> Callable[[torch.Tensor, slice], torch.Tensor]:
    """FlashInfer's top-k of some rows' scores, contiguous float32 [rows, S]."""
    from_zero = not bool(case.start.any())
    lengths = case.end - case.start

    def select(scores: torch.Tensor, part: slice) -> torch.Tensor:
        return flashinfer_top_k(scores, case.start[part], lengths[part], case.top_k, from_zero=from_zero)

    return select


def _deepgemm_flashinfer(case: Case) -> Call:
    """fp8 scores by DeepGEMM, top-k by FlashInfer, in chunks of rows."""
    assert case.k_scale is not None
    k, k_scale = case.k, case.k_scale
    select, parts = _flashinfer(case), []
    for part in _chunks(case):
        q, w, start, end = (with_spare_row(each[part]) for each in (case.q, case.w, case.start, case.end))
        parts.append((part, q, w, start, end))
    out = torch.empty(case.rows, case.top_k, dtype=torch.int32, device=case.q.device)

    def call() -> torch.Tensor:
        for part, q, w, start, end in parts:
            out[part] = select(deepgemm_scores(q, k, k_scale, w, start, end), part)
        return out

    return call


def _triton_flashinfer(case: Case) -> Call:
    """16-bit scores by HyTopK's dense pass, written as a table, top-k by FlashInfer, in chunks of rows."""
    select, parts = _flashinfer(case), _chunks(case)
    out = torch.empty(case.rows, case.top_k, dtype=torch.int32, device=case.q.device)

    def call() -> torch.Tensor:
        for part in parts:
            start, end = case.start[part], case.end[part]
            scores = dense_scores(case.q[part], case.k, case.w[part], start=start, end=end)
            out[part] = select(scores, part)
        return out

    return call


def _cudnn(case: Case) -> Call:
    """bf16 scores and deterministic top-k by the cuDNN frontend, in chunks of rows.

    Its row t sees the keys up to an offset + t. ValueError for windows of another kind.
    """
    from cudnn import DSA  # type: ignore[import-not-found,unused-ignore]

    seen = (case.end[:1] + torch.arange(case.rows, device=case.end.device)).clamp(max=case.keys)
    if bool(case.start.any()) or not torch.equal(seen.int(), case.end):
        raise ValueError("windows: of another kind; allowed: every key, or one key more a row")
    k, parts = case.k[None, :, None, :], []
    for part in _chunks(case):
        q, w, lengths = case.q[part][None], case.w[part][None], case.end[part]
        parts.append((part, q, w, lengths, lengths[:1] - 1))
    out = torch.empty(case.rows, case.top_k, dtype=torch.int32, device=case.q.device)

    def call() -> torch.Tensor:
        for part, q, w, lengths, offset in parts:
            scores = DSA.indexer_forward_wrapper(
                q, k, w, ratio=1, sm_scale=1.0, precision="bf16", q_causal_offsets=offset
            )["scores"]
            out[part] = DSA.indexer_top_k_wrapper(
                scores[0], lengths, case.top_k, next_n=1, return_val=False, tie_break=1, deterministic=True
            )["indices"]
        return out

    return call


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("hytopk", tuple(DTYPES), (), _hytopk),
        Contender("hytopk_unpruned", tuple(DTYPES), (), _unpruned),
        Contender("torch", tuple(DTYPES), (), _torch),
        Contender("slab", tuple(DTYPES), (), _slab),
        Contender("deepgemm+flashinfer", ("fp8",), ("deep_gemm", "flashinfer"), _deepgemm_flashinfer),
        Contender("triton+flashinfer", ("bf16", "fp16"), ("flashinfer",), _triton_flashinfer),
        Contender("cudnn", ("bf16",), ("cudnn",), _cudnn),
    )
}

"""A kernel made of the oracle, for tests of the suite itself; Triton, where used, runs in its interpreter.

On a machine with a GPU other tests of the same run use Triton's compiler, so these are left to a run of their
own with TRITON_INTERPRET=1.

The imitation keeps the whole contract of ``hytopk`` without Triton, quickly, and breaks it in one named way
on request: what each property is for is shown by the fault that it must find.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*"]

from hyscale_kernels.hytopk import Plan, Selection, Stats
from hyscale_kernels.hytopk.selection import check_scales, check_windows
from hyscale_ref.topk import topk
from hyscale_ref.windows import resolve
from hyscale_verify.targets import HyTopK

Fault = Callable[["Answer"], None]


@dataclass
class Answer:
    """What the imitation is about to return, for a fault to spoil."""

    call: dict[str, Any]
    dense: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any]
    count: np.ndarray[Any, Any]
    scores: np.ndarray[Any, Any]
    nans: np.ndarray[Any, Any]
    rescored: np.ndarray[Any, Any]
    candidates: np.ndarray[Any, Any]


class Imitation:
    """The module ``hyscale_kernels.hytopk``, made of the oracle; ``fault`` spoils each answer."""

    Plan = Plan

    def __init__(self, fault: Fault | None = None, skip_checks: bool = False) -> None:
        self.fault = fault
        self.skip_checks = skip_checks
        self.calls = 0

    def dense_scores(
        self, q: Any, k: Any, w: Any, *, start: Any = None, end: Any = None, k_scale: Any = None
    ) -> Any:
        """float32 scores whose heads are summed in order, as the kernel's are."""
        Q, K, w = q.detach().float().numpy(), k.detach().float().numpy(), w.detach().numpy()
        acc = np.zeros((len(Q), len(K)), np.float32)
        with np.errstate(all="ignore"):
            for h in range(Q.shape[1]):
                dot = (Q[:, h, None, :] * K[None]).sum(axis=-1, dtype=np.float32)
                acc += w[:, h, None] * np.maximum(dot, np.float32(0))
            if k_scale is not None:
                acc *= k_scale.numpy()
        (low, high), _ = resolve(
            None if start is None else start.numpy(), None if end is None else end.numpy(), len(Q), len(K)
        )
        key = np.arange(len(K))
        outside = (key < low[:, None]) | (key >= high[:, None])
        return torch.from_numpy(np.where(outside, np.float32(-np.inf), acc + np.float32(0)))

    def hytopk(
        self,
        q: Any,
        k: Any,
        w: Any,
        top_k: int,
        *,
        start: Any = None,
        end: Any = None,
        k_scale: Any = None,
        return_scores: bool = False,
        validate: bool = False,
        plan: Any = None,
    ) -> Selection:
        """As the contract says, but for the fault."""
        self.calls += 1
        if not self.skip_checks:
            from hyscale_kernels.hytopk import api

            api.check_call(q, k, w, start, end, k_scale)
            api.check_top_k(top_k)
            check_windows(start, end, k.shape[0])
            check_scales(k_scale)
        dense = self.dense_scores(q, k, w, start=start, end=end, k_scale=k_scale).numpy()
        bounds = resolve(
            None if start is None else start.numpy(), None if end is None else end.numpy(), *dense.shape
        )[0]
        right = topk(dense, top_k, bounds.start, bounds.end)
        call = {
            "q": q,
            "k": k,
            "w": w,
            "top_k": top_k,
            "start": bounds.start,
            "end": bounds.end,
            "plan": plan,
            "number": self.calls,
            "end given": end is not None,
        }
        answer = Answer(
            call,
            dense,
            _in_memory(right.indices, torch.int32),
            _in_memory(right.count, torch.int32),
            _in_memory(right.scores, torch.float32),
            right.nan_count.astype(np.int32),
            *_path(call, right.count),
        )
        if self.fault is not None:
            self.fault(answer)
        tensor = torch.from_numpy
        return Selection(
            tensor(answer.indices),
            tensor(answer.count),
            tensor(answer.scores) if return_scores else None,
            Stats(
                tensor(answer.nans),
                tensor(answer.rescored),
                tensor(answer.candidates),
                torch.zeros(len(dense), dtype=torch.int32),
            ),
            start,
            end,
            k_scale,
            k.shape[0],
        )

    def workspace_bytes(self, T: int, S: int, H: int, D: int, top_k: int, dtype: Any, device: str) -> int:
        """As the kernel states it."""
        return 16 * T * top_k


def _in_memory(values: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """The values in memory that torch.empty gave."""
    out = torch.empty(values.shape, dtype=dtype).numpy()
    out[...] = values
    return out


def _path(
    call: dict[str, Any], count: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Statistics of a kernel that always overflows a small buffer: (rescored, candidates)."""
    plan, rows = call["plan"], len(count)
    length = call["end"] - call["start"]
    if plan is None or plan.capacity >= len(call["k"]):
        return np.zeros(rows, np.int32), length.astype(np.int32)
    return np.ones(rows, np.int32), length.astype(np.int32)


@pytest.fixture
def imitate() -> Callable[..., HyTopK]:
    """Builds the target ``hytopk`` around an imitation with the given fault."""

    def build(fault: Fault | None = None, **options: Any) -> HyTopK:
        return HyTopK("cpu", api=Imitation(fault, **options))

    return build

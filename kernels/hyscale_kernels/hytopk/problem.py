"""The tensors of one call, as its stages hand them to their kernels."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from .plan import next_power_of_2, padded


@dataclass(frozen=True, slots=True)
class Problem:
    """Checked inputs: q [T, H, D], k [S, D], w [T, H], k_scale [S] or None; lo, hi cleaned windows [T].

    Raises ValueError for float8 on a GPU that does not multiply it.
    """

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    k_scale: torch.Tensor | None
    lo: torch.Tensor
    hi: torch.Tensor

    def __post_init__(self) -> None:
        if self.q.dtype == torch.float8_e4m3fn and self.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            if (major, minor) < (8, 9):
                raise ValueError(
                    f"q is float8_e4m3fn on {self.device}, compute capability {major}.{minor}, which has no "
                    "float8 products (8.9 and later have); allowed there: bfloat16, float16"
                )

    @property
    def num_queries(self) -> int:
        return self.q.shape[0]

    @property
    def num_keys(self) -> int:
        return self.k.shape[0]

    @property
    def device(self) -> torch.device:
        return self.q.device

    def first_keys(self, num_keys: int) -> Self:
        """The same rows over the first ``num_keys`` keys, beyond which no window reaches."""
        scale = None if self.k_scale is None else self.k_scale[:num_keys]
        return replace(self, k=self.k[:num_keys], k_scale=scale)

    def pointers(self) -> tuple[torch.Tensor, ...]:
        """q, k, w, k_scale (k stands in where there is none; HAS_SCALE keeps it from being read)."""
        return self.q, self.k, self.w, self.k if self.k_scale is None else self.k_scale

    def strides(self) -> tuple[int, int, int, int]:
        """q_stride_t, q_stride_h, k_stride, w_stride_t, in elements."""
        return self.q.stride(0), self.q.stride(1), self.k.stride(0), self.w.stride(0)

    def constants(self) -> dict[str, Any]:
        """Compile-time constants that every scoring kernel takes."""
        H, D = self.q.shape[1:]
        return {"HAS_SCALE": self.k_scale is not None, "H": H, "D": D, "D_PAD": padded(D, self.q.dtype)}

    def padded_heads(self) -> int:
        """Heads as the N side of a tensor-core product takes them."""
        return max(16, next_power_of_2(self.q.shape[1]))


@dataclass(frozen=True, slots=True)
class Results:
    """Outputs of all rows of the call: indices, scores [T, K] (scores None unless wanted); the rest [T].

    pending is 1 for rows that selection left to repair (2 once a plateau has filled them); filled
    counts the candidates of each row.
    """

    indices: torch.Tensor
    count: torch.Tensor
    scores: torch.Tensor | None
    nans: torch.Tensor
    pending: torch.Tensor
    filled: torch.Tensor

    def pointers(self) -> tuple[torch.Tensor, ...]:
        """indices, count, scores (indices stand in where there are none), nans, pending."""
        scores = self.indices if self.scores is None else self.scores
        return self.indices, self.count, scores, self.nans, self.pending

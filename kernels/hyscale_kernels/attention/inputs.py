"""What the attention functions accept, checked at the call: every error names the argument."""

import math
from typing import Any

import torch

from ..hytopk.score import INTERPRET
from .plan import AttentionPlan

# One program holds a block of heads times the whole key in shared memory.
MAX_HEADS, MAX_VALUE, MAX_REST = 128, 512, 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def tensor(name: str, value: object, axes: str, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    """``value`` as a tensor with the axes and one of the dtypes wanted, its last axis contiguous."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor [{axes}], got {type(value).__name__}")
    if value.dtype not in dtypes:
        allowed = ", ".join(_short(dtype) for dtype in dtypes)
        raise TypeError(f"{name} is {_short(value.dtype)}; allowed: {allowed}")
    rank = len(axes.split(", "))
    if value.dim() != rank:
        raise ValueError(f"{name} has shape {list(value.shape)}; it must have {rank} axes [{axes}]")
    if value.numel() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name} has strides {list(value.stride())}; its last axis must be contiguous")
    return value


def check_attention(q: Any, latent: Any, indices: Any, sink: Any, scale: Any) -> None:
    """Raise TypeError or ValueError unless the arguments meet the contract (device values aside)."""
    q = tensor("q", q, "T, Hq, D", DTYPES)
    if q.device.type not in ("cuda", "cpu"):
        raise ValueError(f"q is on {q.device}; attention runs on cuda, or on cpu under Triton's interpreter")
    if q.device.type == "cpu" and not INTERPRET:
        raise ValueError(
            "q is on cpu; the attention kernels run there only under Triton's interpreter: set "
            "TRITON_INTERPRET=1 before hyscale_kernels is imported"
        )
    if q.device.type == "cuda" and INTERPRET:
        raise ValueError(
            f"q is on {q.device}, but TRITON_INTERPRET=1 was set when hyscale_kernels was imported; "
            "unset it to run on the GPU"
        )
    if q.dtype == torch.float32 and q.device.type == "cuda":
        raise TypeError("q is float32; on cuda it must be bfloat16 or float16")
    T, Hq, D = q.shape
    if not 1 <= Hq <= MAX_HEADS:
        raise ValueError(f"q has {Hq} heads (shape {list(q.shape)}); allowed: 1 to {MAX_HEADS}")
    if not 1 <= D <= MAX_VALUE + MAX_REST:
        raise ValueError(f"q has key size {D} (shape {list(q.shape)}); allowed: 1 to {MAX_VALUE + MAX_REST}")
    latent = tensor("latent", latent, "S, D", DTYPES)
    if latent.dtype != q.dtype:
        raise TypeError(
            f"latent is {_short(latent.dtype)} and q is {_short(q.dtype)}; they must have the same dtype"
        )
    if latent.shape[1] != D:
        raise ValueError(f"latent has shape {list(latent.shape)}; with q {list(q.shape)} it must be [S, {D}]")
    if latent.shape[0] >= 2**31:
        raise ValueError(f"latent has {latent.shape[0]} keys; at most {2**31 - 1} are allowed")
    indices = tensor("indices", indices, "T, K", (torch.int32,))
    if indices.shape[0] != T:
        raise ValueError(
            f"indices has shape {list(indices.shape)}; with q {list(q.shape)} it must be [{T}, K]"
        )
    if not indices.is_contiguous():
        raise ValueError(f"indices has strides {list(indices.stride())}; it must be contiguous")
    given = {"latent": latent, "indices": indices}
    if sink is not None:
        given["sink"] = check_shape("sink", sink, (Hq,), torch.float32)
    check_device(given, q.device)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a float, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite")


def check_value_dim(value_dim: Any, D: int) -> None:
    """``value_dim`` leading elements of a key are its value; what is left is at most MAX_REST."""
    if isinstance(value_dim, bool) or not isinstance(value_dim, int):
        raise TypeError(f"value_dim must be an int, got {type(value_dim).__name__}")
    low, high = max(1, D - MAX_REST), min(D, MAX_VALUE)
    if not low <= value_dim <= high:
        raise ValueError(f"value_dim is {value_dim}; with keys of size {D} it must be from {low} to {high}")


def check_shape(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """``value`` as a contiguous tensor of exactly this shape and dtype."""
    found = tensor(name, value, ", ".join(str(size) for size in shape), (dtype,))
    if tuple(found.shape) != shape:
        raise ValueError(f"{name} has shape {list(found.shape)}; it must be {list(shape)}")
    if not found.is_contiguous():
        raise ValueError(f"{name} has strides {list(found.stride())}; it must be contiguous")
    return found


def check_device(given: dict[str, torch.Tensor], device: torch.device) -> None:
    for name, value in given.items():
        if value.device != device:
            raise ValueError(f"{name} is on {value.device} and q is on {device}; they must be on one device")


def check_indices(indices: torch.Tensor, num_keys: int) -> None:
    """Raise ValueError naming the first index of a CPU selection beyond the keys."""
    if indices.device.type != "cpu":
        return
    bad = (indices >= num_keys).nonzero()
    if bad.numel():
        row, place = (int(each) for each in bad[0])
        raise ValueError(
            f"indices[{row}, {place}] is {int(indices[row, place])}; allowed: below the {num_keys} keys, "
            "or negative where a place is unused"
        )


def check_plan(plan: object, Hq: int, device: torch.device) -> AttentionPlan:
    if plan is None:
        return AttentionPlan.default(Hq, device)
    if not isinstance(plan, AttentionPlan):
        raise TypeError(f"plan must be an AttentionPlan or None, got {type(plan).__name__}")
    return plan


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

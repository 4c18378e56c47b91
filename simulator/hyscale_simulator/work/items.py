"""The two things a rank does: run a kernel, or communicate."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hyscale_simulator.kernels import Kernel, kernel

__all__ = [
    "Collective",
    "Communicate",
    "Compute",
    "GroupName",
    "Item",
    "Phase",
    "accumulate",
    "backward_linear",
    "linear",
]

Phase = Literal["forward", "recompute", "backward"]
GroupName = Literal["tensor", "context", "expert", "data", "expert_data", "pipeline", "host"]
Collective = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "dispatch",
    "combine",
    "point_to_point",
    "host",
]


@dataclass(frozen=True)
class Compute:
    """``count`` calls of a kernel, one after another.

    kind: the bar of the breakdown it belongs to.
    call: on the rank that takes longest; mean: averaged over the ranks, where they differ.
    weights: whether it belongs to the weight-gradient half of a split backward pass.
    """

    name: str
    kind: str
    call: Kernel
    count: int = 1
    mean: Kernel | None = None
    weights: bool = False


@dataclass(frozen=True)
class Communicate:
    """One collective of this rank.

    num_bytes: the whole (gathered, reduced or held by each rank); for ``dispatch`` and ``combine`` bytes a
    token, with ``tokens``; for ``host`` bytes moved over the host link.
    until: name of the next kernel that needs it; "" for the very next one; "end" for none of this block's.
    start: "here", after the kernels before it, or "block", as soon as the block starts (prefetched).
    """

    name: str
    kind: str
    collective: Collective
    group: GroupName
    num_bytes: float
    tokens: int = 0
    until: str = ""
    start: Literal["here", "block"] = "here"


Item = Compute | Communicate


def linear(name: str, kind: str, m: int, n: int, k: int, dtype: str, *, weights: bool = False) -> list[Item]:
    """y [m, n] = x [m, k] W: with fp8, x is quantised first (and kept transposed for the weight gradient)."""
    items: list[Item] = []
    if dtype == "fp8":
        items.append(
            Compute(f"{name}.quantise", "elementwise", kernel("cast_transpose", "bf16", rows=m, width=k))
        )
    items.append(Compute(name, kind, kernel("gemm", dtype, m=m, n=n, k=k), weights=weights))
    return items


def backward_linear(
    name: str, kind: str, m: int, n: int, k: int, dtype: str, *, input_gradient: bool = True
) -> tuple[list[Item], list[Item]]:
    """(dx [m, k] = dy W^T, dW [k, n] = x^T dy), for overlap to be placed between them."""
    first: list[Item] = []
    if dtype == "fp8":
        first.append(
            Compute(f"{name}.quantise", "elementwise", kernel("cast_transpose", "bf16", rows=m, width=n))
        )
    if input_gradient:
        first += [Compute(f"{name}.dgrad", kind, kernel("gemm", dtype, m=m, n=k, k=n))]
    # The product may be computed transposed: the larger side counts as rows.
    product = kernel("gemm", dtype, m=max(n, k), n=min(n, k), k=m)
    second: list[Item] = [
        Compute(f"{name}.wgrad", kind, product, weights=True),
        accumulate(f"{name}.wgrad", kind, n, k),
    ]
    return first, second


def accumulate(name: str, kind: str, n: int, k: int) -> Compute:
    """Adding a weight gradient [n, k] to the fp32 sum in the product's epilogue: traffic it cannot hide."""
    call = kernel("accumulate", "fp32", rows=n, width=k)
    return Compute(f"{name}.accumulate", kind, call, weights=True)


def stream(name: str, op: str, rows: int, width: int, kind: str = "elementwise") -> Compute:
    """A streaming kernel over [rows, width]."""
    return Compute(name, kind, kernel(op, "bf16", rows=rows, width=width))


def in_phase(items: Iterable[Item], phase: Phase) -> list[Item]:
    """The same items, their kind marked by the pass they run in: ``recompute/attention``."""
    return [replace(item, kind=f"{phase}/{item.kind}") for item in items]

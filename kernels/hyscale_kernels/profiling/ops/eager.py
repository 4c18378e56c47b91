"""What hyscale_kernels.layer runs as a chain of PyTorch's operators, where a framework with fused kernels has
one (elementwise.py). Costs are those of the one: how far a chain is from its floor is what it loses.

Shapes: ``rows`` and ``width`` elements of each, or ``top_k`` selected keys.
"""

import torch
from torch.nn import functional

from ...baselines.rivals import ascending
from ...layer.rotary import rotate_first
from ...quantize import quantize
from .. import fused
from ..op import Cost, Draw, Op, Shape, Work, backward, grid
from .elementwise import Builder, stream

FAMILY = "eager"
ROWS = (16384, 4096)
HEAD = 128  # elements of an index query's head, the first fused.ROTARY of which rotate
KEYS = 65536  # that a selection is drawn from


def index_order() -> Op:
    def build(inputs: Draw, shape: Shape) -> Work:
        rows, top_k = shape["rows"], shape["top_k"]
        shuffle = inputs.uniform(rows, top_k).argsort(dim=1)
        chosen = inputs.selection(rows, KEYS, top_k).gather(1, shuffle)
        return Work(lambda: ascending(chosen))

    def cost(shape: Shape) -> Cost:
        """Each index read and written once; a merge sort compares it once for each doubling of the row."""
        indices = float(shape["rows"]) * shape["top_k"]
        return Cost(lane_ops=indices * (shape["top_k"] - 1).bit_length(), bytes=8.0 * indices)

    return Op(
        name="index_order",
        implementation="torch",
        dtype="fp32",
        family=FAMILY,
        cost=cost,
        build=build,
        shapes={"glm-5.1": grid(rows=ROWS, top_k=2048)},
        tiny={"rows": 4, "top_k": 8},
        value=8.0,
        efficiency=0.05,
    )


def quantise_rows(inputs: Draw, rows: int, width: int) -> Work:
    x = inputs.normal(rows, width // HEAD, HEAD)
    return Work(lambda: quantize(x))


def rope(back: bool) -> Builder:
    """``width`` elements rotate, in heads of which as many again do not."""

    def build(inputs: Draw, rows: int, width: int) -> Work:
        x = inputs.normal(rows, width // fused.ROTARY, HEAD)
        angle = inputs.normal(rows, fused.ROTARY // 2, dtype="fp32")
        cos, sin = angle.cos(), angle.sin()
        if not back:
            return Work(lambda: rotate_first(x, cos, sin))
        x.requires_grad_()
        return backward(rotate_first(x, cos, sin), (x,), inputs.normal(*x.shape))

    return build


def swiglu(back: bool) -> Builder:
    def build(inputs: Draw, rows: int, width: int) -> Work:
        gate, up = inputs.normal(rows, width), inputs.normal(rows, width)
        if not back:
            return Work(lambda: functional.silu(gate) * up)
        gate.requires_grad_()
        up.requires_grad_()
        return backward(functional.silu(gate) * up, (gate, up), inputs.normal(rows, width))

    return build


def cast(inputs: Draw, rows: int, width: int) -> Work:
    x = inputs.normal(rows, width, dtype="fp32")
    return Work(lambda: x.to(torch.bfloat16))


def chain(
    name: str,
    bytes_per_element: float,
    build: Builder,
    width: int,
    *,
    efficiency: float,
    dtype: str = "bf16",
    lane_ops: float = 4.0,
) -> Op:
    """A chain over [rows, width]; ``bytes_per_element`` of its operands and results alone."""
    return stream(
        name, "torch", bytes_per_element, build, ("glm-5.1", grid(rows=ROWS, width=width)), dtype=dtype,
        lane_ops=lane_ops, efficiency=efficiency, family=FAMILY, value=3.0,
    )  # fmt: skip


OPS = (
    index_order(),
    chain("quantise_rows", 3 + 4 / HEAD, quantise_rows, 4096, efficiency=0.03),
    chain("rope_eager", 4 * HEAD / fused.ROTARY, rope(False), 2048, efficiency=0.15),
    chain("rope_eager_bwd", 4 * HEAD / fused.ROTARY, rope(True), 2048, efficiency=0.1),
    chain("swiglu_eager", 6, swiglu(False), 12288, lane_ops=12, efficiency=0.5),
    chain("swiglu_eager_bwd", 10, swiglu(True), 12288, lane_ops=16, efficiency=0.45),
    chain("cast", 6, cast, 6144, dtype="fp32", lane_ops=1, efficiency=0.8),
)  # fmt: skip

"""Streaming kernels over [rows, width] elements: norms, activations, rotary positions, both ends.

PyTorch's own kernel where it has a single one, else the fused kernel of fused.py. Shapes are GLM-5.1's; the
dense suite has those of the dense models (LayerNorm, GeLU, dropout, unfused softmax).
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from .. import fused
from ..op import Draw, Op, Shape, Work, backward, chained, grid, streaming

FAMILY = "elementwise"
HIDDEN, VOCABULARY = 6144, 154880
TOKENS = (16384, 4096, 8192)
P = 0.1

Builder = Callable[[Draw, int, int], Work]


def norm(kind: str, back: bool) -> Builder:
    """RMSNorm or LayerNorm, or its backward pass with the gradient of the weight."""

    def build(inputs: Draw, rows: int, width: int) -> Work:
        x, weight = inputs.normal(rows, width), inputs.normal(width)
        bias = inputs.normal(width)

        def forward() -> torch.Tensor:
            if kind == "rmsnorm":
                return functional.rms_norm(x, (width,), weight, 1e-6)
            return functional.layer_norm(x, (width,), weight, bias, 1e-5)

        if not back:
            return Work(forward)
        leaves = (x, weight) if kind == "rmsnorm" else (x, weight, bias)
        for leaf in leaves:
            leaf.requires_grad_()
        return backward(forward(), leaves, inputs.normal(rows, width))

    return build


def pointwise(function: Callable[[torch.Tensor], torch.Tensor], back: bool = False) -> Builder:
    """A function of PyTorch's, or its backward pass."""

    def build(inputs: Draw, rows: int, width: int) -> Work:
        x = inputs.normal(rows, width)
        if not back:
            return Work(lambda: function(x))
        x.requires_grad_()
        return backward(function(x), (x,), inputs.normal(rows, width))

    return build


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 1)


def dropout(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, P)


def rope(inputs: Draw, rows: int, width: int) -> Work:
    x, angle = inputs.normal(rows, width), inputs.normal(rows, fused.ROTARY // 2, dtype="fp32")
    cos, sin = angle.cos(), angle.sin()
    return Work(lambda: fused.rope(x, cos, sin))


def swiglu(inputs: Draw, rows: int, width: int) -> Work:
    x = inputs.normal(rows, 2 * width)
    return Work(lambda: fused.swiglu(x))


def swiglu_backward(inputs: Draw, rows: int, width: int) -> Work:
    x, dy = inputs.normal(rows, 2 * width), inputs.normal(rows, width)
    return Work(lambda: fused.swiglu_backward(x, dy))


def add(inputs: Draw, rows: int, width: int) -> Work:
    x, y = inputs.normal(rows, width), inputs.normal(rows, width)
    return Work(lambda: x + y)


def dropout_add(inputs: Draw, rows: int, width: int) -> Work:
    x, residual = inputs.normal(rows, width), inputs.normal(rows, width)
    return Work(lambda: fused.dropout_add(x, residual, P, 7))


def dropout_add_backward(inputs: Draw, rows: int, width: int) -> Work:
    dy = inputs.normal(rows, width)
    kept = (inputs.uniform(rows, width) >= P).to(torch.int8)
    return Work(lambda: fused.dropout_backward(dy, kept, P))


def quantise(inputs: Draw, rows: int, width: int) -> Work:
    x = inputs.normal(rows, width)
    return Work(lambda: fused.quantise(x))


def permute(inputs: Draw, rows: int, width: int) -> Work:
    """Rows in another order: tokens to their experts and back."""
    x, order = inputs.normal(rows, width), inputs.permutation(rows)
    return Work(lambda: x.index_select(0, order))


def vocabulary(inputs: Draw) -> int:
    return VOCABULARY if inputs.device.type == "cuda" else 64


def embedding(inputs: Draw, rows: int, width: int) -> Work:
    table, tokens = inputs.normal(vocabulary(inputs), width), inputs.integers(0, vocabulary(inputs), rows)
    return Work(lambda: functional.embedding(tokens, table))


def embedding_backward(inputs: Draw, rows: int, width: int) -> Work:
    """Gradients added to those of the table, as frameworks that accumulate do: no table is filled with 0."""
    table, tokens = inputs.normal(vocabulary(inputs), width), inputs.integers(0, vocabulary(inputs), rows)
    dy = inputs.normal(rows, width)
    return Work(lambda: table.index_add_(0, tokens, dy))


def cross_entropy(inputs: Draw, rows: int, width: int) -> Work:
    logits, target = inputs.normal(rows, width, scale=3.0), inputs.integers(0, width, rows)
    return Work(lambda: fused.cross_entropy(logits, target))


def cross_entropy_unfused(inputs: Draw, rows: int, width: int) -> Work:
    """PyTorch's, in float32, with its backward pass."""
    logits = inputs.normal(rows, width, scale=3.0).requires_grad_()
    target = inputs.integers(0, width, rows)

    def call() -> object:
        return torch.autograd.grad(functional.cross_entropy(logits.float(), target), logits)

    return Work(call)


def fill(inputs: Draw, rows: int, width: int) -> Work:
    table = inputs.empty(rows, width, dtype="fp32")
    return Work(lambda: table.fill_(float("-inf")))


def index_unfused(inputs: Draw, rows: int, width: int) -> Work:
    """What PyTorch does with fp32 products of every head: relu, times the weight, sum over 32 heads."""
    heads = min(rows, 32)
    products = inputs.normal(rows // heads, heads, width, dtype="fp32")
    # In place: values must neither die out nor grow.
    weight = inputs.uniform(rows // heads, heads, 1) * 0.2 + 0.9
    return Work(lambda: products.relu_().mul_(weight).sum(dim=1))


def stream(
    name: str,
    implementation: str,
    bytes_per_element: float,
    build: Builder,
    *suites: tuple[str, list[Shape]],
    lane_ops: float = 4.0,
    dtype: str = "bf16",
    tiny: tuple[int, int] = (8, 128),
    value: float = 1.0,
    efficiency: float = 0.7,
    family: str = FAMILY,
) -> Op:
    """An op over [rows, width] elements that moves ``bytes_per_element`` at least."""
    triton = implementation == "triton"
    return Op(
        name=name,
        implementation=implementation,
        dtype=dtype,
        family=family,
        cost=streaming(bytes_per_element, lane_ops),
        build=lambda inputs, shape: build(inputs, shape["rows"], shape["width"]),
        shapes=dict(suites),
        tiny={"rows": tiny[0], "width": tiny[1]},
        value=value,
        efficiency=efficiency,
        compile_s=0.5 if triton else 0.1,
        compiles=f"{name} {implementation}",
        triton=triton,
    )


def glm(*widths: int, rows: tuple[int, ...] = TOKENS, quick: bool = True) -> list[tuple[str, list[Shape]]]:
    """GLM-5.1's shapes; the quick suite takes one."""
    every = [shape for width in widths for shape in grid(rows=rows, width=width)]
    return [("glm-5.1", chained(every)), ("quick", grid(rows=4096, width=widths[0]) if quick else [])]


def dense(*widths: int, rows: tuple[int, ...] = (2048, 8192)) -> tuple[str, list[Shape]]:
    return ("dense", [shape for width in widths for shape in grid(rows=rows, width=width)])


EXPERT_ROWS = (131072, 32768)


def swiglu_shapes() -> list[tuple[str, list[Shape]]]:
    """Of the dense feed-forward, the shared expert, and the routed experts."""
    every, quick = glm(12288, 2048)
    return [(every[0], chained(every[1], grid(rows=EXPERT_ROWS, width=2048))), quick]


LOGITS = (4096, 8192, 16384)
DENSE = (4096, 8192, 12288, 16384, 20480, 25600)  # hidden sizes of the validation cases
ATTENTION_ROWS = (16 * 2048, 96 * 2048)  # batch * heads * queries of an unfused softmax

OPS = (
    stream("rmsnorm", "torch", 4, norm("rmsnorm", False), *glm(HIDDEN, 2560), dense(4096, 8192, 16384)),
    stream("rmsnorm_bwd", "torch", 6, norm("rmsnorm", True), *glm(HIDDEN, 2560), dense(4096, 8192, 16384)),
    stream("layernorm", "torch", 4, norm("layernorm", False), *glm(128, quick=False), dense(*DENSE)),
    stream("layernorm_bwd", "torch", 6, norm("layernorm", True), *glm(128, quick=False), dense(*DENSE)),
    stream("rope", "triton", 4, rope, *glm(4096, 4224, 2048)),
    stream("swiglu", "triton", 6, swiglu, *swiglu_shapes(), lane_ops=12),
    stream("swiglu_bwd", "triton", 10, swiglu_backward, *swiglu_shapes(), lane_ops=16),
    stream("add", "torch", 6, add, *glm(HIDDEN), dense(4096, 12288)),
    stream("quantise", "triton", 4, quantise, *glm(HIDDEN, 16384, 2048)),
    stream("permute", "torch", 4, permute, *glm(HIDDEN, rows=EXPERT_ROWS)),
    stream("embedding", "torch", 4, embedding, *glm(HIDDEN)),
    stream("embedding_bwd", "torch", 6, embedding_backward, *glm(HIDDEN)),
    stream("cross_entropy", "triton", 6, cross_entropy, *glm(VOCABULARY, rows=LOGITS), lane_ops=14),
    stream(
        "cross_entropy_unfused", "torch", 24, cross_entropy_unfused, *glm(VOCABULARY, rows=(4096,)),
        lane_ops=14,
    ),
    stream("fill", "torch", 4, fill, *glm(524288, rows=(256, 4096), quick=False), dtype="fp32", lane_ops=1),
    stream(
        "index_unfused", "torch", 20, index_unfused, *glm(65536, rows=(8192, 32768), quick=False),
        dtype="fp32", tiny=(64, 32),
    ),
    stream("dropout_add", "triton", 7, dropout_add, dense(*DENSE)),
    stream("dropout_add_bwd", "triton", 5, dropout_add_backward, dense(*DENSE)),
    stream("gelu", "torch", 4, pointwise(functional.gelu), dense(16384, 49152, 81920), lane_ops=16),
    stream("gelu_bwd", "torch", 6, pointwise(functional.gelu, True), dense(16384, 49152, 81920), lane_ops=20),
    stream("softmax", "torch", 4, pointwise(softmax), dense(2048, rows=ATTENTION_ROWS), lane_ops=14),
    stream("softmax_bwd", "torch", 6, pointwise(softmax, True), dense(2048, rows=ATTENTION_ROWS)),
    stream("dropout", "torch", 5, pointwise(dropout), dense(2048, rows=ATTENTION_ROWS)),
    stream("dropout_bwd", "torch", 5, pointwise(dropout, True), dense(2048, rows=ATTENTION_ROWS)),
)  # fmt: skip

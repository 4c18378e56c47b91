"""How an eager framework runs the same work: PyTorch's operators one by one, over float32 parameters.

The items of :mod:`hyscale_simulator.work` describe fused kernels and bf16 weights.  What we measure
(``hyscale_kernels.layer``) has neither.  This file says what it runs instead, and nothing else depends on it:

- a weight is cast to bf16 before its product, in every forward pass and recomputation (that its gradient is
  cast back moves as many bytes as accumulating it would);
- products of a forward pass take ``kernels.product_rows`` rows at a time, those of the backward pass all;
- gate and up are two products; what two products read gets two gradients, which are added;
- rotary positions, SwiGLU, the quantisation of index operands and both ends are chains of operators;
- FlashInfer's rows are put in order, and products per head have [inputs, outputs] weights;
- logits exist for a few rows at a time, and are recomputed.
"""

from dataclasses import replace

from hyscale_simulator.kernels import kernel
from hyscale_simulator.model import Latent
from hyscale_simulator.work.items import Compute, Item, accumulate, stream
from hyscale_simulator.work.rank import Rank

__all__ = [
    "HEAD_ROWS",
    "as_run",
    "bucket_copies",
    "embedding_as_run",
    "head_as_run",
    "head_backward_as_run",
    "update",
]

HEAD_ROWS = 4096
"""Rows whose logits exist at a time (hyscale_kernels.layer.DecoderConfig.head_rows)."""

Shape = dict[str, int]


def as_run(rank: Rank, items: list[Item], *, backward: bool = False) -> list[Item]:
    """The items of one pass of a layer as the scenario's framework runs them."""
    if rank.scenario.kernels.framework == "fused":
        return items
    done: list[Item] = []
    for item in items:
        done += _run(rank, item, dict(item.call.shape), backward) if isinstance(item, Compute) else [item]
    return done


def _run(rank: Rank, item: Compute, shape: Shape, backward: bool) -> list[Item]:
    op, rows, width = item.call.op, shape.get("rows", 0), shape.get("width", 0)
    model = rank.scenario.model_description
    if op == "gemm":
        two = item.name.split(".")[0] == "up" and model.gated
        products = [item] if not two else _gate_and_up(item, shape, model.hidden)
        return _backward(rank, products) if backward else _forward(rank, products)
    if op == "batched_gemm" and item.name.endswith("wgrad"):  # [inputs, outputs], as the weight is kept
        return [_sized(item, m=shape["n"], n=shape["m"])]
    if op == "batched_gemm":
        return [item] if backward else _forward(rank, [item])
    if op == "accumulate" and item.name == "up.wgrad.accumulate" and model.gated:
        half = accumulate(item.name.removesuffix(".accumulate"), item.kind, rows // 2, width)
        return [half, half]
    if op == "rope":
        return [_rope(rank, item, rows, width, backward)]
    if op in ("swiglu", "swiglu_bwd"):
        return [_streamed(item, op.replace("swiglu", "swiglu_eager"), rows, width)]
    if item.name == "select.quantise":
        assert model.indexer is not None
        return [_streamed(item, "quantise_rows", rows, width + model.indexer.head_dim)]
    if item.name == "select.topk" and rank.scenario.selection.selector == "flashinfer":
        order = kernel("index_order", "fp32", "torch", rows=rank.tokens, top_k=shape["top_k"])
        return [item, Compute("select.order", item.kind, order)]
    return [item]


def embedding_as_run(rank: Rank, item: Compute) -> Compute:
    """The lookup (or its gradient) of float32 rows, and their cast."""
    if rank.scenario.kernels.framework == "fused":
        return item
    op = item.call.op.replace("embedding", "embedding_eager")
    return _streamed(item, op, rank.tokens, rank.scenario.model_description.hidden)


def head_as_run(rank: Rank, items: list[Item]) -> list[Item]:
    """Norm, logits and loss, some rows at a time."""
    if rank.scenario.kernels.framework == "fused":
        return items
    done: list[Item] = []
    for item in items:
        assert isinstance(item, Compute)
        done += _in_blocks(item, rank.tokens)
    return done


def head_backward_as_run(rank: Rank, ahead: list[Item], items: list[Item]) -> list[Item]:
    """The forward pass again and its gradients, some rows at a time, which are then joined."""
    if rank.scenario.kernels.framework == "fused":
        return items
    hidden = rank.scenario.model_description.hidden
    return [*head_as_run(rank, [*ahead, *items]), stream("head.join", "join", rank.tokens, hidden, "head")]


def update(rank: Rank, parameters: int) -> list[Item]:
    """Gradients scaled to their largest norm, and the optimizer's step."""
    fused = rank.scenario.kernels.framework == "fused"
    if fused:
        return [Compute("adamw", "optimizer", kernel("adamw", "fp32", rows=parameters, width=1))]
    in_place = kernel("adamw", "fp32", "torch", "in place", rows=parameters, width=1)
    scaled = kernel("scale", "fp32", rows=parameters, width=1)
    return [Compute("gradient clip", "optimizer", scaled), Compute("adamw", "optimizer", in_place)]


def bucket_copies(rank: Rank, parameters: int) -> list[Item]:
    """Gradients copied into buckets before they are reduced, and back."""
    if rank.scenario.kernels.framework == "fused":
        return []
    return [Compute("gradient buckets", "gradient comm", kernel("bucket", "fp32", rows=parameters, width=1))]


def _in_blocks(item: Compute, tokens: int) -> list[Item]:
    """A kernel over all tokens, ``HEAD_ROWS`` of them at a time; those over weights as often."""
    shape = dict(item.call.shape)
    block = min(HEAD_ROWS, tokens)
    count = -(-tokens // block)
    for axis in ("rows", "m", "k"):
        if shape.get(axis) == tokens:
            return [_sized(item, count=count, **{axis: block})]
    return [replace(item, count=count)]


def _forward(rank: Rank, products: list[Compute]) -> list[Item]:
    """Each product after its weight's cast, a block of rows at a time."""
    done: list[Item] = []
    for item in products:
        shape = dict(item.call.shape)
        weight = kernel("cast", "fp32", "torch", rows=shape.get("batch", 1) * shape["n"], width=shape["k"])
        done.append(Compute(f"{item.name}.cast", item.kind, weight))
        block = min(rank.scenario.kernels.product_rows or shape["m"], shape["m"])
        whole, rest = divmod(shape["m"], block)
        done.append(_sized(item, count=whole, m=block))
        if rest:
            done.append(_sized(item, m=rest))
    return done


def _backward(rank: Rank, products: list[Compute]) -> list[Item]:
    """Each product; what two products have read gets a sum of two gradients."""
    done: list[Item] = list(products)
    if products[0].name in ("kv_down.dgrad", "up.dgrad"):
        done.append(
            stream(f"{products[0].name}.add", "add", rank.rows, rank.scenario.model_description.hidden)
        )
    return done


def _gate_and_up(item: Compute, shape: Shape, hidden: int) -> list[Compute]:
    """Two products in place of one with both weights side by side."""
    if item.name.endswith("wgrad"):  # [rows of both weights, hidden], the larger side first
        both = shape["n"] if shape["m"] == hidden else shape["m"]
        half = _sized(item, m=max(both // 2, hidden), n=min(both // 2, hidden))
    else:
        axis = "k" if item.name.endswith("dgrad") else "n"
        half = _sized(item, **{axis: shape[axis] // 2})
    return [half, half]


def _rope(rank: Rank, item: Compute, rows: int, width: int, backward: bool) -> Compute:
    """Only the rotary part of an index query or key is rotated, and autograd takes it apart again.

    Attention's queries are rotated where they are absorbed, by a function with a gradient of its own.
    """
    model = rank.scenario.model_description
    if not item.name.startswith("index."):
        return _streamed(item, "rope_eager", rows, width)
    assert model.indexer is not None
    assert isinstance(model.attention, Latent)
    rotated = width * min(model.attention.rope_dim, model.indexer.head_dim) // model.indexer.head_dim
    return _streamed(item, "rope_eager_bwd" if backward else "rope_eager", rows, rotated)


def _sized(item: Compute, count: int = 1, **sizes: int) -> Compute:
    call = item.call
    shape = {**dict(call.shape), **sizes}
    return replace(
        item, call=kernel(call.op, call.dtype, call.implementation, call.regime, **shape), count=count
    )


def _streamed(item: Compute, op: str, rows: int, width: int) -> Compute:
    return replace(item, call=kernel(op, "bf16", "torch", rows=rows, width=width))

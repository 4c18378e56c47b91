"""Selection replay and the indexer's training: the packed record, scores at the selected keys, their loss.

Shapes: ``rows`` queries with ``top_k`` selected keys each, of ``keys``; ``heads`` and ``dim`` of the indexer.
Selected scores and their gradients do not name ``keys``: 65,536 for regime "", which fit the second-level
cache, or the regime says how many.
"""

import torch

from hyscale_ref.codec import RowLayout

from ...indexer import IndexerPlan, indexer_loss
from ...indexer import selected_scores as scores_at
from ...indexer.api import _backward
from ...replay.decode import launch_decode
from ...replay.encode import launch_encode
from ...replay.tiling import Tiling
from ..op import BYTES, Cost, Draw, Op, Shape, Work, chained, grid

FAMILY = "replay"
NEAR, FAR, BETWEEN = 65536, 1048576, 262144
SCORED = {"heads": 32, "dim": 128}


def codec(name: str) -> Op:
    """Packing a selection to its record, or unpacking it."""

    def build(inputs: Draw, shape: Shape) -> Work:
        rows, keys, top_k = shape["rows"], shape["keys"], shape["top_k"]
        indices = inputs.selection(rows, keys, top_k)
        count = torch.full((rows,), top_k, dtype=torch.int32, device=inputs.device)
        start, end = torch.zeros_like(count), torch.full_like(count, keys)
        tiling = Tiling.default(inputs.device)
        if name == "record_encode":
            return Work(lambda: launch_encode(indices, count, start, keys, tiling))
        words = launch_encode(indices, count, start, keys, tiling)
        return Work(lambda: launch_decode(words, start, end, None, keys, top_k, tiling))

    def cost(shape: Shape) -> Cost:
        indices = float(shape["rows"]) * shape["top_k"]
        packed = 4.0 * shape["rows"] * RowLayout(shape["keys"], shape["top_k"]).words
        return Cost(lane_ops=20.0 * indices, bytes=4.0 * indices + packed)

    return Op(
        name=name,
        implementation="hytopk",
        dtype="fp32",
        family=FAMILY,
        cost=cost,
        build=build,
        shapes={
            "quick": grid(rows=(8192,), keys=(FAR, NEAR), top_k=2048),
            "glm-5.1": chained(
                grid(rows=(16384, 8192, 2048), keys=(FAR, NEAR, 262144), top_k=2048),
                grid(rows=8192, keys=FAR, top_k=(512, 1024, 4096)),
            ),
        },
        tiny={"rows": 20, "keys": 256, "top_k": 8},
        value=1.5,
        efficiency=0.11,
        compile_s=1.0,
        recompiles=("keys", "top_k"),
        triton=True,
    )


def operands(
    inputs: Draw, shape: Shape, dtype: str, keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q, k, w, indices and the key scales of fp8."""
    rows, heads, dim, top_k = shape["rows"], shape["heads"], shape["dim"], shape["top_k"]
    keys = keys if inputs.device.type == "cuda" else 4 * top_k
    scale = inputs.uniform(keys) + 0.5 if dtype == "fp8" else None
    return (
        inputs.normal(rows, heads, dim, dtype=dtype),
        inputs.normal(keys, dim, dtype=dtype),
        inputs.normal(rows, heads, dtype="fp32"),
        inputs.selection(rows, keys, top_k),
        scale,
    )


def at_selected(name: str, dtype: str, keys: int = NEAR, fixed: bool = False) -> Op:
    """Scores at the selected keys, their loss, or their gradients (atomic, or ``fixed`` point)."""

    def build(inputs: Draw, shape: Shape) -> Work:
        q, k, w, indices, scale = operands(inputs, shape, dtype, keys)
        if name == "selected_scores":
            return Work(lambda: scores_at(q, k, w, indices, k_scale=scale))
        target = inputs.uniform(*indices.shape)
        if name == "indexer_loss":
            target /= target.sum(dim=1, keepdim=True)
            return Work(lambda: indexer_loss(q, k, w, indices, target, k_scale=scale))
        sizes = IndexerPlan.default(k.shape[0], q.shape[1], q.shape[2], inputs.device).as_ints()
        gradient = target - 0.5
        return Work(lambda: _backward(gradient, q, k, w, indices, scale, True, fixed, sizes))

    def cost(shape: Shape) -> Cost:
        pairs = float(shape["rows"]) * shape["top_k"]
        heads, dim, size = shape["heads"], shape["dim"], BYTES[dtype]
        distinct = min(pairs, float(keys))  # keys that many rows want are read once
        back = name == "selected_scores_bwd"
        traffic = size * dim * (distinct + shape["rows"] * heads) + (12.0 if "loss" in name else 8.0) * pairs
        written = (size * shape["rows"] * heads + 4.0 * distinct) * dim if back else 0.0
        return Cost(
            2.0 * heads * dim * pairs * (3 if back else 1),
            3.0 * heads * pairs * (2 if back else 1),
            traffic + written,
        )

    regimes = [*(["fixed point"] if fixed else []), *([f"{keys} keys"] if keys != NEAR else [])]
    usual = not regimes
    every = chained(
        grid(rows=(16384, 8192, 4096, 2048), top_k=2048, **SCORED),
        grid(rows=8192, top_k=(512, 1024, 4240, 4096), **SCORED),
    )
    return Op(
        name=name,
        implementation="hytopk",
        dtype=dtype,
        regime=", ".join(regimes),
        family=FAMILY,
        cost=cost,
        build=build,
        shapes={
            "quick": grid(rows=8192, top_k=2048, **SCORED) if usual else [],
            "glm-5.1": every if usual else every[1:2] if keys == BETWEEN else every[:2],
        },
        tiny={"rows": 4, "top_k": 8, "heads": 2, "dim": 16},
        value=2.0 if usual else 0.5,
        efficiency=0.16 if name != "selected_scores_bwd" else 0.11 if dtype == "bf16" else 0.045,
        compile_s=0.8,
        compiles=f"{name} {dtype}",
        triton=True,
    )


NAMES = ("selected_scores", "indexer_loss", "selected_scores_bwd")

OPS = (
    codec("record_encode"),
    codec("record_decode"),
    *(at_selected(name, dtype) for dtype in ("bf16", "fp8") for name in NAMES),
    *(at_selected(name, dtype, keys=FAR) for dtype in ("bf16", "fp8") for name in NAMES),
    *(at_selected(name, "fp8", keys=BETWEEN) for name in NAMES[1:]),
    at_selected("selected_scores_bwd", "bf16", fixed=True),
)

"""Sparse latent attention over selected keys, forward and backward, and the indexer's teacher made from it.

Shapes: ``rows`` queries, ``heads`` of them, ``qk_dim`` and ``v_dim`` of the latent key, ``top_k`` selected.
The selection is spread over 65,536 keys for regime "", or over as many as the regime says.
"""

import torch

from ...indexer import indexer_loss
from ..op import BYTES, Cost, Draw, Op, Shape, Work, backward, chained, grid

FAMILY = "attention"
NEAR, FAR, BETWEEN = 65536, 1048576, 262144
GLM = {"heads": 64, "qk_dim": 576, "v_dim": 512}
INDEX_HEADS, INDEX_DIM = 32, 128  # of the indexer that is taught
NEEDS = ("hyscale_kernels.attention",)


def cost(shape: Shape, keys: int, back: bool) -> Cost:
    """QK and PV; backward repeats QK and adds dP, dV, dQ and dK. A latent key is read once, however many
    rows want it. An exponential and about six more instructions a score."""
    rows, heads, top_k = shape["rows"], shape["heads"], shape["top_k"]
    qk, v, size = shape["qk_dim"], shape["v_dim"], BYTES["bf16"]
    pairs = float(rows) * heads * top_k
    distinct = min(float(rows) * top_k, float(keys))
    traffic = size * (distinct * qk + rows * heads * (qk + v)) + 4.0 * rows * top_k
    if back:
        traffic += size * rows * heads * (qk + v) + 4.0 * distinct * qk
    flops = 2.0 * (3 * qk + 2 * v) * pairs if back else 2.0 * (qk + v) * pairs
    return Cost(flops, 14.0 * pairs, traffic)


def inputs_of(
    inputs: Draw, shape: Shape, keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """q, latent, indices, scale."""
    keys = keys if inputs.device.type == "cuda" else 4 * shape["top_k"]
    q = inputs.normal(shape["rows"], shape["heads"], shape["qk_dim"])
    latent = inputs.normal(keys, shape["qk_dim"])
    return q, latent, inputs.selection(shape["rows"], keys, shape["top_k"]), float(shape["qk_dim"]) ** -0.5


def core(back: bool, keys: int = NEAR) -> Op:
    def build(inputs: Draw, shape: Shape) -> Work:
        from ...attention import sparse_mla

        q, latent, indices, scale = inputs_of(inputs, shape, keys)
        value_dim = shape["v_dim"]
        if not back:
            return Work(lambda: sparse_mla(q, latent, indices, scale=scale, value_dim=value_dim))
        q.requires_grad_()
        latent.requires_grad_()
        out = sparse_mla(q, latent, indices, scale=scale, value_dim=value_dim).out
        return backward(out, (q, latent), inputs.normal(*out.shape))

    usual = keys == NEAR
    every = chained(
        grid(rows=(16384, 8192, 4096, 2048, 1024, 512), **GLM, top_k=2048),
        grid(rows=8192, heads=(16, 128, 8, 32), qk_dim=576, v_dim=512, top_k=2048),
        grid(rows=8192, **GLM, top_k=(1024, 512, 4096)),
        grid(rows=(8193, 4160), **GLM, top_k=2048),
    )
    return Op(
        name="sparse_attention_bwd" if back else "sparse_attention",
        implementation="hyscale",
        dtype="bf16",
        regime="" if usual else f"{keys} keys",
        family=FAMILY,
        cost=lambda shape: cost(shape, keys, back),
        build=build,
        shapes={
            "quick": grid(rows=(4096, 1024), **GLM, top_k=2048) if usual else [],
            "glm-5.1": every if usual else every[:3] if keys == FAR else every[1:2],
        },
        tiny={"rows": 3, "heads": 2, "qk_dim": 24, "v_dim": 16, "top_k": 8},
        value=5.0 if usual else 2.0,
        efficiency=0.21 if back else 0.34,
        compile_s=2.0,
        compiles=f"sparse_mla {back}",
        recompiles=("heads",),
        needs=NEEDS,
        triton=True,
    )


def teacher(whole: bool, keys: int = NEAR) -> Op:
    """The attention's mass over the selected keys; the whole loss divides it by its sum and compares."""

    def build(inputs: Draw, shape: Shape) -> Work:
        from ...attention import attention_mass, sparse_mla

        q, latent, indices, scale = inputs_of(inputs, shape, keys)
        value_dim = min(512, shape["qk_dim"] - shape["qk_dim"] // 9)
        seen = sparse_mla(q, latent, indices, scale=scale, value_dim=value_dim).log_sum_exp
        if not whole:
            return Work(lambda: attention_mass(q, latent, indices, seen, scale=scale))
        index_heads, index_dim = (INDEX_HEADS, INDEX_DIM) if inputs.device.type == "cuda" else (2, 16)
        index_q = inputs.normal(shape["rows"], index_heads, index_dim)
        index_k = inputs.normal(latent.shape[0], index_dim)
        index_w = inputs.normal(shape["rows"], index_heads, dtype="fp32")

        def loss() -> torch.Tensor:
            mass = attention_mass(q, latent, indices, seen, scale=scale)
            return indexer_loss(index_q, index_k, index_w, indices, mass / mass.sum(dim=1, keepdim=True))

        return Work(loss)

    def least(shape: Shape) -> Cost:
        pairs = float(shape["rows"]) * shape["top_k"]
        distinct = min(pairs, float(keys))
        traffic = BYTES["bf16"] * shape["qk_dim"] * (distinct + shape["rows"] * shape["heads"]) + 12.0 * pairs
        flops = 2.0 * shape["heads"] * shape["qk_dim"] * pairs
        if whole:
            flops += 2.0 * INDEX_HEADS * INDEX_DIM * pairs
        return Cost(flops, 10.0 * shape["heads"] * pairs, traffic)

    usual = keys == NEAR
    shapes = grid(rows=(16384, 8192, 4096, 2048), heads=64, qk_dim=576, top_k=2048)
    return Op(
        name="index_loss" if whole else "attention_mass",
        implementation="hyscale",
        dtype="bf16",
        regime="" if usual else f"{keys} keys",
        family=FAMILY,
        cost=least,
        build=build,
        shapes={
            "quick": shapes[2:3] if usual else [],
            "glm-5.1": shapes if usual else shapes[:2] if keys == FAR else shapes[1:2],
        },
        tiny={"rows": 3, "heads": 2, "qk_dim": 24, "top_k": 8},
        value=3.0 if usual else 1.0,
        efficiency=0.26,
        compile_s=2.0,
        compiles="attention_mass",
        needs=NEEDS,
        triton=True,
    )


OPS = (
    *(core(back, keys) for keys in (NEAR, FAR, BETWEEN) for back in (False, True)),
    teacher(whole=True), *(teacher(whole=False, keys=keys) for keys in (NEAR, FAR, BETWEEN)),
)  # fmt: skip

"""The model's linear layers: forward, dgrad and wgrad, bf16 and fp8; and products per head.

Regime "sustained" is one product for a second without a pause, as a step runs them: what the card's power
limit leaves of it. All others are short bursts.

Shapes are those of the simulator: an [m, k] by [k, n] product with the larger side of a weight gradient as m.
The layouts are the ones training uses: y = x W^T, dx = dy W, dW = dy^T x with W [n, k]; fp8 tensor cores of
Hopper take only the first, so there every product is one of transposed copies.
"""

from dataclasses import replace
from itertools import chain

import torch

from ..machine import SUSTAINED_S
from ..op import BYTES, Cost, Draw, Op, Shape, Work, chained, grid

FAMILY = "linears"

# GLM-5.1 (n, k): what one token goes through, the busiest first.
LINEARS = (
    (6144, 16384),  # attention output
    (16384, 2048),  # q up
    (24576, 6144),  # dense feed-forward up and gate
    (6144, 12288),  # dense feed-forward down
    (12288, 6144),  # dense feed-forward up or gate, where they are two products
    (2048, 6144),  # q down
    (4096, 6144),  # shared expert up and gate
    (6144, 2048),  # shared expert down
    (4096, 2048),  # index queries
    (576, 6144),  # latent keys
    (256, 6144),  # router
    (128, 6144),  # index key
    (32, 6144),  # index weights
)
HEAD = (154880, 6144)
TOKENS = (16384, 4096, 8192, 2048)
WHOLE = 65536  # of a rank: a backward pass takes them all at once
WHOLE_LAYERS = ((6144, 16384), (16384, 2048), (12288, 6144), (6144, 12288), (2048, 6144), (576, 6144))
WHOLE_WEIGHTS = ((4096, 2048), (128, 6144), (32, 6144))  # the indexer's: its inputs need no gradient
ODD = (4097, 4352, 4353, 8193)  # where the public table shows its steps


def product(shape: Shape, dtype: str) -> Cost:
    m, n, k = shape["m"], shape["n"], shape["k"]
    return Cost(2.0 * m * n * k, bytes=float(BYTES[dtype] * (m * k + k * n) + 2 * m * n))


def mnk(m: int, n: int, k: int) -> dict[str, int]:
    return {"m": m, "n": n, "k": k}


def passes(tokens: int, n: int, k: int) -> dict[str, dict[str, int]]:
    """The three products of one layer."""
    return {
        "forward": mnk(tokens, n, k),
        "dgrad": mnk(tokens, k, n),
        "wgrad": mnk(max(n, k), min(n, k), tokens),
    }


def layer_shapes(way: str) -> list[Shape]:
    first, *others = ([passes(tokens, *layer)[way] for layer in LINEARS] for tokens in TOKENS)
    whole = {"forward": (), "dgrad": WHOLE_LAYERS, "wgrad": WHOLE_LAYERS + WHOLE_WEIGHTS}[way]
    every: list[Shape] = [*first, *(passes(WHOLE, *layer)[way] for layer in whole), *chain(*others)]
    every.insert(1, passes(4096, *HEAD)[way])
    every.append(passes(8192, *HEAD)[way])
    if way == "forward":
        every += [mnk(m, n, k) for m in ODD for n, k in ((6144, 2048), (4096, 6144), (2048, 6144))]
    return every


def taken(ways: tuple[str, ...]) -> set[tuple[tuple[str, int], ...]]:
    """Shapes that other passes already stand for: a recorded product does not name its pass."""
    return {tuple(sorted(shape.items())) for way in ways for shape in layer_shapes(way)}


def bf16(way: str, earlier: tuple[str, ...] = ()) -> Op:
    """One pass of a linear layer by cuBLAS."""

    def build(inputs: Draw, shape: Shape) -> Work:
        m, n, k = shape["m"], shape["n"], shape["k"]
        if way == "forward":
            x, weight = inputs.normal(m, k), inputs.normal(n, k, scale=k**-0.5)
            return Work(lambda: x @ weight.T)
        if way == "dgrad":
            dy, weight = inputs.normal(m, k), inputs.normal(k, n, scale=k**-0.5)
            return Work(lambda: dy @ weight)
        dy, x = inputs.normal(k, m), inputs.normal(k, n)
        return Work(lambda: dy.T @ x)

    known = taken(earlier)
    shapes = [shape for shape in chained(layer_shapes(way)) if tuple(sorted(shape.items())) not in known]
    quick = [passes(4096, *layer)[way] for layer in LINEARS[:9]]
    return Op(
        name="gemm",
        implementation="cublas",
        dtype="bf16",
        family=FAMILY,
        cost=lambda shape: product(shape, "bf16"),
        build=build,
        shapes={
            "quick": [shape for shape in chained(quick) if tuple(sorted(shape.items())) not in known],
            "glm-5.1": shapes,
        },
        tiny=mnk(16, 32, 48),
        value=8.0,
        efficiency=0.95,
        compile_s=0.0,
    )


def fp8(blocks: bool) -> Op:
    """An fp8 product by cuBLAS: scales of 1 x 128 and 128 x 128 blocks (regime ""), or one a tensor."""

    def build(inputs: Draw, shape: Shape) -> Work:
        m, n, k = shape["m"], shape["n"], shape["k"]
        x, weight = inputs.normal(m, k, dtype="fp8"), inputs.normal(n, k, dtype="fp8")
        if not blocks:
            x_scale, w_scale = (torch.full((), size, device=inputs.device) for size in (0.5, k**-0.5))
        else:
            if k % 512 or n % 128:
                raise ValueError(f"n = {n}, k = {k}: block scales take multiples of 128 and 512")
            x_scale = (inputs.uniform(k // 128, m) + 0.5).T
            w_scale = (inputs.uniform(n // 128, k // 128) + 0.5).T
        return Work(
            lambda: torch._scaled_mm(
                x,
                weight.T,
                scale_a=x_scale,
                scale_b=w_scale,
                out_dtype=torch.bfloat16,
                use_fast_accum=not blocks,
            )
        )

    large = [layer for layer in LINEARS if min(layer) >= 2048]
    quick = [passes(4096, *layer)["forward"] for layer in large[:4]]
    every: list[Shape] = [
        passes(tokens, *layer)[way]
        for tokens in (16384, 4096)
        for way in ("forward", "dgrad", "wgrad")
        for layer in large
    ]
    return Op(
        name="gemm",
        implementation="cublas",
        dtype="fp8",
        regime="" if blocks else "tensor scales",
        family=FAMILY,
        cost=lambda shape: product(shape, "fp8"),
        build=build,
        shapes={"quick": quick, "glm-5.1": chained(quick, every)},
        tiny=mnk(16, 128, 512),
        value=3.0,
        efficiency=0.87 if blocks else 0.95,
        compile_s=0.0,
    )


def per_head() -> Op:
    """One product for every head: what absorbing the key and value expansions of latent attention costs.

    Activations are kept [rows, heads, size] and written so, as in layer/linear.py. WHOLE rows belong to a
    backward pass, which reads weights transposed.
    """

    def build(inputs: Draw, shape: Shape) -> Work:
        batch, m, n, k = shape["batch"], shape["m"], shape["n"], shape["k"]
        if k <= m:  # activations [rows, heads, k] times a weight of each head
            x, out = inputs.normal(m, batch, k).transpose(0, 1), inputs.empty(m, batch, n).transpose(0, 1)
            if m == WHOLE:
                weight = inputs.normal(batch, n, k, scale=k**-0.5).mT
            else:
                weight = inputs.normal(batch, k, n, scale=k**-0.5)
            return Work(lambda: torch.bmm(x, weight, out=out))
        left, right = inputs.normal(k, batch, m), inputs.normal(k, batch, n)  # a weight gradient
        return Work(lambda: torch.bmm(left.permute(1, 2, 0), right.transpose(0, 1)))

    def cost(shape: Shape) -> Cost:
        one = product(shape, "bf16")
        return Cost(shape["batch"] * one.tensor_flops, bytes=shape["batch"] * one.bytes)

    weights = ((512, 192), (256, 512), (192, 512), (512, 256))
    every = [
        *({"batch": 64, "m": m, "n": n, "k": k} for m in (16384, 4096, 8192) for n, k in weights),
        *({"batch": 64, "m": m, "n": n, "k": k} for k in (16384, 4096) for m, n in ((512, 192), (256, 512))),
    ]
    # The backward pass of a rank's tokens: gradients of activations, and of weights [inputs, outputs].
    whole = [
        *({"batch": 64, "m": WHOLE, "n": n, "k": k} for n, k in ((512, 256), (192, 512))),
        *({"batch": 64, "m": m, "n": n, "k": WHOLE} for m, n in ((192, 512), (512, 256))),
    ]
    return Op(
        name="batched_gemm",
        implementation="cublas",
        dtype="bf16",
        family=FAMILY,
        cost=cost,
        build=build,
        shapes={"quick": grid(batch=64, m=4096, n=512, k=192), "glm-5.1": [*every[:4], *whole, *every[4:]]},
        tiny={"batch": 2, "m": 16, "n": 8, "k": 8},
        value=2.0,
        efficiency=0.7,
        compile_s=0.0,
    )


def sustained(dtype: str) -> Op:
    """One large product, over and over."""
    bursts = bf16("forward") if dtype == "bf16" else fp8(blocks=False)

    def build(inputs: Draw, shape: Shape) -> Work:
        return replace(bursts.build(inputs, shape), sustained=True)

    shapes = {"glm-5.1": [mnk(8192, 8192, 8192)]}
    return replace(bursts, regime="sustained", build=build, shapes=shapes, timing_s=SUSTAINED_S)


OPS = (
    bf16("forward"),
    bf16("dgrad", earlier=("forward",)),
    bf16("wgrad", earlier=("forward", "dgrad")),
    fp8(blocks=True),
    fp8(blocks=False),
    sustained("bf16"),
    sustained("fp8"),
    per_head(),
)

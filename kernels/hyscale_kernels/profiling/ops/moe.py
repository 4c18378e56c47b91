"""Grouped products of routed experts, with balanced and skewed routing.

Shapes: ``groups`` local experts, ``m`` token copies of each on average, weights [k, n]; a weight gradient is
[m, n] over ``k`` token copies. Regime "skewed": a quarter of the experts get 70 % of the tokens.
"""

import torch

from ..op import BYTES, Cost, Draw, Op, Shape, Work, chained

FAMILY = "moe"
UP, DOWN = (4096, 6144), (6144, 2048)  # (n, k) of GLM-5.1's experts
MOST_TOKENS = 2**17
ALIGNMENT = 16  # rows; the kernels want every group to start at such a place


def counts(groups: int, mean: int, skewed: bool) -> list[int]:
    """Tokens of each expert, multiples of ALIGNMENT where the mean is one; they sum to groups * mean."""
    if not skewed or groups < 2:
        return [mean] * groups
    busy = max(1, groups // 4)
    unit = ALIGNMENT if mean % ALIGNMENT == 0 else 1
    hot = int(0.7 * groups * mean / busy) // unit * unit
    rest = groups * mean - hot * busy
    cold = rest // (groups - busy) // unit * unit
    return [hot] * busy + [cold] * (groups - busy - 1) + [rest - cold * (groups - busy - 1)]


def ends(inputs: Draw, sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes, device=inputs.device).cumsum(0).to(torch.int32)


def cost(shape: Shape) -> Cost:
    groups, m, n, k = shape["groups"], shape["m"], shape["n"], shape["k"]
    size = BYTES["bf16"]
    return Cost(2.0 * groups * m * n * k, bytes=float(groups * size * (m * k + k * n + m * n)))


def grouped(skewed: bool, weights: bool) -> Op:
    def build(inputs: Draw, shape: Shape) -> Work:
        groups, m, n, k = shape["groups"], shape["m"], shape["n"], shape["k"]
        if weights:
            offsets = ends(inputs, counts(groups, k, skewed))
            dy, x = inputs.normal(groups * k, m), inputs.normal(groups * k, n)
            return Work(lambda: torch._grouped_mm(dy.T, x, offs=offsets))
        offsets = ends(inputs, counts(groups, m, skewed))
        x = inputs.normal(groups * m, k)
        # Kept [n, k], as a linear layer keeps its weight.
        weight = inputs.normal(groups, n, k, scale=k**-0.5).transpose(1, 2)
        return Work(lambda: torch._grouped_mm(x, weight, offs=offsets))

    def shapes(groups: int, tokens: int) -> list[Shape]:
        if weights:
            return [{"groups": groups, "m": m, "n": n, "k": tokens} for m, n in (UP, DOWN)]
        weights_of = (UP, DOWN, UP[::-1], DOWN[::-1])
        return [{"groups": groups, "m": tokens, "n": n, "k": k} for n, k in weights_of]

    sizes = [(4, 32768), (8, 4096), (32, 1024), (4, 4096), (8, 16384), (32, 4096), (16, 2048), (4, 8192)]
    if skewed:
        sizes = sizes[:3]
    assert all(groups * tokens <= MOST_TOKENS for groups, tokens in sizes)
    every = chained(*(shapes(groups, tokens) for groups, tokens in sizes))
    return Op(
        name="grouped_gemm",
        implementation="torch",
        dtype="bf16",
        regime="skewed" if skewed else "",
        family=FAMILY,
        cost=cost,
        build=build,
        shapes={"quick": shapes(8, 4096)[:2], "glm-5.1": every},
        tiny={"groups": 4, "m": 16, "n": 16, "k": 16},
        value=1.0 if skewed else 5.0,
        efficiency=0.9,
        compile_s=0.0,
    )


OPS = tuple(grouped(skewed, weights) for skewed in (False, True) for weights in (False, True))

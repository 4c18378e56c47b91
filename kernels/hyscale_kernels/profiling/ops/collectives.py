"""Collectives over the GPUs of this machine, through NCCL; a process a GPU (ranks.py).

Shapes: ``ranks``; ``bytes``, the whole that is gathered or reduced, or that each rank holds before an
all-to-all: as the simulator counts them. Achieved bytes are bus bytes: (n - 1) / n of the whole, twice that
for an all-reduce.
"""

import torch
import torch.distributed as dist

from ..op import Cost, Draw, Op, Shape, Work, grid

FAMILY = "collectives"
SIZES = tuple(2**power for power in (24, 28, 26, 20, 30, 22, 16, 12))


def collective(name: str) -> Op:
    def build(inputs: Draw, shape: Shape) -> Work:
        ranks, elements = shape["ranks"], shape["bytes"] // 2
        if dist.get_world_size() != ranks:
            raise ValueError(f"ranks = {ranks}; this run has {dist.get_world_size()}")
        whole, part = inputs.normal(elements), inputs.normal(elements // ranks)
        if name == "all_gather":
            return Work(lambda: dist.all_gather_into_tensor(whole, part))
        if name == "reduce_scatter":
            return Work(lambda: dist.reduce_scatter_tensor(part, whole))
        if name == "all_reduce":
            # In place: 8 ranks add three powers of two a call, of the 127 that bf16 has; a point makes 25
            # calls.
            return Work(lambda: dist.all_reduce(whole))
        other = torch.empty_like(whole)
        return Work(lambda: dist.all_to_all_single(other, whole))

    def cost(shape: Shape) -> Cost:
        share = (shape["ranks"] - 1) / shape["ranks"]
        return Cost(bytes=share * shape["bytes"] * (2 if name == "all_reduce" else 1))

    every = grid(ranks=(2, 4, 8), bytes=SIZES)
    return Op(
        name=name,
        implementation="nccl",
        dtype="bf16",
        family=FAMILY,
        cost=cost,
        build=build,
        shapes={"collectives": every, "glm-5.1": every, "quick": grid(ranks=(2, 4, 8), bytes=SIZES[:2])},
        tiny={"ranks": 2, "bytes": 256},
        efficiency=0.06,
        compile_s=1.0,
        link=True,
    )


OPS = tuple(collective(name) for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"))

"""Sizes of the indexer's training kernels. They decide speed and memory; no result but the atomic dk
depends on them, and that one only in the order of its additions."""

from dataclasses import astuple, dataclass, fields

import torch

from ..hytopk.plan import MIB, ceil_div, next_power_of_2, padded

# Most rows of one backward pass; more rows take more passes. It bounds the workspace, and the error bound of
# the fixed-point dk rests on it (README.md, "Fixed point").
ROWS = 8192

# Longest key range of one scatter chunk, counted so that the span table stays small.
MOST_CHUNKS = 128


@dataclass(frozen=True, slots=True)
class IndexerPlan:
    """Internal sizes. Powers of two, but for stages and registers.

    keys           keys one step of a row program gathers, forward
    backward_keys  the same, backward
    stages, warps  pipelining depth and warps of the row programs
    scatter_keys   selected keys one step of the dk scatter takes
    scatter_warps  warps of the scatter
    chunk_keys     keys of one scatter chunk: dk of a chunk should stay in the second-level cache
    registers      most registers a thread of the backward row program takes; 0: as many as it likes
    """

    keys: int
    backward_keys: int
    stages: int
    warps: int
    scatter_keys: int
    scatter_warps: int
    chunk_keys: int
    registers: int = 0

    def __post_init__(self) -> None:
        for name in ("keys", "backward_keys", "warps", "scatter_keys", "scatter_warps", "chunk_keys"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"plan.{name} is {value}; it must be a power of two")
        if self.stages < 1:
            raise ValueError(f"plan.stages is {self.stages}; it must be at least 1")
        if self.registers < 0:
            raise ValueError(f"plan.registers is {self.registers}; it must be at least 0")

    @classmethod
    def default(cls, S: int, H: int, D: int, device: torch.device | str) -> "IndexerPlan":
        if torch.device(device).type != "cuda":
            return cls(32, 32, 1, 1, 32, 1, max(64, next_power_of_2(ceil_div(max(S, 1), MOST_CHUNKS))))
        # 16 MiB of float32 dk: an H200's cache is 50 MB, in two halves.
        fitting = 16 * MIB // (4 * padded(D, torch.bfloat16))
        chunk = max(fitting, next_power_of_2(ceil_div(max(S, 1), MOST_CHUNKS)))
        # A row's gradient of q lives in registers: wide ones need more warps.
        warps = 8 if next_power_of_2(H) * padded(D, torch.bfloat16) >= 64 * 128 else 4
        # 168 of them let three programs of 4 warps share a multiprocessor; fp8's took 190, and two.
        return cls(128, 64, 2, warps, 16, 4, chunk, 168 if warps == 4 else 0)

    def chunks(self, S: int) -> int:
        return max(1, ceil_div(S, self.chunk_keys))

    def as_ints(self) -> list[int]:
        return list(astuple(self))

    @classmethod
    def from_ints(cls, values: list[int]) -> "IndexerPlan":
        if len(values) != len(fields(cls)):
            raise ValueError(f"an indexer plan has {len(fields(cls))} sizes, got {len(values)}")
        return cls(*values)

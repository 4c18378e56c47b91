"""Sizes of the attention kernels. They decide speed; no result depends on them beyond the order of float32
sums, and the fixed-point gradient not even on that."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace

import torch

from ..hytopk.plan import MIB, next_power_of_2

# Most rows of one pass of the fixed-point gradient: its error bound rests on it (README.md).
ROWS = 8192

# What probabilities and logit gradients of one chunk of rows take in the backward pass.
WEIGHT_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Internal sizes. Powers of two, but for stages.

    heads                          query heads of one program; more heads take more programs a row
    keys, stages, warps            forward: keys of one step, pipelining depth, warps
    rows                           backward: most rows of a chunk, whose weights must fit in WEIGHT_BYTES too
    weight_keys, weight_warps      backward, probabilities and logit gradients
    dq_columns, dq_keys, dq_stages, dq_warps        backward, queries: columns of one program, and the rest
    dkv_columns, dkv_keys, dkv_stages, dkv_warps    backward, keys: likewise
    mass_keys, mass_stages, mass_warps              ``attention_mass``
    """

    heads: int
    keys: int
    stages: int
    warps: int
    rows: int
    weight_keys: int
    weight_warps: int
    dq_columns: int
    dq_keys: int
    dq_stages: int
    dq_warps: int
    dkv_columns: int
    dkv_keys: int
    dkv_stages: int
    dkv_warps: int
    mass_keys: int
    mass_stages: int
    mass_warps: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("stages"):
                if value < 1:
                    raise ValueError(f"plan.{field.name} is {value}; it must be at least 1")
            elif value < 1 or value & (value - 1):
                raise ValueError(f"plan.{field.name} is {value}; it must be a power of two")
        if self.dkv_columns < 2:
            raise ValueError(f"plan.dkv_columns is {self.dkv_columns}; it must be at least 2")
        if self.dq_keys > self.weight_keys:
            raise ValueError(
                f"plan.dq_keys is {self.dq_keys}; it must be at most weight_keys, {self.weight_keys}: a "
                "longer step would add up weights past a row's end, which are unwritten"
            )

    @classmethod
    def default(cls, Hq: int, device: torch.device | str) -> "AttentionPlan":
        """What fits shared memory and registers at D = 576 on an H200 (README.md, "Tiles")."""
        heads = min(max(16, next_power_of_2(Hq)), 64)
        if torch.device(device).type != "cuda":
            return cls(heads, 16, 1, 1, ROWS, 16, 1, 16, 16, 1, 1, 16, 16, 1, 1, 16, 1, 1)
        mass = (64, 2, 4) if Hq <= 64 else (64, 1, 8)
        return cls(heads, 64, 2, 8, ROWS, 64, 8, 256, 64, 3, 4, 64, 64, 2, 4, *mass)

    def candidates(self) -> Iterator[tuple[str, "AttentionPlan"]]:
        """Plans worth racing against this one on a GPU, by name; each changes one kernel."""
        for stages in (2, 3):
            yield f"forward 32 keys, {stages} stages", replace(self, keys=32, stages=stages)
        for columns, stages, warps in ((128, 3, 4), (256, 2, 4), (256, 3, 8), (512, 2, 8)):
            yield (
                f"dq {columns} columns, {stages} stages, {warps} warps",
                replace(self, dq_columns=columns, dq_stages=stages, dq_warps=warps),
            )
        for rows in (128, 256):
            yield f"chunks of {rows} rows", replace(self, rows=rows)
        for columns, keys, stages, warps in ((64, 64, 3, 4), (128, 64, 2, 4), (64, 128, 2, 8)):
            yield (
                f"dkv {columns} columns, {keys} keys, {stages} stages, {warps} warps",
                replace(self, dkv_columns=columns, dkv_keys=keys, dkv_stages=stages, dkv_warps=warps),
            )

    def as_ints(self) -> list[int]:
        return list(astuple(self))

    @classmethod
    def from_ints(cls, values: list[int]) -> "AttentionPlan":
        if len(values) != len(fields(cls)):
            raise ValueError(f"an attention plan has {len(fields(cls))} sizes, got {len(values)}")
        return cls(*values)


def chunk_rows(T: int, Hq: int, K: int, itemsize: int) -> int:
    """Most of T rows whose weights (two numbers a row, place and head) fit in WEIGHT_BYTES; at least one."""
    return max(1, min(T, WEIGHT_BYTES // max(1, 2 * itemsize * Hq * K)))

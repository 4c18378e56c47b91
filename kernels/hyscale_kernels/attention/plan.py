"""Sizes of the attention kernels. They decide speed; no result but an atomic gradient's order depends on
them beyond the order of float32 sums."""

from dataclasses import astuple, dataclass, fields

import torch

from ..hytopk.plan import next_power_of_2

# Most rows of one pass of the fixed-point gradient: its error bound rests on it (README.md).
ROWS = 8192


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Internal sizes. Powers of two, but for stages.

    heads                         query heads of one program; more heads take more programs a row
    keys, stages, warps           keys of one step, pipelining depth and warps: forward
    dq_keys, dq_stages, dq_warps  the same for the gradient of q
    dkv_keys, dkv_stages, dkv_warps   the same for the gradient of the latent keys
    mass_keys, mass_stages, mass_warps   the same for ``attention_mass``
    """

    heads: int
    keys: int
    stages: int
    warps: int
    dq_keys: int
    dq_stages: int
    dq_warps: int
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

    @classmethod
    def default(cls, Hq: int, device: torch.device | str) -> "AttentionPlan":
        if torch.device(device).type != "cuda":
            heads = next_power_of_2(min(Hq, 64))
            return cls(heads, 16, 1, 1, 16, 1, 1, 16, 1, 1, 16, 1, 1)
        return cls(64, 64, 2, 8, 64, 2, 8, 64, 2, 8, 64, 2, 8)

    def as_ints(self) -> list[int]:
        return list(astuple(self))

    @classmethod
    def from_ints(cls, values: list[int]) -> "AttentionPlan":
        if len(values) != len(fields(cls)):
            raise ValueError(f"an attention plan has {len(fields(cls))} sizes, got {len(values)}")
        return cls(*values)

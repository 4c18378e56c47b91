"""How codec kernels divide their work: rows a program, columns a step. They never change a byte."""

from dataclasses import dataclass

import torch

from ..hytopk.plan import next_power_of_2


@dataclass(frozen=True, slots=True)
class Tiling:
    """rows a program takes; columns it takes at a time; warps. Powers of two."""

    rows: int
    columns: int
    warps: int

    @classmethod
    def default(cls, device: torch.device) -> "Tiling":
        """One row a program on a GPU; many under the interpreter, where a program costs more than its
        work."""
        return cls(1, 512, 4) if device.type == "cuda" else cls(64, 64, 1)

    def block(self, columns: int) -> int:
        """Columns of one step when there are ``columns`` of them."""
        return min(self.columns, max(16, next_power_of_2(max(columns, 1))))

"""Sizes of HyTopK's tiles, chunks and buffers. They decide speed and memory, never the result."""

import math
from dataclasses import astuple, dataclass, fields

import torch

MIB = 2**20

# Workspace promised by the contract (outputs not counted): WORKSPACE_PER_INDEX * T * K + WORKSPACE_FIXED.
WORKSPACE_PER_INDEX = 16
WORKSPACE_FIXED = 64 * MIB

# Largest top_k: the candidates of one row (at least twice as many) are sorted out inside one program.
MAX_TOP_K = 8192

# Longest key chunk: keeps the scan's launch grid within bounds when one row leaves room for a huge bitmap.
MOST_CHUNK_KEYS = 2**24

# Rows of one pass: few enough that their queries (32 heads of 128 bytes each) stay in the L2 cache.
MOST_CHUNK_ROWS = 4096

# Small arrays: lo, hi of each row of the call; scan_hi, threshold, plateau, and repair's list and NaN counts
# of each row of the chunk; repair's total.
CALL_ROW_BYTES = 8
CHUNK_ROW_BYTES = 20
TOTAL_BYTES = 4


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def padded(size: int, dtype: torch.dtype) -> int:
    """Head size as the tensor core takes it: a power of two, at least 16 (32 for one-byte operands)."""
    return max(next_power_of_2(size), 32 if dtype.itemsize == 1 else 16)


@dataclass(frozen=True, slots=True)
class Plan:
    """Internal sizes of one call. All counts are of rows or keys.

    tile_rows, tile_keys   one scan tile; powers of two, tile_keys a multiple of 32
    segment                keys one scan program walks; 0 lets the launcher fill the device
    samples                keys sampled per row tile to guess the threshold; a multiple of tile_keys
    capacity               candidates kept per row; a power of two, at least top_k + gather
    gather                 keys one step of rescoring and repair takes; a power of two
    row_group              rows one program of the row-wise stages takes; a power of two
    row_chunk, key_chunk   rows and keys one pass takes; multiples of tile_rows and tile_keys
    stages, warps          software pipelining depth and warps of the scan
    registers              most registers a thread of the scan takes; 0 leaves it to the compiler
    repair_splits          most programs that share the keys of one row in repair; a power of two
    """

    tile_rows: int
    tile_keys: int
    segment: int
    samples: int
    capacity: int
    gather: int
    row_group: int
    row_chunk: int
    key_chunk: int
    stages: int
    warps: int
    registers: int
    repair_splits: int

    def __post_init__(self) -> None:
        for name in ("tile_rows", "tile_keys", "capacity", "gather", "row_group", "repair_splits"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"plan.{name} is {value}; it must be a power of two")
        if self.tile_keys % 32:
            raise ValueError(f"plan.tile_keys is {self.tile_keys}; it must be a multiple of 32")
        for name, unit in (
            ("samples", self.tile_keys),
            ("row_chunk", self.tile_rows),
            ("key_chunk", self.tile_keys),
        ):
            value = getattr(self, name)
            if value < unit or value % unit:
                raise ValueError(f"plan.{name} is {value}; it must be a positive multiple of {unit}")
        if self.segment < 0 or self.segment % self.tile_keys:
            raise ValueError(
                f"plan.segment is {self.segment}; it must be a multiple of {self.tile_keys}, or 0"
            )
        for name, least in (("stages", 1), ("warps", 1), ("registers", 0), ("repair_splits", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"plan.{name} is {getattr(self, name)}; it must be at least {least}")

    @classmethod
    def default(
        cls, T: int, S: int, H: int, D: int, top_k: int, dtype: torch.dtype, device: torch.device | str
    ) -> "Plan":
        """The plan of a call: tiles for the device, chunks that keep the promised workspace."""
        if torch.device(device).type == "cuda":
            tile_rows, tile_keys, gather, row_group, segment, warps = 64, 128, 128, 1, 0, 4
            fewest_candidates, samples, repair_splits = 1024, _samples(S, top_k), 64
            # Three programs on a multiprocessor hide one another's waits; that takes 168 registers at
            # most, and shared memory for two stages of bf16 rows or three of fp8 rows.
            row_bytes = padded(D, dtype) * dtype.itemsize
            stages, registers = 3 if row_bytes <= 128 else 2, 168 if row_bytes <= 256 else 0
        else:
            tile_rows, tile_keys, gather, row_group, segment, warps = 16, 64, 64, 16, 4096, 1
            fewest_candidates, samples, repair_splits = 128, 64, 4
            stages, registers = 1, 0
        capacity = max(next_power_of_2((4 if top_k <= 4096 else 2) * top_k), fewest_candidates)
        capacity = max(capacity, next_power_of_2(top_k + gather))
        row_chunk, key_chunk = _chunks(T, S, top_k, capacity, samples, tile_rows, tile_keys)
        return cls(
            tile_rows=tile_rows,
            tile_keys=tile_keys,
            segment=segment,
            samples=samples,
            capacity=capacity,
            gather=gather,
            row_group=row_group,
            row_chunk=row_chunk,
            key_chunk=key_chunk,
            stages=stages,
            warps=warps,
            registers=registers,
            repair_splits=repair_splits,
        )

    def check(self, top_k: int) -> None:
        """Raise ValueError when the row buffers cannot hold ``top_k`` selected keys and one more step."""
        if self.capacity < top_k + self.gather:
            raise ValueError(
                f"plan.capacity is {self.capacity}; with top_k {top_k} and plan.gather {self.gather} "
                f"it must be at least {top_k + self.gather}"
            )

    def segment_keys(self, rows: int, keys: int) -> int:
        """Keys one scan program walks: short enough that programs outnumber the device's slots."""
        if self.segment:
            return self.segment
        row_tiles = ceil_div(rows, self.tile_rows)
        wanted = ceil_div(2048, row_tiles)
        tiles = ceil_div(ceil_div(keys, self.tile_keys), wanted)
        return max(1, min(tiles, 4096 // self.tile_keys)) * self.tile_keys

    def workspace_bytes(self, T: int, S: int) -> int:
        """Peak bytes allocated beside the outputs for T rows over S keys."""
        rows = min(self.row_chunk, T)
        words = ceil_div(min(self.key_chunk, S), 32)
        if self.capacity >= S:
            return T * CALL_ROW_BYTES + rows * S * 4
        small = T * CALL_ROW_BYTES + self.buffers(rows) * CHUNK_ROW_BYTES + TOTAL_BYTES
        sampling = rows * self.samples * 4
        scanning = self.buffers(rows) * self.capacity * 4 + rows * words * 4
        selecting = self.buffers(rows) * self.capacity * 8
        return small + max(sampling, scanning, selecting)

    def buffers(self, rows: int) -> int:
        """Candidate buffers of a pass over ``rows`` rows: repair splits one row over several."""
        return max(rows, self.repair_splits)

    def scan_options(self) -> dict[str, int | None]:
        """Compiler options of the scoring kernels."""
        return {"num_warps": self.warps, "maxnreg": self.registers or None}

    def columns(self) -> int:
        """Columns of a row's buffer that one step of the row-wise stages takes."""
        return min(1024 if self.row_group == 1 else 128, self.capacity)

    def as_ints(self) -> list[int]:
        return list(astuple(self))

    @classmethod
    def from_ints(cls, values: list[int]) -> "Plan":
        if len(values) != len(fields(cls)):
            raise ValueError(f"a plan has {len(fields(cls))} sizes, got {len(values)}")
        return cls(*values)


def _samples(S: int, top_k: int) -> int:
    """Sampled keys: enough that about 32 of them are expected above the cut, 2,048 to 16,384."""
    expected = 64 if S // top_k < 64 else 32
    wanted = next_power_of_2(max(1, math.ceil(expected * S / top_k)))
    return max(2048, min(wanted, 16384))


def _chunks(
    T: int, S: int, top_k: int, capacity: int, samples: int, tile_rows: int, tile_keys: int
) -> tuple[int, int]:
    """Fewest even row chunks, then key chunks, whose buffers stay within the promised workspace."""
    budget = workspace_bound(T, top_k) - CALL_ROW_BYTES * T - TOTAL_BYTES
    bitmap = min(S, 2**18) // 8 + tile_keys
    per_row = CHUNK_ROW_BYTES + max(capacity * 8, capacity * 4 + bitmap, samples * 4)
    most_rows = max(1, min(budget // per_row, MOST_CHUNK_ROWS) // tile_rows) * tile_rows
    chunks = ceil_div(max(T, 1), most_rows)
    row_chunk = ceil_div(ceil_div(max(T, 1), chunks), tile_rows) * tile_rows
    # One row still gets tile_rows buffers, so that repair can split it.
    bitmap = budget // row_chunk - CHUNK_ROW_BYTES - capacity * 4
    most_keys = max(1, min(bitmap * 8, MOST_CHUNK_KEYS) // tile_keys) * tile_keys
    chunks = ceil_div(max(S, 1), most_keys)
    key_chunk = ceil_div(ceil_div(max(S, 1), chunks), tile_keys) * tile_keys
    return row_chunk, key_chunk


def workspace_bound(T: int, top_k: int) -> int:
    """Bytes of workspace the contract allows, outputs not counted, whatever S is."""
    return WORKSPACE_PER_INDEX * T * top_k + WORKSPACE_FIXED

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

# Small per-row arrays: lo, hi of the call; scan_hi, threshold, plateau of the chunk.
ROW_BYTES = 20


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

    def __post_init__(self) -> None:
        for name in ("tile_rows", "tile_keys", "capacity", "gather", "row_group"):
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
        for name in ("stages", "warps"):
            if getattr(self, name) < 1:
                raise ValueError(f"plan.{name} is {getattr(self, name)}; it must be at least 1")

    @classmethod
    def default(
        cls, T: int, S: int, H: int, D: int, top_k: int, dtype: torch.dtype, device: torch.device | str
    ) -> "Plan":
        """The plan of a call: tiles for the device, chunks that keep the promised workspace."""
        if torch.device(device).type == "cuda":
            tile_rows, tile_keys, gather, row_group, stages, warps = 64, 128, 128, 1, 3, 4
            # Two operand tiles a stage must fit shared memory; wide heads leave room for fewer stages.
            if padded(D, dtype) * dtype.itemsize > 256:
                stages = 2
            fewest_candidates, samples = 1024, _samples(S, top_k)
        else:
            tile_rows, tile_keys, gather, row_group, stages, warps = 16, 64, 64, 16, 1, 1
            fewest_candidates, samples = 128, 64
        capacity = max(next_power_of_2((4 if top_k <= 4096 else 2) * top_k), fewest_candidates)
        capacity = max(capacity, next_power_of_2(top_k + gather))
        row_chunk, key_chunk = _chunks(T, S, top_k, capacity, samples, tile_rows, tile_keys)
        return cls(
            tile_rows,
            tile_keys,
            0 if stages > 1 else 4096,
            samples,
            capacity,
            gather,
            row_group,
            row_chunk,
            key_chunk,
            stages,
            warps,
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
        sampling = rows * self.samples * 4
        scanning = rows * (self.capacity * 8 + words * 4)
        return rows * ROW_BYTES + max(sampling, scanning)

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
    expected = 64 if S // top_k <= 64 else 32
    wanted = next_power_of_2(max(1, math.ceil(expected * S / top_k)))
    return max(2048, min(wanted, 16384))


def _chunks(
    T: int, S: int, top_k: int, capacity: int, samples: int, tile_rows: int, tile_keys: int
) -> tuple[int, int]:
    """Fewest even row chunks, then key chunks, whose buffers stay within the promised workspace."""
    budget = WORKSPACE_PER_INDEX * T * top_k + WORKSPACE_FIXED
    fixed = ROW_BYTES + capacity * 8
    least_bitmap = min(S, 2**18) // 8 + tile_keys
    per_row = max(fixed + least_bitmap, ROW_BYTES + samples * 4)
    most_rows = max(1, min(budget // per_row, MOST_CHUNK_ROWS) // tile_rows) * tile_rows
    chunks = ceil_div(max(T, 1), most_rows)
    row_chunk = ceil_div(ceil_div(max(T, 1), chunks), tile_rows) * tile_rows
    rows = min(row_chunk, max(T, 1))
    bitmap_bytes = budget // rows - fixed
    most_keys = max(1, min(bitmap_bytes * 8, MOST_CHUNK_KEYS) // tile_keys) * tile_keys
    chunks = ceil_div(max(S, 1), most_keys)
    key_chunk = ceil_div(ceil_div(max(S, 1), chunks), tile_keys) * tile_keys
    return row_chunk, key_chunk


def workspace_bound(T: int, top_k: int) -> int:
    """Bytes of workspace the contract allows, outputs not counted, whatever S is."""
    return WORKSPACE_PER_INDEX * T * top_k + WORKSPACE_FIXED

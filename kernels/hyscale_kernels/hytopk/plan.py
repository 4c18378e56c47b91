"""Sizes of HyTopK's tiles, chunks and buffers. They decide speed and memory, never the result."""

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace

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

# Standard deviations between the samples expected among a row's K best and the rank of its threshold.
CAUTION = 4.5

# Standard deviations that a buffer leaves above the candidates expected: one row of a million overflows.
MARGIN = 4.75

# What a candidate costs (compacted, scored again, ranked), in sampled keys.
CANDIDATE_COST = 4

# Buffers are not sized beyond this, so that those of one row tile fit the fixed part of the workspace.
MOST_CAPACITY = 2**16

# Most samples of a row: threshold.py numbers them in 32-bit products.
MOST_SAMPLES = 2**15

# Warps of a program of the row-wise stages (threshold, filter, selection).
ROW_WARPS = 2

# Fewest keys and rows for which bounding key tiles costs less than 2 % of their scan.
PRUNE_KEYS = 2**17
PRUNE_ROWS = 2048

# Rows and keys of a tile of Hopper's scan.
HOPPER_TILE = (64, 128)

# Small arrays: lo, hi of each row of the call; scan_hi, threshold, plateau, repair's list and NaN counts of
# each row of the chunk, and a word more for those of each row tile; repair's total.
CALL_ROW_BYTES = 8
CHUNK_ROW_BYTES = 24
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

    tile_rows, tile_keys   one tile of scores; powers of two, tile_keys a multiple of 32
    segment                keys one scoring program walks, about; 0 lets the launcher fill the device
    samples                keys sampled to guess a threshold; a multiple of tile_keys, at most 32,768
    capacity               candidates kept per row, at least top_k + gather; a power of two, or a multiple
                           of the columns that a step of the row-wise stages takes
    table_keys             most keys whose scores are kept as a table; more are scanned
    gather                 keys one step of rescoring and repair takes; a power of two
    row_group              rows one program of the row-wise stages takes; a power of two
    row_chunk, key_chunk   rows and keys one pass takes; multiples of tile_rows and tile_keys
    stages, warps          software pipelining depth and warps of the scoring kernels
    registers              most registers a thread of theirs takes; 0 leaves it to the compiler
    repair_splits          most programs that share the keys of one row in repair; a power of two
    consumers              warp groups that share a program of Hopper's scan (hopper.py), 2 or 3; 0 for the
                           scan in plain Triton
    prune_keys             fewest keys of a pass from which tiles may be left out (prune.py); 0 for never
    """

    tile_rows: int
    tile_keys: int
    segment: int
    samples: int
    capacity: int
    table_keys: int
    gather: int
    row_group: int
    row_chunk: int
    key_chunk: int
    stages: int
    warps: int
    registers: int
    repair_splits: int
    consumers: int = 0
    prune_keys: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"plan.{each.name} is {value!r}; it must be an int")
        for name in ("tile_rows", "tile_keys", "gather", "row_group", "repair_splits"):
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
        if self.samples > MOST_SAMPLES:
            raise ValueError(f"plan.samples is {self.samples}; it must be at most {MOST_SAMPLES}")
        if self.capacity < 1 or (
            self.capacity & (self.capacity - 1) and self.capacity % _columns(self.row_group)
        ):
            raise ValueError(
                f"plan.capacity is {self.capacity}; it must be a power of two or a multiple of "
                f"{_columns(self.row_group)}"
            )
        if self.segment < 0 or self.segment % self.tile_keys:
            raise ValueError(
                f"plan.segment is {self.segment}; it must be a multiple of {self.tile_keys}, or 0"
            )
        for name, least in (
            ("stages", 1),
            ("warps", 1),
            ("registers", 0),
            ("table_keys", 0),
            ("prune_keys", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"plan.{name} is {getattr(self, name)}; it must be at least {least}")
        if self.consumers not in (0, 2, 3):
            raise ValueError(f"plan.consumers is {self.consumers}; it must be 0, 2 or 3")

    @classmethod
    def default(
        cls,
        T: int,
        S: int,
        D: int,
        top_k: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        consumers: int = 0,
    ) -> "Plan":
        """The plan of a call of T rows for a pass over S keys: tiles for the device, chunks that keep the
        promised workspace."""
        if torch.device(device).type == "cuda":
            tile_rows, tile_keys, gather, row_group, segment, warps = 64, 128, 128, 1, 0, 4
            table_keys, repair_splits = min(max(8 * top_k, 8192), 16384), 64
            # Three programs on a multiprocessor hide one another's waits; that takes 168 registers at
            # most, and shared memory for two stages of bf16 rows or three of fp8 rows.
            row_bytes = padded(D, dtype) * dtype.itemsize
            stages, registers = 3 if row_bytes <= 128 else 2, 168 if row_bytes <= 256 else 0
            samples, capacity = _samples_and_capacity(S, top_k, gather, _columns(row_group))
            prune_keys = PRUNE_KEYS if T >= PRUNE_ROWS else 0
        else:
            # Sizes for tests: small enough that a few hundred keys take every path.
            tile_rows, tile_keys, gather, row_group, segment, warps = 16, 64, 64, 16, 4096, 1
            table_keys, repair_splits, stages, registers = 192, 4, 1, 0
            samples, capacity = 64, max(next_power_of_2(4 * top_k), 128)
            prune_keys = 256
        plan = cls(
            tile_rows=tile_rows,
            tile_keys=tile_keys,
            segment=segment,
            samples=samples,
            capacity=capacity,
            table_keys=table_keys,
            gather=gather,
            row_group=row_group,
            row_chunk=tile_rows,
            key_chunk=tile_keys,
            stages=stages,
            warps=warps,
            registers=registers,
            repair_splits=repair_splits,
            consumers=consumers,
            prune_keys=prune_keys,
        )
        return plan._fitted(T, S, D, top_k)

    def _fitted(self, T: int, S: int, D: int, top_k: int) -> "Plan":
        """With the fewest even row chunks, then key chunks, whose buffers keep the promised workspace."""
        budget = workspace_bound(T, top_k) - CALL_ROW_BYTES * T - TOTAL_BYTES
        samples, candidates = 4 * self.samples, 4 * self.capacity
        if self.table_keys >= S:
            per_row = CHUNK_ROW_BYTES + 4 * self.table_columns(S) + max(samples, 2 * candidates)
        else:
            bitmap = min(S, 2**18) // 8 + self.tile_keys
            per_row = CHUNK_ROW_BYTES + max(samples, candidates + bitmap, 2 * candidates)
        most_rows = min(budget // per_row, MOST_CHUNK_ROWS)
        row_chunk = _even(T, most_rows, self.tile_rows)
        # One row still gets tile_rows buffers, so that repair can split it.
        left = budget - row_chunk * (CHUNK_ROW_BYTES + candidates)
        tile_bytes = row_chunk * self.tile_keys // 8
        if self.prunes(S):
            tile_bytes += self._prune_bytes(row_chunk, self.tile_keys, D)
        keys = _even(S, min(left // tile_bytes * self.tile_keys, MOST_CHUNK_KEYS), self.tile_keys)
        return replace(self, row_chunk=row_chunk, key_chunk=keys)

    def check(self, top_k: int) -> None:
        """Raise ValueError when the row buffers cannot hold ``top_k`` selected keys and one more step."""
        if self.capacity < top_k + self.gather:
            raise ValueError(
                f"plan.capacity is {self.capacity}; with top_k {top_k} and plan.gather {self.gather} "
                f"it must be at least {top_k + self.gather}"
            )

    def segment_keys(self, rows: int, keys: int) -> int:
        """Keys one scoring program walks: short enough that programs outnumber the device's slots."""
        if self.segment:
            return self.segment
        row_tiles = ceil_div(rows, self.tile_rows)
        wanted = ceil_div(2048, row_tiles)
        tiles = ceil_div(ceil_div(keys, self.tile_keys), wanted)
        return max(1, min(tiles, 4096 // self.tile_keys)) * self.tile_keys

    def workspace_bytes(self, T: int, S: int, D: int) -> int:
        """Most bytes allocated beside the outputs for T rows over S keys of head size D."""
        rows = min(self.row_chunk, T)
        buffers = self.buffers(rows)
        small = T * CALL_ROW_BYTES + buffers * CHUNK_ROW_BYTES + TOTAL_BYTES
        sampling = rows * self.samples * 4
        selecting = buffers * self.capacity * 8
        if self.table_keys >= S:
            return small + rows * self.table_columns(S) * 4 + max(sampling, selecting)
        keys = min(self.key_chunk, S)
        pruning = self._prune_bytes(rows, keys, D) if self.prunes(S) else 0
        scanning = buffers * self.capacity * 4 + rows * ceil_div(keys, 32) * 4 + pruning
        return small + max(sampling, scanning, selecting)

    def prunes(self, S: int) -> bool:
        """Whether a pass over S keys may leave out tiles of them."""
        return 0 < self.prune_keys <= S

    def scan_tile(self) -> tuple[int, int]:
        """Rows and keys of a tile of the scan."""
        return HOPPER_TILE if self.consumers else (self.tile_rows, self.tile_keys)

    def _prune_bytes(self, rows: int, keys: int, D: int) -> int:
        """Of the balls of ``keys`` keys, and of their flags and list in each row tile; centres as float32."""
        BT, BS = self.scan_tile()
        return ceil_div(keys, BS) * (4 * max(next_power_of_2(D), 32) + 4 + 6 * ceil_div(rows, BT))

    def buffers(self, rows: int) -> int:
        """Candidate buffers of a pass over ``rows`` rows: repair splits one row over several."""
        return max(rows, self.repair_splits)

    def scan_options(self) -> dict[str, int | None]:
        """Compiler options of the scoring kernels."""
        return {"num_warps": self.warps, "maxnreg": self.registers or None}

    def columns(self) -> int:
        """Columns of a row's buffer or table that one step of the row-wise stages takes."""
        return min(_columns(self.row_group), self.capacity)

    def table_columns(self, keys: int) -> int:
        """Columns of a table of the scores of ``keys`` keys: whole tiles, and whole steps of the row-wise
        stages. Both are powers of two."""
        unit = max(self.columns(), self.tile_keys)
        return ceil_div(keys, unit) * unit

    def as_ints(self) -> list[int]:
        return list(astuple(self))

    @classmethod
    def from_ints(cls, values: list[int]) -> "Plan":
        if len(values) != len(fields(cls)):
            raise ValueError(f"a plan has {len(fields(cls))} sizes, got {len(values)}")
        return cls(*values)


@dataclass(frozen=True, slots=True)
class Pass:
    """All stages for rows row0 .. row0+rows-1, none of which sees a key beyond the first ``keys``."""

    row0: int
    rows: int
    keys: int
    plan: Plan


def passes(
    T: int,
    S: int,
    D: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    causal: bool,
    plan: Plan | None = None,
    consumers: int = 0,
) -> Iterator[Pass]:
    """The passes of a call, each with its own default plan of ``consumers`` unless ``plan`` is given.

    In a causal call (row t sees keys 0 .. t) each pass stops at the last key that its rows see, and is
    planned for so many keys.
    """
    row0, seen, sizes = 0, S, plan
    while row0 < T:
        if plan is None and (causal or sizes is None):
            seen = min(S, row0 + MOST_CHUNK_ROWS) if causal else S
            sizes = Plan.default(T, seen, D, top_k, dtype, device, consumers=consumers)
        assert sizes is not None
        rows = min(sizes.row_chunk, T - row0)
        yield Pass(row0, rows, min(S, row0 + rows) if causal else S, sizes)
        row0 += rows


def _columns(row_group: int) -> int:
    """Columns a step of the row-wise stages takes where a row has so many: eight a thread."""
    return 256 * ROW_WARPS if row_group == 1 else 128


def threshold_rank(expected: float) -> int:
    """Rank among a row's samples of its threshold, if ``expected`` of them are among its K best.

    threshold.py computes the same on the device, and takes a rank up to a sixteenth larger.
    """
    return int(expected + CAUTION * math.sqrt(expected) + CAUTION**2 / 3) + 1


def passing(samples: int, S: int, top_k: int) -> tuple[float, float]:
    """(expected, most): keys of a row that reach its threshold, guessed from ``samples`` of its S keys.

    The threshold is the m-th best sample (threshold.py). The share of keys that reach it is spread as
    Beta(m, samples + 1 - m), nearly a gamma distribution of shape m; ``most`` is its quantile at MARGIN
    standard deviations, by Wilson and Hilferty's cube.
    """
    rank = threshold_rank(top_k * samples / S)
    rank += rank // 16
    if rank >= samples:
        return S, S
    spread = math.sqrt((1 - rank / samples) / rank)
    mean = S * rank / (samples + 1)
    return mean, min(S, mean * (1 - spread**2 / 9 + MARGIN * spread / 3) ** 3)


def _samples_and_capacity(S: int, top_k: int, gather: int, columns: int) -> tuple[int, int]:
    """The cheapest number of samples, and a buffer for the candidates that they let through."""
    keys = max(S, 1)
    options = [2**i for i in range(9, MOST_SAMPLES.bit_length())]
    samples = min(options, key=lambda n: n + CANDIDATE_COST * passing(n, keys, top_k)[0])
    most = min(math.ceil(passing(samples, keys, top_k)[1]), MOST_CAPACITY)
    return samples, ceil_div(max(most, 2 * top_k, top_k + gather), columns) * columns


def _even(size: int, most: int, unit: int) -> int:
    """A multiple of ``unit``, ``most`` or less (but one ``unit``), that divides ``size`` evenly."""
    most = max(1, most // unit) * unit
    chunks = ceil_div(max(size, 1), most)
    return ceil_div(ceil_div(max(size, 1), chunks), unit) * unit


def workspace_bound(T: int, top_k: int) -> int:
    """Bytes of workspace the contract allows, outputs not counted, whatever S is."""
    return WORKSPACE_PER_INDEX * T * top_k + WORKSPACE_FIXED

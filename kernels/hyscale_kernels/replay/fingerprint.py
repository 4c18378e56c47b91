"""Fingerprints: two 64-bit numbers that tell whether a recomputation sees what its forward pass saw.

The first is of the windows. Packed rows hold keys relative to the start of their window, so decoding under
other windows yields other keys, and those may well be valid ones. It is the sum over rows of a mixed (row,
start, end): it does not depend on the order of addition, nor on where the windows come from. The second is
``describe``'s, of what was scored.

Shape letters: T rows, S keys.
"""

import torch
import triton
import triton.language as tl

from ..hytopk.api import LOW_PRECISION

# Their places are part of records: append only.
DTYPES = (*LOW_PRECISION, torch.float32)


@triton.jit(do_not_specialize=["T", "S", "inputs"])
def _fingerprint_kernel(
    start_ptr,
    end_ptr,
    out_ptr,
    T,
    S,
    inputs,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the sum over all rows, and the numbers of rows and keys, mixed; ``inputs`` as it is."""
    total = tl.zeros((BLOCK,), tl.int64)
    for i in tl.range(0, T, BLOCK, num_stages=1):
        row = i + tl.arange(0, BLOCK).to(tl.int64)
        live = row < T
        start = tl.zeros((BLOCK,), tl.int64)
        end = tl.zeros((BLOCK,), tl.int64) + S
        if CAUSAL:
            end = row + 1
        if HAS_START:
            start = tl.load(start_ptr + row, mask=live, other=0).to(tl.int64)
        if HAS_END:
            end = tl.load(end_ptr + row, mask=live, other=0).to(tl.int64)
        # Odd multipliers (of splitmix64 and xxhash), wrapping; the shifts carry high bits down.
        mixed = start * 0x1E3779B97F4A7C15 + end * 0x3F58476D1CE4E5B9 + (row + 1) * 0x14D049BB133111EB
        mixed = (mixed ^ (mixed >> 29)) * 0x27D4EB2F165667C5
        mixed = mixed ^ (mixed >> 32)
        total += tl.where(live, mixed * 0x165667B19E3779F9, 0)
    size = (tl.zeros((BLOCK,), tl.int64) + T) * 0x1FFFFFFFFFFFFFC5 + S
    total += tl.where(tl.arange(0, BLOCK) == 0, size * 0x2545F4914F6CDD1D, 0)
    tl.store(out_ptr, tl.sum(total, axis=0))
    tl.store(out_ptr + 1, inputs)


def describe(q: torch.Tensor, top_k: int) -> int:
    """Heads, head size, dtype and K of a scoring call as one number, above 0: no two calls share one."""
    H, D = q.shape[1:]
    return top_k + (H << 16) + (D << 24) + (DTYPES.index(q.dtype) << 40)


def launch_fingerprint(
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    num_rows: int,
    num_keys: int,
    device: torch.device,
    inputs: int = 0,
) -> torch.Tensor:
    """int64 [2] for windows int32 [T] and ``describe``'s number, 0 where nothing is known of the inputs.

    With neither bound given windows are causal, one alone is 0 or S.
    """
    out = torch.empty(2, dtype=torch.int64, device=device)
    _fingerprint_kernel[(1,)](
        out if start is None else start,
        out if end is None else end,
        out,
        num_rows,
        num_keys,
        inputs,
        HAS_START=start is not None,
        HAS_END=end is not None,
        CAUSAL=start is None and end is None,
        BLOCK=1024 if device.type == "cuda" else 128,
        num_warps=4,
    )
    return out

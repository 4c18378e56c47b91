"""Stage 0, windows: clean [start, end) of each row, mark offending rows, reset the row's state.

A row whose window leaves [0, S) or ends before it starts selects nothing: its window becomes empty and
its ``invalid`` flag 1. Decided on the device, so that no call waits for the host.
"""

import torch
import triton
import triton.language as tl

from .plan import ceil_div


@triton.jit(do_not_specialize=["T", "S"])
def _prepare_kernel(
    start_ptr,
    end_ptr,
    lo_ptr,
    hi_ptr,
    invalid_ptr,
    T,
    S,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < T
    lo = tl.zeros((BLOCK,), tl.int32)
    hi = tl.zeros((BLOCK,), tl.int32) + S
    if CAUSAL:
        hi = (rows + 1).to(tl.int32)
    if HAS_START:
        lo = tl.load(start_ptr + rows, mask=mask, other=0)
    if HAS_END:
        hi = tl.load(end_ptr + rows, mask=mask, other=0)
    invalid = (lo < 0) | (hi > S) | (lo > hi)
    tl.store(lo_ptr + rows, tl.where(invalid, 0, lo), mask=mask)
    tl.store(hi_ptr + rows, tl.where(invalid, 0, hi), mask=mask)
    tl.store(invalid_ptr + rows, invalid.to(tl.int32), mask=mask)


def launch_prepare(
    start: torch.Tensor | None, end: torch.Tensor | None, S: int, invalid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cleaned window bounds (lo, hi), int32 [T]; fills the flags ``invalid``, int32 [T].

    With neither bound given the window is causal (the caller has checked T == S); one bound alone
    leaves the other at 0 or S.
    """
    T = invalid.shape[0]
    lo, hi = torch.empty_like(invalid), torch.empty_like(invalid)
    if T:
        block = 256
        _prepare_kernel[(ceil_div(T, block),)](
            lo if start is None else start,
            hi if end is None else end,
            lo,
            hi,
            invalid,
            T,
            S,
            HAS_START=start is not None,
            HAS_END=end is not None,
            CAUSAL=start is None and end is None,
            BLOCK=block,
        )
    return lo, hi

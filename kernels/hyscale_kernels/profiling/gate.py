"""The correctness gate of a race: no speed is reported for a contender whose selection is wrong.

On a few rows the scores are computed again in float64 on the device, with the largest error that the
dtype's arithmetic makes. A key that is among the K best whatever the errors must be selected; one that
cannot be must not. This is a gate, not the suite: hyscale_verify convicts, with proven bounds and ties.
"""

import torch

from .cases import Case

GATE_ROWS = 4

# Largest error of a score, as a share of sum_h |w| sum_d |q| |k|. 16-bit products are exact in float32 and
# some 160 float32 roundings follow (D and H terms, each at most 2**-23 where tensor cores truncate); fp8
# tensor cores keep some 14 bits: measured errors reach 2**-12 of a product's mass; four times that is let
# pass.
ERROR_SHARE = {"bf16": 160 * 2.0**-23, "fp16": 160 * 2.0**-23, "fp8": 2.0**-10}


def sampled_rows(case: Case) -> torch.Tensor:
    number = min(GATE_ROWS, case.rows)
    return torch.linspace(0, case.rows - 1, number, device=case.q.device).long()


def objection(case: Case, indices: torch.Tensor) -> str | None:
    """Why ``indices`` [T, K] cannot be the top-k of some sampled row, in any slot order; None if they can."""
    if tuple(indices.shape) != (case.rows, case.top_k):
        return f"returned shape {list(indices.shape)}, not [{case.rows}, {case.top_k}]"
    for row in sampled_rows(case).tolist():
        first, last = int(case.start[row]), int(case.end[row])
        wanted = min(case.top_k, last - first)
        chosen = indices[row].long()
        chosen = chosen[chosen >= 0]
        if chosen.numel() != wanted or chosen.unique().numel() != wanted:
            return f"row {row} has {chosen.unique().numel()} distinct keys, not {wanted}"
        if wanted and not (first <= int(chosen.min()) and int(chosen.max()) < last):
            return f"row {row} selects outside its window [{first}, {last})"
        low, high = score_interval(case, row, first, last)
        taken = torch.zeros(last - first, dtype=torch.bool, device=low.device)
        taken[chosen - first] = True
        # How many keys may reach a key from below, and how many surely beat it.
        reach = last - first - torch.searchsorted(high.sort().values, low, side="left")
        beaten = last - first - torch.searchsorted(low.sort().values, high, side="right")
        missed = (~taken & (reach <= wanted)).nonzero()
        if missed.numel():
            return f"row {row} misses key {first + int(missed[0])}, which is among its {wanted} best"
        false = (taken & (beaten >= wanted)).nonzero()
        if false.numel():
            return f"row {row} selects key {first + int(false[0])}, which {wanted} keys beat"
    return None


def score_interval(case: Case, row: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 bounds [last - first] of the scores of one row's window."""
    q, w = case.q[row].double(), case.w[row].double()
    k = case.k[first:last].double()
    score = (k @ q.T).relu() @ w
    mass = (k.abs() @ q.abs().T) @ w.abs()
    if case.k_scale is not None:
        scale = case.k_scale[first:last].double()
        score, mass = score * scale, mass * scale
    error = mass * ERROR_SHARE[case.dtype]
    return score - error, score + error

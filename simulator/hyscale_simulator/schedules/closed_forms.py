"""What a step has to take when nothing but the pipeline matters: published forms, and where they hold.

Oracles for the engine and for quick estimates; none of them is used to predict a step. F, B, D, W are the
times of a forward pass, a whole backward pass and its two halves (B = D + W), of one chunk where a stage
holds several; p stages, m microbatches, v chunks. Messages take no time. A form asked outside its regime
raises ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

__all__ = [
    "causal_imbalance",
    "dualpipe_ns",
    "gpipe_ns",
    "interleaved_ns",
    "one_f_one_b_bounds_ns",
    "one_f_one_b_ns",
    "zb_h1_ns",
]


def gpipe_ns(forward_ns: Sequence[int], backward_ns: Sequence[int], num_microbatches: int) -> int:
    """ΣF + (m-1)·max F + ΣB + (m-1)·max B, exact for unequal stages: two permutation flow shops in
    sequence."""
    again = num_microbatches - 1
    return sum(forward_ns) + again * max(forward_ns) + sum(backward_ns) + again * max(backward_ns)


def one_f_one_b_ns(forward_ns: int, backward_ns: int, num_stages: int, num_microbatches: int) -> int:
    """(m + p - 1)(F + B), exact for equal stages (Narayanan et al. 2021: a bubble of (p-1)(F+B))."""
    return (num_microbatches + num_stages - 1) * (forward_ns + backward_ns)


def one_f_one_b_bounds_ns(
    forward_ns: Sequence[int], backward_ns: Sequence[int], num_microbatches: int
) -> tuple[int, int]:
    """Lower and upper bound of 1F1B with unequal stages.

    max over s of Σ_{j<s}(F_j + B_j) + m(F_s + B_s): stage s cannot begin before the first forward pass
    reaches it, nor stop before the last backward pass has left it. And GPipe's time, Σ(F + B) + (m-1)(max F
    + max B). The popular Σ(F + B) + (m-1)·max(F + B) is neither: it can be exceeded where B is not
    proportional to F.
    """
    both = [f + b for f, b in zip(forward_ns, backward_ns, strict=True)]
    lower = max(sum(both[:s]) + num_microbatches * both[s] for s in range(len(both)))
    return lower, gpipe_ns(forward_ns, backward_ns, num_microbatches)


def interleaved_ns(
    forward_ns: int, backward_ns: int, num_stages: int, num_microbatches: int, num_chunks: int
) -> int:
    """(v·m + p - 1)(F + B) of one chunk, exact for equal chunks (Narayanan et al. 2021).

    With F and B of the whole stage that is m(F + B) and a bubble of (p-1)(F + B)/v.
    """
    return (num_chunks * num_microbatches + num_stages - 1) * (forward_ns + backward_ns)


def zb_h1_ns(forward_ns: int, dgrad_ns: int, wgrad_ns: int, num_stages: int, num_microbatches: int) -> int:
    """m(F + D + W) + (p-1)(F + D - W), exact for equal stages with m >= p and W <= min(F, D).

    Qi et al. 2023, table 2, where the backward pass of the inputs is called B.
    """
    if num_microbatches < num_stages or wgrad_ns > min(forward_ns, dgrad_ns):
        raise ValueError(
            f"zb_h1_ns: m {num_microbatches}, p {num_stages}, F {forward_ns}, D {dgrad_ns}, W {wgrad_ns}; "
            "the form holds for m >= p and W <= min(F, D)"
        )
    busy = num_microbatches * (forward_ns + dgrad_ns + wgrad_ns)
    return busy + (num_stages - 1) * (forward_ns + dgrad_ns - wgrad_ns)


def dualpipe_ns(
    forward_ns: int,
    dgrad_ns: int,
    wgrad_ns: int,
    overlapped_ns: int,
    num_stages: int,
    num_microbatches: int,
) -> int:
    """Busy time of a middle stage plus the bubble (p/2-1)(F&B + F - 2W); exact for W <= D <= F.

    F&B is an overlapped pair, at least as long as either half and at most their sum. A middle stage runs
    m-p-1 pairs and p+1 passes of either kind alone. DeepSeek-V3 (2024) states the bubble as (p/2-1)(F&B + B
    - 3W), which is the same when D = F, the case its figure draws.
    """
    backward = dgrad_ns + wgrad_ns
    if not wgrad_ns <= dgrad_ns <= forward_ns:
        raise ValueError(
            f"dualpipe_ns: F {forward_ns}, D {dgrad_ns}, W {wgrad_ns}; the form holds for W <= D <= F"
        )
    if not max(forward_ns, backward) <= overlapped_ns <= forward_ns + backward:
        raise ValueError(
            f"dualpipe_ns: F&B {overlapped_ns}; between {max(forward_ns, backward)} and "
            f"{forward_ns + backward} is wanted"
        )
    pairs = num_microbatches - num_stages - 1
    busy = pairs * overlapped_ns + (num_stages + 1) * (forward_ns + backward)
    return busy + (num_stages // 2 - 1) * (overlapped_ns + forward_ns - 2 * wgrad_ns)


def causal_imbalance(seq_len: int, num_ranks: int, layout: str) -> Fraction:
    """Work of the busiest context-parallel rank over the mean, for causal scoring or attention.

    "contiguous" slices: 2 - (c+1)/(S+1) with c = S/P rows a rank, which tends to 2 - 1/P. "zigzag" (slices r
    and 2P-1-r of 2P): exactly 1. ValueError unless the slices divide the sequence.
    """
    slices = {"contiguous": num_ranks, "zigzag": 2 * num_ranks}
    if layout not in slices:
        raise ValueError(f"layout: {layout!r}; one of {sorted(slices)} is wanted")
    if seq_len < 1 or num_ranks < 1 or seq_len % slices[layout]:
        raise ValueError(f"seq_len: {seq_len}; a multiple of {slices[layout]} slices is wanted")
    if layout == "zigzag":
        return Fraction(1)
    return 2 - Fraction(seq_len // num_ranks + 1, seq_len + 1)

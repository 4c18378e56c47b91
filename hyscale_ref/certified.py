"""Which keys a correct selection must and must not hold when scores are known only to within a bound.

A computed score lies in [score - bound, score + bound]. A key whose place among the K best no choice of
scores in these intervals can take away must be in; a key that no choice can bring there must be out; only the
rest, the ambiguous keys, may differ between correct kernels. With zero bounds nothing is ambiguous, ties
included.

Order and windows are those of :mod:`hyscale_ref.topk`. Shape letters: T queries, S keys, K = top_k.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyscale_ref.arrays import Bool, Float64, Int32, as_count, as_float64, as_int32
from hyscale_ref.windows import Windows, resolve


class CertifiedSets(NamedTuple):
    """Keys that must and that must not be selected, bool [T, S]; a key outside its row's window must not."""

    must_in: Bool
    must_out: Bool


@dataclass(frozen=True)
class Violation:
    """What a selection got wrong in one row, in words; ``key`` is -1 where no single key is at fault."""

    row: int
    key: int
    reason: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.reason}"


def certified_sets(
    scores: ArrayLike,
    bound: ArrayLike,
    top_k: int,
    start: ArrayLike | None = None,
    end: ArrayLike | None = None,
) -> CertifiedSets:
    """The certain part of the top-k of ``scores`` [T, S], each known to within ``bound`` [T, S].

    A bound is >= 0; an infinite one promises nothing, not even that the computed score is a number. A NaN
    score with a finite bound is surely NaN, so out. Windows as in :func:`hyscale_ref.topk.topk`; a row with a
    bad window must be empty.
    """
    scores, bound, K, windows = _checked(scores, bound, top_k, start, end)
    must_in = np.zeros(scores.shape, np.bool_)
    must_out = np.ones(scores.shape, np.bool_)
    for t, (low, high) in enumerate(zip(*windows, strict=True)):
        row = _Row(scores[t, low:high], bound[t, low:high])
        rivals, winners = row.rivals_and_winners()
        must_in[t, low:high] = row.surely_number & (rivals < K)
        must_out[t, low:high] = row.surely_nan | (winners >= K)
    return CertifiedSets(must_in, must_out)


def ambiguous_fraction(
    sets: CertifiedSets, start: ArrayLike | None = None, end: ArrayLike | None = None
) -> float:
    """The share of keys inside their windows that are neither certainly in nor certainly out (0 if none)."""
    (low, high), _ = resolve(start, end, *sets.must_in.shape)
    visible = int((high.astype(np.int64) - low).sum())
    ambiguous = int((~sets.must_in & ~sets.must_out).sum())
    return ambiguous / visible if visible else 0.0


def judge(
    indices: ArrayLike,
    scores: ArrayLike,
    bound: ArrayLike,
    top_k: int,
    start: ArrayLike | None = None,
    end: ArrayLike | None = None,
    *,
    ordered: bool = True,
) -> list[Violation]:
    """What is wrong with the selected ``indices`` [T, K], integers, -1 where nothing is selected.

    Checked, row by row: the indices are distinct keys of the window; the count is min(K, numbers in the
    window), or as near to it as scores of unknown kind allow; every key that must be in is there; none is
    there that must be out. If ``ordered``, also that they ascend, with -1 only at the tail. An empty list
    means that the selection is correct as far as the bounds can tell.
    """
    scores, bound, K, windows = _checked(scores, bound, top_k, start, end)
    chosen = as_int32("indices", indices, [len(scores), K])
    sets = certified_sets(scores, bound, top_k, windows.start, windows.end)
    violations: list[Violation] = []
    for t, (low, high) in enumerate(zip(*windows, strict=True)):
        found = _structure(t, chosen[t], int(low), int(high), ordered)
        row = _Row(scores[t, low:high], bound[t, low:high])
        keys = chosen[t][(low <= chosen[t]) & (chosen[t] < high)]
        selected = np.zeros(scores.shape[1], np.bool_)
        selected[keys] = True
        least = min(K, int(row.surely_number.sum()))
        most = min(K, int((~row.surely_nan).sum()))
        if not found and not least <= len(keys) <= most:
            allowed = str(least) if least == most else f"{least} to {most}"
            found.append(Violation(t, -1, f"{len(keys)} keys are selected; allowed: {allowed}"))
        cut = f"the best {K} end at a score in [{row.cut(row.lower, K):.9g}, {row.cut(row.upper, K):.9g}]"
        for must, wrong in (
            ("be", sets.must_in[t] & ~selected),
            ("not be", sets.must_out[t] & selected),
        ):
            for j in np.flatnonzero(wrong):
                interval = f"its score {scores[t, j]:.9g} lies in {row.interval(int(j - low))}"
                found.append(Violation(t, int(j), f"key {j} must {must} selected: {interval}; {cut}"))
        violations += found
    return violations


class _Row:
    """Score intervals of the keys of one window."""

    def __init__(self, scores: Float64, bound: Float64) -> None:
        unknown = np.isinf(bound)
        self.surely_nan: Bool = np.isnan(scores) & ~unknown
        self.surely_number: Bool = ~np.isnan(scores) & ~unknown
        safe = np.where(self.surely_number, bound, 0.0)
        self.lower: Float64 = np.where(self.surely_number, scores - safe, -np.inf)
        self.upper: Float64 = np.where(self.surely_number, scores + safe, np.where(unknown, np.inf, -np.inf))

    def rivals_and_winners(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each key, how many others could beat it, and how many others surely beat it.

        Upper ends and lower ends are put into one order, best first: (value, then smaller index, then upper
        before lower end). Key i could beat j if i's upper end stands before j's lower end, and surely beats
        it if i's lower end stands before j's upper end.
        """
        n = len(self.lower)
        value = np.concatenate([self.upper, self.lower])
        index = np.tile(np.arange(n), 2)
        is_lower = np.repeat([False, True], n)
        possible = np.concatenate([~self.surely_nan, np.zeros(n, np.bool_)])
        sure = np.concatenate([np.zeros(n, np.bool_), self.surely_number])
        order = np.lexsort((is_lower, index, -value))
        place = np.empty(2 * n, np.int64)
        place[order] = np.arange(2 * n)
        possible_before = np.cumsum(possible[order])[place]
        sure_before = np.cumsum(sure[order])[place]
        rivals = possible_before[n:] - (~self.surely_nan).astype(
            np.int64
        )  # a key's own upper end stands before its lower end
        return rivals, sure_before[:n]

    def cut(self, ends: Float64, K: int) -> float:
        """The K-th best of the intervals' ``ends``; -inf where there are fewer."""
        return float(np.sort(ends)[-K]) if len(ends) >= K else -np.inf

    def interval(self, place: int) -> str:
        if self.surely_nan[place]:
            return "no interval: it is NaN"
        return f"[{self.lower[place]:.9g}, {self.upper[place]:.9g}]"


def _checked(
    scores: ArrayLike, bound: ArrayLike, top_k: int, start: ArrayLike | None, end: ArrayLike | None
) -> tuple[Float64, Float64, int, Windows]:
    scores = as_float64("scores", scores, ["T", "S"])
    bound = as_float64("bound", bound, scores.shape)
    if not (bound >= 0).all():
        t, j = np.argwhere(~(bound >= 0))[0]
        raise ValueError(f"bound[{t}, {j}]: {bound[t, j]}; allowed: >= 0")
    windows, _ = resolve(start, end, *scores.shape)
    return scores, bound, as_count("top_k", top_k, minimum=1), windows


def _structure(t: int, chosen: Int32, low: int, high: int, ordered: bool) -> list[Violation]:
    """Wrong indices, repeats and order of one row, whatever the scores are."""
    found = []
    for j in np.unique(chosen[(chosen != -1) & ((chosen < low) | (chosen >= high))]):
        found.append(Violation(t, int(j), f"index {j} is outside its window [{low}, {high})"))
    keys = chosen[chosen != -1]
    values, counts = np.unique(keys, return_counts=True)
    for j, times in zip(values[counts > 1], counts[counts > 1], strict=True):
        found.append(Violation(t, int(j), f"key {j} is selected {times} times"))
    if ordered and not found:
        if (chosen[: len(keys)] == -1).any():
            found.append(Violation(t, -1, f"-1 stands before a key: {chosen.tolist()[:16]}"))
        elif (np.diff(keys) < 0).any():
            place = int(np.flatnonzero(np.diff(keys) < 0)[0])
            pair = f"{keys[place]} then {keys[place + 1]}"
            found.append(Violation(t, int(keys[place + 1]), f"indices do not ascend: {pair}"))
    return found

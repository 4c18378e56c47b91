"""The form of the answer: ascending, unique, -1 after, inside the window; counts and returned scores."""

import numpy as np
from hypothesis import strategies as st

from hyscale_verify.properties.base import FalsifiedError, Property, Trial, promise
from hyscale_verify.properties.judge import expected, members
from hyscale_verify.strategies import EVERY

MIXED = ("tie_rich", "exact_integers", "row_lengths", "packed_windows", "rank_splits", "nan", "random_normal")


@promise("result", MIXED)
def ascending_and_unique(trial: Trial) -> None:
    """The selected indices of a row rise strictly, so none is repeated."""
    for t, row in enumerate(trial.select().indices):
        length = next((i for i, key in enumerate(row) if key < 0), len(row))
        steps = np.flatnonzero(np.diff(row[:length].astype(np.int64)) <= 0)
        if steps.size:
            i = int(steps[0])
            raise FalsifiedError(
                f"row {t} has {row[i]} and then {row[i + 1]} at place {i}", (t,), (int(row[i]),)
            )


@promise("result", MIXED)
def tail_is_minus_one(trial: Trial) -> None:
    """After the keys there are to select every entry of a row is -1, and before that none is negative."""
    scores = trial.ranked()
    for t, (row, n) in enumerate(
        zip(trial.select().indices, expected(trial.case, scores).count, strict=True)
    ):
        wrong = np.flatnonzero(np.where(np.arange(len(row)) < n, row < 0, row != -1))
        if wrong.size:
            place = int(wrong[0])
            raise FalsifiedError(f"row {t} of {n} selectable keys has {row[place]} at place {place}", (t,))


@promise("result", (*MIXED, "infinities"))
def as_many_as_there_are(trial: Trial) -> None:
    """A row selects min(K, keys of its window that are not NaN), and says so in ``count``."""
    scores = trial.ranked()
    result, right = trial.select(), expected(trial.case, scores).count
    for t, row in enumerate(result.indices):
        number = len(members(row))
        if number != right[t]:
            raise FalsifiedError(f"row {t} selects {number} keys, must select {right[t]}", (t,))
        if result.count is not None and result.count[t] != right[t]:
            raise FalsifiedError(f"row {t} has count {result.count[t]}, must be {right[t]}", (t,))


@promise("window", (*MIXED, "odd_sizes", "sorted", "reversed"))
def window_is_respected(trial: Trial) -> None:
    """No index lies outside start[t] <= j < end[t]."""
    for t, row in enumerate(trial.select().indices):
        low, high = int(trial.case.start[t]), int(trial.case.end[t])
        for key in members(row):
            if not low <= key < high:
                raise FalsifiedError(f"row {t} with window [{low}, {high}) selects key {key}", (t,), (key,))


@promise("window", ("constant", "tie_rich"))
def window_edges_count(trial: Trial) -> None:
    """The first and last key of a window are selected when they are best, their neighbours outside never.

    Every row gets one window; its two edge keys score 2, all inside it 1, and the keys next to it 3.
    """
    case = trial.case
    S = case.num_keys
    low = trial.draw(st.integers(0, S - 1), "start")
    high = trial.draw(st.integers(low + 1, S), "end")
    level = np.ones(S, np.float32)
    level[[low, high - 1]] = 2
    level[[key for key in (low - 1, high) if 0 <= key < S]] = 3
    q, k, w = np.zeros_like(case.q), np.zeros_like(case.k), np.zeros_like(case.w)
    q[:, 0, 0], w[:, 0], k[:, 0] = 1, 1, level
    rows = np.ones(case.num_queries, np.int32)
    trial.case = case = case.with_(
        q=q,
        k=k,
        w=w,
        start=low * rows,
        end=high * rows,
        k_scale=None if case.k_scale is None else level * 0 + 1,
    )
    edges = {low, high - 1}
    for t, row in enumerate(trial.select().indices):
        chosen = set(members(row))
        for key in sorted(chosen - set(range(low, high))):
            raise FalsifiedError(
                f"row {t} with window [{low}, {high}) selects key {key} outside it", (t,), (key,)
            )
        for key in sorted(edges - chosen) if case.top_k >= len(edges) else ():
            raise FalsifiedError(
                f"row {t} with window [{low}, {high}) leaves out key {key} at its edge, the best",
                (t,),
                (key,),
            )


@promise("canonical scores", EVERY, needs=["hytopk"])
def returned_scores(trial: Trial) -> None:
    """Returned scores are the dense pass's bit for bit (+0 for -0), -inf in the tail."""
    dense, result = trial.dense(), trial.select(return_scores=True)
    if result.scores is None:
        raise FalsifiedError("return_scores=True returned no scores")
    for t, row in enumerate(result.indices):
        chosen = row[row >= 0]
        have = result.scores[t, : len(chosen)]
        want = dense[t, chosen] + np.float32(0.0)
        wrong = np.flatnonzero(have.view(np.int32) != want.view(np.int32))
        if wrong.size:
            i = int(wrong[0])
            raise FalsifiedError(
                f"row {t} returns {have[i]!r} for key {chosen[i]}, its dense score is {want[i]!r}",
                (t,),
                (int(chosen[i]),),
            )
        tail = result.scores[t, len(chosen) :]
        if (tail != -np.inf).any():
            raise FalsifiedError(
                f"row {t} has the score {tail[tail != -np.inf][0]} in its tail, must be -inf", (t,)
            )


@promise("order", ("signed_zero", "relu_plateau", "tie_rich"), needs=["hytopk"])
def negative_zero_is_zero(trial: Trial) -> None:
    """No returned score is -0, and -0 ties with +0: the set is that of the scores with every zero +0."""
    result = trial.select(return_scores=True)
    if result.scores is None:
        raise FalsifiedError("return_scores=True returned no scores")
    minus = np.argwhere((result.scores == 0) & np.signbit(result.scores))
    if minus.size:
        t, i = (int(x) for x in minus[0])
        raise FalsifiedError(
            f"row {t} returns -0 for key {result.indices[t, i]}", (t,), (int(result.indices[t, i]),)
        )


PROPERTIES: tuple[Property, ...] = (
    ascending_and_unique,
    tail_is_minus_one,
    as_many_as_there_are,
    window_is_respected,
    window_edges_count,
    returned_scores,
    negative_zero_is_zero,
)

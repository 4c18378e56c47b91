"""The right keys: the exact set by four rungs of the oracle ladder, ties, NaN, infinities, short rows.

Rung 1, exact inputs: the oracle's set bit for bit. Rung 2: a stable sort of the target's own scores. Rung 3:
certified intervals around float64 scores. Rung 4, metamorphic relations, is in ``relations.py``.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st

from hyscale_ref.bounds import (
    FLOAT32,
    HOPPER_E4M3,
    TENSOR_CORE_16BIT,
    Arithmetic,
    BoundedScores,
    bounded_scores,
)
from hyscale_ref.certified import ambiguous_fraction, certified_sets, judge
from hyscale_verify.properties.base import FalsifiedError, Property, Trial, promise
from hyscale_verify.properties.judge import expected, members, same_bits, same_sets
from hyscale_verify.strategies import EVERY, EXACT, TIES, cases
from hyscale_verify.targets import Result, outside_windows


@promise("exact", EXACT)
def exact_set_of_exact_inputs(trial: Trial) -> None:
    """Rung 1: where every sum is exact in float32, the set is the oracle's, ties included."""
    scores = trial.case.scores()
    same_sets(trial.select(), expected(trial.case, scores).indices, scores, "the exact scores")


@promise("exact", EVERY, needs=["dense"])
def exact_set_of_own_scores(trial: Trial) -> None:
    """Rung 2: the set is a stable sort's of the target's own float32 scores."""
    scores = trial.dense()
    same_sets(trial.select(), expected(trial.case, scores).indices, scores, "the target's own scores")


INEXACT = ("random_normal", "wide_range", "ulp_neighbours", "exact_integers", "infinities", "nan")


def _bounded(trial: Trial) -> BoundedScores:
    """float64 scores of the trial's case and how far the device's arithmetic may be from them."""
    arithmetic: Arithmetic = FLOAT32
    if trial.device == "cuda" and trial.case.dtype != "fp32":
        arithmetic = HOPPER_E4M3 if trial.case.dtype == "fp8" else TENSOR_CORE_16BIT
    case = trial.case
    return bounded_scores(case.q, case.k, case.w, case.k_scale, arithmetic=arithmetic)


@promise("score", INEXACT, needs=["dense", "fused"])
def dense_scores_within_bounds(trial: Trial) -> None:
    """Rung 3: every score lies within its rigorous rounding bound of the float64 score."""
    dense = trial.dense().astype(np.float64)
    exact, bound = _bounded(trial)
    judged = ~outside_windows(trial.case) & np.isfinite(bound)
    both_nan = np.isnan(dense) & np.isnan(exact)
    error = np.where(both_nan | (dense == exact), 0, np.abs(dense - exact))
    for t, j in np.argwhere(judged & ~(error <= bound)):
        raise FalsifiedError(
            f"row {t} scores key {j} {dense[t, j]:.9g}, more than {bound[t, j]:.3g} off {exact[t, j]:.9g}",
            (int(t),),
            (int(j),),
        )
    rounding = judged & (bound > 0)
    trial.numbers["error as a share of its bound"] = float(
        np.max(error[rounding] / bound[rounding], initial=0)
    )


@promise("exact", INEXACT, needs=["fused"])
def certified_set(trial: Trial) -> None:
    """Rung 3: keys certain to be among the best K are in, keys certain not to be are out.

    At most 1 % of the keys of random normal inputs may be uncertain (a quarter where the fp8 accumulator of
    Hopper tensor cores is modelled); fewer than 64 keys are too few to tell.
    """
    case = trial.case
    exact, bound = _bounded(trial)
    wrong = judge(trial.select().indices, exact, bound, case.top_k, case.start, case.end)
    for each in wrong:
        keys = (each.key,) if each.key >= 0 else ()
        raise FalsifiedError(str(each), (each.row,), keys)
    sets = certified_sets(exact, bound, case.top_k, case.start, case.end)
    share = ambiguous_fraction(sets, case.start, case.end)
    if case.regime == "random_normal" and 64 <= case.num_keys <= 4096:
        trial.numbers["uncertain share of keys"] = share
        allowed = 0.25 if trial.device == "cuda" and case.dtype == "fp8" else 0.01
        if share > allowed:
            raise FalsifiedError(f"{share:.3g} of the keys are uncertain; {allowed} are allowed")


@promise("order", TIES)
def tie_rule(trial: Trial) -> None:
    """Among equal scores the smaller key indices are selected."""
    scores = trial.ranked()
    outside = outside_windows(trial.case)
    for t, row in enumerate(trial.select().indices):
        chosen = [key for key in members(row) if key < trial.case.num_keys]
        passed_over = np.ones(trial.case.num_keys, bool)
        passed_over[chosen] = False
        passed_over &= ~outside[t]
        for key in chosen:
            smaller = np.flatnonzero(passed_over[:key] & (scores[t, :key] == scores[t, key]))
            if smaller.size:
                other = int(smaller[0])
                raise FalsifiedError(
                    f"row {t} selects key {key} and passes over key {other}, "
                    f"though both score {scores[t, key]:.9g}: the smaller index comes first",
                    (t,),
                    (other, key),
                )


@promise("order", ("nan", "infinities"))
def nan_never_selected(trial: Trial) -> None:
    """A key whose score is NaN is never selected, and NaN scores are counted per row."""
    scores = trial.ranked()
    result = trial.select()
    for t, row in enumerate(result.indices):
        for key in members(row):
            if key < trial.case.num_keys and np.isnan(scores[t, key]):
                raise FalsifiedError(f"row {t} selects key {key}, whose score is NaN", (t,), (key,))
    if "hytopk" in trial.target.offers:
        counted = result.stats.nan_scores.cpu().numpy()
        right = expected(trial.case, scores).nan_count
        for wrong in np.flatnonzero(counted != right).tolist():
            raise FalsifiedError(
                f"row {wrong} has {right[wrong]} NaN scores and counts {counted[wrong]}", (wrong,)
            )


@promise("order", ("infinities",))
def infinities_are_ordinary(trial: Trial) -> None:
    """+inf comes before and -inf after every finite score, and both can be selected."""
    scores = trial.ranked()
    outside = outside_windows(trial.case)
    for t, row in enumerate(trial.select().indices):
        chosen = [key for key in members(row) if key < trial.case.num_keys]
        others = np.setdiff1d(np.flatnonzero(~outside[t] & ~np.isnan(scores[t])), chosen)
        room = trial.case.top_k - len(chosen)
        if room > 0 and others.size:
            key = int(others[0])
            raise FalsifiedError(
                f"row {t} has room for {room} more and leaves out key {key} (score {scores[t, key]})",
                (t,),
                (key,),
            )
        if chosen and others.size:
            worst, best = chosen[int(np.argmin(scores[t, chosen]))], int(others[np.argmax(scores[t, others])])
            if scores[t, best] > scores[t, worst]:
                raise FalsifiedError(
                    f"row {t} selects key {worst} (score {scores[t, worst]}) and not key {best} "
                    f"(score {scores[t, best]})",
                    (t,),
                    (worst, best),
                )


@promise("short rows", ("row_lengths", "packed_windows", "rank_splits", "tie_rich"))
def short_rows_are_complete(trial: Trial) -> None:
    """A row of at most K keys selects every one that is not NaN, in ascending order."""
    result = trial.select()
    for t in np.flatnonzero(trial.case.lengths <= trial.case.top_k):
        wanted = list(range(int(trial.case.start[t]), int(trial.case.end[t])))
        have = result.indices[t].tolist()[: len(wanted)]
        if have != wanted:
            raise FalsifiedError(
                f"row {t} of {len(wanted)} keys and K={trial.case.top_k} begins {have}, must be {wanted}",
                (int(t),),
            )


V = TypeVar("V")
Shapes = tuple[tuple[int, int], ...]

INTERPRETED: Shapes = ((300, 3000), (2000, 5000), (2048, 9000), (4096, 6000))
"""(K, S), smaller K first: of HyTopK they take both ways, by way of candidates and by a table."""

COMPILED: Shapes = (
    (129, 20000),
    (257, 6000),
    (512, 20000),
    (1000, 3000),
    (1025, 9000),
    (2000, 20000),
    (2048, 5000),
    (2048, 20000),
    (4096, 6000),
    (4096, 20000),
)
"""The same where a call takes milliseconds: on a GPU, and for selectors, which are functions of a table."""


def _nth(options: tuple[V, ...], i: int) -> tuple[V]:
    """The i-th option alone, counted round and round."""
    return (options[i % len(options)],)


@promise(
    "exact",
    ("exact_integers", "tie_rich"),
    share=0.03,
    why_few="each example selects thousands of keys, at every size of a list",
)
def production_sizes(trial: Trial) -> None:
    """Rung 1 at the sizes of models: K to 4096, powers of two or not, over thousands of keys, entry by entry.

    Six rows see every key, more than K, K + 1, K, K - 1 and K / 2 of them. Indices, their order and their
    tail, and counts must be the oracle's.
    """
    interpreted = trial.device == "cpu" and "fused" in trial.target.offers
    space = trial.space
    for i, (K, S) in enumerate(INTERPRETED if interpreted else COMPILED):
        # Few examples are drawn, so that dtype, heads and head size take turns.
        turn = replace(
            space,
            dtypes=_nth(space.dtypes, i),
            heads=_nth(space.heads[:2], i),
            dims=_nth(space.dims, i // 2),
        )
        lengths = np.array([S, (S + K) // 2, K + 1, K, K - 1, K // 2])
        sized = cases(trial.case.regime, turn.exactly(len(lengths), S, K), ("full",))
        case = trial.data.draw(sized, label=f"K={K}, S={S}")
        where = np.random.default_rng(trial.data.draw(st.integers(0, 2**32 - 1), label="seed of the windows"))
        start = where.integers(0, S - lengths, endpoint=True)
        trial.case = case.with_(start=start.astype(np.int32), end=(start + lengths).astype(np.int32))
        scores = trial.case.scores()
        right, result = expected(trial.case, scores), trial.select()
        same_sets(result, right.indices, scores, "the exact scores")
        oracle = Result(right.indices.astype(np.int32), right.count.astype(np.int32))
        same_bits(Result(result.indices, result.count), oracle, "the target against the oracle")


PROPERTIES: tuple[Property, ...] = (
    exact_set_of_exact_inputs,
    exact_set_of_own_scores,
    dense_scores_within_bounds,
    certified_set,
    tie_rule,
    nan_never_selected,
    infinities_are_ordinary,
    short_rows_are_complete,
    production_sizes,
)

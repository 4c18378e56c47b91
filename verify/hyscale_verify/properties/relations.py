"""Rung 4: relations between two calls that hold whatever the right answer is."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from hyscale_ref import windows
from hyscale_verify.properties.base import FalsifiedError, Property, Trial, promise
from hyscale_verify.properties.judge import joined, members, same_bits, taken
from hyscale_verify.strategies import TIES
from hyscale_verify.targets import Result, outside_windows

ANY = ("tie_rich", "exact_integers", "ulp_neighbours", "random_normal", "relu_plateau", "duplicated_keys")


def _cut_points(trial: Trial, total: int, label: str) -> list[int]:
    cuts = trial.draw(st.lists(st.integers(0, total), max_size=3).map(sorted), label)
    return [0, *cuts, total]


@promise("deterministic", (*ANY, "row_lengths"))
def row_independence(trial: Trial) -> None:
    """A row's answer depends on that row alone: reorder the rows, or ruin every other row with NaN."""
    case = trial.case
    whole = trial.select()
    order = trial.draw(st.permutations(range(case.num_queries)), "row order")
    same_bits(trial.select(case.rows(order)), taken(whole, np.array(order)), "rows in another order")
    kept = trial.draw(st.integers(0, case.num_queries - 1), "row kept")
    others = np.arange(case.num_queries) != kept
    q, w, end = case.q.copy(), case.w.copy(), case.end.copy()
    q[others], w[others], end[others] = np.nan, np.nan, case.num_keys
    start = np.where(others, 0, case.start).astype(np.int32)
    ruined = trial.select(case.with_(q=q, w=w, start=start, end=end))
    row = slice(kept, kept + 1)
    same_bits(taken(ruined, row), taken(whole, row), f"row {kept} among other rows")


@promise("deterministic", (*ANY, "packed_windows"))
def chunks_of_rows(trial: Trial) -> None:
    """Calling on pieces of the rows, one after the other, gives the answer of one call."""
    cuts = _cut_points(trial, trial.case.num_queries, "row cuts")
    pieces = [trial.select(trial.case.rows(slice(a, b))) for a, b in pairwise(cuts) if a < b]
    same_bits(joined(pieces), trial.select(), "in pieces")


@promise("deterministic", ("tie_rich", "random_normal", "ulp_neighbours"), windows=("causal", "packed"))
def rank_split(trial: Trial) -> None:
    """Context parallel: the rows of p ranks (contiguous or zig-zag) together answer as one rank does."""
    case = trial.case
    rows_of = trial.draw(st.sampled_from((windows.contiguous_rows, windows.zigzag_rows)), "split")
    ranks = trial.draw(st.integers(2, 4), "ranks")
    held = [rows_of(case.num_queries, ranks, rank) for rank in range(ranks)]
    shares = [(rows, trial.select(case.rows(rows))) for rows in held if len(rows)]
    back = np.argsort(np.concatenate([rows for rows, _ in shares]))
    same_bits(taken(joined([r for _, r in shares]), back), trial.select(), f"{ranks} ranks against one")


@promise("deterministic", ANY, windows=("causal",))
def prefix_causality(trial: Trial) -> None:
    """Under a causal window, rows before t do not see keys from t on: cut those off, or change them."""
    case = trial.case
    t = trial.draw(st.integers(1, case.num_queries), "t")
    before = taken(trial.select(), slice(0, t))
    prefix = case.rows(slice(0, t)).keys(slice(0, t))
    same_bits(trial.select(prefix), before, f"the sequence cut after {t} positions")
    k = case.k.copy()
    k[t:] = trial.draw(st.sampled_from((0.0, 8.0, float("nan"))), "later keys become")
    changed = taken(trial.select(case.with_(k=k)), slice(0, t))
    same_bits(changed, before, f"keys from {t} on changed")


@promise("order", (*ANY, "nan", "infinities"))
def k_is_a_prefix_of_k_plus_one(trial: Trial) -> None:
    """The top K are among the top K + 1, which have at most one key more."""
    case = trial.case
    fewer, more = trial.select(), trial.select(case.with_(top_k=case.top_k + 1))
    for t, (one, two) in enumerate(zip(fewer.indices, more.indices, strict=True)):
        lost = sorted(set(members(one)) - set(members(two)))
        if lost:
            raise FalsifiedError(
                f"row {t} selects key {lost[0]} at K={case.top_k}, not at K={case.top_k + 1}",
                (t,),
                tuple(lost),
            )
        if len(members(two)) - len(members(one)) > 1:
            raise FalsifiedError(
                f"row {t} gains {len(members(two)) - len(members(one))} keys from K to K + 1", (t,)
            )


@promise("exact", (*ANY, "nan"), windows=("full",))
def key_permutation(trial: Trial) -> None:
    """Permute the keys: the same scores are selected, and the same keys where the cut is no tie.

    Scores are the target's own where it shows them: each must move with its key bit for bit, NaN as NaN.
    """
    case = trial.case
    order = np.array(trial.draw(st.permutations(range(case.num_keys)), "key order"))
    moved = case.keys(order)
    scores = trial.ranked()
    if "fused" in trial.target.offers and "dense" in trial.target.offers:
        again = trial.dense(moved)
        carried = scores[:, order]
        changed = (again.view(np.int32) != carried.view(np.int32)) & ~(np.isnan(again) & np.isnan(carried))
        if changed.any():
            t, j = (int(x) for x in np.argwhere(changed)[0])
            raise FalsifiedError(
                f"row {t} scores key {order[j]} {scores[t, order[j]]!r}, and {again[t, j]!r} at place {j}",
                (t,),
                (int(order[j]),),
            )
    first, second = trial.select(), trial.select(moved)
    for t in range(case.num_queries):
        here, there = members(first.indices[t]), [int(order[j]) for j in members(second.indices[t])]
        if not np.array_equal(np.sort(scores[t, here]), np.sort(scores[t, there]), equal_nan=True):
            raise FalsifiedError(
                f"row {t} selects {here}, after a permutation of the keys {sorted(there)}", (t,)
            )


@promise("exact", (*ANY, *TIES[2:6]), windows=("full",))
def append_below_the_cut(trial: Trial) -> None:
    """Keys appended that do not beat the cut change nothing; copies of keys passed over never do.

    A copy ties with its original, which has the smaller index and was not selected.
    """
    case = trial.case
    whole = trial.select()
    chosen = set(np.unique(whole.indices).tolist())
    passed_over = [key for key in range(case.num_keys) if key not in chosen]
    trial.assume(bool(passed_over) and case.num_queries > 0)
    copies = trial.draw(
        st.lists(st.sampled_from(passed_over), min_size=1, max_size=5), "keys copied to the end"
    )
    longer = case.keys(np.concatenate([np.arange(case.num_keys), copies]))
    longer = longer.with_(end=np.full(case.num_queries, longer.num_keys, np.int32))
    same_bits(trial.select(longer), whole, f"keys {copies} appended again")


@promise("exact", ("tie_rich", "exact_integers", "ulp_neighbours", "relu_plateau", "sorted", "spike"))
def power_of_two_scaling(trial: Trial) -> None:
    """Weights times 2**m scale every score exactly: the set stays."""
    m = trial.draw(st.integers(-30, 30), "m")
    scaled = trial.case.with_(w=np.ldexp(trial.case.w, m).astype(np.float32))
    one, two = trial.select(), trial.select(scaled)
    same_bits(Result(two.indices), Result(one.indices), f"weights times 2**{m}")


@promise("deterministic", ("tie_rich", "random_normal", "duplicated_keys"))
def keys_outside_do_not_matter(trial: Trial) -> None:
    """Keys outside every window can be anything, NaN included, and cutting them off shifts the answer."""
    case = trial.case
    used = ~outside_windows(case).all(axis=0)
    trial.assume(bool(used.any()) and not used.all())
    k = case.k.copy()
    k[~used] = trial.draw(st.sampled_from((float("nan"), 9.0)), "keys outside become")
    whole = trial.select()
    same_bits(trial.select(case.with_(k=k)), whole, "keys outside the windows changed")
    first = int(np.flatnonzero(used)[0])
    rows = case.lengths > 0
    shifted = case.keys(slice(first, None)).rows(rows)
    shifted = shifted.with_(start=shifted.start - first, end=shifted.end - first)
    there = trial.select(shifted)
    moved = Result(np.where(there.indices < 0, there.indices, there.indices + np.int32(first)))
    same_bits(moved, Result(whole.indices[rows]), f"the first {first} keys cut off")


PROPERTIES: tuple[Property, ...] = (
    row_independence,
    chunks_of_rows,
    rank_split,
    prefix_causality,
    k_is_a_prefix_of_k_plus_one,
    key_permutation,
    append_below_the_cut,
    power_of_two_scaling,
    keys_outside_do_not_matter,
)

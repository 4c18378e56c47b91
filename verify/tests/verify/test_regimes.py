"""Each family of inputs is what it claims to be."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from hyscale_ref.topk import topk
from hyscale_verify.cases import DTYPES, LAYOUTS, Case, rounded
from hyscale_verify.draws import draws_of_the_seed_alone
from hyscale_verify.runner import HOLDS, Plan, Unit, judge
from hyscale_verify.strategies import CPU, CUDA, REGIMES, TIES, cases
from hyscale_verify.targets import HyTopK, given_scores, outside_windows


@functools.cache
def drawn(regime: str, number: int = 40, **options: object) -> list[Case]:
    """Some cases of a regime, always the same ones."""
    found: list[Case] = []

    @seed(7)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(cases(regime, CPU, **options))  # type: ignore[arg-type]
    def collect(case: Case) -> None:
        found.append(case)

    with np.errstate(all="ignore"), draws_of_the_seed_alone():
        collect()
    return found


def share(found: list[Case], what: Callable[[Case], bool]) -> float:
    return sum(map(what, found)) / len(found)


@pytest.mark.parametrize("regime", sorted(REGIMES))
def test_every_case_is_well_formed(regime: str) -> None:
    for case in drawn(regime, 20, sizes=True):
        T, H, D = case.q.shape
        assert case.k.shape == (case.num_keys, D)
        assert case.w.shape == (T, H)
        assert case.start.dtype == case.end.dtype == np.int32
        assert ((case.start >= 0) & (case.start <= case.end) & (case.end <= case.num_keys)).all()
        assert (case.k_scale is not None) == (case.dtype == "fp8")
        for values in (case.q, case.k):
            np.testing.assert_array_equal(rounded(values, case.dtype), values)  # q and k are representable
        assert case.top_k >= 1
        assert "K=" in case.in_words()


@pytest.mark.parametrize("regime", [name for name, spec in REGIMES.items() if spec.exact])
def test_scores_of_exact_regimes_are_exact_in_any_order(regime: str) -> None:
    rng = np.random.default_rng(0)
    for case in drawn(regime, 20):
        scores = case.scores()
        assert (scores == scores.astype(np.float32)).all()
        order = rng.permutation(case.q.shape[2])
        dots = np.zeros((case.num_queries, case.q.shape[1], case.num_keys), np.float32)
        for d in order:  # float32 sums in a random order of the head's elements
            dots += case.q[:, :, None, d] * case.k[None, None, :, d]
        total = np.zeros_like(dots[:, 0])
        for h in rng.permutation(case.q.shape[1]):
            total += case.w[:, h, None] * np.maximum(dots[:, h], np.float32(0))
        if case.k_scale is not None:
            total *= case.k_scale
        np.testing.assert_array_equal(total, scores)
        # The narrow accumulator of fp8 tensor cores holds 13 bits below the leading one.
        products = np.abs(case.q)[:, :, None, :] * np.abs(case.k)
        assert products.sum(axis=-1).max(initial=0) < 2**13


def tied_at_the_cut(case: Case) -> bool:
    """Some row has a key outside the selection that scores what a selected key scores."""
    scores = given_scores(case)
    chosen = topk(scores, case.top_k, case.start, case.end).indices
    outside = outside_windows(case)
    for t, row in enumerate(chosen):
        rest = np.setdiff1d(np.flatnonzero(~outside[t]), row)
        if np.isin(scores[t, rest], scores[t, row[row >= 0]]).any():
            return True
    return False


@pytest.mark.parametrize("regime", TIES)
def test_tie_regimes_tie_at_the_cut(regime: str) -> None:
    assert share(drawn(regime), tied_at_the_cut) > 0.1


def test_random_normal_hardly_ever_ties_at_the_cut_of_large_rows() -> None:
    large = [
        case for case in drawn("random_normal") if (case.scores() > 0).sum() > case.top_k * case.num_queries
    ]
    assert share(large, tied_at_the_cut) < 0.5  # relu's zeros below the cut do not count as ties at it


def test_relu_plateau_leaves_most_scores_at_zero() -> None:
    zeros = np.concatenate([(case.scores() == 0).ravel() for case in drawn("relu_plateau")])
    assert 0.6 < zeros.mean() < 1


def test_signed_zero_makes_negative_zeros_in_float32() -> None:
    def makes(case: Case) -> bool:
        row = np.zeros(case.num_keys, np.float32)
        for h in range(case.q.shape[1]):  # fused multiply-adds from +0: only underflow leaves a -0
            dot = np.maximum(case.q[0, h] @ case.k.T, 0).astype(np.float64)
            row = (row + np.float64(case.w[0, h]) * dot).astype(np.float32)
        minus = (row == 0) & np.signbit(row)
        return bool(minus.any() and not minus.all())

    assert share([case for case in drawn("signed_zero", 100) if case.num_keys > 8], makes) > 0.05


def test_ulp_neighbours_are_one_step_apart() -> None:
    def neighbours(case: Case) -> bool:
        row = np.unique(case.scores()[0].astype(np.float32))
        return bool((np.nextafter(row[:-1], np.float32(np.inf)) == row[1:]).any())

    assert share([case for case in drawn("ulp_neighbours") if case.num_keys > 8], neighbours) > 0.9


def test_wide_range_spans_many_powers_of_two() -> None:
    widest = 0.0
    for case in drawn("wide_range"):
        sizes = np.abs(case.scores())
        sizes = sizes[sizes > 0]
        if sizes.size:
            widest = max(widest, float(np.log2(sizes.max() / sizes.min())))
    assert widest > 60


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_of_both_signs_in_every_format(dtype: str) -> None:
    found = [
        given_scores(case)[~outside_windows(case)] for case in drawn("infinities", 200) if case.dtype == dtype
    ]
    scores = np.concatenate(found)
    assert np.isposinf(scores).any()
    assert np.isneginf(scores).any()
    assert np.isfinite(scores).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_every_format_beside_numbers(dtype: str) -> None:
    scores = np.concatenate([case.scores().ravel() for case in drawn("nan", 200) if case.dtype == dtype])
    assert 0.05 < np.isnan(scores).mean() < 0.95


@pytest.mark.parametrize(("regime", "sign"), [("sorted", 1), ("reversed", -1)])
def test_sorted_and_reversed_scores_are_monotone(regime: str, sign: int) -> None:
    for case in drawn(regime):
        steps = sign * np.diff(case.scores(), axis=1)
        assert (steps > 0).all()  # strictly, up to 512 keys


def test_periodic_scores_take_two_levels() -> None:
    for case in drawn("periodic"):
        level = case.scores()[0] / case.w[0].sum()
        assert (((level >= 20) & (level <= 23)) | ((level >= 300) & (level <= 303))).all()


def test_spike_has_one_high_score_and_constant_none() -> None:
    for case in drawn("spike"):
        row = case.scores()[0]
        assert (row == row.max()).sum() == 1
        assert len(np.unique(row)) == min(2, case.num_keys)
    for case in drawn("constant"):
        assert len(np.unique(case.scores()[0])) == 1


def test_duplicated_keys_come_from_four() -> None:
    found = drawn("duplicated_keys")
    assert all(len(np.unique(case.k, axis=0)) <= 4 for case in found)
    assert share(found, lambda case: len(np.unique(case.k, axis=0)) < case.num_keys) > 0.5


def test_neighbours_of_a_document_are_alike() -> None:
    def alike(case: Case) -> bool:
        step, apart = (np.linalg.norm(case.k[n:] - case.k[:-n], axis=1) for n in (1, case.num_keys // 2))
        return float(np.median(step)) < 0.3 * float(np.median(apart))

    assert share([case for case in drawn("documents", 100) if case.num_keys > 100], alike) > 0.4


def test_spoiled_documents_hold_what_a_bound_may_trip_over() -> None:
    found = drawn("spoiled_documents", 300)
    for dtype in DTYPES:
        keys = np.concatenate([case.k.ravel() for case in found if case.dtype == dtype])
        assert np.isnan(keys).any()
        assert np.isinf(keys).any() == (dtype != "fp8")
    weights = np.concatenate([case.w.ravel() for case in found])
    assert np.isnan(weights).any()
    assert np.isposinf(weights).any()
    assert np.isneginf(weights).any()
    weights = weights[np.isfinite(weights) & (weights != 0)]
    assert weights.min() < -1e9
    assert weights.max() > 1e29
    assert np.abs(weights).min() < 1e-29


def test_key_tiles_of_documents_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a third of the calls that the property of pruning makes, the scan is spared something."""
    api: Any = importlib.import_module("hyscale_kernels.hytopk.api")
    prune, spared = api.launch_prune, [0]

    def spy(problem: Any, scan_hi: Any, threshold: Any, bitmap: Any, *rest: Any) -> Any:
        every = prune(problem, scan_hi, threshold.new_full(threshold.shape, -np.inf), bitmap.clone(), *rest)
        left = prune(problem, scan_hi, threshold, bitmap, *rest)
        spared[-1] += int((every.length - left.length).sum())
        return left

    class Target(HyTopK):
        def select(self, case: Case, *args: Any, **options: Any) -> Any:
            spared.append(0)
            result = super().select(case, *args, **options)
            if not case.sizes or not case.sizes.prune_keys:
                assert spared.pop() == 0
            return result

    monkeypatch.setattr(api, "launch_prune", spy)
    plan = Plan("hytopk", "cpu", "quick", seed=0, shrink=False)
    verdict = judge(Unit(plan, "pruning_changes_nothing", "documents"), Target("cpu"))
    assert verdict.verdict == HOLDS, verdict.counterexample
    assert len(spared[1:]) >= 5
    assert sum(each > 0 for each in spared[1:]) / len(spared[1:]) > 0.3


def test_row_lengths_cover_zero_one_and_the_neighbours_of_k() -> None:
    seen: set[str] = set()
    for case in drawn("row_lengths", 200):
        for length in case.lengths:
            names = {0: "0", 1: "1", case.top_k - 1: "K-1", case.top_k: "K", case.top_k + 1: "K+1"}
            if case.num_keys > case.top_k + 1 > 3 and length in names:
                seen.add(names[length])
    assert seen == {"0", "1", "K-1", "K", "K+1"}


def test_packed_windows_hold_several_documents() -> None:
    found = drawn("packed_windows")
    assert all(case.num_queries == case.num_keys for case in found)
    assert share(found, lambda case: len(np.unique(case.start)) > 1) > 0.3


def test_odd_sizes_are_odd() -> None:
    for case in drawn("odd_sizes"):
        T, H, D = case.q.shape
        assert T % 2 == H % 2 == case.num_keys % 2 == case.top_k % 2 == 1
        assert D & (D - 1)  # no power of two


def test_strided_storage_comes_in_every_layout() -> None:
    found = drawn("strided_storage", 100)
    assert {case.layout for case in found} == set(LAYOUTS)
    for case in found:
        inputs = case.tensors("cpu")
        assert inputs.q.stride(-1) == inputs.k.stride(-1) == 1
        np.testing.assert_array_equal(inputs.q.float().numpy(), case.q)
        np.testing.assert_array_equal(inputs.k.float().numpy(), case.k)
        if case.layout == "padded rows" and case.num_keys > 1:
            assert not inputs.k.is_contiguous()
        if case.layout == "offset storage":
            assert inputs.k.storage_offset() == 3


def test_internal_sizes_make_small_buffers_overflow() -> None:
    found = [case for case in drawn("random_normal", 400, sizes=True) if case.sizes is not None]
    assert 0.25 < len(found) / 400 < 0.75
    assert sum(case.sizes.capacity(case.top_k) < case.num_keys for case in found if case.sizes) >= 20


@pytest.mark.parametrize("space", [CPU, CUDA], ids=["cpu", "cuda"])
def test_internal_sizes_always_hold_the_selection(space: object) -> None:
    @settings(max_examples=60, database=None, deadline=None)
    @seed(3)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        top_k, keys = data.draw(st.integers(1, 5000)), data.draw(st.integers(1, 300))
        sizes = data.draw((CPU if space is CPU else CUDA).internal_sizes(keys))
        assert sizes.capacity(top_k) >= top_k + sizes.gather
        assert sizes.samples % sizes.tile_keys == 0

    check()


def test_a_tiny_case_prints_all_its_scores() -> None:
    case = next(case for case in drawn("tie_rich") if case.num_keys == 3)
    words = case.in_words(rows=(0,))
    assert "3 keys" in words
    assert all(f"{key}: " in words for key in range(3))


def test_a_large_case_prints_the_accused_keys() -> None:
    case = next(case for case in drawn("random_normal") if case.num_keys > 100)
    words = case.in_words(rows=(0,), keys=(50,))
    assert "50: " in words
    assert "20: " not in words
    assert f"({case.num_keys} keys)" in words

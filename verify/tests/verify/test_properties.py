"""Every property holds for the right answer and convicts the fault that it is for."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hyscale_verify.properties import PROPERTIES
from hyscale_verify.runner import FALSIFIED, HOLDS, Plan, Unit, judge
from hyscale_verify.targets import Fused, HyTopK, Selector

PLAN = Plan("hytopk", "cpu", "ci", seed=1, shrink=False)


def verdict_of(target: Any, name: str, regime: str, seed: int = PLAN.seed) -> str:
    """The verdict of a property on a regime; a crash is not a verdict."""
    verdict = judge(Unit(replace(PLAN, seed=seed), name, regime), target)
    assert not verdict.crashed, f"{verdict.reason}\n{verdict.counterexample}"
    return verdict.verdict


def verdicts(target: Any, name: str, regimes: tuple[str, ...] = ()) -> dict[str, str]:
    """The verdict of each regime of one property."""
    return {regime: verdict_of(target, name, regime) for regime in regimes or PROPERTIES[name].regimes}


def falsified(target: Any, name: str) -> bool:
    """Whether some regime of a property convicts; those after it are not tried."""
    return any(verdict_of(target, name, regime) == FALSIFIED for regime in PROPERTIES[name].regimes)


# Properties of the operator itself, which an imitation without one has nothing to show for.
OF_THE_OPERATOR = {"opcheck", "torch_compile", "torch_compile_dynamic", "selective_checkpoint"}


def applies(name: str, target: Any) -> bool:
    return not PROPERTIES[name].lacks(target, "cpu") and name not in OF_THE_OPERATOR


def spoil_rows(change: Callable[[Any, int], None]) -> Callable[[Any], None]:
    """A fault that ``change`` makes in the indices of each row that selects something."""

    def fault(answer: Any) -> None:
        for t in range(len(answer.indices)):
            if answer.count[t]:
                change(answer, t)

    return fault


def better_than_the_last(answer: Any, t: int) -> None:
    """Exchange the last selected key for one outside the selection, if there is one."""
    low, high = answer.call["start"][t], answer.call["end"][t]
    rest = np.setdiff1d(np.arange(low, high), answer.indices[t])
    if rest.size:
        n = answer.count[t]
        answer.indices[t, :n] = np.sort(np.append(answer.indices[t, : n - 1], rest[-1]))


def other_tie(answer: Any, t: int) -> None:
    """Of equal scores at the cut take a larger key."""
    row, n = answer.dense[t], answer.count[t]
    chosen = answer.indices[t, :n]
    worst = chosen[np.argmin(row[chosen])]
    low, high = answer.call["start"][t], answer.call["end"][t]
    rest = np.setdiff1d(np.arange(low, high), chosen)
    equal = rest[row[rest] == row[worst]]
    if equal.size:
        answer.indices[t, :n] = np.sort(np.where(chosen == worst, equal[-1], chosen))


def reach(answer: Any, t: int) -> None:
    """Take the key at end[t] instead of the last one."""
    if answer.call["end"][t] < answer.dense.shape[1]:
        answer.indices[t, answer.count[t] - 1] = answer.call["end"][t]


def take_nan(answer: Any, t: int) -> None:
    nan = np.flatnonzero(np.isnan(answer.dense[t]))
    if nan.size:
        answer.indices[t, 0] = nan[0]


def repeat_first(answer: Any, t: int) -> None:
    if answer.count[t] > 1:
        answer.indices[t, 1] = answer.indices[t, 0]


def drop_last(answer: Any, t: int) -> None:
    answer.count[t] -= 1
    answer.indices[t, answer.count[t]] = -1
    answer.scores[t, answer.count[t]] = -np.inf


def bad_tail(answer: Any) -> None:
    answer.indices[answer.indices < 0] = 0x7FFFFFFF


def wrong_count(answer: Any) -> None:
    answer.count += 1


def stop_at_forty(answer: Any) -> None:
    """No more than 40 keys are selected, whatever K is."""
    answer.indices[:, 40:] = -1
    answer.count[...] = np.minimum(answer.count, 40)


def write_one_block_of_the_tail(answer: Any) -> None:
    """Beyond 128 entries of its tail a row ends in zeros."""
    for row, n in zip(answer.indices, answer.count, strict=True):
        row[n + 128 :] = 0


def lose_infinity(answer: Any, t: int) -> None:
    """Leave out the last -inf."""
    chosen = answer.indices[t, : answer.count[t]]
    if np.isneginf(answer.dense[t, chosen]).any():
        drop_last(answer, t)


def short_scores(answer: Any) -> None:
    answer.scores[...] = np.where(
        np.isfinite(answer.scores), answer.scores * np.float32(1 + 2**-22), answer.scores
    )


def negative_zeros(answer: Any) -> None:
    answer.scores[answer.scores == 0] = -0.0


def forget_nan(answer: Any) -> None:
    answer.nans[...] = 0


def look_at_neighbours(answer: Any) -> None:
    """Rows of a call with more than one row lose their last key."""
    if len(answer.indices) > 1:
        spoil_rows(drop_last)(answer)


def mind_nan_in_other_rows(answer: Any) -> None:
    if answer.call["q"].isnan().any():
        spoil_rows(drop_last)(answer)


def shorten_the_default_window(answer: Any) -> None:
    if not answer.call["end given"]:
        spoil_rows(drop_last)(answer)


def look_at_the_future(answer: Any) -> None:
    """With an even number of keys the last selected key is lost."""
    if answer.dense.shape[1] % 2 == 0:
        spoil_rows(drop_last)(answer)


def odd_k(answer: Any) -> None:
    if answer.call["top_k"] % 2 == 0:
        spoil_rows(better_than_the_last)(answer)


def prefer_place(answer: Any) -> None:
    """Key 0 is always selected, whatever it scores."""
    for t in range(len(answer.indices)):
        if answer.count[t] and answer.call["start"][t] == 0 and answer.indices[t, 0] != 0:
            answer.indices[t, 0] = 0


def scale_matters(answer: Any) -> None:
    if np.abs(answer.dense[np.isfinite(answer.dense)]).max(initial=0) > 1000:
        spoil_rows(better_than_the_last)(answer)


def tire(answer: Any) -> None:
    """Every third call is wrong."""
    if answer.call["number"] % 3 == 0:
        spoil_rows(drop_last)(answer)


def leave_unwritten(answer: Any) -> None:
    """The first entry of the tail is whatever the memory held."""
    fresh = torch.empty(1, dtype=torch.int32).item()
    for t in range(len(answer.indices)):
        if answer.count[t] < answer.indices.shape[1]:
            answer.indices[t, answer.count[t]] = fresh


def write_to_weights(answer: Any) -> None:
    answer.call["w"].neg_()


def need_contiguity(answer: Any) -> None:
    if not answer.call["q"].is_contiguous() or answer.call["k"].storage_offset():
        spoil_rows(drop_last)(answer)


def need_no_gradient(answer: Any) -> None:
    if answer.call["q"].requires_grad:
        spoil_rows(drop_last)(answer)


def mind_the_plan(answer: Any) -> None:
    if answer.call["plan"] is not None:
        spoil_rows(drop_last)(answer)


def mind_pruning(answer: Any) -> None:
    """Where tiles may be left out one candidate goes as well, though no selected key."""
    if answer.call["plan"].prune_keys:
        answer.candidates -= 1


def claim_no_rescoring(answer: Any) -> None:
    answer.rescored[...] = 0
    answer.candidates[...] = 0


def truncate(answer: Any) -> None:
    """An overflowing row loses its last key and does not say so."""
    if answer.call["plan"] is not None and answer.call["plan"].capacity < answer.dense.shape[1]:
        answer.rescored[...] = 0
        spoil_rows(drop_last)(answer)


FAULTS: list[tuple[str, Callable[[Any], None]]] = [
    ("exact_set_of_exact_inputs", spoil_rows(better_than_the_last)),
    ("exact_set_of_own_scores", spoil_rows(better_than_the_last)),
    ("certified_set", spoil_rows(better_than_the_last)),
    ("tie_rule", spoil_rows(other_tie)),
    ("nan_never_selected", spoil_rows(take_nan)),
    ("nan_never_selected", forget_nan),
    ("infinities_are_ordinary", spoil_rows(lose_infinity)),
    ("infinities_are_ordinary", spoil_rows(better_than_the_last)),
    ("short_rows_are_complete", spoil_rows(drop_last)),
    ("production_sizes", stop_at_forty),
    ("production_sizes", write_one_block_of_the_tail),
    ("ascending_and_unique", spoil_rows(repeat_first)),
    ("tail_is_minus_one", bad_tail),
    ("as_many_as_there_are", wrong_count),
    ("as_many_as_there_are", spoil_rows(drop_last)),
    ("window_is_respected", spoil_rows(reach)),
    ("window_edges_count", spoil_rows(reach)),
    ("window_edges_count", spoil_rows(drop_last)),
    ("returned_scores", short_scores),
    ("returned_scores", negative_zeros),
    ("negative_zero_is_zero", negative_zeros),
    ("row_independence", mind_nan_in_other_rows),
    ("chunks_of_rows", look_at_neighbours),
    ("rank_split", look_at_neighbours),
    ("prefix_causality", look_at_the_future),
    ("k_is_a_prefix_of_k_plus_one", odd_k),
    ("key_permutation", prefer_place),
    ("append_below_the_cut", look_at_the_future),
    ("power_of_two_scaling", scale_matters),
    ("keys_outside_do_not_matter", look_at_the_future),
    ("repeated_calls", tire),
    ("poisoned_memory", leave_unwritten),
    ("inputs_stay_as_they_are", write_to_weights),
    ("memory_layout", need_contiguity),
    ("gradient_mode", need_no_gradient),
    ("internal_sizes", mind_the_plan),
    ("pruning_changes_nothing", mind_pruning),
    ("pruning_changes_nothing", mind_the_plan),
    ("forced_overflow_of_candidates", truncate),
    ("forced_refill_of_the_repair_buffer", mind_the_plan),
    ("statistics_are_consistent", claim_no_rescoring),
    ("windows_left_out", shorten_the_default_window),
    ("empty_calls", bad_tail),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(FAULTS)])
def test_the_fault_is_found(name: str, fault: Callable[[Any], None], imitate: Callable[..., HyTopK]) -> None:
    assert falsified(imitate(fault), name)


@pytest.mark.parametrize("name", sorted({name for name, _ in FAULTS}))
def test_the_right_answer_holds(name: str, imitate: Callable[..., HyTopK]) -> None:
    found = verdicts(imitate(), name)
    assert set(found.values()) == {HOLDS}, found


def test_dense_scores_off_by_more_than_rounding_are_found(imitate: Callable[..., HyTopK]) -> None:
    target = imitate()
    right = target.api.dense_scores
    target.api.dense_scores = lambda *args, **kwargs: right(*args, **kwargs) * (1 + 2**-16)
    assert falsified(target, "dense_scores_within_bounds")


@pytest.mark.parametrize("name", ["wrong_arguments", "wrong_windows", "wrong_scales"])
def test_a_kernel_that_checks_nothing_is_found(name: str, imitate: Callable[..., HyTopK]) -> None:
    target = imitate(skip_checks=True)
    assert falsified(target, name)
    assert set(verdicts(imitate(), name).values()) == {HOLDS}


def test_a_stated_workspace_beyond_the_bound_is_found(imitate: Callable[..., HyTopK]) -> None:
    target = imitate()
    assert set(verdicts(target, "workspace_is_bounded").values()) == {HOLDS}
    target.api.workspace_bytes = lambda T, S, *rest: 4 * T * S  # a score table
    assert set(verdicts(target, "workspace_is_bounded").values()) == {FALSIFIED}


def test_a_hidden_score_table_is_found(imitate: Callable[..., HyTopK]) -> None:
    def table(answer: Any) -> None:
        torch.empty(answer.dense.size * 1000)

    assert FALSIFIED in verdicts(imitate(table), "no_score_table").values()


def by_sort(scores: torch.Tensor, top_k: int, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """A right selector that does not order its answer."""
    from hyscale_ref.topk import topk

    indices = topk(scores.numpy(), top_k, start.numpy(), end.numpy()).indices
    return torch.from_numpy(indices[:, ::-1].copy())


def test_any_selector_is_judged_on_the_set_and_on_the_form() -> None:
    target = Selector("by_sort", by_sort, "cpu")
    for name in ("exact_set_of_own_scores", "tie_rule", "nan_never_selected"):
        assert set(verdicts(target, name).values()) == {HOLDS}, name
    assert FALSIFIED in verdicts(target, "ascending_and_unique").values()


def at_most_1024(scores: torch.Tensor, top_k: int, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """A selector that drops what lies beyond 1024 keys, as kernels with a fixed buffer do."""
    from hyscale_ref.topk import topk

    indices = torch.full((len(scores), top_k), -1, dtype=torch.int32)
    chosen = topk(scores.numpy(), min(top_k, 1024), start.numpy(), end.numpy()).indices
    indices[:, : chosen.shape[1]] = torch.from_numpy(chosen)
    return indices


def test_a_selector_that_stops_at_1024_keys_is_found_at_the_first_larger_k() -> None:
    target = Selector("at_most_1024", at_most_1024, "cpu")
    verdict = judge(Unit(PLAN, "production_sizes", "tie_rich"), target)
    assert verdict.verdict == FALSIFIED
    assert "K=1025" in verdict.counterexample
    assert set(verdicts(target, "exact_set_of_own_scores").values()) == {HOLDS}


def rounded_scores(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, top_k: int, start: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """A fused kernel that loses 16 bits of every score on the way."""
    from hyscale_ref.scores import indexer_scores
    from hyscale_ref.topk import topk

    scores = indexer_scores(q.float().numpy(), k.float().numpy(), w.numpy()).astype(np.float32)
    coarse = (scores.view(np.int32) & -0x10000).view(np.float32)
    return torch.from_numpy(topk(coarse, top_k, start.numpy(), end.numpy()).indices)


def test_a_fused_kernel_that_ranks_coarse_scores_is_found_by_exact_and_certified_sets() -> None:
    target = Fused("rounded", rounded_scores, "cpu", ("fp32",))
    assert verdicts(target, "exact_set_of_exact_inputs", ("tie_rich",)) == {"tie_rich": HOLDS}
    # A handful of draws can miss a coarse score: what is drawn depends on what the process has imported.
    for name, regime in (("exact_set_of_exact_inputs", "ulp_neighbours"), ("certified_set", "random_normal")):
        assert any(verdict_of(target, name, regime, seed) == FALSIFIED for seed in range(20)), name


def test_a_violated_memory_bound_is_a_falsified_property_not_a_crash() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def copy_one_too_many(source, target, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(source + i, mask=i <= n), mask=i < n)

    def function(q: Any, k: Any, w: Any, top_k: int, start: Any, end: Any) -> torch.Tensor:
        target = torch.empty_like(start)
        copy_one_too_many[(1,)](start, target, len(start), BLOCK=16)
        return torch.full((len(q), top_k), -1, dtype=torch.int32)

    target = Fused("overrun", function, "cpu", ("fp32",))
    verdict = judge(Unit(PLAN, "only_its_own_memory", "tie_rich"), target)
    assert verdict.verdict == FALSIFIED
    assert not verdict.crashed
    assert "load of 1 elements outside every tensor of the launch" in verdict.counterexample


def test_every_property_says_what_it_demands_and_where_it_belongs() -> None:
    assert len(PROPERTIES) >= 40
    for name, prop in PROPERTIES.items():
        assert prop.name == name
        assert len(prop.words) > 20, name
        assert (prop.share < 1) == bool(prop.why_few), name
        assert prop.regimes, name


def test_reasons_for_skipping_name_what_is_missing(imitate: Callable[..., HyTopK]) -> None:
    assert PROPERTIES["second_stream"].lacks(imitate(), "cpu") == "needs device cuda"
    selector = Selector("by_sort", by_sort, "cpu")
    assert PROPERTIES["returned_scores"].lacks(selector, "cpu") == "needs a target that offers: hytopk"


def test_forced_properties_really_force_the_kernel() -> None:
    """On the real kernel none of them may be skipped for want of an example that takes the forced path."""
    plan = dataclasses.replace(PLAN, profile="quick")
    target = HyTopK("cpu")
    for name, regime in (
        ("forced_overflow_of_candidates", "random_normal"),
        ("forced_refill_of_the_repair_buffer", "sorted"),
        ("forced_flood_by_a_plateau", "constant"),
        ("forced_underflow", "exact_integers"),
    ):
        verdict = judge(Unit(plan, name, regime), target)
        assert verdict.verdict == HOLDS, (name, verdict.reason, verdict.counterexample)
        assert verdict.examples >= 3
        forced = re.search(r"rows forced: mean ([0-9.]+)", verdict.reason)
        assert forced, verdict.reason
        assert float(forced.group(1)) >= 0.5  # of two rows


def test_a_window_builder_off_by_one_is_found(
    imitate: Callable[..., HyTopK], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyscale_kernels import windows

    right = windows.sliding
    assert set(verdicts(imitate(), "window_builders").values()) == {HOLDS}
    monkeypatch.setattr(windows, "sliding", lambda T, width, **options: right(T, width + 1, **options))
    assert set(verdicts(imitate(), "window_builders").values()) == {FALSIFIED}


def test_fp8_that_agrees_with_bf16_is_measured_and_nonsense_is_found(imitate: Callable[..., HyTopK]) -> None:
    unit = Unit(PLAN, "fp8_agrees_with_bf16", "random_normal")
    good = judge(unit, imitate())
    assert good.verdict == HOLDS
    assert good.reason.startswith("share of keys that differ: mean 0.0")

    def worst(answer: Any) -> None:
        if answer.call["q"].dtype == torch.float8_e4m3fn:
            for t, row in enumerate(answer.dense):
                answer.indices[t] = np.sort(np.argsort(row, kind="stable")[: answer.indices.shape[1]])

    assert judge(unit, imitate(worst)).verdict == FALSIFIED

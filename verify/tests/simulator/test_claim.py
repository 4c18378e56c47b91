"""The study of 2.07x: its formulas, its bounds, and its agreement with the closed form."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyscale_simulator.claim import (
    CLAIMED,
    GAINS,
    PRECISIONS,
    TOLERANCE,
    BaselineCase,
    Crossover,
    baseline_case,
    closed_form,
    crossover,
    public_kernels,
    required_share,
)
from hyscale_simulator.evaluate import evaluator
from hyscale_simulator.scenario import length_scenario
from hyscale_simulator.switches import BASELINES
from hyscale_simulator.uncertainty import relative_errors, speedup_band

SECONDS = st.floats(0.01, 1e3)


@pytest.fixture(scope="module")
def cases() -> list[BaselineCase]:
    return [baseline_case(b, precision, evaluator()) for b in BASELINES for precision in PRECISIONS]


@given(SECONDS, SECONDS, st.floats(1.0, 10.0))
def test_the_required_share_inverts_the_closed_form(other: float, selection: float, gain: float) -> None:
    speedup = closed_form(other, selection, selection / gain)
    share = 2 * selection / (other + 2 * selection)
    assert required_share(speedup, gain) == pytest.approx(share, rel=1e-6, abs=1e-9)


@given(SECONDS, SECONDS)
def test_replay_alone_stays_below_two_in_the_closed_form(other: float, selection: float) -> None:
    assert closed_form(other, selection, selection) < 2


def test_the_published_bounds_on_the_share() -> None:
    # 1/2.07 = 1 - share (1 - 1/2f), worked by hand: f without bound, 3.3, 2, 1.2.
    for gain, share in ((math.inf, 0.5169), (3.3, 0.6092), (2.0, 0.6892), (1.2, 0.8861)):
        assert required_share(CLAIMED, gain) == pytest.approx(share, abs=5e-4)


def test_every_baseline_agrees_with_the_closed_form(cases: list[BaselineCase]) -> None:
    assert {(c.baseline.letter, c.precision) for c in cases} == {
        (b.letter, p) for b in BASELINES for p in PRECISIONS
    }
    for case in cases:
        assert abs(case.closed_form_error) <= 0.03, (case.baseline.letter, case.precision)


def test_replay_alone_stays_below_two_in_the_simulator(cases: list[BaselineCase]) -> None:
    assert all(1 < case.replay_only < 2 for case in cases)


def test_a_faster_kernel_never_lowers_the_speedup(cases: list[BaselineCase]) -> None:
    for case in cases:
        speedups = [cell.speedup for cell in case.cells]
        assert [cell.kernel_gain for cell in case.cells] == pytest.approx(GAINS)
        assert speedups == sorted(speedups)
        assert speedups[-1] <= case.free_kernel


def test_the_needed_gain_gives_the_claimed_speedup(cases: list[BaselineCase]) -> None:
    checked = 0
    for case in cases:
        if case.gain_claimed is None:
            assert case.free_kernel < CLAIMED
            continue
        own = case.reference_s / case.improved_selection_s
        scale = (("selection", own / case.gain_claimed),)
        step = evaluator()(case.after.scenario, scale=scale).step_time_s
        assert case.before.step_time_s / step == pytest.approx(CLAIMED, rel=0.01)
        checked += 1
    assert checked >= 2


def test_consistent_cells_are_those_within_the_tolerance(cases: list[BaselineCase]) -> None:
    for case in cases:
        for cell in case.cells:
            low, high = CLAIMED * (1 - TOLERANCE), CLAIMED * (1 + TOLERANCE)
            assert cell.consistent == (low <= cell.speedup <= high)


def test_the_kernel_gain_without_the_table_is_small_on_an_h20() -> None:
    # vLLM RFC 53563: 3 to 10 %.  The prediction of the materialised pair is within 15 % of what it measured.
    for kernel in public_kernels(evaluator()):
        assert 0.03 <= 1 - kernel.published_fused_ms / kernel.published_ms <= 0.10
        assert kernel.predicted_ms == pytest.approx(kernel.published_ms, rel=0.15)


@pytest.mark.parametrize(
    ("ratios", "tokens"),
    [
        (((1024, 0.5), (4096, 2.0)), 1625),
        (((1024, 1.5), (4096, 2.0)), 1024),
        (((1024, 0.5), (4096, 0.9)), None),
        (((1024, 1.5), (4096, 0.5), (16384, 1.5)), 8192),
    ],
)
def test_the_crossover_is_the_last_crossing(
    ratios: tuple[tuple[int, float], ...], tokens: int | None
) -> None:
    found = Crossover(BASELINES[2], ratios)
    assert found.tokens == tokens
    assert found.always == (tokens == 1024)


def test_the_kernel_pays_more_the_longer_the_context() -> None:
    ratios = [ratio for _, ratio in crossover(BASELINES[4], evaluator(), (16384, 131072, 1048576)).ratios]
    assert ratios == sorted(ratios)


def test_a_shorter_context_keeps_the_tokens_of_a_step() -> None:
    base = BASELINES[2].scenario()
    for tokens in (2**15, 2**18, 2**20):
        batch = length_scenario(base, tokens).batch
        assert batch.sequence_tokens * batch.sequences_per_step == 16 * 2**20
        assert batch.sequence_tokens * batch.sequences_per_microbatch == 2**20
    assert length_scenario(base, 2**22).batch.sequences_per_step == 16


def test_the_band_holds_the_speedup_and_repeats() -> None:
    evaluate = evaluator()
    before, after = evaluate(BASELINES[2].scenario()), evaluate(BASELINES[2].improved())
    band = speedup_band(before, after, evaluate, samples=16, seed=3)
    assert band.low < before.step_ns / after.step_ns < band.high
    assert band == speedup_band(before, after, evaluate, samples=16, seed=3)
    assert band.speedups != speedup_band(before, after, evaluate, samples=16, seed=4).speedups


def test_errors_that_both_scenarios_share_cancel() -> None:
    evaluate = evaluator()
    same = evaluate(BASELINES[2].scenario())
    band = speedup_band(same, same, evaluate, samples=4)
    assert band.low == band.high == 1.0


def test_errors_are_the_stated_ones() -> None:
    evaluate = evaluator()
    result = evaluate(BASELINES[2].scenario())
    errors = relative_errors(result)
    items = next(block for block, _ in result.step.totals if "sparse_attention_bwd" in dict(block.ops))
    stated = dict(items.sigma)["sparse_attention_bwd"] / dict(items.ops)["sparse_attention_bwd"]
    assert errors["sparse_attention_bwd"] == pytest.approx(stated)
    assert 0.05 <= stated <= 0.5  # projected or assumed: never as sure as a measurement
    assert errors["network"] == 0.15
    assert "adamw" not in errors


def test_a_band_wants_a_power_of_two() -> None:
    result = evaluator()(BASELINES[2].scenario())
    with pytest.raises(ValueError, match="samples = 12; a power of two"):
        speedup_band(result, result, evaluator(), samples=12)

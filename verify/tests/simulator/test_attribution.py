"""The laws of the attribution, on random games and on real steps."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyscale_simulator.attribution import (
    CausalPoint,
    attribute,
    causal_curve,
    elasticity,
    interactions,
    knee,
    leave_one_out,
    one_at_a_time,
    play,
    shapley,
    waterfall,
)
from hyscale_simulator.evaluate import evaluator
from hyscale_simulator.switches import BASELINES, Baseline, SwitchError

VALUES = st.floats(-1e3, 1e3, allow_nan=False)


@st.composite
def games(draw: st.DrawFn, max_players: int = 5) -> list[float]:
    n = draw(st.integers(1, max_players))
    return draw(st.lists(VALUES, min_size=1 << n, max_size=1 << n))


def players(game: list[float]) -> int:
    return len(game).bit_length() - 1


@given(games())
def test_shapley_values_add_up_to_the_whole(game: list[float]) -> None:
    assert math.fsum(shapley(game)) == pytest.approx(game[-1] - game[0], abs=1e-9)


@given(games(4))
def test_shapley_values_are_means_over_all_orders(game: list[float]) -> None:
    n = players(game)
    total = [0.0] * n
    orders = list(itertools.permutations(range(n)))
    for order in orders:
        subset = 0
        for player in order:
            total[player] += game[subset | 1 << player] - game[subset]
            subset |= 1 << player
    assert shapley(game) == pytest.approx([value / len(orders) for value in total], abs=1e-8)


@given(games(), st.data())
def test_equal_players_get_equal_values(game: list[float], data: st.DataObject) -> None:
    n = players(game)
    if n < 2:
        return
    i, j = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))

    def swapped(subset: int) -> int:
        bits = subset & ~(1 << i | 1 << j)
        return bits | (subset >> i & 1) << j | (subset >> j & 1) << i

    symmetric = [(game[s] + game[swapped(s)]) / 2 for s in range(len(game))]
    values = shapley(symmetric)
    assert values[i] == pytest.approx(values[j], abs=1e-9)


@given(games(), st.data())
def test_a_player_without_effect_gets_nothing(game: list[float], data: st.DataObject) -> None:
    dummy = 1 << data.draw(st.integers(0, players(game) - 1))
    game = [game[subset & ~dummy] for subset in range(len(game))]
    assert shapley(game)[dummy.bit_length() - 1] == 0.0


@given(st.integers(1, 4).flatmap(lambda n: st.tuples(*[
    st.lists(VALUES, min_size=1 << n, max_size=1 << n)] * 2)))  # fmt: skip
def test_values_of_a_sum_are_sums_of_values(both: tuple[list[float], list[float]]) -> None:
    one, two = both
    together = shapley([a + b for a, b in zip(one, two, strict=True)])
    apart = [a + b for a, b in zip(shapley(one), shapley(two), strict=True)]
    assert together == pytest.approx(apart, abs=1e-8)


@given(games())
def test_a_waterfall_adds_up_and_begins_alone_and_ends_last(game: list[float]) -> None:
    steps = waterfall(game)
    assert math.fsum(steps) == pytest.approx(game[-1] - game[0], abs=1e-9)
    assert steps[0] == one_at_a_time(game)[0]
    assert steps[-1] == leave_one_out(game)[-1]


@given(st.lists(VALUES, min_size=2, max_size=5))
def test_players_that_add_do_not_interact(own: list[float]) -> None:
    game = play(len(own), lambda s: math.fsum(v for i, v in enumerate(own) if s >> i & 1))
    assert all(abs(value) < 1e-9 for value in interactions(game).values())
    assert shapley(game) == pytest.approx(own, abs=1e-9)


def test_two_players_of_which_one_suffices_interact_by_what_is_lost() -> None:
    game = [0.0, 3.0, 3.0, 3.0]
    assert shapley(game) == [1.5, 1.5]
    assert interactions(game) == {(0, 1): -3.0}


@pytest.mark.parametrize(("count", "match"), [(11, "join some switches"), (-1, "num_players = -1")])
def test_too_many_players_are_refused(count: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        play(count, lambda subset: 0.0)


def test_a_game_has_a_power_of_two_of_values() -> None:
    with pytest.raises(ValueError, match="3 values"):
        shapley([0.0, 1.0, 2.0])


def test_a_knee_is_where_another_path_takes_over() -> None:
    curve = [CausalPoint(f, max(4.0 + 6.0 * f, 8.0)) for f in (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)]
    assert elasticity(curve) == pytest.approx(0.6)
    assert knee(curve) == 0.5
    assert knee([CausalPoint(f, 4.0 + 6.0 * f) for f in (1.0, 0.5, 0.0)]) is None


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda b: b.letter)
def test_shares_of_every_baseline_add_up(baseline: Baseline) -> None:
    found = attribute(baseline.scenario(), baseline.improved(), evaluator())
    assert math.fsum(found.log_shares) == pytest.approx(1.0, abs=1e-9)
    saved = (found.baseline.step_ns - found.improved.step_ns) / 1e9
    for parts in (found.seconds, found.waterfall):
        assert math.fsum(parts) == pytest.approx(saved, abs=1e-9)
    assert found.improved.scenario == baseline.improved()


def test_scenarios_that_do_not_differ_have_no_switches() -> None:
    same = BASELINES[2].scenario()
    found = attribute(same, same, evaluator())
    assert found.switches == ()
    assert found.speedup == 1.0


def test_more_switches_than_can_be_played_are_named() -> None:
    base = BASELINES[1].scenario()
    other = base.with_(**{
        "selection.table": False, "selection.selector": "hytopk", "selection.mask_pass": False,
        "selection.skipped_fraction": 0.5, "selection.record": "packed", "recompute.replay": True,
        "offload.selection": True, "layout.context_split": "contiguous", "precision.linear": "fp8",
        "precision.dispatch": "fp8", "overlap.context": False, "overlap.expert": True,
    })  # fmt: skip
    with pytest.raises(SwitchError, match="at most 10"):
        attribute(base, other, evaluator())


def test_a_class_on_the_critical_path_has_its_share_as_elasticity() -> None:
    result = evaluator()(BASELINES[2].scenario())
    curve = causal_curve(BASELINES[2].scenario(), "selection", evaluator())
    share = dict(result.critical_path)["selection"] / result.step_time_s
    assert elasticity(curve) == pytest.approx(share, rel=0.02)
    assert [p.seconds for p in curve] == sorted((p.seconds for p in curve), reverse=True)

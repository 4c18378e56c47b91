"""Pipeline schedules: complete, free of deadlock, and as long as their closed forms say, to the
nanosecond."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyscale_simulator.engine import simulate
from hyscale_simulator.longest_path import longest_path
from hyscale_simulator.schedules import (
    Op,
    PassTimes,
    Schedule,
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    pipeline_graph,
    zb_h1,
)
from hyscale_simulator.schedules.closed_forms import (
    causal_imbalance,
    dualpipe_ns,
    gpipe_ns,
    interleaved_ns,
    one_f_one_b_bounds_ns,
    one_f_one_b_ns,
    zb_h1_ns,
)

times = st.integers(0, 1000)
stages = st.integers(1, 8)
microbatches = st.integers(1, 16)
quick = settings(max_examples=150, deadline=None)


def step_ns(schedule: Schedule, chunks: list[list[PassTimes]], hop_ns: int = 0) -> int:
    """Step time by the engine, which the longest-path pass has to confirm."""
    graph = pipeline_graph(schedule, chunks, hop_ns)
    timeline = simulate(graph)
    assert timeline.end_ns.tolist() == longest_path(graph).end_ns.tolist()
    return timeline.makespan_ns


def equal(schedule: Schedule, *passes: int) -> list[list[PassTimes]]:
    return [[PassTimes(*passes)] * schedule.num_chunks] * schedule.num_stages


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    p, m = draw(stages), draw(microbatches)
    kind = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe"]))
    if kind == "interleaved":
        return interleaved(p, p * draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    if kind == "dualpipe":
        half = draw(st.integers(1, 4))
        return dualpipe(2 * half, 4 * half + 2 * draw(st.integers(0, 4)))
    plain: dict[str, Callable[[int, int], Schedule]] = {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zb-h1": zb_h1,
    }
    return plain[kind](p, m)


@quick
@given(schedules())
def test_every_microbatch_passes_every_place_forward_and_backward_once(schedule: Schedule) -> None:
    ran = Counter(
        (op.microbatch, stage, op.chunk, kind)
        for stage, program in enumerate(schedule.programs)
        for ops in program
        for op in ops
        for kind in ("DW" if op.kind == "B" else op.kind)
    )
    wanted = Counter(
        (microbatch, stage, chunk, kind)
        for microbatch in range(schedule.num_microbatches)
        for stage, chunk in schedule.route(microbatch)
        for kind in "FDW"
    )
    assert ran == wanted


@quick
@given(schedules())
def test_steps_keep_each_stage_in_order_and_come_after_their_inputs(schedule: Schedule) -> None:
    reached = [0] * schedule.num_stages
    for step in schedule.steps():
        assert step.slot == reached[step.stage]
        assert all(given.slot < reached[given.stage] for given in step.inputs)
        reached[step.stage] += 1
    assert reached == [len(program) for program in schedule.programs]


@quick
@given(st.lists(st.tuples(times, times, times), min_size=1, max_size=8), microbatches)
def test_gpipe_is_exact_for_unequal_stages(passes: list[tuple[int, int, int]], m: int) -> None:
    stage_times = [PassTimes(*one) for one in passes]
    forward, backward = [t.forward_ns for t in stage_times], [t.backward_ns for t in stage_times]
    took = step_ns(gpipe(len(passes), m), [[t] for t in stage_times])
    assert took == gpipe_ns(forward, backward, m)


@quick
@given(stages, microbatches, times, times, times)
def test_1f1b_is_exact_for_equal_stages(p: int, m: int, f: int, d: int, w: int) -> None:
    schedule = one_f_one_b(p, m)
    assert step_ns(schedule, equal(schedule, f, d, w)) == one_f_one_b_ns(f, d + w, p, m)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(times, times), min_size=1, max_size=8), microbatches)
def test_1f1b_of_unequal_stages_lies_between_its_bounds(passes: list[tuple[int, int]], m: int) -> None:
    forward, backward = [f for f, _ in passes], [b for _, b in passes]
    low, high = one_f_one_b_bounds_ns(forward, backward, m)
    took = step_ns(one_f_one_b(len(passes), m), [[PassTimes(f, b, 0)] for f, b in passes])
    assert low <= took <= high


def test_the_popular_1f1b_form_can_be_exceeded() -> None:
    """Σ(F + B) + (m-1)·max(F + B) is no bound where B is not proportional to F."""
    forward, backward, m = [9, 1, 3], [1, 9, 2], 2
    took = step_ns(one_f_one_b(3, m), [[PassTimes(f, b, 0)] for f, b in zip(forward, backward, strict=True)])
    popular = sum(forward) + sum(backward) + (m - 1) * 10
    assert (took, popular) == (38, 35)
    assert took <= one_f_one_b_bounds_ns(forward, backward, m)[1]


@quick
@given(stages, st.integers(1, 4), st.integers(1, 4), times, times, times)
def test_interleaving_divides_the_bubble_by_the_chunks(
    p: int, rounds: int, v: int, f: int, d: int, w: int
) -> None:
    schedule = interleaved(p, rounds * p, v)
    took = step_ns(schedule, equal(schedule, f, d, w))
    assert took == interleaved_ns(f, d + w, p, rounds * p, v)
    assert took - rounds * p * v * (f + d + w) == (p - 1) * (f + d + w)


def test_interleaving_with_one_chunk_is_1f1b() -> None:
    assert interleaved(4, 7, 1).programs == one_f_one_b(4, 7).programs


@quick
@given(stages, st.integers(0, 12), times, times, st.data())
def test_zb_h1_is_exact_in_its_regime(p: int, extra: int, f: int, d: int, data: st.DataObject) -> None:
    w = data.draw(st.integers(0, min(f, d)))
    schedule = zb_h1(p, p + extra)
    assert step_ns(schedule, equal(schedule, f, d, w)) == zb_h1_ns(f, d, w, p, p + extra)


@quick
@given(st.integers(1, 5), st.integers(0, 6), times, st.data())
def test_dualpipe_is_exact_in_its_regime(half: int, extra: int, f: int, data: st.DataObject) -> None:
    p, m = 2 * half, 4 * half + 2 * extra
    d = data.draw(st.integers(0, f))
    w = data.draw(st.integers(0, d))
    pair = data.draw(st.integers(max(f, d + w), f + d + w))
    schedule = dualpipe(p, m)
    took = step_ns(schedule, equal(schedule, f, d, w, pair))
    assert took == dualpipe_ns(f, d, w, pair, p, m)
    if d == f:
        busy = (m - p - 1) * pair + (p + 1) * (f + d + w)
        assert took - busy == (half - 1) * (pair + (d + w) - 3 * w), "the bubble as the paper states it"


def test_closed_forms_refuse_what_they_do_not_cover() -> None:
    with pytest.raises(ValueError, match="holds for m >= p"):
        zb_h1_ns(5, 5, 5, 4, 3)
    with pytest.raises(ValueError, match=r"W <= min\(F, D\)"):
        zb_h1_ns(5, 5, 6, 4, 4)
    with pytest.raises(ValueError, match="W <= D <= F"):
        dualpipe_ns(5, 6, 1, 11, 4, 8)
    with pytest.raises(ValueError, match=r"between 8 and 13"):
        dualpipe_ns(5, 5, 3, 14, 4, 8)


def test_activations_in_flight_are_the_published_counts() -> None:
    p, m = 8, 20
    assert [gpipe(p, m).activations_in_flight(s) for s in range(p)] == [m] * p
    assert [one_f_one_b(p, m).activations_in_flight(s) for s in range(p)] == [p - s for s in range(p)]
    assert [one_f_one_b(p, 3).activations_in_flight(s) for s in range(p)] == [3] * 6 + [2, 1]
    assert [zb_h1(p, m).activations_in_flight(s) for s in range(p)] == [p] * p, "the first stage of 1F1B"
    assert [zb_h1(p, m).activations_in_flight(s, until="D") for s in range(p)] == [p - s for s in range(p)]
    assert [dualpipe(p, m).activations_in_flight(s) for s in range(p)] == [p + 1] * p


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 3), (8, 4)])
def test_interleaving_holds_megatrons_share_more(p: int, v: int) -> None:
    """Narayanan et al.: 1 + (p-1)/(p·v) times the p microbatches of 1F1B, on the first stage."""
    held = Fraction(interleaved(p, 4 * p, v).activations_in_flight(0), v)
    assert held == p * (1 + Fraction(p - 1, p * v))


def test_hops_delay_each_microbatch_by_about_two() -> None:
    """The slope of an unoverlapped hop in 1F1B, p = 8 equal stages: +68 c at m = 32, +124 c at m = 64."""
    for m, slope in ((32, 68), (64, 124)):
        schedule = one_f_one_b(8, m)
        chunks = equal(schedule, 1000, 1000, 1000)
        assert step_ns(schedule, chunks, hop_ns=10) - step_ns(schedule, chunks) == 10 * slope


@quick
@given(schedules(), st.integers(0, 50), times, times, times)
def test_a_hop_never_makes_a_pipeline_faster(schedule: Schedule, hop: int, f: int, d: int, w: int) -> None:
    chunks = equal(schedule, f, d, w)
    assert step_ns(schedule, chunks, hop) >= step_ns(schedule, chunks)


def test_messages_go_to_other_stages_only() -> None:
    graph = pipeline_graph(one_f_one_b(3, 2), [[PassTimes(5, 5, 5)]] * 3, hop_ns=1)
    messages = [graph.name(i) for i in range(len(graph)) if graph.task(i).kind == "p2p"]
    assert sorted(messages) == sorted(
        [f"F{i} to stage {s}" for i in range(2) for s in (1, 2)]
        + [f"B{i} to stage {s}" for i in range(2) for s in (0, 1)]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpipe(0, 1), "num_stages: 0"),
        (lambda: one_f_one_b(1, 0), "num_microbatches: 0"),
        (lambda: interleaved(4, 6, 2), "a multiple of the 4 stages"),
        (lambda: interleaved(4, 8, 0), "num_chunks: 0"),
        (lambda: dualpipe(3, 12), "an even number"),
        (lambda: dualpipe(4, 6), "at least 8 for 4 stages"),
        (lambda: dualpipe(4, 9), "an even number"),
        (lambda: gpipe(2, 2).activations_in_flight(0, until="B"), "until: 'B'"),
        (lambda: pipeline_graph(gpipe(2, 2), [[PassTimes(1, 1, 1)]]), "1 on each of 2 stages"),
    ],
)
def test_illegal_combinations_name_the_rule(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_programs_that_wait_for_each_other_are_a_deadlock() -> None:
    first = ((Op("B", 0),), (Op("F", 0),))
    last = ((Op("F", 0),), (Op("B", 0),))
    with pytest.raises(ValueError, match="deadlock at B0 on stage 0, F0 on stage 1"):
        list(Schedule("broken", 1, (((0, 0), (1, 0)),), (first, last)).steps())
    with pytest.raises(
        ValueError, match=r"F0 on stage 1 waits for F of microbatch 0 at \(stage, chunk\) \(0, 0\)"
    ):
        list(Schedule("broken", 1, (((0, 0), (1, 0)),), ((), last)).steps())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 12))
def test_causal_imbalance_counts_the_pairs(ranks: int, rows: int) -> None:
    seq_len = 2 * ranks * rows
    slices = [sum(t + 1 for t in range(s * rows, (s + 1) * rows)) for s in range(2 * ranks)]
    contiguous = [slices[2 * r] + slices[2 * r + 1] for r in range(ranks)]
    zigzag = [slices[r] + slices[2 * ranks - 1 - r] for r in range(ranks)]
    mean = Fraction(sum(slices), ranks)
    assert max(contiguous) / mean == causal_imbalance(seq_len, ranks, "contiguous")
    assert max(zigzag) / mean == causal_imbalance(seq_len, ranks, "zigzag") == 1


def test_contiguous_imbalance_tends_to_two_less_one_over_ranks() -> None:
    for ranks, limit in ((8, 1.875), (16, 1.9375), (32, 1.96875), (64, 1.984375)):
        assert float(causal_imbalance(2**20, ranks, "contiguous")) == pytest.approx(limit, rel=1e-5)
    with pytest.raises(ValueError, match="a multiple of 16 slices"):
        causal_imbalance(8, 8, "zigzag")
    with pytest.raises(ValueError, match="'striped'"):
        causal_imbalance(8, 8, "striped")

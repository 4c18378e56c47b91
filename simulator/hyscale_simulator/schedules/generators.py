"""The pipeline schedules, as the papers and the public implementations run them.

`num_stages` is p, `num_microbatches` m, `num_chunks` v. A ValueError names the rule that a combination
breaks.
"""

from __future__ import annotations

from hyscale_simulator.schedules.schedule import Op, Place, Schedule, Slot

__all__ = ["dualpipe", "gpipe", "interleaved", "one_f_one_b", "zb_h1"]


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forward passes, then all backward passes in the same order (Huang et al. 2019)."""
    _check(num_stages, num_microbatches)
    passes = [Op(kind, i) for kind in "FB" for i in range(num_microbatches)]
    return _straight("gpipe", num_microbatches, [passes] * num_stages)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Fill with p-1-s forward passes, then alternate one forward and one backward (PipeDream-Flush)."""
    _check(num_stages, num_microbatches)
    programs = []
    for stage in range(num_stages):
        warmup = min(num_stages - 1 - stage, num_microbatches)
        programs.append(_alternate("FB", warmup, [(i, 0) for i in range(num_microbatches)]))
    return _straight("1f1b", num_microbatches, programs)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021; Megatron-LM): stage s holds chunks s, s+p, s+2p, … of the
    model.

    Microbatches go in rounds of p through one chunk after the other. m has to be a multiple of p.
    """
    _check(num_stages, num_microbatches)
    if num_chunks < 1:
        raise ValueError(f"num_chunks: {num_chunks}; at least 1 is wanted")
    if num_chunks > 1 and num_microbatches % num_stages:
        raise ValueError(
            f"num_microbatches: {num_microbatches}; interleaving wants a multiple of the {num_stages} stages"
        )
    if num_chunks == 1:
        return one_f_one_b(num_stages, num_microbatches)
    rounds = range(0, num_microbatches, num_stages)
    forward = [(r + i, c) for r in rounds for c in range(num_chunks) for i in range(num_stages)]
    backward = [(r + i, c) for r in rounds for c in reversed(range(num_chunks)) for i in range(num_stages)]
    programs = []
    for stage in range(num_stages):
        warmup = min(2 * (num_stages - 1 - stage) + (num_chunks - 1) * num_stages, len(forward))
        programs.append(_alternate("FB", warmup, forward, backward))
    route = tuple((stage, chunk) for chunk in range(num_chunks) for stage in range(num_stages))
    return Schedule("interleaved", num_microbatches, (route,), _programs(programs))


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Zero-bubble ZB-H1 (Qi et al. 2023): 1F1B with split backward, W of stage s lagging s microbatches
    behind D.

    The W passes left over fill what 1F1B leaves idle while it drains; no stage holds more activations than
    the first stage of 1F1B.
    """
    _check(num_stages, num_microbatches)
    m = num_microbatches
    programs = []
    for stage in range(num_stages):
        program: list[Op] = []
        lag = min(stage, m)
        for op in _alternate("FD", min(num_stages - 1 - stage, m), [(i, 0) for i in range(m)]):
            program.append(op)
            if op.kind == "D" and op.microbatch >= lag:
                program.append(Op("W", op.microbatch - lag))
        program += [Op("W", i) for i in range(m - lag, m)]
        programs.append(program)
    return _straight("zb-h1", num_microbatches, programs)


def dualpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """DualPipe (DeepSeek-V3 report, 2024; the order of its public implementation).

    Half of the microbatches enter at each end; stage s holds chunk 0, the s-th part of the model, and chunk
    1, the (p-1-s)-th. p has to be even, m even and at least 2p.
    """
    _check(num_stages, num_microbatches)
    p, m = num_stages, num_microbatches
    if p % 2:
        raise ValueError(f"num_stages: {p}; DualPipe wants an even number")
    if m % 2 or m < 2 * p:
        raise ValueError(
            f"num_microbatches: {m}; DualPipe wants an even number, at least {2 * p} for {p} stages"
        )
    routes = (tuple((s, 0) for s in range(p)), tuple((s, 1) for s in reversed(range(p))))
    programs = tuple(_dualpipe_program(stage, p, m) for stage in range(p))
    return Schedule("dualpipe", m, routes, programs)


def _dualpipe_program(stage: int, p: int, m: int) -> tuple[Slot, ...]:
    from_end = min(stage, p - 1 - stage)
    to_middle = p // 2 - 1 - from_end
    middle = to_middle == 0
    seen = {(kind, side): 0 for kind in "FBW" for side in (0, 1)}
    late: list[tuple[int, int]] = []  # (microbatch, chunk) whose W waits, first in, first out

    # Side 0 is the direction that enters at the nearer end. Backward passes of either kind count together.
    def take(kind: str, side: int) -> Op:
        chunk = side if stage < p // 2 else 1 - side
        turn = seen["B" if kind == "D" else kind, side]
        seen["B" if kind == "D" else kind, side] += 1
        microbatch = turn + chunk * (m // 2)
        if kind == "D":
            late.append((microbatch, chunk))
        return Op(kind, microbatch, chunk)

    def weight() -> Op:
        microbatch, chunk = late.pop(0)
        return Op("W", microbatch, chunk)

    slots: list[Slot] = []
    slots += [(take("F", 0),) for _ in range(2 * to_middle)]
    for _ in range(from_end + 1):
        slots += [(take("F", 0),), (take("F", 1),)]
    for _ in range(to_middle):
        slots += [(take("D", 1),), (weight(),), (take("F", 1),)]
    for i in range(m // 2 - p + from_end + 1):
        if i == 0 and middle:
            slots += [(take("F", 0),), (take("B", 1),)]  # not overlapped: shortens the bubble
        else:
            slots.append((take("F", 0), take("B", 1)))
        slots.append((take("F", 1), take("B", 0)))
    for _ in range(to_middle):
        slots += [(take("B", 1),), (take("F", 1), take("B", 0))]
    split = False
    for i in range(from_end + 1):
        split = split or (i == (from_end + 1) // 2 and from_end % 2 == 1)
        slots.append((take("D" if split else "B", 1),))
        split = split or (i == (from_end + 1) // 2 and from_end % 2 == 0)
        slots.append((take("D" if split else "B", 0),))
    for _ in range(to_middle):
        slots += [(weight(),), (take("D", 0),)]
    slots += [(weight(),) for _ in range(from_end + 1)]
    assert not late, "every split backward pass has its W"
    return tuple(slots)


def _alternate(
    kinds: str, warmup: int, forward: list[Place], backward: list[Place] | None = None
) -> list[Op]:
    """`warmup` forward passes, then forward and backward in turn, then the backward passes that are left.

    `forward` and `backward` are orders of (microbatch, chunk).
    """
    first, second = kinds[0], kinds[1]
    backward = forward if backward is None else backward
    ops = [Op(first, *f) for f in forward[:warmup]]
    for f, b in zip(forward[warmup:], backward, strict=False):
        ops += [Op(first, *f), Op(second, *b)]
    return ops + [Op(second, *b) for b in backward[len(forward) - warmup :]]


def _straight(name: str, num_microbatches: int, programs: list[list[Op]]) -> Schedule:
    route = tuple((stage, 0) for stage in range(len(programs)))
    return Schedule(name, num_microbatches, (route,), _programs(programs))


def _programs(programs: list[list[Op]]) -> tuple[tuple[Slot, ...], ...]:
    return tuple(tuple((op,) for op in program) for program in programs)


def _check(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1:
        raise ValueError(f"num_stages: {num_stages}; at least 1 is wanted")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches: {num_microbatches}; at least 1 is wanted")

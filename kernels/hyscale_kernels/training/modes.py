"""Training steps in the three modes that are compared, on one set of parameters and one text, in turns.

    materialised     a score table, selected twice: the layer's forward pass and its recomputation
    hytopk           fused selection, twice
    hytopk+replay    fused selection once; recomputation decodes the record

Ranks meet in every layer's collectives, so a step takes as long as its slowest rank.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..layer import Observation, Step
from .config import Phase
from .measure import Baseline, in_turns, over_ranks
from .records import Mode, layer_options
from .trainer import StepResult, Trainer, retargeted

COMMUNICATION, SELECTION, ORDERING = "communication", "selection", "ordering"


@dataclass(frozen=True)
class Summary:
    """Several steps of one mode.

    step_ms, parts, loss    of the step whose time is the median (of an even number, the lower one), as its
                            slowest rank saw it: the parts add up to the time
    peak_bytes              on any rank, in any step
    p20_ms, p80_ms, samples_ms    of the slowest rank
    communication_ms        of the ranks, means over steps: time in which nothing but communication went on,
                            waiting for slower ranks included; the least of them is communication alone
    imbalance               of forward selection, and of all but communication: the slowest rank over the mean
    ordering_ms             of the step above: putting rows in order after FlashInfer, which it does not do
    """

    step_ms: float
    parts: dict[str, float]
    loss: float
    peak_bytes: int
    p20_ms: float
    p80_ms: float
    samples_ms: list[float]
    communication_ms: list[float]
    imbalance: dict[str, float]
    ordering_ms: float


def summarise(samples: Sequence[Sequence[StepResult]]) -> Summary:
    """``samples[i][r]`` is what rank r saw of the i-th step. ValueError for none."""
    if not samples:
        raise ValueError("samples: none; allowed: one or more steps")
    slowest = [max(ranks, key=lambda result: result.step_ms) for ranks in samples]
    times = [result.step_ms for result in slowest]
    middle = sorted(slowest, key=lambda result: result.step_ms)[(len(slowest) - 1) // 2]
    p20, p80 = np.percentile(times, [20, 80])
    talk = np.array([[_sum(result.parts, COMMUNICATION) for result in ranks] for ranks in samples])
    whole = np.array([[result.step_ms for result in ranks] for ranks in samples])
    chosen = np.array(
        [[result.parts.get(f"{SELECTION}.forward", 0.0) for result in ranks] for ranks in samples]
    )
    return Summary(
        step_ms=middle.step_ms,
        parts=middle.parts,
        loss=middle.loss,
        peak_bytes=max(result.peak_bytes for ranks in samples for result in ranks),
        p20_ms=float(p20),
        p80_ms=float(p80),
        samples_ms=times,
        communication_ms=talk.mean(axis=0).tolist(),
        imbalance={
            "selection.forward": _imbalance(chosen),
            "all but communication": _imbalance(whole - talk),
        },
        ordering_ms=_sum(middle.parts, ORDERING),
    )


def _sum(parts: Mapping[str, float], name: str) -> float:
    return sum(ms for part, ms in parts.items() if part.split(".")[0] == name)


def _imbalance(ms: "np.ndarray[Any, Any]") -> float:
    """Of [steps, ranks]: the slowest rank over the mean, of means over steps; 1 where nothing was spent."""
    by_rank = ms.mean(axis=0)
    return float(by_rank.max() / by_rank.mean()) if by_rank.mean() > 0 else 1.0


def measure_modes(
    trainer: Trainer,
    phase: Phase,
    modes: Sequence[Mode],
    baseline: Baseline,
    *,
    warmups: int,
    rounds: int,
    go_on: Callable[[], bool] = lambda: True,
) -> dict[Mode, Summary | str]:
    """Steps of ``phase`` in each mode, in turns; or why a mode has none.

    All are whole steps of the same parameters on the same text: the learning rate is 0, so the optimizer does
    its work and moves nothing, and losses can be compared.
    """
    models = {
        mode: retargeted(trainer.model, **layer_options(mode, baseline.selection, baseline.table_bytes))
        for mode in modes
    }
    own, done, still = trainer.model, trainer.done, replace(phase, learning_rate=0.0)

    def call(mode: Mode) -> list[StepResult]:
        trainer.model, trainer.done = models[mode], done
        return over_ranks(trainer.step(still), trainer.context)

    calls: dict[str, Callable[[], Any]] = {mode: partial(call, mode) for mode in modes}
    try:
        turns = in_turns(calls, warmups=warmups, rounds=rounds, go_on=go_on, device=trainer.device)
    finally:
        trainer.model = own
    return {
        mode: turns.faults[mode] if mode in turns.faults else summarise(turns.samples[mode]) for mode in modes
    }


def selection_hashes(trainer: Trainer, phase: Phase) -> dict[int, str]:
    """SHA-256 of each selecting layer's indices [S, K] over the whole sequence, on held-out text.

    Every rank gets the same; equal hashes on other numbers of ranks mean equal selections, bit for bit.
    """
    found: dict[int, str] = {}

    def look(seen: Observation) -> None:
        indices, context = seen.indices, trainer.context
        whole = indices if context is None else context.start_gather(indices).wait()
        found[seen.layer] = hashlib.sha256(whole.cpu().numpy().tobytes()).hexdigest()

    batch, rows = trainer.held_out(phase)
    tokens = rows.of_sequence(batch.tokens).to(trainer.device)
    trainer.model.observe(tokens, Step(rows=rows, context=trainer.context), look)
    return found


def gradients(trainer: Trainer, phase: Phase, mode: Mode, baseline: Baseline) -> tuple[float, str]:
    """(loss, SHA-256 of all gradients) of one step in ``mode``; parameters stay as they are."""
    model = retargeted(trainer.model, **layer_options(mode, baseline.selection, baseline.table_bytes))
    batch, rows = trainer.held_out(phase)
    tokens, targets = (rows.of_sequence(each).to(trainer.device) for each in batch[:2])
    try:
        losses = model(tokens, targets, Step(rows=rows, context=trainer.context))
        losses.total.backward()
        digest = hashlib.sha256()
        for parameter in model.parameters():
            if parameter.grad is not None:
                digest.update(parameter.grad.cpu().numpy().tobytes())
        return float(losses.total.detach()), digest.hexdigest()
    finally:
        model.zero_grad(set_to_none=True)

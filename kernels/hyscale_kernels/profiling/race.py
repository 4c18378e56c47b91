"""A race of selections: a correctness gate first, then interleaved timing of those that pass.

Every contender passes the gate (gate.py), and HyTopK must equal a stable sort of its own dense scores too.
One that fails is recorded with its reason and no speed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..hytopk import api, dense_scores, workspace_bytes
from ..provenance import environment
from .cases import Case
from .contenders import CONTENDERS
from .gate import objection, sampled_rows
from .timing import SPIN_CYCLES, interleaved, peak_extra_bytes

STAGE_ROUNDS = 5  # of which the median counts


@dataclass(frozen=True)
class Shape:
    rows: int
    keys: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """A shape such as 4096x65536: queries x keys. ValueError otherwise."""
        parts = text.lower().split("x")
        if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(f"shape {text!r} is not ROWSxKEYS, such as 4096x65536")
        return cls(int(parts[0]), int(parts[1]))


def sorts_its_own_scores(case: Case, indices: torch.Tensor) -> bool:
    """Whether HyTopK's indices of some rows equal a stable sort of its own dense scores."""
    rows = sampled_rows(case)
    start, end = case.start[rows], case.end[rows]
    scores = dense_scores(case.q[rows], case.k, case.w[rows], start=start, end=end, k_scale=case.k_scale)
    ranked = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : case.top_k]
    beyond = torch.arange(ranked.shape[1], device=rows.device) >= (end - start)[:, None]
    wanted = ranked.masked_fill(beyond, case.keys).sort(dim=1).values
    wanted = wanted.masked_fill(wanted == case.keys, -1)
    chosen = indices[rows]
    return torch.equal(wanted.int(), chosen[:, : wanted.shape[1]]) and bool(
        (chosen[:, wanted.shape[1] :] < 0).all()
    )


def hytopk_stages(select: Callable[[], object]) -> dict[str, float]:
    """Median milliseconds of each stage of ``select``, a call of HyTopK, by events around its launches."""
    names = [name for name in dir(api) if name.startswith("launch_")]
    originals = {name: getattr(api, name) for name in names}
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def timed(name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = originals[name](*arguments, **keywords)
            end.record()
            events.append((name.removeprefix("launch_"), begin, end))
            return result

        return call

    totals: dict[str, list[float]] = {}
    try:
        for name in names:
            setattr(api, name, timed(name))
        for _ in range(STAGE_ROUNDS):
            events.clear()
            torch.cuda._sleep(SPIN_CYCLES)
            select()
            torch.cuda.synchronize()
            sums: dict[str, float] = {}
            for stage, begin, end in events:
                sums[stage] = sums.get(stage, 0.0) + begin.elapsed_time(end)
            for stage, value in sums.items():
                totals.setdefault(stage, []).append(value)
    finally:
        for name, original in originals.items():
            setattr(api, name, original)
    return {stage: float(np.median(values)) for stage, values in totals.items()}


def race(
    case: Case, names: Sequence[str], *, rounds: int = 15, budget_s: float = 20.0
) -> Iterator[dict[str, Any]]:
    """One record a contender: its time when it passes the gate, else the reason why it has none."""
    header = {
        "schema": 1,
        "op": "hytopk",
        **environment("hytopk"),
        "dtype": case.dtype,
        "rows": case.rows,
        "keys": case.keys,
        "heads": case.q.shape[1],
        "dim": case.q.shape[2],
        "top_k": case.top_k,
        "windows": case.windows,
        "regime": case.regime,
    }
    calls = {}
    for name in names:
        contender = CONTENDERS[name]
        reason = contender.obstacle(case)
        status = "cannot run"
        if reason is None:
            try:
                call = contender.prepare(case)
                indices = call()
                status, reason = "wrong", objection(case, indices)
                if reason is None and name == "hytopk" and not sorts_its_own_scores(case, indices):
                    reason = "differs from a stable sort of its own dense scores"
                del indices
            except Exception as error:  # a rival may raise anything; the others are raced all the same
                said = f"{type(error).__name__}: {error}"
                status, reason = "failed", said.splitlines()[0][:300]
        if reason is None:
            calls[name] = call
        else:
            yield {**header, "contender": name, "status": status, "reason": reason}
    if not calls:
        return
    timings = interleaved(calls, rounds=rounds, budget_s=budget_s)
    for name, call in calls.items():
        timing = timings[name]
        record = {
            **header,
            "contender": name,
            "status": "ok",
            "median_ms": timing.median_ms,
            "p20_ms": timing.p20_ms,
            "p80_ms": timing.p80_ms,
            "samples": timing.samples,
            "scoring_tflops": case.flops() / timing.median_ms / 1e9,
            "peak_extra_bytes": peak_extra_bytes(call),
        }
        if name == "hytopk":
            H, D = case.q.shape[1:]
            record["stages"] = hytopk_stages(call)
            record["stated_workspace_bytes"] = workspace_bytes(
                case.rows, case.keys, H, D, case.top_k, case.q.dtype
            )
        yield record

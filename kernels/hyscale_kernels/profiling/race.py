"""A race of selections: a correctness gate first, then interleaved timing of those that pass.

The gate checks every contender on a few rows against the rounding bounds of float64 scores: every key
that is certainly among the K best must be there, no key that certainly is not may be. HyTopK must also
equal a stable sort of its own dense scores. A contender that fails is recorded with its reason and no speed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hyscale_ref.bounds import HOPPER_E4M3, TENSOR_CORE_16BIT, bounded_scores
from hyscale_ref.certified import judge

from ..hytopk import api, dense_scores, hytopk, workspace_bytes
from ..provenance import environment
from .cases import Case
from .contenders import CONTENDERS, Contender
from .timing import interleaved, peak_extra_bytes

GATE_ROWS = 4
GATE_SCORES = 2**20  # float64 scores of the gate, over its rows: a second or two on the host


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


def gate(case: Case, contender: Contender, indices: torch.Tensor) -> str | None:
    """Why the contender's selection is wrong on some sampled row, or None."""
    if tuple(indices.shape) != (case.rows, case.top_k):
        return f"returned shape {list(indices.shape)}, not [{case.rows}, {case.top_k}]"
    number = max(1, min(GATE_ROWS, case.rows, GATE_SCORES // case.keys))
    rows = torch.linspace(0, case.rows - 1, number, device=case.q.device).long()
    chosen = indices[rows].int()
    start, end = case.start[rows], case.end[rows]
    if contender.name == "hytopk":
        scores = dense_scores(case.q[rows], case.k, case.w[rows], start=start, end=end, k_scale=case.k_scale)
        ranked = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : case.top_k]
        beyond = torch.arange(case.top_k, device=rows.device) >= (end - start)[:, None]
        wanted = ranked.masked_fill(beyond, case.keys).sort(dim=1).values
        wanted = wanted.masked_fill(wanted == case.keys, -1)
        if not torch.equal(wanted.int(), chosen):
            return "differs from a stable sort of its own dense scores"
    ascending = chosen.masked_fill(chosen < 0, 2**31 - 1).sort(dim=1).values
    ascending = ascending.masked_fill(ascending == 2**31 - 1, -1)
    arithmetic = HOPPER_E4M3 if case.dtype == "fp8" else TENSOR_CORE_16BIT
    q, k, w = (tensor.double().cpu().numpy() for tensor in (case.q[rows], case.k, case.w[rows]))
    scale = None if case.k_scale is None else case.k_scale.double().cpu().numpy()
    reference, bound = bounded_scores(q, k, w, scale, arithmetic=arithmetic)
    violations = judge(
        ascending.cpu().numpy().astype(np.int32),
        reference,
        bound,
        case.top_k,
        start.cpu().numpy(),
        end.cpu().numpy(),
    )
    return str(violations[0]) if violations else None


def hytopk_stages(case: Case, repeats: int = 5) -> dict[str, float]:
    """Median milliseconds of each stage of one call, by events around its launches."""
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
        for _ in range(repeats):
            events.clear()
            torch.cuda._sleep(2_000_000)
            hytopk(case.q, case.k, case.w, case.top_k, start=case.start, end=case.end, k_scale=case.k_scale)
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
                status, reason = "wrong", gate(case, contender, indices)
                del indices
            except (RuntimeError, ImportError, OSError) as error:
                status, reason = "failed", f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
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
            record["stages"] = hytopk_stages(case)
            record["stated_workspace_bytes"] = workspace_bytes(
                case.rows, case.keys, H, D, case.top_k, case.q.dtype
            )
        yield record

"""Sparse latent attention on a GPU: a correctness gate, then times beside their floors, and plans raced.

    PYTHONPATH=.:kernels:verify python3 benchmarks/sparse_mla.py --out benchmarks/results/sparse_mla.jsonl
    ncu --clock-control none -k 'regex:^_(forward|recompute|queries|keys)_kernel' -c 4 \\
        python3 benchmarks/sparse_mla.py --once     # benchmarks/results/sparse_mla_ncu.txt

Appends one JSON line a claim or a time to --out; a red gate means that no time is recorded. Most of its time
is compilation. FLOPs are those of kernels/hyscale_kernels/attention/README.md: with n selected pairs,
2 n Hq (D + Dv) forward and 2 n Hq (3 D + 2 Dv) backward.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyscale_kernels.attention import AttentionPlan, attention_mass, backward_workspace_bytes, sparse_mla
from hyscale_kernels.attention.api import _backward
from hyscale_kernels.attention.eager import eager_sparse_mla
from hyscale_kernels.attention.keys import launch_keys, launch_settle, new_sums
from hyscale_kernels.attention.plan import chunk_rows
from hyscale_kernels.attention.prepare import launch_prepare
from hyscale_kernels.attention.queries import launch_queries
from hyscale_kernels.attention.recompute import Weights, launch_bounds, launch_weights
from hyscale_kernels.attention.tiles import Call
from hyscale_kernels.indexer.rows import Contributions
from hyscale_kernels.indexer.scatter import launch_grid
from hyscale_kernels.profiling.ceilings import CACHE_BYTES_PER_S
from hyscale_kernels.profiling.timing import Timing, interleaved, peak_extra_bytes
from hyscale_kernels.provenance import environment
from hyscale_verify.attention.bounds import values_and_bounds
from hyscale_verify.attention.cases import AttentionCase

D, DV, K = 576, 512, 2048
SCALE = 192**-0.5  # GLM-5.1: the key size before absorption, without the rotary part
SPREAD, CAUSAL = (8192, 131_072), (8192, 8192)
TARGET_TFLOPS = {"forward": 300.0, "backward, atomic": 150.0}  # 64 heads, SPREAD
CACHE_ADDITIONS_PER_S = 0.57e12  # float32 additions that hit it, from the indexer's dk on an H200
EAGER_ROWS, PROFILED_ROWS = 1024, 2048

Record = dict[str, Any]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def spread_indices(T: int, S: int, K: int, generator: torch.Generator) -> torch.Tensor:
    """K ascending keys a row, one from each of K equal parts of the keys that the row may see, then -1.

    A row sees all S keys, or with T == S its own position and those before it.
    """
    place = torch.arange(K, device="cuda")
    indices = torch.empty(T, K, dtype=torch.int32, device="cuda")
    for row0 in range(0, T, 4096):
        rows = torch.arange(row0, min(T, row0 + 4096), device="cuda")[:, None]
        length = rows + 1 if T == S else torch.full_like(rows, S)
        low, high = place * length // K, (place + 1) * length // K
        drawn = torch.rand(low.shape, device="cuda", generator=generator)
        keys = low + (drawn * (high - low)).long().clamp(max=(high - low - 1).clamp(min=0))
        few = torch.where(place < length, place, -1)  # fewer keys than places: all of them
        indices[row0 : row0 + len(rows)] = torch.where(length > K, keys, few).int()
    return indices


@dataclass
class Case:
    """Random inputs on the GPU, and what the kernels return for them."""

    q: torch.Tensor
    latent: torch.Tensor
    indices: torch.Tensor
    grad: torch.Tensor
    sink: torch.Tensor | None = None

    @classmethod
    def draw(cls, T: int, S: int, heads: int, places: int = K, sink: bool = False, seed: int = 0) -> "Case":
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16)

        q, latent, grad = normal(T, heads, D), normal(S, D), normal(T, heads, DV)
        indices = spread_indices(T, S, places, generator)
        return cls(q, latent, indices, grad, normal(heads).float() if sink else None)

    def forward(self, plan: AttentionPlan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse_mla(self.q, self.latent, self.indices, scale=SCALE, sink=self.sink, plan=plan)

    def backward(
        self, found: tuple[torch.Tensor, torch.Tensor], fixed: bool, plan: AttentionPlan | None = None
    ) -> Gradients:
        sizes = (plan or AttentionPlan.default(self.q.shape[1], "cuda")).as_ints()
        return _backward(  # type: ignore[no-any-return]
            self.grad,
            self.q,
            self.latent,
            self.indices,
            self.sink,
            *found,
            SCALE,
            DV,
            True,
            True,
            fixed,
            sizes,
        )

    def mass(self, log_sum_exp: torch.Tensor) -> torch.Tensor:
        return attention_mass(self.q, self.latent, self.indices, log_sum_exp, scale=SCALE, sink=self.sink)

    def on_host(self, rows: list[int]) -> AttentionCase:
        """Some rows, with the keys that they select alone, renumbered."""
        indices = self.indices[rows].cpu().numpy()
        keys, renumbered = np.unique(np.maximum(indices, 0), return_inverse=True)
        return AttentionCase(
            self.q[rows].float().cpu().numpy(),
            self.latent[torch.from_numpy(keys).long().cuda()].float().cpu().numpy(),
            np.where(indices < 0, -1, renumbered.reshape(indices.shape)).astype(np.int32),
            self.grad[rows].float().cpu().numpy(),
            None if self.sink is None else self.sink.cpu().numpy(),
            SCALE,
            "bf16",
        )


def over_bound(got: torch.Tensor, wanted: Any, allowed: Any) -> float:
    """The largest error in units of its bound; at most 1 is right."""
    error = np.abs(got.double().cpu().numpy() - wanted)
    return float(np.nan_to_num(error / allowed, nan=np.inf).max())


# Gate


def whole_gate(heads: int) -> Record:
    """Every result of a small case within its bound of float64; fixed point bit-equal by any plan."""
    case = Case.draw(24, 3000, heads, places=300, sink=True, seed=heads)
    case.indices[3, 100:] = -1
    case.indices[5] = -1
    case.indices[7, ::3] = -9
    found = case.forward()
    used = found[1] > float("-inf")
    ratios: dict[str, float] = {}
    for way in ("atomic", "fixed_point"):
        fixed = way == "fixed_point"
        # Keys stay where they are: every row is taken, and none is renumbered.
        host = replace(
            case.on_host(list(range(24))),
            latent=case.latent.float().cpu().numpy(),
            indices=case.indices.cpu().numpy(),
        )
        wanted, allowed = values_and_bounds(host, fixed_point=fixed)
        dq, dlatent, dsink = case.backward(found, fixed)
        ratios[f"out_{way}"] = over_bound(found[0], wanted.out, allowed.out + 1e-30)
        ratios[f"dq_{way}"] = over_bound(dq, wanted.q, allowed.q)
        ratios[f"dlatent_{way}"] = over_bound(dlatent, wanted.latent, allowed.latent)
        ratios[f"dsink_{way}"] = over_bound(dsink, wanted.sink, allowed.sink)
        ratios[f"mass_{way}"] = over_bound(case.mass(found[1]), wanted.mass, allowed.mass)
        seen = used.cpu().numpy()
        ratios[f"log_sum_exp_{way}"] = over_bound(
            found[1][used], wanted.log_sum_exp[seen], allowed.log_sum_exp[seen]
        )
    default = AttentionPlan.default(heads, "cuda")
    first = case.backward(found, True)[1]
    others = [*[default] * 5, replace(default, rows=4)]
    unequal = sum(not torch.equal(case.backward(found, True, plan)[1], first) for plan in others)
    return {
        "claim": "results and gradients within their bounds of float64; fixed point repeats bit for bit",
        "heads": heads,
        "error_over_bound": ratios,
        "empty_rows_are_zero": bool((found[0][5] == 0).all()) and not bool(used[5].any()),
        "fixed_point_unequal": unequal,
        "holds": max(ratios.values()) <= 1
        and unequal == 0
        and bool((found[0][5] == 0).all())
        and not bool(used[5].any()),
    }


def sampled_gate(what: str, case: Case, rows: list[int]) -> Record:
    """Sampled rows of a case within their bounds of float64: out, log-sum-exp, dq, mass."""
    found = case.forward()
    dq, dlatent, _ = case.backward(found, False)
    host = case.on_host(rows)
    wanted, allowed = values_and_bounds(host, fixed_point=False)
    ratios = {
        "out": over_bound(found[0][rows], wanted.out, allowed.out),
        "log_sum_exp": over_bound(found[1][rows], wanted.log_sum_exp, allowed.log_sum_exp),
        "dq": over_bound(dq[rows], wanted.q, allowed.q),
        "mass": over_bound(case.mass(found[1])[rows], wanted.mass, allowed.mass),
    }
    fixed = case.backward(found, True)[1].float()
    apart = float((fixed - dlatent.float()).norm() / fixed.norm())
    return {
        "claim": f"sampled rows within their bounds of float64: {what}",
        "rows": rows,
        "error_over_bound": ratios,
        "atomic_and_fixed_point_apart": apart,
        "holds": max(ratios.values()) <= 1 and apart <= 2.0**-8,
    }


def gate() -> Iterator[Record]:
    for heads in (16, 32, 64, 128):
        yield whole_gate(heads)
    case = Case.draw(*SPREAD, 64)
    yield sampled_gate(f"T, S = {SPREAD}", case, [0, 4095, 8191])
    del case
    torch.cuda.empty_cache()
    long = Case.draw(65_536, 131_072, 64, places=256)  # q has 2**31.2 elements
    yield sampled_gate("offsets beyond 2**31 elements", long, [0, 58_255, 65_535])


# Times


def rates() -> dict[str, float]:
    """GEMM TFLOP/s in bf16 and copy TB/s of this GPU, now."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    there = torch.empty(2**29, dtype=torch.bfloat16, device="cuda")
    here = torch.ones_like(there)
    times = interleaved({"gemm": lambda: x @ x, "copy": lambda: there.copy_(here)}, rounds=9, budget_s=2.0)
    return {
        "gemm_tflops": 2 * 8192**3 / times["gemm"].median_ms / 1e9,
        "copy_tb_per_s": 4 * 2**29 / times["copy"].median_ms / 1e9,
    }


def work(call: str, pairs: int, heads: int) -> tuple[float, dict[str, float]]:
    """(FLOPs, bytes or additions by floor) of a call over ``pairs`` selected pairs."""
    if call.startswith("forward"):
        return 2.0 * pairs * heads * (D + DV), {"gathers": 2.0 * pairs * D}
    if call.startswith("mass"):
        return 2.0 * pairs * heads * D, {"gathers": 2.0 * pairs * D}
    return 2.0 * pairs * heads * (3 * D + 2 * DV), {"gathers": 4.0 * pairs * D, "additions": 1.0 * pairs * D}


def timed(
    shape: tuple[int, int],
    heads: int,
    calls: dict[str, Callable[[], object]],
    pairs: int,
    rate: dict[str, float],
) -> Iterator[tuple[str, Timing, Record]]:
    times = interleaved(calls, rounds=9, budget_s=2.5, warmups=1)
    for call, timing in times.items():
        flops, moved = work(call, pairs, heads)
        tflops = flops / timing.median_ms / 1e9
        floors = {"products": flops / rate["gemm_tflops"] / 1e9}
        if "gathers" in moved:
            floors["cache_gathers"] = moved["gathers"] / CACHE_BYTES_PER_S * 1e3
        if "additions" in moved:
            floors["cache_additions"] = moved["additions"] / CACHE_ADDITIONS_PER_S * 1e3
        record: Record = {
            "claim": "time",
            "call": call,
            "shape": {"T": shape[0], "S": shape[1], "K": K, "heads": heads, "D": D, "Dv": DV, "pairs": pairs},
            **{name: round(value, 4) for name, value in asdict(timing).items()},
            "flops": flops,
            "tflops": round(tflops, 1),
            "fraction_of_gemm": round(tflops / rate["gemm_tflops"], 4),
            "floor_ms": {name: round(value, 3) for name, value in floors.items()},
        }
        yield call, timing, record


def race(shape: tuple[int, int], heads: int, rate: dict[str, float]) -> Iterator[Record]:
    """Times of one shape with the default plan, and the peak memory of each call."""
    T, S = shape
    case = Case.draw(T, S, heads)
    pairs = int((case.indices >= 0).sum())
    found = case.forward()
    calls: dict[str, Callable[[], object]] = {
        "forward": case.forward,
        "mass": partial(case.mass, found[1]),
        "backward, atomic": partial(case.backward, found, False),
        "backward, fixed point": partial(case.backward, found, True),
    }
    medians: dict[str, float] = {}
    for call, timing, record in timed(shape, heads, calls, pairs, rate):
        medians[call] = timing.median_ms
        record["plan"] = asdict(AttentionPlan.default(heads, "cuda"))
        record["peak_extra_bytes"] = peak_extra_bytes(calls[call])
        if call.startswith("backward"):
            stated = backward_workspace_bytes(T, S, heads, D, K, fixed_point="fixed" in call)
            record["stated_workspace_bytes"] = stated
            record["holds"] = record["peak_extra_bytes"] <= stated + 2**20
        if heads == 64 and shape == SPREAD:
            if call in TARGET_TFLOPS:
                record["target_tflops"] = TARGET_TFLOPS[call]
                record["holds"] = record.get("holds", True) and record["tflops"] >= TARGET_TFLOPS[call]
            elif call == "backward, fixed point":
                record["target"] = "at least half the rate of atomics"
                record["holds"] = record["holds"] and timing.median_ms <= 2 * medians["backward, atomic"]
        yield record


def stages() -> Iterator[Record]:
    """What each kernel of the backward pass takes, over all rows: one chunk timed, times the chunks."""
    T, S = SPREAD
    case = Case.draw(T, S, 64)
    out, log_sum_exp = case.forward()
    plan = AttentionPlan.default(64, "cuda")
    call = Call(case.q, case.latent, case.indices, None, SCALE, DV)
    rows = chunk_rows(T, 64, K, 2)
    prepared = launch_prepare(call, out, log_sum_exp, case.grad, peaks=True)
    weights = Weights(*(torch.empty(rows, K, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
    launch_weights(call, case.grad, prepared, weights, 0, rows, plan)
    grid = launch_grid(Contributions(out, *launch_bounds(call, case.grad, prepared, 0, T, plan)))
    dq, table, sums = torch.empty_like(case.q), torch.zeros(S, D, device="cuda"), new_sums(call)
    calls: dict[str, Callable[[], object]] = {
        "prepare": partial(launch_prepare, call, out, log_sum_exp, case.grad, True),
        "bounds": partial(launch_bounds, call, case.grad, prepared, 0, T, plan),
        "recompute": partial(launch_weights, call, case.grad, prepared, weights, 0, rows, plan),
        "queries": partial(launch_queries, call, weights.da, dq, 0, rows, plan),
        "keys, atomic": partial(launch_keys, call, case.grad, weights, None, table, 0, rows, plan),
        "keys, fixed point": partial(launch_keys, call, case.grad, weights, grid, sums, 0, rows, plan),
        "settle": partial(launch_settle, sums, grid, table, False),
    }
    chunked = {"recompute", "queries", "keys, atomic", "keys, fixed point"}
    for name, timing in interleaved(calls, rounds=9, budget_s=1.0, warmups=1).items():
        times = T / rows if name in chunked else 1.0
        yield {
            "claim": "stage of the backward pass",
            "stage": name,
            "median_ms": round(timing.median_ms * times, 4),
            "p20_ms": round(timing.p20_ms * times, 4),
            "p80_ms": round(timing.p80_ms * times, 4),
            "samples": timing.samples,
            "rows_timed": rows if name in chunked else T,
        }


def contest(rate: dict[str, float]) -> Iterator[Record]:
    """The candidate plans against the default, which they must agree with."""
    case = Case.draw(*SPREAD, 64)
    pairs = int((case.indices >= 0).sum())
    found = case.forward()
    default = AttentionPlan.default(64, "cuda")
    plans = {"default": default, **dict(default.candidates())}
    calls: dict[str, tuple[str, Callable[[], object]]] = {}
    for name, plan in plans.items():
        if name.startswith(("default", "forward")):
            calls[f"forward: {name}"] = name, partial(case.forward, plan)
        if not name.startswith("forward"):
            calls[f"backward, atomic: {name}"] = name, partial(case.backward, found, False, plan)
        if name.startswith(("default", "dkv")):
            calls[f"backward, fixed point: {name}"] = name, partial(case.backward, found, True, plan)
    reference = case.backward(found, True)[1]
    agrees: dict[str, bool] = {}
    for name, plan in plans.items():
        apart = (case.forward(plan)[0].float() - found[0].float()).norm() / found[0].float().norm()
        same = torch.equal(case.backward(found, True, plan)[1], reference)
        agrees[name] = same and float(apart) <= 2.0**-8
    runs = {call: run for call, (_, run) in calls.items()}
    for call, _, record in timed(SPREAD, 64, runs, pairs, rate):
        name = calls[call][0]
        yield record | {
            "plan": asdict(plans[name]), "agrees_with_default": agrees[name], "holds": agrees[name]
        }  # fmt: skip


def eager_race(rate: dict[str, float]) -> Iterator[Record]:
    """Plain torch on as many rows as its gathered keys leave room for."""
    shape = (EAGER_ROWS, SPREAD[1])
    case = Case.draw(*shape, 64)
    q, latent = case.q.requires_grad_(), case.latent.requires_grad_()
    pairs = int((case.indices >= 0).sum())

    def forward() -> torch.Tensor:
        return eager_sparse_mla(q, latent, case.indices, scale=SCALE, value_dim=DV)[0]

    out = forward()
    calls: dict[str, Callable[[], object]] = {
        "forward, eager": torch.no_grad()(forward),
        "backward, eager": lambda: torch.autograd.grad(out, (q, latent), case.grad, retain_graph=True),
    }
    for _, _, record in timed(shape, 64, calls, pairs, rate):
        yield record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines file to append to")
    parser.add_argument("--skip-candidates", action="store_true", help="time the default plan alone")
    parser.add_argument("--gate", action="store_true", help="look at correctness alone, and time nothing")
    parser.add_argument("--once", action="store_true", help="a forward and a backward pass, for a profiler")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("sparse_mla: needs a CUDA device, and this machine has none", file=sys.stderr)
        return 3
    if options.once:
        case = Case.draw(PROFILED_ROWS, SPREAD[1], 64)
        case.backward(case.forward(), False)
        torch.cuda.synchronize()
        return 0
    common = {"schema": 1, "op": "sparse_mla", **environment("attention")}
    failed = 0

    def report(record: Record) -> None:
        nonlocal failed
        failed += not record.get("holds", True)
        print(json.dumps(record), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**common, **record}) + "\n")

    for record in gate():
        report(record)
    if failed:
        print("sparse_mla: the gate is red; no time is recorded", file=sys.stderr)
        return 1
    if options.gate:
        return 0
    torch.cuda.empty_cache()
    rate = rates()
    report({"claim": "rates", **{name: round(value, 3) for name, value in rate.items()}})
    for shape in (SPREAD, CAUSAL):
        for heads in (64, 128):
            for record in race(shape, heads, rate):
                report(record)
            torch.cuda.empty_cache()
    for part in (stages(), eager_race(rate), iter(()) if options.skip_candidates else contest(rate)):
        for record in part:
            report(record)
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

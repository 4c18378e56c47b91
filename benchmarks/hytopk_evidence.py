"""HyTopK on a GPU: what the contract promises, measured, one JSON line a claim.

    python benchmarks/hytopk_evidence.py --out benchmarks/results/hytopk_h200.jsonl

Claims: exact against the kernel's own dense scores at GLM-5.1's shape (2,048 queries, 1,048,576 keys);
workspace within the contract's bound; dense scores within the rounding bound of float64 and as accurate
as an eager low-precision run; 100 runs bit-equal; members on which bf16 and fp8 selections differ.
With --sanitize, a small case for compute-sanitizer, and nothing else.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyscale_kernels.hytopk import Selection, dense_scores, hytopk, workspace_bytes
from hyscale_kernels.profiling.cases import DTYPES
from hyscale_kernels.provenance import environment
from hyscale_ref.bounds import HOPPER_E4M3, TENSOR_CORE_16BIT, bounded_scores
from hyscale_ref.certified import ambiguous_fraction, certified_sets, judge

HEADS, HEAD_SIZE, TOP_K = 32, 128, 2048

Inputs = dict[str, Any]


def inputs(name: str, T: int, S: int, seed: int = 0) -> Inputs:
    """Random GLM-5.1-shaped inputs; every key visible to every query."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    case: Inputs = {
        "q": normal(T, HEADS, HEAD_SIZE).to(DTYPES[name]),
        "k": normal(S, HEAD_SIZE).to(DTYPES[name]),
        "w": normal(T, HEADS),
        "start": torch.zeros(T, dtype=torch.int32, device="cuda"),
        "end": torch.full((T,), S, dtype=torch.int32, device="cuda"),
    }
    if name == "fp8":
        case["k_scale"] = torch.rand(S, device="cuda", generator=generator) + 0.5
    return case


def run(case: Inputs, top_k: int = TOP_K) -> Selection:
    arguments = dict(case)
    return hytopk(arguments.pop("q"), arguments.pop("k"), arguments.pop("w"), top_k, **arguments)


def dense(case: Inputs, rows: slice) -> torch.Tensor:
    """Dense scores of some query rows."""
    arguments = {name: value[rows] for name, value in case.items() if name in ("q", "w", "start", "end")}
    if "k_scale" in case:
        arguments["k_scale"] = case["k_scale"]
    return dense_scores(arguments.pop("q"), case["k"], arguments.pop("w"), **arguments)


def best_of(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """The top_k best keys of each row by a stable sort, ascending."""
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :top_k]
    return order.sort(dim=1).values.int()


def exact_at_a_million(name: str) -> dict[str, Any]:
    """Equality with a stable sort of the kernel's own scores, every row, and the peak workspace."""
    T, S = 2048, 2**20
    case = inputs(name, T, S)
    run(case)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    selection = run(case)
    torch.cuda.synchronize()
    stats = selection.stats
    outputs = (selection.indices, selection.count, stats.nan_scores, stats.rescored)
    kept = sum(tensor.nbytes for tensor in (*outputs, stats.candidates, stats.invalid))
    peak = torch.cuda.max_memory_allocated() - before - kept
    wrong = 0
    for first in range(0, T, 128):
        rows = slice(first, first + 128)
        wrong += int((best_of(dense(case, rows), TOP_K) != selection.indices[rows]).any(dim=1).sum())
    bound = 16 * T * TOP_K + 64 * 2**20
    return {
        "claim": "exact and bounded at a million keys",
        "rows": T,
        "keys": S,
        "rows_wrong": wrong,
        "rows_rescored": int((stats.rescored != 0).sum()),
        "peak_workspace_bytes": peak,
        "stated_workspace_bytes": workspace_bytes(T, S, HEADS, HEAD_SIZE, TOP_K, DTYPES[name]),
        "bound_bytes": bound,
        "holds": wrong == 0 and peak <= bound,
    }


def eager(case: Inputs) -> torch.Tensor:
    """Scores by eager low-precision PyTorch: bfloat16 (fp16 for fp16) products, float32 head sum."""
    low = torch.float16 if case["q"].dtype == torch.float16 else torch.bfloat16
    q, k = case["q"].to(low), case["k"].to(low)
    total = torch.zeros(q.shape[0], k.shape[0], device="cuda")
    for head in range(HEADS):
        total += case["w"][:, head, None] * torch.relu(q[:, head] @ k.T).float()
    return total * case["k_scale"] if "k_scale" in case else total


def within_rounding(name: str) -> dict[str, Any]:
    """Dense scores against float64 and its bound; RMS error against the eager run; certified sets."""
    T, S, top_k = 64, 4096, 512
    case = inputs(name, T, S, seed=1)
    arithmetic = HOPPER_E4M3 if name == "fp8" else TENSOR_CORE_16BIT
    wide = [case[key].double().cpu().numpy() for key in ("q", "k", "w")]
    scale = case["k_scale"].double().cpu().numpy() if "k_scale" in case else None
    scores, bound = bounded_scores(*wide, scale, arithmetic=arithmetic)
    ours = dense(case, slice(None)).double().cpu().numpy()
    error, theirs = np.abs(ours - scores), np.abs(eager(case).double().cpu().numpy() - scores)
    rms, eager_rms = float(np.sqrt((error**2).mean())), float(np.sqrt((theirs**2).mean()))
    start, end = (case[key].cpu().numpy() for key in ("start", "end"))
    indices = run(case, top_k).indices.cpu().numpy()
    violations = judge(indices, scores, bound, top_k, start, end)
    outside = int((error > bound).sum())
    return {
        "claim": "dense scores within the rounding bound, as accurate as eager",
        "rows": T,
        "keys": S,
        "outside_bound": outside,
        "worst_error_over_bound": float((error / np.maximum(bound, np.finfo(float).tiny)).max()),
        "rms_error": rms,
        "eager_rms_error": eager_rms,
        "certified_violations": len(violations),
        "ambiguous_fraction": ambiguous_fraction(
            certified_sets(scores, bound, top_k, start, end), start, end
        ),
        "holds": outside == 0 and rms <= 2 * eager_rms and not violations,
    }


def repeats(name: str) -> dict[str, Any]:
    """100 runs, bit-equal."""
    case = inputs(name, 512, 131072, seed=2)
    first = run(case)
    different = sum(not torch.equal(run(case).indices, first.indices) for _ in range(99))
    return {
        "claim": "100 runs bit-equal",
        "rows": 512,
        "keys": 131072,
        "different": different,
        "holds": different == 0,
    }


def disagreement() -> dict[str, Any]:
    """Share of members that an fp8 selection does not share with the bf16 one, same inputs."""
    T, S = 512, 131072
    case = inputs("bf16", T, S, seed=3)
    scale = case["k"].float().abs().amax(dim=1) / 448.0
    narrow = dict(case)
    narrow["q"] = case["q"].to(torch.float8_e4m3fn)
    narrow["k"] = (case["k"].float() / scale[:, None]).to(torch.float8_e4m3fn)
    narrow["k_scale"] = scale
    wide, low = run(case).indices, run(narrow).indices
    member = torch.zeros(T, S, dtype=torch.bool, device="cuda").scatter_(1, wide.long(), True)
    share = 1.0 - float(member.gather(1, low.long()).float().mean())
    return {
        "claim": "bf16 and fp8 selections, share of members that differ (random inputs)",
        "rows": T,
        "keys": S,
        "share": share,
        "holds": True,
    }


def sanitize() -> None:
    """A small case that goes through every kernel: for compute-sanitizer."""
    for name in DTYPES:
        for kind in ("random", "plateau", "flood"):
            case = inputs(name, 70, 12000)
            if kind == "plateau":
                case["k"] = case["k"][:1].expand_as(case["k"]).contiguous()
            case["end"] = torch.arange(12000 - 70, 12000, dtype=torch.int32, device="cuda")
            if kind == "flood":
                wide = case["k"].float()
                wide[::2, 0] = float("nan")
                case["k"] = wide.to(DTYPES[name])
            run(case, 100)
            dense(case, slice(None))
    torch.cuda.synchronize()


def claims() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for name in DTYPES:
        yield name, lambda name=name: exact_at_a_million(name)  # type: ignore[misc]
        yield name, lambda name=name: within_rounding(name)  # type: ignore[misc]
        yield name, lambda name=name: repeats(name)  # type: ignore[misc]
    yield "bf16/fp8", disagreement


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="append the records to this file")
    parser.add_argument("--sanitize", action="store_true", help="run only a small case through every kernel")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("hytopk_evidence: needs a CUDA device, and this machine has none", file=sys.stderr)
        return 3
    if options.sanitize:
        sanitize()
        return 0
    header = environment("hytopk")
    failed = 0
    for name, claim in claims():
        record = {"schema": 1, "op": "hytopk", "dtype": name, **header, **claim()}
        failed += not record["holds"]
        line = json.dumps(record)
        print(line, flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

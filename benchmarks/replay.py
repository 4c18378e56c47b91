"""Selection replay on a GPU: its race (hyscale_verify/replay_race.py), then a model trained both ways.

    python benchmarks/replay.py --out benchmarks/results

Appends to race_replay.jsonl under --out, one JSON line a claim or a time; a red gate means that no time is
recorded. With --sweep it also times other tile sizes of the backward pass and prints them.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from hyscale_kernels.hytopk import hytopk
from hyscale_kernels.indexer import IndexerPlan
from hyscale_kernels.indexer.api import _backward
from hyscale_kernels.profiling.timing import interleaved
from hyscale_verify.replay_race import Case, Record, header, race


def example() -> Any:
    """The example script as a module: its model is the one trained here."""
    path = Path(__file__).parent.parent / "examples" / "replay_training.py"
    spec = importlib.util.spec_from_file_location("replay_training", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tied_rows(module: Any, config: Any) -> tuple[int, list[float]]:
    """Rows of the first layer whose k-th score is tied, and the share of selections that differ by layer."""
    torch.manual_seed(0)
    model = module.Model(config, torch.bfloat16).cuda()
    tokens = torch.randint(config.vocabulary, (config.tokens,)).cuda()
    seen: list[torch.Tensor] = []
    tied = 0

    def select(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        nonlocal tied
        selection = hytopk(q, k, w, config.top_k, return_scores=True)
        if not seen:
            wider = hytopk(q, k, w, config.top_k + 1, return_scores=True)
            assert selection.scores is not None
            assert wider.scores is not None
            cut = selection.scores.masked_fill(selection.indices < 0, float("inf")).amin(dim=1)
            at_cut = (wider.scores == cut[:, None]).sum(dim=1) > (selection.scores == cut[:, None]).sum(dim=1)
            tied = int(at_cut.sum())
        seen.append(selection.indices)
        return selection.indices

    with torch.no_grad():
        model(tokens, lambda number, layer, x: layer(x, select))
    shares = [float((a != b).float().mean()) for a, b in pairwise(seen)]
    return tied, shares


def model_claims() -> Iterator[Record]:
    module = example()
    config = replace(module.GPU, layers=4, steps=20)
    torch.use_deterministic_algorithms(True)
    tied, shares = tied_rows(module, config)
    histories = {way: module.train(way, config, "cuda") for way in module.WAYS}
    base = histories["twice"]
    for way, history in histories.items():
        yield {
            "claim": "a model under full recompute: selections, losses and gradients",
            "way": way,
            "layers": config.layers,
            "tokens": config.tokens,
            "steps": config.steps,
            "selections_a_layer_and_step": history.selections_per_step / config.layers,
            "first_loss": float(history.losses[0]),
            "last_loss": float(history.losses[-1]),
            "bit_equal_to_twice": module.same_bits(base, history),
            "rows_tied_at_the_cut": tied,
            "places_that_differ_between_layers": shares,
            "holds": module.same_bits(base, history)
            and history.selections_per_step == config.layers * (2 if way == "twice" else 1)
            and tied > 0
            and min(shares) > 0,
        }
    histories.clear()
    short = replace(config, steps=3)
    peaks = {way: module.train(way, short, "cuda", keep_gradients=False) for way in module.WAYS}
    packed = peaks["tape"].record_bytes
    for way in ("replay", "tape"):
        yield {
            "claim": "peak memory beside plain checkpointing",
            "way": way,
            "peak_bytes": peaks[way].peak_bytes,
            "plain_peak_bytes": peaks["twice"].peak_bytes,
            "packed_bytes": packed,
            "holds": peaks[way].peak_bytes <= 1.02 * peaks["twice"].peak_bytes + packed,
        }
    torch.use_deterministic_algorithms(False)


def sweep(dtype: str) -> None:
    """Print backward times for other tile sizes."""
    case = Case(dtype, 8192, 2**20, 32, 128, 2048)
    base = IndexerPlan.default(case.S, case.H, case.D, "cuda")
    plans = {"default": base}
    for keys, warps in ((16, 2), (16, 4), (32, 4), (64, 4), (64, 8)):
        plans[f"scatter_keys={keys} scatter_warps={warps}"] = replace(
            base, scatter_keys=keys, scatter_warps=warps
        )
    for chunk in (2**14, 2**16, 2**17):
        plans[f"chunk_keys={chunk}"] = replace(base, chunk_keys=chunk)
    names = ("backward_keys", "stages", "warps", "registers")
    for sizes in (
        (64, 1, 4, 168), (64, 2, 4, 0), (64, 2, 4, 128), (64, 3, 4, 168), (64, 2, 8, 0), (64, 1, 8, 128),
        (128, 2, 8, 0),
    ):  # fmt: skip
        changed = dict(zip(names, sizes, strict=True))
        plans[" ".join(f"{name}={size}" for name, size in changed.items())] = replace(base, **changed)
    rows_only = {
        f"{name}, dq and dw alone": (
            lambda plan=plan: _backward(
                case.grad, case.q, case.k, case.w, case.indices, case.k_scale, False, False, plan.as_ints()
            )
        )
        for name, plan in plans.items()
        if name == "default" or "backward_keys" in name
    }
    calls: dict[str, Callable[[], object]] = {
        f"{name}, {'fixed' if fixed else 'atomic'}": (
            lambda plan=plan, fixed=fixed: case.backward(fixed, plan)  # type: ignore[misc]
        )
        for name, plan in plans.items()
        for fixed in (False, True)
    }
    for name, timing in interleaved({**rows_only, **calls}, rounds=5, budget_s=8.0, warmups=1).items():
        print(f"sweep {dtype} {name}: {timing.median_ms:.3f} ms", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder in which race_replay.jsonl is appended to")
    parser.add_argument("--sweep", action="store_true", help="time other tile sizes as well, and print them")
    parser.add_argument("--skip-model", action="store_true", help="leave the trained model out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("replay: needs a CUDA device, and this machine has none", file=sys.stderr)
        return 3
    common = header()
    failed = 0

    def report(record: Record) -> None:
        nonlocal failed
        failed += not record.get("holds", True)
        line = json.dumps({**common, **record})
        print(json.dumps(record), flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            with (options.out / "race_replay.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")

    timed = False
    for record in race():
        report(record)
        timed = timed or record["claim"] == "time"
    if not timed:
        print("replay: the gate is red; no time is recorded", file=sys.stderr)
        return 1
    if options.sweep:
        for dtype in ("bf16", "fp8"):
            sweep(dtype)
    if not options.skip_model:
        for record in model_claims():
            report(record)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

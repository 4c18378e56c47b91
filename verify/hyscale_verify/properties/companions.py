"""What stands beside HyTopK: window builders in torch, and fp8 quantisation."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from hyscale_ref import windows
from hyscale_verify.properties.base import FalsifiedError, Property, Trial, promise
from hyscale_verify.properties.judge import members
from hyscale_verify.targets import result_of

MOST_THAT_MAY_DIFFER = 0.3


def _draw_builder(trial: Trial) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A builder's name and arguments, as the NumPy builder takes them."""
    T, extra = trial.draw(st.integers(0, 60), "T"), trial.draw(st.integers(0, 9), "more positions")
    ratio = trial.draw(st.integers(1, 5), "ratio")
    cuts = trial.draw(st.lists(st.integers(0, T), max_size=4).map(sorted), "document boundaries")
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "full": ((T, extra), {}),
        "causal": ((T, T + extra), {"ratio": ratio}),
        "packed": (([0, *cuts, T], T + extra), {"ratio": ratio}),
        "sliding": ((T, extra + 1), {"causal": trial.draw(st.booleans(), "causal")}),
    }
    name = trial.draw(st.sampled_from(sorted(calls)), "builder")
    return (name, *calls[name])


@promise("window", ("tie_rich",), needs=["hytopk"])
def window_builders(trial: Trial) -> None:
    """Windows built in torch are the oracle's: full, causal, packed, sliding; compressed keys; rank rows."""
    name, args, options = _draw_builder(trial)
    ours, device = trial.hytopk.module("windows"), torch.device(trial.device)
    right = getattr(windows, name)(*args, **options)
    if name == "packed":
        built = ours.packed(torch.tensor(args[0], device=device), *args[1:], **options)
    else:
        built = getattr(ours, name)(*args, **options, device=device)
    ranks = trial.draw(st.integers(1, 4), "ranks")
    rank = trial.draw(st.integers(0, ranks - 1), "rank")
    rows = trial.draw(st.sampled_from(("contiguous_rows", "zigzag_rows")), "rows")
    held = getattr(windows, rows)(len(right.start), ranks, rank)
    right = right.rows(held)
    built = built.rows(
        getattr(ours, rows)(args[0] if name != "packed" else args[1], ranks, rank, device=device)
    )
    for part in ("start", "end"):
        one, two = getattr(built, part).cpu().numpy(), getattr(right, part)
        if one.dtype != np.int32 or not np.array_equal(one, two):
            raise FalsifiedError(f"{part} of {name}: {one.tolist()}, must be {two.tolist()}")


@promise("quantisation", ("random_normal",), needs=["hytopk"])
def fp8_agrees_with_bf16(trial: Trial) -> None:
    """Reports the share of selected keys that bf16 and quantised fp8 do not have in common.

    Random normal numbers quantised to e4m3 must keep 70 % of the keys; real indexers differ in about 0.5 %.
    """
    trial.assume("fp8" in trial.target.dtypes)
    rows, keys, H, D, top_k = (2, 200, 2, 16, 33) if trial.device == "cpu" else (64, 6000, 32, 128, 200)
    rng = np.random.default_rng(trial.draw(st.integers(0, 2**32 - 1), "seed"))

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(trial.device)

    q, k, w = normal(rows, H, D), normal(keys, D), normal(rows, H).abs()
    end = torch.full((rows,), keys, dtype=torch.int32, device=trial.device)
    call = trial.hytopk.api.hytopk
    eighth = trial.hytopk.module("quantize").quantize_inputs(q, k, w)
    low = result_of(call(eighth.q, eighth.k, eighth.w, top_k, end=end, k_scale=eighth.k_scale))
    high = result_of(call(q.bfloat16(), k.bfloat16(), w, top_k, end=end))
    differ = [
        len(set(members(a)) - set(members(b))) / top_k for a, b in zip(low.indices, high.indices, strict=True)
    ]
    share = float(np.mean(differ))
    trial.numbers["share of keys that differ"] = share
    if share > MOST_THAT_MAY_DIFFER:
        raise FalsifiedError(f"{share:.3g} of the selected keys differ; {MOST_THAT_MAY_DIFFER} are allowed")


PROPERTIES: tuple[Property, ...] = (window_builders, fp8_agrees_with_bf16)

"""The edge of the contract: wrong arguments, wrong values of device tensors, calls with nothing in them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from hyscale_ref import windows
from hyscale_verify.cases import Case
from hyscale_verify.properties.base import FalsifiedError, Property, Trial, promise
from hyscale_verify.properties.judge import same_bits, taken
from hyscale_verify.strategies import cases
from hyscale_verify.targets import result_of

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Mistake:
    """A wrong call: ``make`` spoils the arguments of a right one; the error must name ``argument``."""

    argument: str
    make: Callable[[Arguments], Arguments]


def _put(name: str, change: Callable[[torch.Tensor], Any]) -> Mistake:
    return Mistake(name, lambda call: {**call, name: change(call[name])})


def _set(name: str, value: Any) -> Mistake:
    return Mistake(name, lambda call: {**call, name: value})


def _gapped(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a stride of 2 on the last axis."""
    return torch.stack([tensor, tensor], dim=-1).flatten(-2)[..., ::2]


MISTAKES: dict[str, Mistake] = {
    "q is a list": _set("q", [[[1.0]]]),
    "q is None": _set("q", None),
    "q has rank 2": _put("q", lambda q: q[:, 0]),
    "q has rank 4": _put("q", lambda q: q[None]),
    "q is int32": _put("q", lambda q: q.to(torch.int32)),
    "q is float64": _put("q", lambda q: q.double()),
    "q is float8_e5m2": _put("q", lambda q: q.to(torch.float8_e5m2)),
    "q has no heads": Mistake("q", lambda call: {**call, "q": call["q"][:, :0], "w": call["w"][:, :0]}),
    "q has 129 heads": Mistake(
        "q",
        lambda call: {**call, "q": call["q"][:, :1].repeat(1, 129, 1), "w": call["w"][:, :1].repeat(1, 129)},
    ),
    "head size 257": Mistake(
        "q",
        lambda call: {
            **call,
            "q": call["q"].repeat(1, 1, 17)[..., :257],
            "k": call["k"].repeat(1, 17)[:, :257],
        },
    ),
    "q is on meta": _put("q", lambda q: q.to("meta")),
    "q has a gapped last axis": _put("q", _gapped),
    "k has rank 1": _put("k", lambda k: k[:, 0].contiguous()),
    "k has rank 3": _put("k", lambda k: k[None]),
    "k has another head size": _put("k", lambda k: k[:, :-1].contiguous()),
    "k has another dtype": _put(
        "k", lambda k: k.to(torch.bfloat16 if k.dtype != torch.bfloat16 else torch.float16)
    ),
    "k is on meta": _put("k", lambda k: k.to("meta")),
    "k has a gapped last axis": _put("k", _gapped),
    "w is float16": _put("w", lambda w: w.half()),
    "w is float64": _put("w", lambda w: w.double()),
    "w lacks a head": _put("w", lambda w: w[:, :-1].contiguous() if w.shape[1] > 1 else w.repeat(1, 2)),
    "w lacks a row": _put("w", lambda w: w[:-1]),
    "w has rank 1": _put("w", lambda w: w[:, 0].contiguous()),
    "w is on meta": _put("w", lambda w: w.to("meta")),
    "top_k is 0": _set("top_k", 0),
    "top_k is -1": _set("top_k", -1),
    "top_k is 2.0": _set("top_k", 2.0),
    "top_k is True": _set("top_k", True),
    "top_k is a tensor": _set("top_k", torch.tensor(2)),
    "top_k is 2**31": _set("top_k", 2**31),
    "start is int64": _put("start", lambda start: start.long()),
    "start is a float": _put("start", lambda start: start.float()),
    "start is a list": _put("start", lambda start: start.tolist()),
    "start is too short": _put("start", lambda start: start[:-1]),
    "start has rank 2": _put("start", lambda start: start[:, None]),
    "end is int64": _put("end", lambda end: end.long()),
    "end is too long": _put("end", lambda end: end.repeat(2)),
    "end is on meta": _put("end", lambda end: end.to("meta")),
    "no windows though T differs from S": Mistake(
        "start",
        lambda call: {
            **call,
            "q": call["q"].repeat(2, 1, 1),
            "w": call["w"].repeat(2, 1),
            "start": None,
            "end": None,
            "k": call["k"][:1],
            "k_scale": None if call["k_scale"] is None else call["k_scale"][:1],
        },
    ),
    "k_scale for no reason or missing": Mistake(
        "k_scale",
        lambda call: {
            **call,
            "k_scale": torch.ones(len(call["k"]), device=call["k"].device)
            if call["k_scale"] is None
            else None,
        },
    ),
}


def arguments(case: Case, device: str) -> Arguments:
    """The keyword arguments of a right call."""
    inputs = case.tensors(device)
    return {"q": inputs.q, "k": inputs.k, "w": inputs.w, "top_k": inputs.top_k, **inputs.keywords}


@promise("errors", ("tie_rich", "row_lengths", "random_normal"), needs=["hytopk"])
def wrong_arguments(trial: Trial) -> None:
    """Every wrong type, dtype, rank, shape, stride, device or K raises TypeError or ValueError, named."""
    for name, mistake in MISTAKES.items():
        call = mistake.make(arguments(trial.case, trial.device))
        try:
            trial.hytopk.api.hytopk(**call)
        except (TypeError, ValueError) as error:
            if mistake.argument not in str(error):
                raise FalsifiedError(
                    f"{name}: the error does not name {mistake.argument}: {error}"
                ) from error
        except Exception as error:
            raise FalsifiedError(f"{name}: raised {type(error).__name__}: {error}") from error
        else:
            raise FalsifiedError(f"{name}: accepted")


@promise("errors", ("tie_rich", "exact_integers", "nan"), needs=["hytopk"])
def wrong_windows(trial: Trial) -> None:
    """A row whose window is none (start < 0, end > S, start > end) selects nothing and is reported.

    On a CPU the call raises, naming row and value. On a GPU the row is marked invalid, other rows are as
    they were, and ``check()`` or ``validate=True`` raises.
    """
    case = trial.case
    S = case.num_keys
    row = trial.draw(st.integers(0, case.num_queries - 1), "row")
    wrong = trial.draw(
        st.sampled_from(((-1, S), (0, S + 1), (S, S - 1), (-(2**31), 0), (0, 2**31 - 1))), "window"
    )
    start, end = case.start.copy(), case.end.copy()
    start[row], end[row] = wrong
    spoiled = case.with_(start=start, end=end)
    if trial.device == "cpu":
        _must_raise(trial, lambda: trial.select(spoiled), f"{row}", "window", str(wrong[0]))
        return
    whole, result = trial.select(), trial.select(spoiled)
    if result.indices[row].max(initial=-1) != -1 or result.count is None or result.count[row] != 0:
        raise FalsifiedError(f"row {row} with the window {wrong} selects something", (row,))
    others = np.arange(case.num_queries) != row
    same_bits(taken(result, others), taken(whole, others), "rows beside one without a window")
    marks = result.stats.invalid.cpu().numpy()
    if marks[row] != 1 or marks[others].any():
        raise FalsifiedError(f"rows marked invalid: {np.flatnonzero(marks).tolist()}; must be [{row}]")
    _must_raise(trial, result.selection.check, f"{row}", "window", str(wrong[0]))
    _must_raise(trial, lambda: trial.select(spoiled, validate=True), f"{row}", "window", str(wrong[0]))


def _must_raise(trial: Trial, call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except ValueError as error:
        for word in words:
            if word not in str(error):
                raise FalsifiedError(f"the error does not name {word!r}: {error}") from error
    else:
        raise FalsifiedError(f"nothing was raised that names {', '.join(words)}")


@promise("errors", ("tie_rich", "exact_integers"), needs=["hytopk"])
def wrong_scales(trial: Trial) -> None:
    """A k_scale that is not positive and finite is reported; on a GPU its key scores NaN.

    On a CPU the call raises, naming key and value. On a GPU ``check()`` raises, and the key is not selected.
    """
    case = trial.case
    trial.assume("fp8" in trial.target.dtypes and case.num_keys > 0)
    key = trial.draw(st.integers(0, case.num_keys - 1), "key")
    value = trial.draw(st.sampled_from((0.0, -1.0, float("nan"), float("inf"), -0.0)), "value")
    scale = np.ones(case.num_keys, np.float32)
    scale[key] = value
    spoiled = case.with_(dtype="fp8", k_scale=scale)
    if trial.device == "cpu":
        _must_raise(trial, lambda: trial.select(spoiled), str(key), "k_scale", str(value))
        return
    result = trial.select(spoiled)
    if (result.indices == key).any():
        raise FalsifiedError(f"key {key} with the scale {value} is selected", keys=(key,))
    _must_raise(trial, result.selection.check, str(key), "k_scale", str(value))


@promise("window", ("tie_rich", "random_normal", "duplicated_keys"), needs=["hytopk"], windows=("causal",))
def windows_left_out(trial: Trial) -> None:
    """Without start and end the window is causal; with one of them the other is 0 or S."""
    case = trial.case
    call = arguments(case, trial.device)
    api = trial.hytopk.api
    S = case.num_keys
    causal = trial.select()
    zero, full = case.start * 0, case.end * 0 + S
    low = windows.causal(case.num_queries).end - 1
    start = torch.from_numpy(low).to(trial.device)
    for given, right, what in (
        ({"start": None, "end": None}, causal, "neither start nor end"),
        ({"start": None, "end": call["end"]}, trial.select(case.with_(start=zero)), "end alone"),
        ({"start": start, "end": None}, trial.select(case.with_(start=low, end=full)), "start alone"),
    ):
        same_bits(result_of(api.hytopk(**{**call, **given})), right, what)


@promise("result", ("tie_rich", "random_normal"))
def empty_calls(trial: Trial) -> None:
    """No rows, no keys, or both: an answer of the right shape with nothing selected."""
    rows, keys = trial.draw(st.sampled_from(((0, 0), (0, 3), (3, 0), (1, 0), (0, 200))), "T and S")
    top_k = trial.draw(st.sampled_from(trial.space.top_k), "K")
    space = trial.space.exactly(rows, keys, top_k)
    trial.case = case = trial.data.draw(cases(trial.case.regime, space, ("full",)), label="case")
    result = trial.select()
    if result.indices.shape != (rows, case.top_k) or (result.indices != -1).any():
        raise FalsifiedError(
            f"indices {result.indices.shape} {result.indices.tolist()}; must be {rows} rows of -1"
        )
    if result.count is not None and (result.count.shape != (rows,) or result.count.any()):
        raise FalsifiedError(f"count {result.count.tolist()}; must be {rows} zeros")


PROPERTIES: tuple[Property, ...] = (
    wrong_arguments,
    wrong_windows,
    wrong_scales,
    windows_left_out,
    empty_calls,
)

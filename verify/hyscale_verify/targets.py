"""What the suite can judge: our kernels, their rivals, and anyone's function.

A target turns a :class:`~hyscale_verify.cases.Case` into selected indices. What else it *offers* decides
which properties apply:

    fused    takes q, k, w (a *selector* takes a finished score table instead)
    dense    its own float32 scores can be had, so that its selection is judged on them bit for bit
    hytopk   the whole contract of ``hyscale_kernels.hytopk``: counts, scores, stats, plans, errors

Every target is held to the contract's form as well: strictly ascending indices, then -1. Kernels are imported
only when a target is built, after :func:`hyscale_verify.devices.prepare`.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch

from hyscale_ref.named import function_named
from hyscale_ref.topk import topk
from hyscale_verify.cases import DTYPES, Case, Float32, Int32, Tensors
from hyscale_verify.errors import EnvironmentLackingError, FalsifiedError


@dataclass(frozen=True)
class Result:
    """A target's answer: indices int32 [T, K], and what ``hytopk`` adds to them."""

    indices: Int32
    count: Int32 | None = None
    scores: Float32 | None = None
    stats: Any = None
    selection: Any = None


class Target(Protocol):
    """Something that selects keys."""

    name: str
    offers: frozenset[str]
    dtypes: tuple[str, ...]

    def select(self, case: Case, inputs: Tensors | None = None, **options: Any) -> Result:
        """Run on the case, or on ``inputs`` made from it.

        ``options`` are those of ``hytopk``: return_scores, plan, validate.
        """

    def dense(self, case: Case) -> Float32:
        """The target's own scores, float32 [T, S], -inf outside the windows; needs ``dense``."""


def outside_windows(case: Case) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """bool [T, S], True where row t may not select key j."""
    key = np.arange(case.num_keys)
    return (key < case.start[:, None]) | (key >= case.end[:, None])


def given_scores(case: Case) -> Float32:
    """The exact scores rounded once to float32, as a selector gets them: -inf outside the windows.

    The sign of a zero carries no meaning, and a selector must not see one in it: odd keys get -0.
    """
    with np.errstate(over="ignore"):
        scores = case.scores().astype(np.float32)
    zero = scores == 0
    zero[:, ::2] = False
    scores[zero] = -0.0
    scores[outside_windows(case)] = -np.inf
    return scores


def _indices(name: str, returned: object, case: Case) -> Int32:
    """A target's return value as int32 [T, K]; FalsifiedError where it is not of that form."""
    if isinstance(returned, torch.Tensor):
        returned = returned.detach().cpu().numpy()
    indices = np.asarray(returned)
    if not np.issubdtype(indices.dtype, np.integer):
        what = indices.dtype if indices.dtype != object else type(returned).__name__
        raise FalsifiedError(f"{name} returned {'None' if returned is None else what}; allowed: integers")
    wanted = (case.num_queries, case.top_k)
    if indices.shape != wanted:
        raise FalsifiedError(f"{name} returned shape {indices.shape}; allowed: [T, K] = {wanted}")
    return indices.astype(np.int64).clip(-(2**31), 2**31 - 1).astype(np.int32)


class HyTopK:
    """``hytopk`` of ``package`` (the installed one, or a copy with a planted bug).

    ``api`` stands in for the module ``package``.hytopk where it is given.
    """

    def __init__(self, device: str, package: str = "hyscale_kernels", api: Any = None) -> None:
        self.name = "hytopk"
        self.device = device
        self.offers = frozenset({"fused", "dense", "hytopk"})
        self.dtypes = _fused_dtypes(device)
        self.package = package
        self.api = importlib.import_module(f"{package}.hytopk") if api is None else api

    def module(self, name: str) -> ModuleType:
        """A module of the judged package, e.g. ``windows``."""
        return importlib.import_module(f"{self.package}.{name}")

    def select(self, case: Case, inputs: Tensors | None = None, **options: Any) -> Result:
        inputs = inputs or case.tensors(self.device)
        if "plan" not in options:
            options["plan"] = self.plan(case)
        selection = self.api.hytopk(inputs.q, inputs.k, inputs.w, inputs.top_k, **inputs.keywords, **options)
        return result_of(selection)

    def plan(self, case: Case) -> Any:
        """The case's internal sizes as the kernel's Plan; None where the case leaves them to it."""
        sizes = case.sizes
        if sizes is None:
            return None
        T, _, D = case.q.shape
        inputs = case.tensors(self.device)
        hopper = self.module("hytopk.hopper").obstacle(inputs.q, inputs.k) is None
        default = self.api.Plan.default(
            T, case.num_keys, D, case.top_k, DTYPES[case.dtype], torch.device(self.device)
        )
        return replace(
            default,
            tile_rows=sizes.tile_rows,
            tile_keys=sizes.tile_keys,
            segment=sizes.segment_tiles * sizes.tile_keys,
            samples=sizes.samples,
            capacity=sizes.capacity(case.top_k),
            gather=sizes.gather,
            row_group=sizes.row_group,
            row_chunk=sizes.row_tiles * sizes.tile_rows,
            key_chunk=sizes.key_tiles * sizes.tile_keys,
            repair_splits=sizes.repair_splits,
            table_keys=sizes.table_keys,
            consumers=sizes.consumers if hopper else 0,
            prune_keys=sizes.prune_keys,
        )

    def dense(self, case: Case) -> Float32:
        inputs = case.tensors(self.device)
        scores = self.api.dense_scores(inputs.q, inputs.k, inputs.w, **inputs.keywords)
        return np.asarray(scores.cpu().numpy())


def result_of(selection: Any) -> Result:
    """A kernel's ``Selection`` on the host."""
    return Result(
        indices=selection.indices.cpu().numpy(),
        count=selection.count.cpu().numpy(),
        scores=None if selection.scores is None else selection.scores.cpu().numpy(),
        stats=selection.stats,
        selection=selection,
    )


class Selector:
    """A function (scores, top_k, start, end) -> indices, fed the exact scores in float32."""

    def __init__(self, name: str, function: Callable[..., object], device: str) -> None:
        self.name = name
        self.device = device
        self.offers = frozenset({"dense"})
        self.dtypes: tuple[str, ...] = ("fp32",)
        self._function = function

    def select(self, case: Case, inputs: Tensors | None = None, **options: Any) -> Result:
        inputs = inputs or case.tensors(self.device)
        scores = torch.from_numpy(given_scores(case)).to(self.device)
        returned = self._function(scores, case.top_k, inputs.start, inputs.end)
        return Result(_indices(self.name, returned, case))

    def dense(self, case: Case) -> Float32:
        return given_scores(case)


class Fused:
    """A function (q, k, w, top_k, start, end[, k_scale]) -> indices."""

    def __init__(
        self,
        name: str,
        function: Callable[..., object],
        device: str,
        dtypes: tuple[str, ...],
    ) -> None:
        self.name = name
        self.device = device
        self.offers = frozenset({"fused"})
        self.dtypes = dtypes
        self._function = function

    def select(self, case: Case, inputs: Tensors | None = None, **options: Any) -> Result:
        inputs = inputs or case.tensors(self.device)
        scale = {} if case.k_scale is None else {"k_scale": inputs.k_scale}
        returned = self._function(inputs.q, inputs.k, inputs.w, case.top_k, **inputs.windows, **scale)
        if not isinstance(returned, torch.Tensor):  # a result object, as hytopk's
            returned = getattr(returned, "indices", returned)
        return Result(_indices(self.name, returned, case))

    def dense(self, case: Case) -> Float32:
        raise NotImplementedError(f"{self.name} does not show its scores")


def _reference(scores: torch.Tensor, top_k: int, start: torch.Tensor, end: torch.Tensor) -> object:
    """The oracle's own selection."""
    table, low, high = (each.cpu().numpy() for each in (scores, start, end))
    return topk(table, top_k, low, high).indices


def _torch_topk(scores: torch.Tensor, top_k: int, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """``torch.topk`` in each row's window; its members in ascending order, then -1."""
    indices = torch.full((len(scores), top_k), -1, dtype=torch.int32)
    for t, (low, high) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        chosen = scores[t, low:high].topk(min(top_k, high - low)).indices
        indices[t, : len(chosen)] = chosen.sort().values + low
    return indices


def _flashinfer_topk(
    scores: torch.Tensor, top_k: int, start: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """FlashInfer's ragged top-k with its deterministic, smallest-index flags; ascending, then -1."""
    from hyscale_kernels.baselines.rivals import ascending, flashinfer_top_k

    return ascending(flashinfer_top_k(scores.contiguous(), start, end - start, top_k, from_zero=False))


BASELINES = {"materialised": "materialised_topk", "slab": "slab_topk"}
NAMED = ("hytopk", *BASELINES, "torch_topk", "reference", "flashinfer")


def load(spec: str, device: str) -> Target:
    """The target called ``spec``: one of ``NAMED``, or ``module:function``.

    A function whose parameters start with (scores, top_k) is a selector, one whose parameters start with
    (q, k, w, top_k) is fused; both must accept ``start`` and ``end``. Raises ValueError naming what is wrong
    with ``spec``, EnvironmentLackingError where the machine lacks what the target needs.
    """
    if spec == "hytopk":
        return HyTopK(device)
    if spec in BASELINES:
        function = getattr(importlib.import_module("hyscale_kernels.baselines"), BASELINES[spec])
        return Fused(spec, function, device, _fused_dtypes(device))
    if spec == "torch_topk":
        return Selector(spec, _torch_topk, device)
    if spec == "reference":
        return Selector(spec, _reference, device)
    if spec == "flashinfer":
        if device != "cuda" or importlib.util.find_spec("flashinfer") is None:
            raise EnvironmentLackingError(
                "target flashinfer: needs a CUDA device and the package flashinfer-python"
            )
        return Selector(spec, _flashinfer_topk, device)
    if ":" in spec:
        return _imported(spec, device)
    raise ValueError(f"target: {spec!r}; allowed: {', '.join(NAMED)}, or module:function")


def _fused_dtypes(device: str) -> tuple[str, ...]:
    return ("bf16", "fp16", "fp8") if device == "cuda" else ("fp32", "bf16", "fp16", "fp8")


def _imported(spec: str, device: str) -> Target:
    function = function_named(spec)
    try:
        parameters = list(inspect.signature(function).parameters)
    except ValueError as error:  # of some builtins
        raise ValueError(f"target: {spec!r} does not show its parameters: {error}") from error
    missing = [name for name in ("start", "end") if name not in parameters]
    if parameters[:2] == ["scores", "top_k"] and not missing:
        return Selector(spec, function, device)
    if parameters[:4] == ["q", "k", "w", "top_k"] and not missing:
        dtypes = _fused_dtypes(device) if "k_scale" in parameters else _fused_dtypes(device)[:-1]
        return Fused(spec, function, device, dtypes)
    raise ValueError(
        f"target: {spec!r} has the parameters ({', '.join(parameters)}); "
        "allowed: (q, k, w, top_k, start, end[, k_scale]) or (scores, top_k, start, end)"
    )

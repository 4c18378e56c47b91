"""Targets: what they are fed, how anyone's function is recognised, what is refused."""

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hyscale_verify import targets
from hyscale_verify.cases import Case, InternalSizes
from hyscale_verify.devices import prepare
from hyscale_verify.errors import EnvironmentLackingError, FalsifiedError
from hyscale_verify.targets import Fused, HyTopK, Selector, given_scores, load


def case(**changes: Any) -> Case:
    """Three keys scored 2, 0, 1 for one row that may select the last two."""
    q, k = np.zeros((1, 1, 16), np.float32), np.zeros((3, 16), np.float32)
    q[0, 0, 0], k[:, 0] = 1, (2, 0, 1)
    made = Case(
        regime="by hand",
        dtype="fp32",
        q=q,
        k=k,
        w=np.ones((1, 1), np.float32),
        top_k=2,
        start=np.array([1], np.int32),
        end=np.array([3], np.int32),
    )
    return made.with_(**changes)


def test_a_selector_is_fed_exact_scores_with_zeros_of_either_sign_and_minus_infinity_outside() -> None:
    scores = given_scores(case())
    np.testing.assert_array_equal(scores, [[-np.inf, 0, 1]])
    assert np.signbit(scores[0, 1])


@pytest.mark.parametrize("name", ["reference", "torch_topk", "materialised", "slab", "hytopk"])
def test_named_targets_select(name: str) -> None:
    result = load(name, "cpu").select(case())
    assert result.indices.tolist() == [[1, 2]]


def test_torch_topk_is_not_helped_with_nan_or_minus_infinity() -> None:
    spoiled = case(start=np.array([0], np.int32), top_k=1)
    spoiled.k[1, 0] = np.nan
    assert load("torch_topk", "cpu").select(spoiled).indices.tolist() == [[1]]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Registers functions as a module and returns its name."""

    def register(**functions: Any) -> str:
        made = types.ModuleType("somebodys_kernels")
        vars(made).update(functions)
        monkeypatch.setitem(sys.modules, "somebodys_kernels", made)
        return "somebodys_kernels"

    return register


def test_a_function_of_scores_is_a_selector(module: Callable[..., str]) -> None:
    def select(scores: Any, top_k: int, start: Any, end: Any) -> Any:
        return np.array([[2, 1]])

    target = load(f"{module(select=select)}:select", "cpu")
    assert isinstance(target, Selector)
    assert target.select(case()).indices.tolist() == [[2, 1]]
    assert "dense" in target.offers


def test_a_function_of_q_k_w_is_fused_and_takes_fp8_only_with_a_scale(module: Callable[..., str]) -> None:
    def plain(q: Any, k: Any, w: Any, top_k: int, start: Any, end: Any) -> Any:
        return torch.full((len(q), top_k), -1)

    def scaled(q: Any, k: Any, w: Any, top_k: int, *, start: Any, end: Any, k_scale: Any = None) -> Any:
        return torch.full((len(q), top_k), len(k_scale) if k_scale is not None else -1)

    name = module(plain=plain, scaled=scaled)
    assert load(f"{name}:plain", "cpu").dtypes == ("fp32", "bf16", "fp16")
    target = load(f"{name}:scaled", "cpu")
    assert isinstance(target, Fused)
    assert target.dtypes == ("fp32", "bf16", "fp16", "fp8")
    eighth = case(dtype="fp8", k_scale=np.ones(3, np.float32))
    assert target.select(eighth).indices.tolist() == [[3, 3]]


def test_a_result_object_with_indices_will_do(module: Callable[..., str]) -> None:
    def select(q: Any, k: Any, w: Any, top_k: int, start: Any, end: Any) -> Any:
        return types.SimpleNamespace(indices=torch.tensor([[1, 2]]))

    assert load(f"{module(select=select)}:select", "cpu").select(case()).indices.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.zeros((1, 2)), "returned float64; allowed: integers"),
        (np.zeros((2, 2), np.int64), r"returned shape \(2, 2\); allowed: \[T, K\] = \(1, 2\)"),
        (None, "returned None; allowed: integers"),
        ({0: 1}, "returned dict; allowed: integers"),
    ],
)
def test_an_answer_of_another_form_falsifies(returned: Any, message: str) -> None:
    target = Selector("odd", lambda *args: returned, "cpu")
    with pytest.raises(FalsifiedError, match=message):
        target.select(case())


def takes_nothing() -> None: ...


def takes_scores(scores: Any, top_k: int) -> None: ...


def takes_queries(q: Any, k: Any, top_k: int, start: Any, end: Any) -> None: ...


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "hytop",
            "target: 'hytop'; allowed: hytopk, materialised, slab, torch_topk, reference, flashinfer, or",
        ),
        ("", "target: ''"),
        (":", "both named"),
        ("math:", "both named"),
        (":sqrt", "both named"),
        ("no_such_module:f", "target: 'no_such_module:f' cannot be imported"),
        ("math:no_such_function", "module 'math' has no function 'no_such_function'"),
        ("math:pi", "module 'math' has no function 'pi'"),
        ("builtins:dict", "'builtins:dict' does not show its parameters"),
        (
            "somebodys_kernels:takes_nothing",
            r"has the parameters \(\); allowed: \(q, k, w, top_k, start, end",
        ),
        ("somebodys_kernels:takes_scores", r"has the parameters \(scores, top_k\)"),
        ("somebodys_kernels:takes_queries", r"has the parameters \(q, k, top_k, start, end\)"),
    ],
)
def test_an_unknown_target_is_named(spec: str, message: str, module: Callable[..., str]) -> None:
    module(takes_nothing=takes_nothing, takes_scores=takes_scores, takes_queries=takes_queries)
    with pytest.raises(ValueError, match=message):
        load(spec, "cpu")


def test_flashinfer_needs_a_gpu() -> None:
    with pytest.raises(EnvironmentLackingError, match="target flashinfer: needs a CUDA device"):
        load("flashinfer", "cpu")


def test_internal_sizes_become_a_plan() -> None:
    sizes = InternalSizes(
        tile_rows=2,
        tile_keys=32,
        gather=4,
        slack=2,
        row_group=1,
        samples=64,
        segment_tiles=3,
        row_tiles=5,
        key_tiles=7,
        repair_splits=2,
        prune_keys=1,
    )
    target = HyTopK("cpu")
    plan = target.plan(case(sizes=sizes))
    assert plan.prune_keys == 1
    assert (plan.capacity, plan.segment, plan.row_chunk, plan.key_chunk) == (16, 96, 10, 224)
    assert target.plan(case()) is None
    assert target.select(case(sizes=sizes)).indices.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("gpu", ValueError, "device: 'gpu'; allowed: auto, cpu, cuda"),
        ("cuda", EnvironmentLackingError, "device cuda: torch .* sees no CUDA device"),
    ],
)
def test_a_device_that_cannot_be_used_says_why(device: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare(device)


def test_a_triton_that_was_imported_as_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(EnvironmentLackingError, match="triton was imported without TRITON_INTERPRET=1"):
        prepare("cpu")


def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert prepare("auto") == "cpu"


def test_modules_of_the_judged_package_are_found() -> None:
    assert HyTopK("cpu").module("windows").__name__ == "hyscale_kernels.windows"
    assert targets.NAMED[0] == "hytopk"

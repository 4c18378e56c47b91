"""Sparse latent attention: its promises, operators, modes, every refused argument, and its planted bugs."""

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hyscale_kernels
from hyscale_kernels import attention
from hyscale_kernels.attention import (
    AttentionPlan,
    attention_mass,
    backward_workspace_bytes,
    plan,
    sparse_mla,
)
from hyscale_kernels.attention.eager import eager_attention_mass, eager_sparse_mla
from hyscale_kernels.hytopk.api import NAMESPACE
from hyscale_kernels.profiling.timing import peak_extra_bytes
from hyscale_kernels.provenance import source_hash
from hyscale_ref import attention as reference
from hyscale_ref.loss import attention_target
from hyscale_verify.attention.catalogue import MUTANTS
from hyscale_verify.attention.properties import JUDGEMENTS
from hyscale_verify.errors import FalsifiedError
from hyscale_verify.interpreter import checked_memory
from hyscale_verify.mutants.catalogue import Mutant
from hyscale_verify.mutants.harness import planted

PACKAGE = Path(hyscale_kernels.__file__).parent
T, S, HQ, D, DV, K = 3, 12, 3, 9, 5, 7
SCALE = 0.4
Inputs = dict[str, Any]


@pytest.fixture
def inputs(device: str) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    low = torch.float32 if device == "cpu" else torch.bfloat16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, low)

    indices = torch.randint(-4, S, (T, K), generator=generator, dtype=torch.int32)
    indices[1] = -1
    sink = torch.randn(HQ, generator=generator).to(device)
    return {"q": normal(T, HQ, D), "latent": normal(S, D), "indices": indices.to(device), "sink": sink}


def tracked(inputs: Inputs) -> Inputs:
    return {name: each.clone().requires_grad_(name != "indices") for name, each in inputs.items()}


def attend(inputs: Inputs, **options: Any) -> attention.SparseAttention:
    return sparse_mla(**inputs, scale=SCALE, value_dim=DV, **options)


def judge_often(judged: Any, name: str, device: str) -> None:
    for seed in range(20):
        JUDGEMENTS[name](judged, device, seed)


@pytest.mark.parametrize("name", JUDGEMENTS)
@pytest.mark.parametrize("seed", [3, 9, 11])
def test_promises_are_kept(name: str, seed: int, device: str) -> None:
    JUDGEMENTS[name](attention, device, seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_planted_bugs_are_convicted(mutant: Mutant, device: str) -> None:
    assert (PACKAGE / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    if device == "cuda":
        pytest.skip("compiles every kernel for every bug; the interpreter convicts them in seconds")
    with planted(mutant) as package, pytest.raises(FalsifiedError):
        judge_often(importlib.import_module(f"{package}.attention"), mutant.likely[0], device)


@pytest.mark.parametrize(("heads", "value_dim", "rest"), [(1, 1, 0), (33, 40, 1), (65, 7, 3), (16, 32, 16)])
def test_odd_sizes_stay_inside_their_tensors(heads: int, value_dim: int, rest: int, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    low = torch.float32 if device == "cpu" else torch.bfloat16
    wide = torch.randn(heads, 2, value_dim + rest + 3, generator=generator).to(device, low)
    q = wide.transpose(0, 1)[..., : value_dim + rest]  # heads are the slowest axis, rows leave a gap
    latent = torch.randn(6, value_dim + rest + 1, generator=generator).to(device, low)[:, :-1]
    indices = torch.tensor([[5, -7, 0], [2, 2, -1]], dtype=torch.int32, device=device)
    given = [q.detach().requires_grad_(), latent.detach().requires_grad_()]

    def attended() -> torch.Tensor:
        result = sparse_mla(*given, indices, scale=SCALE, value_dim=value_dim, dkv="fixed_point")
        (result.out * 2).sum().backward()
        mass = attention_mass(*given, indices, result.log_sum_exp, scale=SCALE)
        torch.testing.assert_close(mass.sum(dim=1), torch.full_like(mass[:, 0], heads), rtol=2**-18, atol=0)
        return result.out

    if device == "cpu":
        with checked_memory():
            out = attended()
    else:
        out = attended()
    arrays = [each.detach().double().cpu().numpy() for each in given]
    options = {"scale": SCALE, "value_dim": value_dim}
    wanted = reference.sparse_mla(*arrays, indices.cpu().numpy(), **options)
    gradients = reference.sparse_mla_gradients(
        *arrays, indices.cpu().numpy(), grad_out=np.full(wanted.out.shape, 2.0), **options
    )
    bound = 2.0**-16 if device == "cpu" else 2.0**-4
    for got, want in ((out, wanted.out), (given[0].grad, gradients.q), (given[1].grad, gradients.latent)):
        assert np.abs(got.detach().double().cpu().numpy() - want).max() <= bound * (1 + np.abs(want).max())


def test_the_kernel_is_as_accurate_as_eager_torch(inputs: Inputs) -> None:
    """Root mean square errors against float64, of out and of every gradient: at most twice eager's."""
    grad = torch.randn(T, HQ, DV, generator=torch.Generator().manual_seed(2)).to(inputs["q"])
    ours, eager = tracked(inputs), tracked(inputs)
    results = (attend(ours, dkv="fixed_point").out, eager_sparse_mla(**eager, scale=SCALE, value_dim=DV)[0])
    for out in results:
        out.backward(grad)
    wide = {
        name: each.double().cpu().numpy() if name != "indices" else each.cpu().numpy()
        for name, each in inputs.items()
    }
    exact = reference.sparse_mla(**wide, scale=SCALE, value_dim=DV)
    gradients = reference.sparse_mla_gradients(
        **wide, scale=SCALE, value_dim=DV, grad_out=grad.double().cpu().numpy()
    )
    pairs = [(*results, exact.out)]
    pairs += [
        (ours[name].grad, eager[name].grad, getattr(gradients, name)) for name in ("q", "latent", "sink")
    ]
    for mine, theirs, want in pairs:
        errors = [
            float(np.sqrt(np.mean((each.detach().double().cpu().numpy() - want) ** 2)))
            for each in (mine, theirs)
        ]
        assert errors[0] <= 2 * errors[1] + 2.0**-22 * float(np.sqrt(np.mean(want**2))), errors


def test_mass_is_what_the_indexer_s_target_is_made_of(inputs: Inputs) -> None:
    result = attend(inputs)
    given = (inputs["q"], inputs["latent"], inputs["indices"])
    mass = attention_mass(*given, result.log_sum_exp, scale=SCALE, sink=inputs["sink"])
    eager = eager_attention_mass(*given, result.log_sum_exp, scale=SCALE, sink=inputs["sink"])
    torch.testing.assert_close(mass, eager.float(), rtol=2**-7, atol=2**-16)
    target = mass / mass.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    q, latent, sink = (inputs[name].double().cpu().numpy() for name in ("q", "latent", "sink"))
    p = reference.attention_probabilities(q, latent[:, None], inputs["indices"].cpu().numpy(), SCALE, sink)
    np.testing.assert_allclose(target.cpu().numpy(), attention_target(p), rtol=0, atol=2e-6)


def test_operators_pass_torch_s_own_checks(inputs: Inputs) -> None:
    operators = getattr(torch.ops, NAMESPACE)
    given = tracked(inputs)
    sizes = AttentionPlan.default(HQ, given["q"].device).as_ints()
    torch.library.opcheck(operators.sparse_mla.default, (*given.values(), SCALE, DV, True, sizes))
    result = attend(inputs)
    q, latent, indices, sink = inputs.values()
    backward = (result.out, q, latent, indices, sink, *result, SCALE, DV, True, True, True, sizes)
    torch.library.opcheck(operators.sparse_mla_backward.default, backward)
    mass = (q, latent, indices, result.log_sum_exp, sink, SCALE, sizes)
    torch.library.opcheck(operators.attention_mass.default, mass)


def test_compiles_without_a_graph_break(inputs: Inputs) -> None:
    given, again = tracked(inputs), tracked(inputs)

    def run(q: torch.Tensor, latent: torch.Tensor, indices: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        result = sparse_mla(q, latent, indices, scale=SCALE, value_dim=DV, sink=sink, dkv="fixed_point")
        mass = attention_mass(q, latent, indices, result.log_sum_exp, scale=SCALE, sink=sink)
        return (result.out**2).sum() + mass.sum()

    run(**given).backward()
    torch.compile(run, backend="aot_eager", fullgraph=True)(**again).backward()
    for name in ("q", "latent", "sink"):
        assert torch.equal(given[name].grad, again[name].grad)


def test_selective_checkpointing_can_keep_attention(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    launch = attention.api.launch_forward

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return launch(*arguments)

    monkeypatch.setattr(attention.api, "launch_forward", counted)
    operator = getattr(torch.ops, NAMESPACE).sparse_mla.default

    def contexts(kept: bool) -> Any:
        def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keep = kept and op == operator
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return lambda: create_selective_checkpoint_contexts(policy)

    gradients = []
    for kept, wanted in ((True, 1), (False, 2)):
        calls = 0
        given = tracked(inputs)
        out = checkpoint(
            lambda given=given: attend(given, dkv="fixed_point").out.square(),
            use_reentrant=False,
            context_fn=contexts(kept),
        )
        out.sum().backward()
        assert calls == wanted
        gradients.append([given[name].grad for name in ("q", "latent", "sink")])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_only_the_gradients_asked_for_are_computed(inputs: Inputs) -> None:
    whole = tracked(inputs)
    attend(whole, dkv="fixed_point").out.sum().backward()
    for name in ("q", "latent", "sink"):
        given = {other: each.clone().requires_grad_(other == name) for other, each in inputs.items()}
        attend(given, dkv="fixed_point").out.sum().backward()
        assert torch.equal(given[name].grad, whole[name].grad)
        assert all(each.grad is None for other, each in given.items() if other != name)


def test_no_gradient_flows_through_log_sum_exp_or_mass(inputs: Inputs) -> None:
    given = tracked(inputs)
    result = attend(given)
    assert result.out.requires_grad
    assert not result.log_sum_exp.requires_grad
    mass = attention_mass(
        given["q"], given["latent"], given["indices"], result.log_sum_exp, scale=SCALE, sink=given["sink"]
    )
    assert not mass.requires_grad


def test_deterministic_algorithms_choose_fixed_point(inputs: Inputs) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        one, two = tracked(inputs), tracked(inputs)
        attend(one).out.sum().backward()
        attend(two, dkv="fixed_point").out.sum().backward()
        assert torch.equal(one["latent"].grad, two["latent"].grad)
        with pytest.raises(RuntimeError, match="dkv is 'atomic', whose additions come in any order"):
            attend(inputs, dkv="atomic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="dkv is 'atomic'"):
            attend(inputs, dkv="atomic")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ROWS", 2)
    monkeypatch.setattr(plan, "WEIGHT_BYTES", 1)


def test_passes_and_chunks_add_up(inputs: Inputs, short_passes: None) -> None:
    grad = torch.randn(T, HQ, DV, generator=torch.Generator().manual_seed(3)).to(inputs["q"])
    wide = {name: each.double().cpu().numpy() for name, each in inputs.items() if name != "indices"}
    wanted = reference.sparse_mla_gradients(
        **wide,
        indices=inputs["indices"].cpu().numpy(),
        scale=SCALE,
        value_dim=DV,
        grad_out=grad.double().cpu().numpy(),
    )
    bound = 2.0**-18 if inputs["q"].dtype == torch.float32 else 2.0**-5
    for way in ("atomic", "fixed_point"):
        given = tracked(inputs)
        attend(given, dkv=way).out.backward(grad)
        for name in ("q", "latent", "sink"):
            error = np.abs(given[name].grad.double().cpu().numpy() - getattr(wanted, name)).max()
            assert error <= bound * (1 + np.abs(getattr(wanted, name)).max())


def test_nan_stays_visible_and_in_its_row(inputs: Inputs) -> None:
    given = tracked(inputs)
    grad = torch.zeros(T, HQ, DV, dtype=given["q"].dtype, device=given["q"].device)
    grad[2, 1, 0] = torch.nan
    with np.errstate(invalid="ignore"):
        attend(given, dkv="fixed_point").out.backward(grad)
    keys = [int(each) for each in inputs["indices"][2] if each >= 0]
    assert given["latent"].grad[keys].isnan().any(dim=1).all()
    others = [j for j in range(S) if j not in keys]
    assert not given["latent"].grad[others].isnan().any()
    assert given["q"].grad[2, 1].isnan().all()
    assert not given["q"].grad[:2].isnan().any()


def test_empty_sizes_give_empty_results_and_zero_gradients(device: str) -> None:
    low = torch.float32 if device == "cpu" else torch.bfloat16
    for rows, keys, places in ((0, 5, 3), (2, 0, 3), (2, 5, 0)):
        q = torch.ones(rows, 2, 8, dtype=low, device=device, requires_grad=True)
        latent = torch.ones(keys, 8, dtype=low, device=device, requires_grad=True)
        sink = torch.zeros(2, device=device, requires_grad=True)
        indices = torch.full((rows, places), -1, dtype=torch.int32, device=device)
        result = sparse_mla(q, latent, indices, scale=1.0, value_dim=8, sink=sink)
        assert result.out.shape == (rows, 2, 8)
        assert not result.out.any()
        assert (result.log_sum_exp == float("-inf")).all()
        assert not attention_mass(q, latent, indices, result.log_sum_exp, scale=1.0).any()
        result.out.sum().backward()
        assert all(each.grad is not None and not each.grad.any() for each in (q, latent, sink))


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(("rows", "keys"), [(1000, 1000), (8192, 131_072), (65_536, 2**20)])
def test_workspace_is_within_the_contract(heads: int, rows: int, keys: int) -> None:
    for fixed in (False, True):
        stated = backward_workspace_bytes(rows, keys, heads, 576, 2048, fixed_point=fixed)
        assert stated <= 4 * rows * (2048 + 576) + 8 * keys * (576 + 1) + 2**28
        assert stated < 2 * rows * heads * 2048 * 2 or rows == 1000  # never the weights of all rows


def peak_beside_results(call: Callable[[], object], device: str) -> int:
    if device == "cuda":
        return peak_extra_bytes(call)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = call()
    changes = [each.nbytes() for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = np.cumsum(changes)
    del result
    return int(held.max() - held[-1])


def test_the_workspace_is_what_is_stated(
    inputs: Inputs, short_passes: None, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """With so many keys that all else is small, and in two passes."""
    monkeypatch.setattr(attention.api, "ROWS", plan.ROWS)
    keys = 4000
    q, indices = inputs["q"].bfloat16(), inputs["indices"]
    latent = torch.ones(keys, D, dtype=q.dtype, device=q.device)
    found = sparse_mla(q, latent, indices, scale=SCALE, value_dim=DV)
    sizes = AttentionPlan.default(HQ, device).as_ints()
    for fixed in (False, True):
        peak = peak_beside_results(
            partial(
                attention.api._backward, found.out, q, latent, indices, None, *found, SCALE, DV, True, True,
                fixed, sizes,
            ),
            device,
        )  # fmt: skip
        stated = backward_workspace_bytes(T, keys, HQ, D, K, fixed_point=fixed)
        assert peak <= stated + 2**13
        assert peak > stated - 4 * keys * D


def test_a_plan_names_the_size_it_cannot_run() -> None:
    default = AttentionPlan.default(64, "cuda")
    assert AttentionPlan.from_ints(default.as_ints()) == default
    for change, message in (
        ({"keys": 48}, "plan.keys is 48; it must be a power of two"),
        ({"dq_stages": 0}, "plan.dq_stages is 0; it must be at least 1"),
        ({"dkv_columns": 1}, "plan.dkv_columns is 1; it must be at least 2"),
        ({"dq_keys": 128}, "plan.dq_keys is 128; it must be at most weight_keys, 64"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(default, **change)
    names = [name for name, _ in default.candidates()]
    assert len(set(names)) == len(names)
    assert default not in [each for _, each in default.candidates()]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1.0]}, TypeError, r"q must be a torch.Tensor \[T, Hq, D\], got list"),
    ({"q": torch.zeros(T, HQ, D).double()}, TypeError, "q is float64; allowed: bfloat16, float16, float32"),
    ({"q": torch.zeros(T, D)}, ValueError, r"q has shape \[3, 9\]; it must have 3 axes \[T, Hq, D\]"),
    ({"q": torch.zeros(T, HQ, 2 * D)[..., ::2]}, ValueError, "q has strides .* its last axis must be"),
    ({"q": torch.zeros(T, 129, D)}, ValueError, "q has 129 heads .* allowed: 1 to 128"),
    ({"q": torch.zeros(T, 0, D)}, ValueError, "q has 0 heads"),
    ({"q": torch.zeros(T, HQ, 577)}, ValueError, "q has key size 577 .* allowed: 1 to 576"),
    ({"latent": torch.zeros(S, D).half()}, TypeError, "latent is float16 and q is"),
    ({"latent": torch.zeros(S, D + 1)}, ValueError, r"latent has shape \[12, 10\]; .* must be \[S, 9\]"),
    ({"latent": torch.zeros(S, D).to("meta")}, ValueError, "latent is on meta and q is on"),
    ({"indices": torch.zeros(T, K)}, TypeError, "indices is float32; allowed: int32"),
    (
        {"indices": torch.zeros(T + 1, K).int()},
        ValueError,
        r"indices has shape \[4, 7\]; .* must be \[3, K\]",
    ),
    ({"indices": torch.zeros(T, 2 * K).int()[:, :K]}, ValueError, "indices has strides .* be contiguous"),
    ({"sink": torch.zeros(HQ + 1)}, ValueError, r"sink has shape \[4\]; it must be \[3\]"),
    ({"sink": torch.zeros(HQ).half()}, TypeError, "sink is float16; allowed: float32"),
    ({"scale": "1"}, TypeError, "scale must be a float, got str"),
    ({"scale": float("inf")}, ValueError, "scale is inf; it must be finite"),
    ({"value_dim": 5.0}, TypeError, "value_dim must be an int, got float"),
    ({"value_dim": 10}, ValueError, "value_dim is 10; with keys of size 9 it must be from 1 to 9"),
    ({"value_dim": 0}, ValueError, "value_dim is 0; with keys of size 9 it must be from 1 to 9"),
    ({"dkv": "fast"}, ValueError, "dkv is 'fast'; allowed: 'auto', 'atomic', 'fixed_point'"),
    ({"plan": 3}, TypeError, "plan must be an AttentionPlan or None, got int"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_arguments_are_refused_by_name(
    inputs: Inputs, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    device, low = inputs["q"].device, inputs["q"].dtype
    moved = {}
    for name, value in change.items():
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            value = value.to(
                device, low if value.dtype == torch.float32 and name in ("q", "latent") else None
            )
        moved[name] = value
    with pytest.raises(error, match=message):
        sparse_mla(**(inputs | {"scale": SCALE, "value_dim": DV} | moved))


def test_mass_wants_the_log_sum_exp_of_the_call(inputs: Inputs) -> None:
    q, latent, indices, _ = inputs.values()
    with pytest.raises(ValueError, match=r"log_sum_exp has shape \[3, 4\]; it must be \[3, 3\]"):
        attention_mass(q, latent, indices, torch.zeros(T, HQ + 1, device=q.device), scale=SCALE)
    with pytest.raises(TypeError, match="log_sum_exp is float16; allowed: float32"):
        attention_mass(q, latent, indices, torch.zeros(T, HQ, device=q.device).half(), scale=SCALE)


def test_an_index_beyond_the_keys_is_refused_or_shows(inputs: Inputs) -> None:
    indices = inputs["indices"].clone()
    indices[2, 4] = S
    given = tracked(inputs | {"indices": indices})
    if indices.device.type == "cpu":
        with pytest.raises(
            ValueError, match=r"indices\[2, 4\] is 12; allowed: below the 12 keys, or negative"
        ):
            attend(given)
        return
    out, log_sum_exp = attend(given)
    assert out[2].isnan().all()
    assert log_sum_exp[2].isnan().all()
    assert not out[:2].isnan().any()


def test_the_recorded_times_are_of_these_sources() -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "results" / "sparse_mla.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert sum("target_tflops" in record for record in records) >= 2
    assert all(record.get("holds", True) for record in records)
    assert {record["source_hash"] for record in records} == {source_hash("attention")}, (
        "the kernels have changed since they were measured; run benchmarks/sparse_mla.py on a GPU"
    )

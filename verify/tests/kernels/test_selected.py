"""Selected scores and the indexer's loss: operators, modes, several passes, and every refused argument."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyscale_kernels.hytopk import hytopk
from hyscale_kernels.hytopk.api import NAMESPACE
from hyscale_kernels.indexer import IndexerPlan, api, backward_workspace_bytes, indexer_loss, selected_scores
from hyscale_kernels.profiling.additions import add_ones
from hyscale_kernels.profiling.timing import peak_extra_bytes
from hyscale_kernels.quantize import quantize
from hyscale_ref.loss import selected_score_gradients
from hyscale_ref.loss import selected_scores as reference_scores

T, S, H, D, K = 4, 50, 2, 16, 6
Inputs = dict[str, torch.Tensor]


@pytest.fixture
def inputs(device: str) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(shape, generator=generator).to(device) for shape in [(T, H, D), (S, D), (T, H)])
    low = torch.float32 if device == "cpu" else torch.bfloat16
    q, k = q.to(low), k.to(low)
    end = torch.tensor([0, 1, 4, S], dtype=torch.int32, device=device)
    indices = hytopk(q, k, w, K, end=end).indices
    return {"q": q, "k": k, "w": w, "indices": indices}


def tracked(inputs: Inputs) -> Inputs:
    return {name: each.clone().requires_grad_(name != "indices") for name, each in inputs.items()}


def finite(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(scores == float("-inf"), 0).sum()


def test_operators_pass_torch_s_own_checks(inputs: Inputs) -> None:
    operators = getattr(torch.ops, NAMESPACE)
    given = tracked(inputs)
    sizes = IndexerPlan.default(S, H, D, given["q"].device).as_ints()
    plain = (*given.values(), None, None, None, None, True, sizes)
    torch.library.opcheck(operators.selected_scores.default, plain)
    target = torch.rand(T, K, device=given["q"].device)
    loss = (*given.values(), target, None, None, None, None, 1.0, 1.0, True, sizes)
    torch.library.opcheck(operators.indexer_loss.default, loss)
    torch.library.opcheck(
        operators.selected_scores_backward.default, (target, *inputs.values(), None, True, True, sizes)
    )


def test_compiles_without_a_graph_break(inputs: Inputs) -> None:
    given, again = tracked(inputs), tracked(inputs)

    def run(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return selected_scores(q, k, w, indices, dk="fixed_point").masked_fill(indices < 0, 0).sum()

    run(**given).backward()
    torch.compile(run, backend="aot_eager", fullgraph=True)(**again).backward()
    for name in ("q", "k", "w"):
        assert torch.equal(given[name].grad, again[name].grad)


def test_empty_sizes_give_empty_results_and_zero_gradients(device: str) -> None:
    low = torch.float32 if device == "cpu" else torch.bfloat16
    for rows, keys in ((0, 5), (2, 0)):
        q = torch.ones(rows, 1, 16, dtype=low, device=device, requires_grad=True)
        k = torch.ones(keys, 16, dtype=low, device=device, requires_grad=True)
        w = torch.ones(rows, 1, device=device, requires_grad=True)
        indices = torch.full((rows, 3), -1, dtype=torch.int32, device=device)
        scores = selected_scores(q, k, w, indices)
        assert scores.shape == (rows, 3)
        loss = indexer_loss(q, k, w, indices, torch.ones(rows, 3, device=device))
        (finite(scores) + loss.sum()).backward()
        assert all(each.grad is not None and not each.grad.any() for each in (q, k, w))


class Allocations(TorchDispatchMode):
    """Notes the shapes of all tensors that operators of torch fill with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if "zero" in func.name():
            self.zeros.append(tuple(out.shape))
        return out


def test_the_loss_makes_no_gradient_of_the_gradient_it_keeps(inputs: Inputs) -> None:
    given = tracked(inputs)
    target = torch.rand(T, K, device=given["q"].device)
    loss = indexer_loss(*given.values(), target).sum()
    with Allocations() as seen:
        loss.backward()
    assert (T, K) not in seen.zeros


def test_operators_make_their_own_plan(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def sizes(plan: list[int], q: torch.Tensor, k: torch.Tensor) -> IndexerPlan:
        seen.append(plan)
        return IndexerPlan.default(S, H, D, q.device)

    monkeypatch.setattr(api, "_sizes", sizes)
    selected_scores(*inputs.values())
    indexer_loss(*inputs.values(), torch.rand(T, K, device=inputs["q"].device))
    assert seen == [[], []]


def test_several_passes_over_rows_add_up(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    grad = torch.randn(T, K, generator=torch.Generator().manual_seed(1)).to(inputs["q"].device)
    arrays = [inputs[name].double().cpu().numpy() for name in ("q", "k", "w")]
    wanted = selected_score_gradients(*arrays, inputs["indices"].cpu().numpy(), grad.cpu().numpy())
    monkeypatch.setattr(api, "ROWS", 3)
    for way in ("atomic", "fixed_point"):
        given = tracked(inputs)
        selected_scores(**given, dk=way).backward(grad)
        for name in ("q", "k", "w"):
            np.testing.assert_allclose(
                given[name].grad.double().cpu().numpy(),
                getattr(wanted, name),
                rtol=2**-7,
                atol=2**-9,
            )


def test_float8_gradients_reach_what_was_quantised(inputs: Inputs) -> None:
    q, k = (inputs[name].float().requires_grad_() for name in ("q", "k"))
    q8, q_scale = quantize(q)
    k8, k_scale = quantize(k)
    w = (inputs["w"] * q_scale).requires_grad_()
    scores = selected_scores(
        q8, k8, w, inputs["indices"], k_scale=k_scale, q_source=q, k_source=k, q_scale=q_scale
    )
    finite(scores).backward()
    q_hat, k_hat = (each[0].double() * each[1][..., None].double() for each in ((q8, q_scale), (k8, k_scale)))
    ones = np.ones((T, K))
    wanted = selected_score_gradients(
        q_hat.cpu().numpy(), k_hat.cpu().numpy(), inputs["w"].double().cpu().numpy(),
        inputs["indices"].cpu().numpy(), ones,
    )  # fmt: skip
    for got, want in ((q.grad, wanted.q), (k.grad, wanted.k), (w.grad * q_scale, wanted.w)):
        np.testing.assert_allclose(got.double().cpu().numpy(), want, rtol=1e-3, atol=1e-3)
    assert q8.grad is None


def test_scores_are_the_reference_s(inputs: Inputs) -> None:
    scores = selected_scores(**inputs).cpu().numpy()
    used = inputs["indices"].cpu().numpy() >= 0
    arrays = [inputs[name].double().cpu().numpy() for name in ("q", "k", "w")]
    wanted = reference_scores(*arrays, inputs["indices"].cpu().numpy())
    np.testing.assert_allclose(scores[used], wanted[used], rtol=1e-5, atol=1e-5)
    assert (scores[~used] == -np.inf).all()


def test_deterministic_algorithms_choose_fixed_point(inputs: Inputs) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        one, two = tracked(inputs), tracked(inputs)
        finite(selected_scores(**one)).backward()
        finite(selected_scores(**two, dk="fixed_point")).backward()
        assert torch.equal(one["k"].grad, two["k"].grad)
        with pytest.raises(RuntimeError, match="dk is 'atomic', whose additions come in any order"):
            selected_scores(**inputs, dk="atomic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="dk is 'atomic'"):
            selected_scores(**inputs, dk="atomic")
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_loss_gradient_is_kept_where_none_is_asked_for(inputs: Inputs) -> None:
    target = torch.full((T, K), 1 / K, device=inputs["q"].device)
    assert not indexer_loss(**inputs, target=target).requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_loss_has_the_gradients_of_the_divergence(inputs: Inputs, temperature: float) -> None:
    one, two = tracked(inputs), tracked(inputs)
    target = torch.rand(T, K, generator=torch.Generator().manual_seed(3)).to(inputs["q"].device)
    used = inputs["indices"] >= 0
    target = target.masked_fill(~used, 0)
    target = target / target.sum(dim=1, keepdim=True).clamp(min=1e-9)
    options: dict[str, Any] = {"coefficient": 0.7, "temperature": temperature, "dk": "fixed_point"}
    indexer_loss(**one, target=target, **options).sum().backward()
    scores = selected_scores(**two, dk="fixed_point")[1:] / temperature  # the first row has no key
    log_p = scores.log_softmax(dim=1).masked_fill(~used[1:], 0)
    (0.7 * torch.special.xlogy(target[1:], target[1:]) - 0.7 * target[1:] * log_p).sum().backward()
    for name in ("q", "k", "w"):
        assert one[name].grad.abs().max() > 0
        torch.testing.assert_close(one[name].grad, two[name].grad, rtol=2**-7, atol=2**-12)


def test_a_row_s_multiplier_scales_its_gradient(inputs: Inputs) -> None:
    target = torch.rand(T, K, generator=torch.Generator().manual_seed(2)).to(inputs["q"].device)
    one, two = tracked(inputs), tracked(inputs)
    indexer_loss(**one, target=target).sum().backward()
    factors = torch.tensor([1.0, 2.0, 4.0, 0.5], device=target.device)
    (indexer_loss(**two, target=target) * factors).sum().backward()
    assert torch.equal(two["w"].grad, one["w"].grad * factors[:, None])


@pytest.mark.parametrize("dk", ["atomic", "fixed_point"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF], ids=["quiet", "as a GPU makes it"])
def test_nan_gradients_stay_visible(inputs: Inputs, dk: Any, bits: int) -> None:
    given = tracked(inputs)
    grad = torch.zeros(T, K, device=inputs["q"].device)
    grad.view(torch.int32)[3, 2] = bits
    with np.errstate(invalid="ignore"):
        selected_scores(**given, dk=dk).backward(grad)
    key = int(inputs["indices"][3, 2])
    assert given["k"].grad[key].isnan().all()
    others = [j for j in range(S) if j != key]
    assert not given["k"].grad[others].isnan().any()
    for name in ("q", "w"):
        assert given[name].grad[3].isnan().any()
        assert not given[name].grad[:3].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_the_additions_alone_meet_every_key_once_a_row(inputs: Inputs, dtype: torch.dtype) -> None:
    indices = inputs["indices"]
    table = add_ones(indices, S, D, dtype)()
    hits = torch.bincount(indices[indices >= 0], minlength=S)
    assert torch.equal(table, hits[:, None].expand(S, D).to(dtype))


@pytest.mark.parametrize("S", [1000, 2**20])
@pytest.mark.parametrize("T", [1000, 8192, 65536])
def test_workspace_is_within_the_contract(T: int, S: int) -> None:
    bound = 256 * 2**20
    assert (
        backward_workspace_bytes(T, S, 32, 128, 2048, fixed_point=False) <= 4 * T * 2048 + 4 * S * 128 + bound
    )
    assert (
        backward_workspace_bytes(T, S, 32, 128, 2048, fixed_point=True) <= 4 * T * 2048 + 8 * S * 129 + bound
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fixed", [False, True], ids=["atomic", "fixed_point"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_a_backward_pass_allocates_what_is_stated(dtype: torch.dtype, fixed: bool) -> None:
    rows, keys, heads, size, top_k = 256, 2**18, 32, 128, 512
    q = torch.randn(rows, heads, size, device="cuda").to(dtype)
    k = torch.randn(keys, size, device="cuda").to(dtype)
    w, grad = torch.randn(rows, heads, device="cuda"), torch.randn(rows, top_k, device="cuda")
    scale = torch.ones(keys, device="cuda") if dtype == torch.float8_e4m3fn else None
    indices = torch.arange(0, keys, keys // top_k, dtype=torch.int32, device="cuda").repeat(rows, 1)
    plan = IndexerPlan.default(keys, heads, size, "cuda").as_ints()
    extra = peak_extra_bytes(lambda: api._backward(grad, q, k, w, indices, scale, True, fixed, plan))
    stated = backward_workspace_bytes(rows, keys, heads, size, top_k, fixed_point=fixed)
    assert extra <= stated + 8 * 2**20  # the allocator rounds


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"indices": [[0]]}, TypeError, "indices must be a torch.Tensor"),
    ({"indices": torch.zeros(T, K)}, TypeError, "indices is float32; allowed: torch.int32"),
    ({"indices": torch.zeros(T + 1, K, dtype=torch.int32)}, ValueError, r"indices has shape \[5, 6\]"),
    ({"indices": torch.zeros(K, T, dtype=torch.int32).T}, ValueError, "indices has strides"),
    ({"dk": "fast"}, ValueError, "dk is 'fast'; allowed: 'auto', 'atomic', 'fixed_point'"),
    ({"plan": 3}, TypeError, "plan must be an IndexerPlan or None, got int"),
    ({"q_source": torch.zeros(T, H, D)}, ValueError, "q_source is for float8 q and k only"),
    ({"k_scale": torch.ones(S)}, ValueError, "k_scale is for float8 keys only"),
    ({"w": torch.zeros(T, H + 1)}, ValueError, r"w has shape \[4, 3\]"),
    ({"q": torch.zeros(T, H, D).double()}, TypeError, "q is float64"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_arguments_are_refused_by_name(
    inputs: Inputs, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    moved = {n: v.to(inputs["q"].device) if isinstance(v, torch.Tensor) else v for n, v in change.items()}
    with pytest.raises(error, match=message):
        selected_scores(**(inputs | moved))


LOSS_BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"target": torch.zeros(T, K + 1)}, ValueError, r"target has shape \[4, 7\]; it must be \[4, 6\]"),
    ({"target": torch.zeros(T, K).half()}, TypeError, "target is float16"),
    ({"temperature": 0.0}, ValueError, "temperature is 0.0; it must be positive and finite"),
    ({"temperature": "warm"}, TypeError, "temperature must be a float, got str"),
    ({"coefficient": float("nan")}, ValueError, "coefficient is nan; it must be finite"),
]


@pytest.mark.parametrize(("change", "error", "message"), LOSS_BAD)
def test_the_loss_s_arguments_are_refused_by_name(
    inputs: Inputs, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = inputs | {"target": torch.zeros(T, K, device=inputs["q"].device)}
    moved = {n: v.to(inputs["q"].device) if isinstance(v, torch.Tensor) else v for n, v in change.items()}
    with pytest.raises(error, match=message):
        indexer_loss(**(given | moved))


@pytest.mark.parametrize(
    "row",
    [[3, 2, -1, -1, -1, -1], [1, 1, -1, -1, -1, -1], [-1, 2, 3, 4, 5, 6], [0, S, -1, -1, -1, -1], [-2] * 6],
)
def test_what_is_no_selection_is_refused_or_scores_nan(inputs: Inputs, row: list[int]) -> None:
    indices = inputs["indices"].clone()
    indices[1] = torch.tensor(row)
    if indices.device.type == "cpu":
        with pytest.raises(ValueError, match=r"indices\[1, \d\] is -?\d+; a row holds keys below 50"):
            selected_scores(**(inputs | {"indices": indices}))
    else:
        assert selected_scores(**(inputs | {"indices": indices}))[1].isnan().any()


def test_float8_wants_the_sources_of_its_gradients(inputs: Inputs) -> None:
    q8, k8 = (inputs[name].to(torch.float8_e4m3fn) for name in ("q", "k"))
    given = {"w": inputs["w"], "indices": inputs["indices"], "k_scale": torch.ones(S, device=q8.device)}
    with pytest.raises(TypeError, match="float8 takes no gradient: pass what was quantised"):
        selected_scores(q8.requires_grad_(), k8, **given)
    with pytest.raises(ValueError, match="q_scale is missing"):
        selected_scores(q8.detach(), k8, **given, q_source=inputs["q"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": 48}, "plan.keys is 48; it must be a power of two"),
        ({"stages": 0}, "plan.stages is 0; it must be at least 1"),
        ({"registers": -1}, "plan.registers is -1; it must be at least 0"),
    ],
)
def test_a_plan_that_cannot_run_names_the_size(change: dict[str, int], message: str) -> None:
    sizes = dict(zip(IndexerPlan.__slots__, (32, 32, 1, 1, 32, 1, 64, 0), strict=True))
    with pytest.raises(ValueError, match=message):
        IndexerPlan(**(sizes | change))

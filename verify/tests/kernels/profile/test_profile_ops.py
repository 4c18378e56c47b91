"""Every declared op runs once at a tiny size; what it says about its work is what the simulator counts."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional

from hyscale_kernels.baselines.rivals import ascending
from hyscale_kernels.profiling import ceilings, fused
from hyscale_kernels.profiling.ceilings import Ceilings
from hyscale_kernels.profiling.op import Draw, Op, grid
from hyscale_kernels.profiling.ops import ALL, FAMILIES
from hyscale_kernels.profiling.ops.moe import counts
from hyscale_kernels.profiling.ops.selection import case
from hyscale_kernels.profiling.ops.stages import Stages
from hyscale_kernels.profiling.session import planned_s
from hyscale_kernels.profiling.suites import SUITES, suite
from hyscale_simulator.kernels import OPS, kernel

HERE = [op for op in ALL if op.family != "collectives"]


def obstacle(op: Op, device: str) -> str | None:
    if (missing := op.missing()) is not None:
        return f"needs {missing}, which is not installed"
    if device == "cpu" and op.label == "gemm/cublas/fp8":
        return "block-scaled fp8 products need a GPU: PyTorch's CPU takes one scale a tensor or a row"
    return None


@pytest.mark.parametrize("op", [*ceilings.OPS, *HERE], ids=lambda op: op.label)
def test_an_op_runs_and_runs_again(op: Op, device: str) -> None:
    if (reason := obstacle(op, device)) is not None:
        pytest.skip(reason)
    work = op.build(Draw(device, seed=1), op.tiny)
    for _ in range(2 if not op.triton or device == "cuda" else 1):  # the interpreter is slow
        if work.reset is not None:
            work.reset()
        work.call()


def test_tiny_and_real_shapes_have_the_same_names() -> None:
    for op in ALL:
        for name, shapes in op.shapes.items():
            for shape in shapes:
                assert shape.keys() == op.tiny.keys(), f"{op.label} in {name}"


def test_costs_are_positive_wherever_a_shape_is() -> None:
    for op in (*ALL, *ceilings.OPS):
        for shape in (op.tiny, *(shape for shapes in op.shapes.values() for shape in shapes)):
            cost = op.cost(shape)
            assert cost.bytes + cost.tensor_flops + cost.lane_ops > 0, op.label


# Ops whose bytes the simulator counts otherwise: it has every row gather its own keys, where a key that many
# rows want is read once here; its quantise reads twice; and what it prices as chains of operators by all that
# they move, an op's floor counts as one kernel.
FEWER_BYTES = {
    "sparse_attention", "sparse_attention_bwd", "index_loss", "selected_scores", "selected_scores_bwd",
    "quantise", "record_encode", "record_decode", "hytopk", "attention", "attention_bwd", "attention_mass",
    "indexer_loss", "index_order", "quantise_rows", "rope_eager", "rope_eager_bwd", "swiglu_eager",
    "swiglu_eager_bwd",
}  # fmt: skip
MORE_BYTES = {"index_select"}  # torch.topk writes the values too, and int64 indices


@pytest.mark.parametrize("op", [op for op in HERE if op.name in OPS], ids=lambda op: op.label)
def test_the_simulator_counts_the_same_work(op: Op) -> None:
    for shape in [shape for shapes in op.shapes.values() for shape in shapes][:20]:
        ours, theirs = op.cost(shape), kernel(op.name, op.dtype, **shape).cost
        if op.name == "hytopk":  # the stages' own work is no floor of the whole
            assert (
                0.7 * theirs.tensor_flops < ours.tensor_flops <= theirs.tensor_flops or shape["keys"] < 65536
            )
        elif op.name == "grouped_gemm":  # its rows are padded to a tile
            assert ours.tensor_flops <= theirs.tensor_flops
        elif op.name == "hytopk_threshold":  # the simulator does not follow the plan's number of samples
            assert theirs.tensor_flops / 4 <= ours.tensor_flops <= theirs.tensor_flops * 2
            continue
        elif op.name == "index_loss":  # the indexer's own scores belong to the loss here
            assert theirs.tensor_flops < ours.tensor_flops < 1.2 * theirs.tensor_flops
        else:
            assert ours.tensor_flops == pytest.approx(theirs.tensor_flops)
        if op.name in MORE_BYTES:
            assert theirs.bytes < ours.bytes < 1.3 * theirs.bytes
        elif op.name in FEWER_BYTES or op.label == "adamw/torch/fp32/in place":  # it writes no bf16 copy
            assert 0 < ours.bytes <= theirs.bytes * 1.2
        else:
            assert ours.bytes == pytest.approx(theirs.bytes)


@pytest.mark.parametrize("op", [op for op in HERE if op.name in OPS], ids=lambda op: op.label)
def test_the_simulator_finds_its_axes_in_every_shape(op: Op) -> None:
    usual = getattr(OPS[op.name], "usual", {})  # sizes that shapes without them mean
    assert set(OPS[op.name].axes) <= {*op.tiny, *usual}


def test_what_the_simulator_needs_of_glm_is_measured() -> None:
    """Everything a training step of the GLM-5.1 presets is priced from, collectives and epilogues aside."""
    needed = {
        "adamw", "add", "batched_gemm", "cross_entropy", "embedding", "embedding_bwd", "gemm", "grad_norm",
        "grouped_gemm", "hytopk", "hytopk_compact", "hytopk_finish", "hytopk_scan", "hytopk_threshold",
        "index_loss", "index_order", "index_scores", "index_select", "layernorm", "layernorm_bwd", "permute",
        "record_decode", "record_encode", "rmsnorm", "rmsnorm_bwd", "rope", "selected_scores",
        "selected_scores_bwd", "sparse_attention", "sparse_attention_bwd", "swiglu", "swiglu_bwd",
    }  # fmt: skip
    assert needed <= {op.name for op in ALL if op.shapes.get("glm-5.1")}


def test_suites_are_as_large_as_promised_and_fit_their_time() -> None:
    """Of ops that need no other package, on one GPU."""
    plain = [op for op in HERE if not op.needs or op.needs[0].startswith("hyscale")]
    quick, glm = suite("quick", plain), suite("glm-5.1", plain)
    assert len(quick) >= 80
    assert planned_s(quick) <= 80
    assert len(glm) >= 600
    assert planned_s(glm) <= 270
    rows = {dict(entry.shape).get("rows") for entry in glm if entry.op.name == "hytopk"}
    keys = {dict(entry.shape).get("keys") for entry in glm if entry.op.name == "hytopk"}
    assert {512, 16384, 4097} <= rows
    assert {4096, 1048576, 65537} <= keys


@pytest.mark.parametrize("name", SUITES)
def test_no_point_is_measured_twice(name: str) -> None:
    found = Counter(entry.key for entry in suite(name, ALL))
    assert found
    assert max(found.values()) == 1


def test_the_threshold_is_held_against_the_keys_it_samples() -> None:
    """Times of an H200 (benchmarks/results/race_hytopk.jsonl, bf16): a floor lies below every one of them."""
    rates = Ceilings(0.68e15, 1.26e15, 30e12, 4.2e12, 3e-6)
    op = next(op for op in ALL if op.label == "hytopk_threshold/hytopk/bf16")
    for rows, keys, ms in ((4096, 65536, 0.296), (4096, 262144, 0.515), (2048, 1048576, 1.247)):
        shape = {"rows": rows, "keys": keys, "heads": 32, "dim": 128}
        floor = rates.floor_s(op.cost(shape), op.dtype)
        assert floor is not None
        assert 0.1 < floor * 1e3 / ms < 1.0


def test_the_dense_suite_has_the_dense_models() -> None:
    for entry in suite("dense", ALL):
        if entry.op.implementation == "flash-attention-2":  # it knows one head size
            assert entry.shape["qk_dim"] == entry.shape["v_dim"]
    names = {entry.op.name for entry in suite("dense", ALL)}
    assert {"attention", "attention_bwd", "softmax", "dropout", "layernorm", "gelu", "gelu_bwd"} <= names


def test_ops_are_chosen_by_name_family_and_label() -> None:
    assert {entry.op.name for entry in suite("quick", ALL, ["replay"])} >= {"record_encode", "indexer_loss"}
    assert {entry.op.label for entry in suite("quick", ALL, ["gemm/cublas/fp8"])} == {"gemm/cublas/fp8"}
    assert {entry.op.dtype for entry in suite("quick", ALL, ["gemm"])} == {"bf16", "fp8"}
    with pytest.raises(ValueError, match="suite quick has no op 'nothing'; ops: adamw, add,"):
        suite("quick", ALL, ["nothing"])
    with pytest.raises(ValueError, match=r"no suite 'slow'; there are: quick, glm-5\.1"):
        suite("slow", ALL)


def test_every_family_says_its_name() -> None:
    for family in FAMILIES:
        assert {op.family for op in family.OPS} == {family.FAMILY}


def test_a_drawn_selection_is_one() -> None:
    for rows, keys, top_k in ((5, 64, 64), (7, 100, 33), (3, 1000, 7)):
        indices = Draw("cpu").selection(rows, keys, top_k)
        assert (indices.dtype, tuple(indices.shape)) == (torch.int32, (rows, top_k))
        assert (indices.diff(dim=1) > 0).all()
        assert 0 <= int(indices.min()) <= int(indices.max()) < keys
    with pytest.raises(ValueError, match="top_k is 9; at most keys = 8"):
        Draw("cpu").selection(1, 8, 9)


def test_selected_keys_are_put_in_order() -> None:
    """As the layer's loss wants them: ascending, what is missing at the tail."""
    chosen = torch.tensor([[7, -1, 0, 3], [5, 4, 2, 9], [-1, -1, -1, -1]], dtype=torch.int32)
    wanted = torch.tensor([[0, 3, 7, -1], [2, 4, 5, 9], [-1, -1, -1, -1]], dtype=torch.int32)
    found = ascending(chosen)
    assert torch.equal(found, wanted)
    assert found.dtype == torch.int32


def test_the_eager_chains_start_from_what_the_layer_gives_them() -> None:
    """Each result has the layer's shape and dtype."""
    ops = {op.label: op for op in ALL}

    def result(label: str) -> Any:
        return ops[label].build(Draw("cpu", 5), ops[label].tiny).call()

    values, scale = result("quantise_rows/torch/bf16")
    assert (values.dtype, tuple(values.shape)) == (torch.float8_e4m3fn, (8, 1, 128))
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (8, 1))
    rotated = result("rope_eager/torch/bf16")
    assert (rotated.dtype, tuple(rotated.shape)) == (torch.bfloat16, (8, 2, 128))
    (gradient,) = result("rope_eager_bwd/torch/bf16")
    assert gradient.shape == rotated.shape
    gate, up = result("swiglu_eager_bwd/torch/bf16")
    assert gate.shape == up.shape == result("swiglu_eager/torch/bf16").shape == (8, 128)
    assert result("cast/torch/fp32").dtype == torch.bfloat16
    assert (result("index_order/torch/fp32").diff(dim=1) > 0).all()


def test_gradients_of_a_whole_rank_are_measured() -> None:
    """Of 65,536 tokens, each layer of GLM-5.1's that a trainer runs: activations' gradients and weights'."""
    measured = {
        (entry.shape["m"], entry.shape["n"], entry.shape["k"])
        for entry in suite("glm-5.1", ALL, ["gemm/cublas/bf16"])
    }
    for n, k in ((6144, 16384), (16384, 2048), (12288, 6144), (6144, 12288), (2048, 6144), (576, 6144)):
        assert {(65536, k, n), (max(n, k), min(n, k), 65536)} <= measured
    assert {(4096, 2048, 65536), (6144, 128, 65536), (6144, 32, 65536)} <= measured


def test_inputs_differ_by_seed_and_repeat_with_it() -> None:
    one, again, other = (Draw("cpu", seed).normal(100) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert (one != 0).float().mean() > 0.9


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(("groups", "mean"), [(4, 32768), (8, 4096), (32, 1024), (1, 7), (3, 5)])
def test_routing_sends_every_token_somewhere(groups: int, mean: int, skewed: bool) -> None:
    found = counts(groups, mean, skewed)
    assert len(found) == groups
    assert sum(found) == groups * mean
    assert min(found) >= 0
    if mean % 16 == 0:
        assert all(size % 16 == 0 for size in found)
    if skewed and groups >= 4:
        assert sum(found[: groups // 4]) >= 0.65 * groups * mean


def test_stages_give_the_selection_of_the_whole(device: str) -> None:
    """Run one after the other, again, they leave hytopk's own indices."""
    from hyscale_kernels.hytopk import hytopk

    shape = {"rows": 20, "keys": 300, "heads": 2, "dim": 16, "top_k": 4}
    drawn = case(Draw(device, 3), shape, "bf16", "untrained")
    stages = Stages.of(drawn)
    wanted = hytopk(drawn.q, drawn.k, drawn.w, 4, start=drawn.start, end=drawn.end).indices
    stages.finish()
    assert torch.equal(stages.results.indices, wanted)
    filled = stages.results.filled.clone()
    stages.results.indices.fill_(-7)
    for name in ("hytopk_threshold", "hytopk_scan", "hytopk_compact", "hytopk_rescore", "hytopk_finish"):
        work = stages.work(name)
        if work.reset is not None:
            work.reset()
        work.call()
    assert torch.equal(stages.results.indices, wanted)
    assert torch.equal(stages.results.filled, filled)


# The fused kernels: float32, which the interpreter handles as a GPU does.


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rope_rotates(device: str) -> None:
    x, angle = normal(3, 192), normal(3, 32, seed=1)
    got = fused.rope(x.to(device), angle.cos().to(device), angle.sin().to(device)).cpu()
    a, b = x.view(3, 3, 64).split(32, dim=2)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    torch.testing.assert_close(got, torch.cat([a * c - b * s, b * c + a * s], dim=2).view(3, 192))


def test_swiglu_and_its_gradient(device: str) -> None:
    x, dy = normal(3, 2600).requires_grad_(), normal(3, 1300, seed=1)
    gate, up = x.split(1300, dim=1)
    wanted = functional.silu(gate) * up
    torch.testing.assert_close(fused.swiglu(x.detach().to(device)).cpu(), wanted.detach())
    (gradient,) = torch.autograd.grad(wanted, x, dy)
    got = fused.swiglu_backward(x.detach().to(device), dy.to(device)).cpu()
    torch.testing.assert_close(got, gradient)


def test_dropout_drops_its_share_and_its_gradient_follows_the_mask(device: str) -> None:
    x, residual = normal(5, 700), normal(5, 700, seed=1)
    out, kept = (part.cpu() for part in fused.dropout_add(x.to(device), residual.to(device), 0.25, 3))
    torch.testing.assert_close(out, torch.where(kept != 0, x / 0.75, 0.0) + residual)
    assert 0.70 < kept.float().mean() < 0.80
    got = fused.dropout_backward(x.to(device), kept.to(device), 0.25).cpu()
    torch.testing.assert_close(got, torch.where(kept != 0, x / 0.75, 0.0))


def test_quantise_scales_rows_and_columns(device: str) -> None:
    x = normal(130, 256)
    rows, columns, r_scale, c_scale = (part.float().cpu() for part in fused.quantise(x.to(device)))
    assert rows.abs().max() <= fused.FP8_MAX * 1.0001
    assert columns.abs().max() <= fused.FP8_MAX * 1.0001
    tolerance = {"rtol": 0.07, "atol": 0.02} if device == "cuda" else {}
    torch.testing.assert_close(rows * r_scale.T.repeat_interleave(128, dim=1), x, **tolerance)  # type: ignore[arg-type]
    wide = c_scale.repeat_interleave(128, dim=0)[:130]
    torch.testing.assert_close(columns.T * wide, x, **tolerance)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocabulary", [5, 4096, 5000])
def test_cross_entropy_and_its_gradient(vocabulary: int, device: str) -> None:
    logits = (4 * normal(3, vocabulary)).requires_grad_()
    target = torch.tensor([0, vocabulary - 1, vocabulary // 2])
    loss, grad = (part.cpu() for part in fused.cross_entropy(logits.detach().to(device), target.to(device)))
    wanted = functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss, wanted.detach())
    (gradient,) = torch.autograd.grad(wanted.mean(), logits)
    torch.testing.assert_close(grad, gradient)


def test_adamw_takes_pytorchs_step(device: str) -> None:
    N = 1500
    grad, master, m = (normal(N, seed=seed) for seed in range(3))
    v = normal(N, seed=3).square()
    parts = [part.clone().to(device) for part in (grad, m, v, master)]
    out = torch.empty_like(parts[0])
    fused.adamw(*parts, out, 10)
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = grad.clone()
    optimiser = torch.optim.AdamW([parameter], lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimiser.state[parameter] = {"step": torch.tensor(9.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimiser.step()
    torch.testing.assert_close(parts[3].cpu(), parameter.detach())
    torch.testing.assert_close(out.cpu(), parameter.detach())
    torch.testing.assert_close(parts[1].cpu(), optimiser.state[parameter]["exp_avg"])
    torch.testing.assert_close(parts[2].cpu(), optimiser.state[parameter]["exp_avg_sq"])


def test_the_fma_loop_does_what_it_counts(device: str) -> None:
    """Every link of every chain: the result is that of the recurrence."""
    x = torch.rand(128, generator=torch.Generator().manual_seed(0))
    got = fused.fma(x.to(device), 2).cpu()
    acc = x[:, None].double() + torch.arange(fused.FMA_CHAINS)
    for _ in range(2 * fused.FMA_UNROLL):
        acc = acc * (x * 1e-3 + 0.9)[:, None] + (x * 1e-3)[:, None]
    torch.testing.assert_close(got.double(), acc.sum(dim=1), rtol=1e-4, atol=1e-5)


def test_grids_vary_the_last_axis_fastest() -> None:
    found: Any = grid(rows=(1, 2), keys=(3, 4), dim=5)
    assert [tuple(shape.values()) for shape in found] == [(1, 3, 5), (1, 4, 5), (2, 3, 5), (2, 4, 5)]

"""Counts of work against counted operations: each formula beside loops over a tiny shape."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyscale_simulator.kernels import OPS, Kernel, kernel, record_bits


class Counter:
    """A number that counts the multiplications and additions done with it."""

    flops = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def __mul__(self, other: "Counter") -> "Counter":
        Counter.flops += 1
        return Counter(self.value * other.value)

    def __add__(self, other: "Counter") -> "Counter":
        Counter.flops += 1
        return Counter(self.value + other.value)


def array(*shape: int) -> np.ndarray:
    """An array of counters."""
    flat = [Counter(float(i % 7 - 3)) for i in range(int(np.prod(shape)))]
    return np.array(flat, dtype=object).reshape(shape)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b by loops from zero, as hardware accumulates: k multiplications and k additions each."""
    out = np.empty((a.shape[0], b.shape[1]), dtype=object)
    for i, j in itertools.product(range(a.shape[0]), range(b.shape[1])):
        total = Counter(0.0)
        for k in range(a.shape[1]):
            total = total + a[i, k] * b[k, j]
        out[i, j] = total
    return out


@pytest.fixture(autouse=True)
def reset() -> None:
    Counter.flops = 0


small = st.integers(1, 4)
DIMENSIONS = (
    *("m", "n", "k", "groups", "batch", "heads", "kv_heads", "queries", "keys", "rows", "width"),
    *("dim", "qk_dim", "v_dim", "top_k"),
)


@given(m=small, n=small, k=small)
def test_gemm(m: int, n: int, k: int) -> None:
    Counter.flops = 0
    product(array(m, k), array(k, n))
    call = kernel("gemm", "bf16", m=m, n=n, k=k)
    assert call.cost.tensor_flops == Counter.flops
    assert call.cost.bytes == 2 * (m * k + k * n + m * n)


@given(batch=small, m=small, n=small, k=small)
def test_batched_gemm(batch: int, m: int, n: int, k: int) -> None:
    Counter.flops = 0
    for _ in range(batch):
        product(array(m, k), array(k, n))
    assert kernel("batched_gemm", "bf16", batch=batch, m=m, n=n, k=k).cost.tensor_flops == Counter.flops


def test_grouped_gemm_pads_each_group_to_a_tile() -> None:
    padded = kernel("grouped_gemm", "fp8", groups=3, m=129, n=8, k=16).cost
    assert padded.tensor_flops == 3 * kernel("gemm", "fp8", m=256, n=8, k=16).cost.tensor_flops


@given(heads=small, queries=small, keys=small, qk=small, v=small)
def test_attention_forward_and_backward(heads: int, queries: int, keys: int, qk: int, v: int) -> None:
    Counter.flops = 0
    for _ in range(heads):
        q, k, values = array(queries, qk), array(keys, qk), array(keys, v)
        scores = product(q, k.T)
        product(scores, values)
    shape = {"batch": 1, "heads": heads, "kv_heads": heads, "queries": queries, "keys": keys}
    shape |= {"qk_dim": qk, "v_dim": v}
    assert kernel("attention", "bf16", **shape).cost.tensor_flops == Counter.flops
    Counter.flops = 0
    for _ in range(heads):
        q, k, values = array(queries, qk), array(keys, qk), array(keys, v)
        grad = array(queries, v)
        scores = product(q, k.T)  # again, from the saved statistics
        product(scores.T, grad)  # dV
        d_scores = product(grad, values.T)  # dP
        product(d_scores, k)  # dQ
        product(d_scores.T, q)  # dK
    assert kernel("attention_bwd", "bf16", **shape).cost.tensor_flops == Counter.flops


@given(rows=small, keys=small, heads=small, dim=small)
def test_index_scores(rows: int, keys: int, heads: int, dim: int) -> None:
    Counter.flops = relus = weighted = 0
    for _ in range(heads):
        scores = product(array(rows, dim), array(dim, keys))
        relus += scores.size
        weighted += scores.size
    call = kernel("index_scores", "bf16", rows=rows, keys=keys, heads=heads, dim=dim)
    assert call.cost.tensor_flops == Counter.flops
    assert call.cost.vector_slots == 2 * relus + weighted  # a maximum issues at half rate
    assert call.cost.bytes == 2 * dim * (rows * heads + keys) + 4 * rows * keys


@given(rows=small, chosen=small, heads=small, dim=small)
def test_scores_at_selected_keys_and_their_gradient(rows: int, chosen: int, heads: int, dim: int) -> None:
    Counter.flops = 0
    for _ in range(rows):
        product(array(heads, dim), array(dim, chosen))
    shape = {"rows": rows, "top_k": chosen, "heads": heads, "dim": dim}
    assert kernel("selected_scores", "bf16", **shape).cost.tensor_flops == Counter.flops
    Counter.flops = 0
    for _ in range(rows):
        product(array(heads, dim), array(dim, chosen))  # relu's mask needs the products again
        product(array(heads, chosen), array(chosen, dim))  # dq
        product(array(chosen, heads), array(heads, dim))  # dk
    assert kernel("selected_scores_bwd", "bf16", **shape).cost.tensor_flops == Counter.flops


@given(rows=small, chosen=small, heads=small, rank=small, rope=small)
def test_sparse_attention(rows: int, chosen: int, heads: int, rank: int, rope: int) -> None:
    Counter.flops = 0
    for _ in range(rows):
        latents = array(chosen, rank + rope)
        scores = product(array(heads, rank + rope), latents.T)
        product(scores, latents[:, :rank])
    shape = {"rows": rows, "heads": heads, "qk_dim": rank + rope, "v_dim": rank, "top_k": chosen}
    assert kernel("sparse_attention", "bf16", **shape).cost.tensor_flops == Counter.flops
    Counter.flops = 0
    for _ in range(rows):
        latents, q, grad = array(chosen, rank + rope), array(heads, rank + rope), array(heads, rank)
        scores = product(q, latents.T)
        d_scores = product(grad, latents[:, :rank].T)
        product(scores.T, grad)
        product(d_scores, latents)
        product(d_scores.T, q)
    assert kernel("sparse_attention_bwd", "bf16", **shape).cost.tensor_flops == Counter.flops


def test_glm_at_a_million_tokens() -> None:
    """The figures of one layer that the literature works with, FLOPs a token."""
    scores = kernel("index_scores", "bf16", rows=1, keys=2**19, heads=32, dim=128).cost
    sparse = kernel("sparse_attention", "bf16", rows=1, heads=64, qk_dim=576, v_dim=512, top_k=2048).cost
    back = kernel("sparse_attention_bwd", "bf16", rows=1, heads=64, qk_dim=576, v_dim=512, top_k=2048).cost
    teacher = kernel("attention_mass", "bf16", rows=1, heads=64, qk_dim=576, top_k=2048).cost
    selected = kernel("selected_scores", "bf16", rows=1, heads=32, dim=128, top_k=2048).cost
    assert scores.tensor_flops == pytest.approx(4295e6, rel=1e-3)
    assert sparse.tensor_flops == pytest.approx(284.9e6, rel=1e-2)
    assert back.tensor_flops == pytest.approx(720.7e6, rel=1e-2)
    assert teacher.tensor_flops == pytest.approx(150.8e6, rel=1e-2)
    assert selected.tensor_flops == pytest.approx(16.8e6, rel=1e-2)
    assert scores.tensor_flops == 256 * selected.tensor_flops


def test_fp32_scoring_runs_on_cuda_cores() -> None:
    cost = kernel("index_scores", "fp32", rows=4, keys=8, heads=2, dim=16).cost
    assert cost.tensor_flops == 0
    assert cost.vector_slots >= 4 * 8 * 2 * 16


@pytest.mark.parametrize(
    ("top_k", "keys", "bits"), [(2048, 2**20, 11.0), (2048, 2048, 2.0), (2048, 1024, 1.5), (1, 1, 2.0)]
)
def test_bits_of_a_packed_index(top_k: int, keys: int, bits: float) -> None:
    assert record_bits(top_k, keys) == pytest.approx(bits)


def test_bad_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="op = 'conv'"):
        kernel("conv", "bf16", m=1)
    with pytest.raises(ValueError, match="dtype = 'int4'"):
        kernel("gemm", "int4", m=1, n=1, k=1)
    with pytest.raises(ValueError, match=r"shape\.m = -1"):
        kernel("gemm", "bf16", m=-1, n=1, k=1)


@pytest.mark.parametrize("op", sorted(OPS))
def test_an_empty_call_costs_nothing(op: str) -> None:
    cost = Kernel(op, "bf16", tuple(sorted((name, 0) for name in DIMENSIONS))).cost
    assert (cost.tensor_flops, cost.vector_slots, cost.bytes) == (0, 0, 0)


@pytest.mark.parametrize("op", sorted(OPS))
@pytest.mark.parametrize("axis", ["rows", "keys", "queries", "m", "width", "batch"])
def test_work_never_shrinks_with_size(op: str, axis: str) -> None:
    shape = dict.fromkeys(DIMENSIONS, 256)
    small_cost = Kernel(op, "bf16", tuple(sorted(shape.items()))).cost
    large_cost = Kernel(op, "bf16", tuple(sorted((shape | {axis: 512}).items()))).cost
    assert large_cost.tensor_flops >= small_cost.tensor_flops
    assert large_cost.vector_slots >= small_cost.vector_slots

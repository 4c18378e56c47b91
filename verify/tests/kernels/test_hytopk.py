"""HyTopK's own promises that need no drawn examples; the suite of hyscale_verify checks the contract."""

import ast
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import hyscale_kernels
from hyscale_kernels.hytopk import Plan, default_plan, hytopk, warm_up, workspace_bytes
from hyscale_kernels.hytopk.api import NAMESPACE
from hyscale_kernels.hytopk.plan import MOST_CHUNK_ROWS, passes, threshold_rank, workspace_bound
from hyscale_kernels.hytopk.problem import Problem
from hyscale_kernels.provenance import source_hash

HYTOPK = Path(hyscale_kernels.__file__).parent / "hytopk"
RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "hytopk_h200.jsonl"


@pytest.mark.parametrize("T", [1, 63, 64, 65, 2048, 131072, 10**6])
@pytest.mark.parametrize("S", [1, 8192, 8193, 32768, 65536, 2**20, 2**31 - 1])
@pytest.mark.parametrize("top_k", [1, 100, 2048, 8192])
def test_workspace_is_within_the_contract_whatever_the_length(T: int, S: int, top_k: int) -> None:
    size = workspace_bytes(T, S, 32, 128, top_k, torch.float8_e4m3fn)
    assert 0 < size <= workspace_bound(T, top_k) == 16 * T * top_k + 64 * 2**20


@pytest.mark.parametrize("S", [2**17, 2**20, 2**24])
def test_workspace_stops_growing_with_the_length(S: int) -> None:
    table = 4 * 2048 * S
    assert workspace_bytes(2048, S, 32, 128, 2048, torch.bfloat16) < table / 7


def test_a_causal_call_has_workspace_for_each_of_its_passes() -> None:
    T, sizes = 20000, (128, 2048, torch.float8_e4m3fn, "cuda")
    stated = workspace_bytes(T, T, 32, *sizes)
    for causal in (False, True):
        for each in passes(T, T, *sizes, causal=causal):
            assert each.plan.workspace_bytes(T, each.keys, sizes[0]) <= stated


def test_causal_passes_see_their_own_keys_and_no_more() -> None:
    T = 50000
    found = list(passes(T, T, 128, 2048, torch.bfloat16, "cuda", causal=True))
    assert sum(each.rows for each in found) == T
    for each, following in itertools.pairwise(found):
        assert following.row0 == each.row0 + each.rows
    for each in found:
        assert each.keys == each.row0 + each.rows
        assert (
            each.plan.samples
            == Plan.default(T, min(T, each.row0 + MOST_CHUNK_ROWS), 128, 2048, torch.bfloat16, "cuda").samples
        )
    by_table = [each.keys <= each.plan.table_keys for each in found]
    assert by_table[0]
    assert not by_table[-1]
    assert by_table == sorted(by_table, reverse=True)


def test_passes_over_windows_see_every_key_and_share_a_plan() -> None:
    found = list(passes(9000, 70000, 128, 2048, torch.bfloat16, "cuda", causal=False))
    assert len(found) > 1
    assert {each.keys for each in found} == {70000}
    assert len({each.plan for each in found}) == 1


def binomial_tail(n: int, p: float, counts: range) -> float:
    """Probability that of n draws, each true with p, as many are true as one of ``counts``."""
    return sum(
        math.exp(
            math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
            + i * math.log(p) + (n - i) * math.log1p(-p)
        )
        for i in counts
    )  # fmt: skip


@pytest.mark.parametrize("top_k", [1, 2, 5, 16, 100, 256, 777, 2048, 6000, 8192])
@pytest.mark.parametrize("S", [5000, 8192, 24000, 65536, 10**5, 2**19, 2**20, 2873098, 2**24])
def test_a_threshold_fails_a_row_in_a_million_at_most(top_k: int, S: int) -> None:
    """The m-th best of n samples lets more keys through than fit when fewer than m samples are among the
    ``capacity`` best keys, and fewer than K when m samples are among the K best."""
    plan = Plan.default(4096, S, 128, top_k, torch.float8_e4m3fn, "cuda")
    n, rank = plan.samples, threshold_rank(top_k * plan.samples / S)
    if plan.capacity < S:  # else every key is kept
        assert binomial_tail(n, plan.capacity / S, range(rank + rank // 16)) < 1.1e-6
        assert binomial_tail(n, top_k / S, range(rank, min(n, rank + 1000) + 1)) < 1.1e-6


class Sizes(TorchDispatchMode):
    """Notes the plan, the last argument, of each call of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == NAMESPACE:
            self.seen.append(args[-1])
        return func(*args, **(kwargs or {}))


def test_an_operator_makes_its_own_plan(device: str) -> None:
    low = torch.float32 if device == "cpu" else torch.bfloat16
    q, k = torch.ones(3, 2, 16, device=device, dtype=low), torch.ones(3, 16, device=device, dtype=low)
    w = torch.ones(3, 2, device=device)
    plan = default_plan(q, k, 2)
    with Sizes() as sizes:
        first = hytopk(q, k, w, 2)
        second = hytopk(q, k, w, 2, plan=plan)
    assert sizes.seen == [[], plan.as_ints()]
    assert first.indices.tolist() == second.indices.tolist() == [[0, -1], [0, 1], [0, 1]]


def test_a_warm_up_leaves_nothing_to_compile(device: str) -> None:
    low = torch.float32 if device == "cpu" else torch.bfloat16
    first, seconds = warm_up(2, 16, low, device)
    assert (first == 0) == (device == "cpu")
    assert seconds > 0
    assert warm_up(2, 16, low, device)[0] == 0


def test_chunks_cover_all_rows_and_keys_evenly() -> None:
    plan = Plan.default(5000, 10**6, 128, 2048, torch.bfloat16, "cuda")
    assert plan.row_chunk % plan.tile_rows == 0
    assert plan.key_chunk % plan.tile_keys == 0
    chunks = -(-5000 // plan.row_chunk)
    assert (chunks - 1) * plan.row_chunk < 5000
    assert chunks * (plan.row_chunk - plan.tile_rows) < 5000  # one tile less a chunk would not do


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_rows": 48}, "plan.tile_rows is 48; it must be a power of two"),
        ({"tile_keys": 16}, "plan.tile_keys is 16; it must be a multiple of 32"),
        ({"capacity": 0}, "plan.capacity is 0"),
        ({"capacity": 200}, "plan.capacity is 200; it must be a power of two or a multiple of 128"),
        ({"samples": 100}, "plan.samples is 100; it must be a positive multiple of 64"),
        ({"samples": 65536}, "plan.samples is 65536; it must be at most 32768"),
        ({"table_keys": -1}, "plan.table_keys is -1; it must be at least 0"),
        ({"row_chunk": 0}, "plan.row_chunk is 0"),
        ({"key_chunk": 65}, "plan.key_chunk is 65"),
        ({"segment": 33}, "plan.segment is 33"),
        ({"warps": 0}, "plan.warps is 0; it must be at least 1"),
        ({"registers": -1}, "plan.registers is -1; it must be at least 0"),
        ({"repair_splits": 3}, "plan.repair_splits is 3; it must be a power of two"),
        ({"consumers": 1}, "plan.consumers is 1; it must be 0, 2 or 3"),
    ],
)
def test_a_plan_that_cannot_run_names_the_size(change: dict[str, int], message: str) -> None:
    plan = Plan.default(10, 300, 16, 5, torch.float32, "cpu")
    with pytest.raises(ValueError, match=message.split(";")[0]):
        dataclasses.replace(plan, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prune_keys": 1.5}, "1.5"),
        ({"tile_rows": 16.0}, "16.0"),
        ({"warps": True}, "True"),
        ({"samples": None}, "None"),
    ],
)
def test_a_size_of_a_plan_that_is_no_integer_is_named(change: dict[str, Any], said: str) -> None:
    plan = Plan.default(10, 300, 16, 5, torch.float32, "cpu")
    with pytest.raises(TypeError, match=rf"plan\.{next(iter(change))} is {said}; it must be an int"):
        dataclasses.replace(plan, **change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"T": -1}, ValueError, "T is -1; allowed: 0 or more"),
        ({"S": 2**31}, ValueError, "S is 2147483648; allowed: 0 or more, up to 2147483647"),
        ({"H": 0}, ValueError, "H is 0; allowed: 1 or more, up to 128"),
        ({"D": 257}, ValueError, "D is 257; allowed: 1 or more, up to 256"),
        ({"T": 2.5}, TypeError, "T is 2.5; it must be an int"),
        ({"top_k": 0}, ValueError, "top_k is 0"),
        ({"dtype": torch.float32}, TypeError, "dtype is torch.float32; allowed on cuda"),
        ({"dtype": "bf16"}, TypeError, "dtype is 'bf16'; allowed on cuda: torch's bfloat16, float16"),
    ],
)
def test_the_workspace_of_a_call_that_would_be_refused_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    sizes: dict[str, Any] = {"T": 8, "S": 8, "H": 2, "D": 16, "top_k": 4, "dtype": torch.bfloat16}
    assert workspace_bytes(**sizes) > 0
    with pytest.raises(error, match=message):
        workspace_bytes(**(sizes | change))


def test_a_plan_survives_the_operator_boundary() -> None:
    plan = Plan.default(10, 300, 16, 5, torch.float32, "cpu")
    assert Plan.from_ints(plan.as_ints()) == plan
    with pytest.raises(ValueError, match="a plan has 16 sizes, got 2"):
        Plan.from_ints([1, 2])


def test_a_gpu_without_float8_products_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with FakeTensorMode():
        q = torch.empty(1, 1, 16, device="cuda", dtype=torch.float8_e4m3fn)
        with pytest.raises(ValueError, match=r"float8_e4m3fn on cuda:0, compute capability 8\.0"):
            Problem(q, q, q, None, q, q)


def test_only_upcast_and_dot_know_the_interpreter() -> None:
    users = set()
    for path in HYTOPK.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
                if "INTERPRET" in names:
                    users.add((path.name, function.name))
    # The public check refuses tensors on a device that this import cannot run on.
    assert users == {("api.py", "check_inputs"), ("score.py", "operand"), ("score.py", "dot")}


def test_the_recorded_evidence_is_of_these_sources() -> None:
    records = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
    assert records
    assert all(record["holds"] for record in records)
    measured = {record["source_hash"] for record in records}
    assert measured == {source_hash("hytopk")}, (
        "the kernels have changed since they were measured; run benchmarks/hytopk_evidence.py on a GPU"
    )

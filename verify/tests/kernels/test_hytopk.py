"""HyTopK's own promises that need no drawn examples; the suite of hyscale_verify checks the contract."""

import ast
import dataclasses
import json
from pathlib import Path

import pytest
import torch

import hyscale_kernels
from hyscale_kernels.hytopk import Plan, workspace_bytes
from hyscale_kernels.hytopk.plan import workspace_bound
from hyscale_kernels.provenance import source_hash

HYTOPK = Path(hyscale_kernels.__file__).parent / "hytopk"
RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "hytopk_h200.jsonl"


@pytest.mark.parametrize("T", [1, 63, 64, 65, 2048, 131072, 10**6])
@pytest.mark.parametrize("S", [1, 8192, 8193, 65536, 2**20, 2**31 - 1])
@pytest.mark.parametrize("top_k", [1, 100, 2048, 8192])
def test_workspace_is_within_the_contract_whatever_the_length(T: int, S: int, top_k: int) -> None:
    size = workspace_bytes(T, S, 32, 128, top_k, torch.float8_e4m3fn)
    assert 0 < size <= workspace_bound(T, top_k) == 16 * T * top_k + 64 * 2**20


@pytest.mark.parametrize("S", [2**17, 2**20, 2**24])
def test_workspace_stops_growing_with_the_length(S: int) -> None:
    table = 4 * 2048 * S
    assert workspace_bytes(2048, S, 32, 128, 2048, torch.bfloat16) < table / 7


def test_chunks_cover_all_rows_and_keys_evenly() -> None:
    plan = Plan.default(5000, 10**6, 32, 128, 2048, torch.bfloat16, "cuda")
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
        ({"samples": 100}, "plan.samples is 100; it must be a positive multiple of 64"),
        ({"row_chunk": 0}, "plan.row_chunk is 0"),
        ({"key_chunk": 65}, "plan.key_chunk is 65"),
        ({"segment": 33}, "plan.segment is 33"),
        ({"warps": 0}, "plan.warps is 0; it must be at least 1"),
        ({"registers": -1}, "plan.registers is -1; it must be at least 0"),
        ({"repair_splits": 3}, "plan.repair_splits is 3; it must be a power of two"),
    ],
)
def test_a_plan_that_cannot_run_names_the_size(change: dict[str, int], message: str) -> None:
    plan = Plan.default(10, 300, 4, 16, 5, torch.float32, "cpu")
    with pytest.raises(ValueError, match=message.split(";")[0]):
        dataclasses.replace(plan, **change)


def test_a_plan_survives_the_operator_boundary() -> None:
    plan = Plan.default(10, 300, 4, 16, 5, torch.float32, "cpu")
    assert Plan.from_ints(plan.as_ints()) == plan
    with pytest.raises(ValueError, match="a plan has 14 sizes, got 2"):
        Plan.from_ints([1, 2])


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

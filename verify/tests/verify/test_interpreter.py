"""The interpreter's helper: the same values faster, memory accesses checked, fp8's NaN decoded."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from hyscale_verify.interpreter import MemoryAccessError, access_error_in, checked_memory, quicken
from hyscale_verify.memory import spread_rows, watched_allocations


@triton.jit
def _scale(source, target, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < n).to(tl.float32) * factor, mask=i < n)


@triton.jit
def _gather(source, index, target, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + tl.load(index + i).to(tl.int64) * stride))


@triton.jit
def _count(target, index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.atomic_add(target + tl.load(index + i), 1)


@pytest.fixture(autouse=True)
def quick() -> None:
    quicken()


def gather(source: torch.Tensor, index: list[int]) -> torch.Tensor:
    out = torch.zeros(len(index))
    _gather[(1,)](source, torch.tensor(index), out, source.stride(0), BLOCK=len(index))
    return out


def test_quickened_kernels_compute_the_same_and_twice_is_once() -> None:
    quicken()
    source, target = torch.randn(100), torch.zeros(100)
    _scale[(7,)](source, target, 100, 2.0, BLOCK=16)
    assert torch.equal(target, source * 2)


def test_e4m3_nan_widens_to_nan_and_all_else_exactly() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    source = bits.view(torch.float8_e4m3fn)
    target = torch.zeros(256)
    _scale[(1,)](source, target, 256, 1.0, BLOCK=256)
    np.testing.assert_array_equal(target.numpy(), source.float().numpy())
    assert int(target.isnan().sum()) == 2


def test_accesses_inside_pass() -> None:
    with checked_memory():
        assert gather(torch.arange(8.0), [0, 7, 3, 3]).tolist() == [0, 7, 3, 3]


@pytest.mark.parametrize("index", [8, -1, 10**6])
def test_a_load_outside_every_tensor_ends_the_launch(index: int) -> None:
    with checked_memory(), pytest.raises(Exception, match="MemoryAccessError") as caught:
        gather(torch.arange(8.0), [0, index, 1, 2])
    wrong = access_error_in(caught.value)
    assert isinstance(wrong, MemoryAccessError)
    assert "load of 1 elements outside every tensor of the launch" in str(wrong)


def test_a_load_inside_the_storage_but_outside_the_view_ends_the_launch() -> None:
    room = torch.arange(8.0)
    with checked_memory(), pytest.raises(Exception, match="MemoryAccessError"):
        gather(room[:4], [0, 5, 1, 2])


def test_a_store_and_an_atomic_outside_end_the_launch() -> None:
    with checked_memory():
        with pytest.raises(Exception, match="store of 3 elements"):
            _scale[(1,)](torch.zeros(8), torch.zeros(5), 8, 1.0, BLOCK=8)
        with pytest.raises(Exception, match="atomic of 1 elements"):
            _count[(1,)](torch.zeros(4, dtype=torch.int32), torch.tensor([0, 1, 2, 4]), BLOCK=4)


def test_masked_out_addresses_may_be_anywhere() -> None:
    with checked_memory():
        _scale[(1,)](torch.zeros(3), torch.zeros(3), 3, 1.0, BLOCK=64)


def test_checking_ends_with_the_block() -> None:
    with checked_memory():
        pass
    room = torch.arange(8.0)
    assert gather(room[:4], [0, 5, 1, 2]).tolist() == [0, 5, 1, 2]


def test_another_error_is_no_access_error() -> None:
    assert access_error_in(ValueError("x")) is None


def test_spread_rows_lie_far_apart_and_hold_the_values() -> None:
    tensor = torch.randn(3, 2, 5).to(torch.bfloat16)
    spread = spread_rows(tensor, 2**31)
    assert torch.equal(spread, tensor)
    assert spread.stride(0) * 2 > 2**31
    assert spread.stride()[1:] == tensor.stride()[1:]


def test_far_rows_are_reached_through_64_bit_offsets_only() -> None:
    spread = spread_rows(torch.arange(4.0)[:, None], 2**31)
    with checked_memory():
        assert gather(spread, [3, 0]).tolist() == [3, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(7),
        lambda: torch.empty_like(torch.zeros(7)),
        lambda: torch.empty_strided((7,), (1,)),
        lambda: torch.zeros(2).new_empty(7),
    ],
)
def test_every_kind_of_empty_is_filled_and_counted(make: Any) -> None:
    with watched_allocations(0xFF) as seen:
        tensor = make()
        assert tensor.isnan().all()
        assert seen.live == seen.peak == 28
        del tensor
        assert (seen.live, seen.peak) == (0, 28)


def test_without_a_pattern_memory_is_counted_and_left_alone() -> None:
    with watched_allocations() as seen:
        first = torch.empty(10, dtype=torch.int32)
        second = torch.empty((2, 3), dtype=torch.uint8)
        del first
    assert seen.peak == 46
    assert second.shape == (2, 3)
    assert torch.empty is not None
    assert torch.empty.__module__ != "hyscale_verify.memory"

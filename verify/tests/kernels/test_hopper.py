"""Hopper's scan without a Hopper GPU: it compiles for one, says when it cannot run, and fills its waves."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hyscale_kernels.hytopk import Plan, dense_scores, hytopk
from hyscale_kernels.hytopk.hopper import _share_kernel, obstacle

COMPILE = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from hyscale_kernels.hytopk.hopper import BS, BT, REGISTERS, _hopper_kernel

name, consumers, sides, listed = sys.argv[1], *map(int, sys.argv[2:])
element = {"fp8e4nv": gl.float8e4nv, "bf16": gl.bfloat16, "fp16": gl.float16}[name]
chosen = dict(HAS_SCALE=name == "fp8e4nv", LISTED=bool(listed), H=32, D=128, SIDES=sides, CONSUMERS=consumers,
              REGISTERS=REGISTERS[consumers])
kinds = {}
for argument in _hopper_kernel.arg_names:
    if argument in chosen:
        kinds[argument] = "constexpr"
    elif argument in ("q_rows", "k_rows"):
        block = [BT.value if argument == "q_rows" else BS.value, 128]
        layout = gl.NVMMASharedLayout.get_default_for(block, element)
        kinds[argument] = f"tensordesc<{name}{block},{layout!r}>"
    elif argument.endswith("_ptr"):
        kinds[argument] = "*i32" if argument[:2] in ("lo", "sc", "bi", "bl", "ro", "st", "co") else "*fp32"
    else:
        kinds[argument] = "i32"
places = {(_hopper_kernel.arg_names.index(name),): value for name, value in chosen.items()}
compiled = compile(
    GluonASTSource(_hopper_kernel, kinds, places), GPUTarget("cuda", 90, 32), options={"num_warps": 4}
)
print(compiled.metadata.shared, "wgmma.mma_async" in compiled.asm["ptx"])
"""
SHARED_MEMORY = 227 * 1024  # of one program on an H100 or H200


@pytest.mark.parametrize(
    ("dtype", "consumers", "sides", "listed"),
    [("fp8e4nv", 3, 2, 0), ("fp8e4nv", 3, 2, 1), ("bf16", 3, 1, 1), ("bf16", 2, 1, 0)],
)
def test_it_compiles_for_sm_90_and_fits(
    dtype: str, consumers: int, sides: int, listed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, dtype, str(consumers), str(sides), str(listed)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shared, tensor_cores = done.stdout.splitlines()[-1].split()
    assert int(shared) <= SHARED_MEMORY
    assert tensor_cores == "True"


@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are for the interpreter")
def test_a_plan_for_it_is_refused_where_it_cannot_run() -> None:
    q, k, w = torch.zeros(2, 4, 16), torch.zeros(300, 16), torch.zeros(2, 4)
    assert "compute capability 9.0" in str(obstacle(q, k))
    plan = replace(Plan.default(2, 300, 16, 5, torch.float32, "cpu"), consumers=3)
    with pytest.raises(
        ValueError, match=r"plan\.consumers is 3, but Hopper's scan cannot run here: it needs"
    ):
        hytopk(q, k, w, 5, end=torch.full((2,), 300, dtype=torch.int32), plan=plan)
    with pytest.raises(ValueError, match=r"plan\.consumers is 3, but Hopper's scan cannot run here"):
        dense_scores(q, k, w, end=torch.full((2,), 300, dtype=torch.int32), plan=plan)


class Shaped:
    """What ``obstacle`` looks at, of a tensor that no machine without a GPU can hold."""

    def __init__(self, *shape: int, stride: tuple[int, ...], itemsize: int = 1, address: int = 0) -> None:
        self.shape, self._stride, self._itemsize, self._address = shape, stride, itemsize, address
        self.device = torch.device("cuda")

    def stride(self, axis: int | None = None) -> Any:
        return self._stride if axis is None else self._stride[axis]

    def element_size(self) -> int:
        return self._itemsize

    def data_ptr(self) -> int:
        return self._address


@pytest.mark.parametrize(
    ("q", "k", "why"),
    [
        (Shaped(8, 32, 128, stride=(4096, 128, 1)), Shaped(9, 128, stride=(128, 1)), None),
        (
            Shaped(8, 32, 128, stride=(8192, 256, 2), itemsize=2),
            Shaped(9, 128, stride=(128, 1)),
            "side by side",
        ),
        (Shaped(8, 31, 128, stride=(3968, 128, 1)), Shaped(9, 128, stride=(128, 1)), "heads in pairs"),
        (Shaped(8, 32, 72, stride=(2304, 72, 1)), Shaped(9, 72, stride=(72, 1)), "64, 128 or 256 bytes"),
        (Shaped(8, 32, 128, stride=(4100, 128, 1)), Shaped(9, 128, stride=(128, 1)), "rows of q must start"),
        (
            Shaped(8, 32, 128, stride=(0, 128, 1)),
            Shaped(9, 128, stride=(128, 1)),
            "rows of q must not overlap",
        ),
        (
            Shaped(8, 32, 128, stride=(4096, 128, 1)),
            Shaped(9, 128, stride=(0, 1)),
            "rows of k must not overlap",
        ),
        (Shaped(8, 32, 128, stride=(4096, 128, 1)), Shaped(9, 128, stride=(128, 1), address=8), "rows of k"),
    ],
)
def test_the_obstacle_is_named(q: Any, k: Any, why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = obstacle(q, k)
    assert found is None if why is None else why in str(found)


@pytest.mark.parametrize(("consumers", "listed"), [(3, False), (2, False), (3, True)])
@pytest.mark.parametrize("R", [1, 64, 200, 4500])
def test_rounds_are_counted_for_every_row_tile(R: int, consumers: int, listed: bool, device: str) -> None:
    """The shares of a chunk's rounds, against NumPy: they need no Hopper GPU."""
    BT, BS, key0, key1, row0 = 64, 128, 4096, 9000, 7
    tiles = -(-R // BT)
    draw = np.random.default_rng(R)
    bounds = np.sort(draw.integers(0, 12000, (2, row0 + R)), axis=0).astype(np.int32)
    bounds[:, row0 + R // 2 :] = bounds[0, row0 + R // 2 :]  # empty windows, whole row tiles of them
    length = draw.integers(0, 50, tiles).astype(np.int32)
    rounds, start, count = (
        torch.full((size,), -1, dtype=torch.int32, device=device) for size in (tiles + 1, tiles, tiles)
    )
    lo, hi, lengths = (
        torch.from_numpy(each.copy()).to(device) for each in (bounds[0], bounds[1, row0:], length)
    )
    _share_kernel[(1,)](
        lo, hi, lengths, rounds, start, count, row0, R, key0, key1,
        LISTED=listed, BT=BT, BS=BS, CONSUMERS=consumers, TILES=64,
    )  # fmt: skip
    before = 0
    for tile in range(tiles):
        some = [
            (a, b)
            for a, b in zip(*bounds[:, row0 + tile * BT : row0 + min(tile * BT + BT, R)], strict=True)
            if b > a
        ]
        first = max(min((a for a, _ in some), default=key1), key0)
        first = key0 + (first - key0) // BS * BS
        wanted = max(-(-(min(max((b for _, b in some), default=0), key1) - first) // BS), 0)
        if listed:
            first, wanted = key0, int(length[tile])
        assert (int(count[tile]), int(rounds[tile])) == (wanted, before)
        assert wanted == 0 or int(start[tile]) == first
        before += -(-wanted // consumers)
    assert int(rounds[tiles]) == before

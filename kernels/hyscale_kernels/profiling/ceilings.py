"""What this GPU can do at best, measured first: copy bandwidth, product rates, fp32 rate, launch.

A point's floor is the time that its least work takes at these rates; its ceiling fraction is floor over
median.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import fused
from .op import Cost, Draw, Entry, Op, Shape, Work

FAMILY = "ceilings"
FMA_THREADS_ROUNDS = {"lanes": 132 * 2048, "rounds": 400}


def _moved(shape: Shape) -> Cost:
    return Cost(bytes=2.0 * shape["bytes"])


def _copy(inputs: Draw, shape: Shape) -> Work:
    here = inputs.normal(shape["bytes"] // 2)
    there = torch.empty_like(here)
    return Work(lambda: there.copy_(here))


def _product(dtype: str) -> Op:
    def build(inputs: Draw, shape: Shape) -> Work:
        m, n, k = shape["m"], shape["n"], shape["k"]
        x, weight = inputs.normal(m, k, dtype=dtype), inputs.normal(n, k, dtype=dtype)
        if dtype == "bf16":
            return Work(lambda: x @ weight.T)
        one = torch.ones((), device=inputs.device)
        return Work(
            lambda: torch._scaled_mm(
                x, weight.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )

    return _ceiling("gemm", dtype, build, lambda s: Cost(2.0 * s["m"] * s["n"] * s["k"]),
                    {"m": 8192, "n": 8192, "k": 8192}, {"m": 16, "n": 16, "k": 16})  # fmt: skip


def _fma(inputs: Draw, shape: Shape) -> Work:
    x, rounds = inputs.uniform(shape["lanes"]), shape["rounds"]
    return Work(lambda: fused.fma(x, rounds))


def _launch(inputs: Draw, shape: Shape) -> Work:
    x = inputs.normal(shape["bytes"] // 4, dtype="fp32")
    return Work(lambda: x.add_(1e-3))


def _ceiling(what: str, dtype: str, build, cost, shape: Shape, tiny: Shape, triton: bool = False) -> Op:  # type: ignore[no-untyped-def]
    return Op(
        name="ceiling", implementation=what, dtype=dtype, family=FAMILY, cost=cost, build=build,
        shapes={"ceilings": [shape]}, tiny=tiny, efficiency=0.8, compile_s=0.2, triton=triton, link=True,
    )  # fmt: skip


OPS: tuple[Op, ...] = (
    _product("bf16"),
    _product("fp8"),
    _ceiling("copy", "bf16", _copy, _moved, {"bytes": 2**32}, {"bytes": 1024}),
    _ceiling(
        "fma", "fp32", _fma,
        lambda s: Cost(lane_ops=float(s["lanes"]) * s["rounds"] * fused.FMA_CHAINS * fused.FMA_UNROLL),
        FMA_THREADS_ROUNDS, {"lanes": 128, "rounds": 2}, triton=True,
    ),
    _ceiling("launch", "fp32", _launch, _moved, {"bytes": 4096}, {"bytes": 64}),
)  # fmt: skip


def entries(tiny: bool = False) -> Iterator[Entry]:
    for op in OPS:
        yield Entry(op, op.tiny if tiny else op.shapes["ceilings"][0])


@dataclass(frozen=True)
class Ceilings:
    """Rates a second, and seconds of an empty launch. A rate that could not be measured is None."""

    bf16_flops: float | None = None
    fp8_flops: float | None = None
    lane_ops: float | None = None
    bytes: float | None = None
    launch_s: float | None = None

    @classmethod
    def of(cls, found: dict[tuple[str, str], tuple[Cost, float]]) -> "Ceilings":
        """From (what, dtype) -> (work, seconds)."""

        def rate(what: str, dtype: str, pick: str) -> float | None:
            if (what, dtype) not in found:
                return None
            cost, seconds = found[what, dtype]
            return float(getattr(cost, pick)) / seconds

        launch = found.get(("launch", "fp32"))
        return cls(
            rate("gemm", "bf16", "tensor_flops"), rate("gemm", "fp8", "tensor_flops"),
            rate("fma", "fp32", "lane_ops"), rate("copy", "bf16", "bytes"),
            None if launch is None else launch[1],
        )  # fmt: skip

    def floor_s(self, cost: Cost, dtype: str) -> float | None:
        """Seconds below which the work cannot be done; None where a rate that it needs is not known."""
        tensor = {"fp8": self.fp8_flops, "bf16": self.bf16_flops, "fp16": self.bf16_flops}.get(dtype)
        terms = [self.launch_s or 0.0]
        for amount, rate in (
            (cost.tensor_flops, tensor), (cost.lane_ops, self.lane_ops), (cost.bytes, self.bytes)
        ):  # fmt: skip
            if amount:
                if rate is None:
                    return None
                terms.append(amount / rate)
        return max(terms)


# As measured on an H200 (benchmarks/results/profile_quick_*.jsonl; gathers: benchmarks/sparse_mla.py).
GEMM_FLOPS = {"bf16": 0.79e15, "fp16": 0.79e15, "fp8": 1.51e15}
COPY_BYTES_PER_S = 4.3e12
CACHE_BYTES_PER_S = 6.3e12  # of gathers that hit the second-level cache

NOMINAL = Ceilings(GEMM_FLOPS["bf16"], GEMM_FLOPS["fp8"], 44e12, COPY_BYTES_PER_S, 5e-6)
"""To plan by, before a run has measured its own."""

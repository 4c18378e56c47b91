"""The floor under a kernel's time (tensor cores, CUDA cores, memory, launch), and projection by it."""

import math

from hyscale_simulator.calibration import calibration
from hyscale_simulator.descriptions import DescriptionError
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.kernels import Kernel

TILES = ((128, 256), (128, 128))
"""Rows and columns of a thread block's part of a product: the large tiles of CUTLASS on Hopper."""

__all__ = ["floor_us", "project_us", "terms_us"]


def terms_us(call: Kernel, gpu: Gpu, *, loaded: bool = False) -> tuple[float, float, float]:
    """Microseconds that the tensor work, the vector work and the bytes each need alone.

    Tensor: at the best rate of short measurements, or the one sustained under load.  Vector: at one
    multiply-add a lane and clock.  Memory: at the copy rate.
    """
    cost, constants = call.cost, calibration()
    tensor = 0.0
    if cost.tensor_flops:
        rate = gpu.tensor_flops_per_s(call.dtype) * _fraction(gpu, call.dtype, loaded)
        tensor = cost.tensor_flops / rate * 1e6
    vector = cost.vector_slots / (gpu.vector_fp32_tflops * 1e12 / 2) * 1e6
    memory = cost.bytes / (gpu.memory_tb_per_s * 1e12 * constants.stream.fraction) * 1e6
    return tensor, vector, memory


def _fraction(gpu: Gpu, dtype: str, loaded: bool) -> float:
    if gpu.sustained_tensor_fraction is not None:
        return gpu.sustained_tensor_fraction
    if dtype == "fp32":
        return 1.0
    try:
        entry = calibration().tensor(gpu.family, dtype)
    except DescriptionError as error:
        raise DescriptionError(f"gpu {gpu.name}: {error}") from None
    return entry.loaded if loaded or entry.roof is None else entry.roof


def last_wave(call: Kernel, gpu: Gpu) -> float:
    """Time over what it would be if every wave of thread blocks filled the GPU, for the best tile."""
    if call.op != "gemm":
        return 1.0
    shape = dict(call.shape)
    m, n = shape["m"], shape["n"]
    if not m * n:
        return 1.0
    return min(
        math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / gpu.sms) * gpu.sms * rows * columns
        for rows, columns in TILES
    ) / (m * n)


def floor_us(call: Kernel, gpu: Gpu, *, loaded: bool = False) -> float:
    """The largest of the three terms, plus the launch."""
    return max(terms_us(call, gpu, loaded=loaded)) + calibration().launch.us


def project_us(
    measured_us: float, call: Kernel, source: Gpu, target: Gpu, nearest: Kernel | None = None
) -> float:
    """Carry a measurement of ``call`` from one GPU to another, term by term.

    What is above the floor on the source (instruction issue, prologues, imbalance inside the kernel) is time
    on its cores and scales with their rate, or with the memory's where memory is the floor; the floor itself
    is replaced by the target's, with its last wave of thread blocks in place of the source's (of ``nearest``,
    the measured shape).  A kernel below its floor keeps its ratio to it.  Never one ratio for all.
    """
    launch = calibration().launch.us
    here, there = terms_us(call, source), list(terms_us(call, target, loaded=True))
    there[0] *= last_wave(call, target) / last_wave(nearest or call, source)
    floor, body = max(here), max(measured_us - launch, 0.0)
    if body <= floor:
        return max(there) * (body / floor) + launch if floor else launch
    if here[2] == floor:
        scale = source.memory_tb_per_s / target.memory_tb_per_s
    else:
        scale = source.vector_fp32_tflops / target.vector_fp32_tflops
    return max(there) + (body - floor) * scale + launch

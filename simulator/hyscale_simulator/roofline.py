"""The floor under a kernel's time: tensor cores, CUDA cores, memory and the launch; and projection by them."""

import math

from hyscale_simulator.calibration import calibration
from hyscale_simulator.hardware import Gpu
from hyscale_simulator.kernels import Kernel

__all__ = ["floor_us", "project_us", "terms_us"]


def terms_us(call: Kernel, gpu: Gpu) -> tuple[float, float, float]:
    """Microseconds that the tensor work, the vector work and the bytes each need alone.

    Tensor: at the sustained rate, with the last wave of thread blocks paid in full.  Vector: at one
    multiply-add a lane and clock.  Memory: at the copy rate.
    """
    cost, constants = call.cost, calibration()
    tensor = 0.0
    if cost.tensor_flops:
        rate = gpu.tensor_flops_per_s(call.dtype) * sustained(gpu, call.dtype)
        waves = math.ceil(cost.blocks / gpu.sms) * gpu.sms / cost.blocks if cost.blocks else 1.0
        tensor = cost.tensor_flops / rate * waves * 1e6
    vector = cost.vector_slots / (gpu.vector_fp32_tflops * 1e12 / 2) * 1e6
    memory = cost.bytes / (gpu.memory_tb_per_s * 1e12 * constants.stream.fraction) * 1e6
    return tensor, vector, memory


def sustained(gpu: Gpu, dtype: str) -> float:
    """Sustained over data-sheet tensor rate: the description's own figure, else the calibration's."""
    if gpu.sustained_tensor_fraction is not None:
        return gpu.sustained_tensor_fraction
    return calibration().sustained(gpu.family, dtype)


def floor_us(call: Kernel, gpu: Gpu) -> float:
    """The largest of the three terms, plus the launch."""
    return max(terms_us(call, gpu)) + calibration().launch.us


def project_us(measured_us: float, call: Kernel, source: Gpu, target: Gpu) -> float:
    """Carry a measurement of ``call`` from one GPU to another, term by term.

    What is above the floor on the source (instruction issue, prologues, imbalance inside the kernel) is time
    on its cores and scales with their rate, or with the memory's where memory is the floor; the floor itself
    is replaced by the target's.  A kernel below its floor keeps its ratio to it.  Never one ratio for all.
    """
    launch = calibration().launch.us
    here, there = terms_us(call, source), terms_us(call, target)
    floor, body = max(here), max(measured_us - launch, 0.0)
    if body <= floor:
        return max(there) * (body / floor) + launch if floor else launch
    if here[2] == floor:
        scale = source.memory_tb_per_s / target.memory_tb_per_s
    else:
        scale = source.vector_fp32_tflops / target.vector_fp32_tflops
    return max(there) + (body - floor) * scale + launch

"""A Chrome trace of one call, through PyTorch's profiler; Perfetto opens it."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from .op import Draw, Entry

WARM_UPS = 3


def trace(entry: Entry, device: torch.device, path: Path) -> list[tuple[str, float]]:
    """Write the trace of one call after warm-up to ``path``; (kernel, its microseconds), the longest first.

    Without a GPU the kernels are those of the CPU.
    """
    work = entry.op.build(Draw(device), entry.shape)
    on_gpu = device.type == "cuda"

    def once() -> None:
        if work.reset is not None:
            work.reset()
        work.call()
        if on_gpu:
            torch.cuda.synchronize(device)

    for _ in range(WARM_UPS):
        once()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=kinds) as profiler:
        once()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    spent = [
        (event.key, float(event.self_device_time_total if on_gpu else event.self_cpu_time_total))
        for event in profiler.key_averages()
    ]
    return sorted(((name, us) for name, us in spent if us > 0), key=lambda item: -item[1])

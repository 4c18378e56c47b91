"""Processes of a context-parallel group: those that torchrun started, or started here, one a GPU.

On a CPU the ranks talk through gloo, on GPUs through NCCL with NVLink multicast off.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import start_processes

from ..layer import ContextParallel
from ..layer.rows import Split

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
PATIENCE = timedelta(minutes=3)


def start(function: Callable[..., None], size: int, *arguments: Any) -> None:
    """Run ``function(rank, size, store, *arguments)`` in ``size`` new processes, and wait for them.

    They are to call :func:`group_of` with these. Raises ProcessRaisedException with the traceback of the
    first that failed; the others are ended.
    """
    os.environ.update(NO_MULTICAST)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, str(Path(folder) / "store"), *arguments)
        start_processes(function, arguments, nprocs=size, start_method="spawn")


@contextmanager
def group_of(rank: int, size: int, store: str, device: str) -> Iterator[torch.device]:
    """This process as one of ``size`` ranks that meet at the file ``store``; its device."""
    own = _device(device, rank)
    distributed.init_process_group(
        "nccl" if own.type == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=PATIENCE, device_id=own if own.type == "cuda" else None,
    )  # fmt: skip
    try:
        yield own
    finally:
        distributed.destroy_process_group()


@contextmanager
def torchrun_group(
    device: str, split: Split, wanted: int | None = None, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[torch.device, ContextParallel | None]]:
    """This process's device and the group of all processes that torchrun started; None for one alone.

    ``wanted`` is how many ranks the user asked for. RuntimeError if torchrun did not start so many.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if wanted is not None and wanted != size:
        found = f"WORLD_SIZE is {size}" if "WORLD_SIZE" in environment else "it was not started by torchrun"
        raise RuntimeError(
            f"context parallel over {wanted} rank(s): there is no process group of that size, {found}. "
            f"Start it with: torchrun --nproc-per-node {wanted} SCRIPT ..."
        )
    if size == 1:
        yield _device(device, 0), None
        return
    own = _device(device, int(environment.get("LOCAL_RANK", "0")))
    os.environ.update(NO_MULTICAST)
    distributed.init_process_group(
        "nccl" if own.type == "cuda" else "gloo", timeout=PATIENCE,
        device_id=own if own.type == "cuda" else None,
    )  # fmt: skip
    try:
        yield own, ContextParallel.over(split=split)
    finally:
        distributed.destroy_process_group()


def _device(device: str, rank: int) -> torch.device:
    """ValueError for a GPU that is not there."""
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise ValueError(f"device: {device!r}; allowed: 'cpu', 'cuda'")
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if rank >= present:
        raise ValueError(f"device: 'cuda' for rank {rank}; allowed here: at most {present} GPU(s)")
    own = torch.device("cuda", rank)
    torch.cuda.set_device(own)
    return own

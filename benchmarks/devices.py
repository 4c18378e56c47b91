"""What a measuring script sets before torch starts, and what it says about where it ran."""

import os
from typing import Any, Literal


def prepare(device: str) -> None:
    """Call it in every process before hyscale_kernels is imported."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        from hyscale_verify.interpreter import quicken

        quicken()


def usual_device() -> Literal["cpu", "cuda"]:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def header(commit: str, device: str) -> dict[str, Any]:
    """commit and gpu of a record. An empty ``commit`` is asked of git."""
    import torch

    from hyscale_kernels.profiling.machine import git_commit

    return {
        "commit": commit or git_commit(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def surroundings() -> dict[str, Any]:
    """Versions, sources and settings that a measured step depends on."""
    from hyscale_kernels.provenance import environment

    names = ("NCCL_NVLS_ENABLE", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
    found = environment("attention", "baselines", "hytopk", "indexer", "layer", "replay", "training")
    return {**found, "settings": {name: os.environ.get(name, "") for name in names}}

"""What a measuring script sets before torch starts, and what it says about where it ran."""

import os
from collections.abc import Callable
from typing import Any, Literal

import typer

# NVLink multicast stays off: figures are of NCCL's other algorithms.
FIXED = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
USUAL = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def one_of(*allowed: str) -> Callable[[str | None], str | None]:
    """A callback of an option: the value if it is allowed or None, else an error of usage."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{value!r}; allowed: {', '.join(allowed)}")
        return value

    return check


def prepare(device: str | None) -> Literal["cpu", "cuda"]:
    """Call it in every process before torch and hyscale_kernels are imported; gives the device to use.

    None: a GPU if there is one. A CPU runs the kernels in Triton's interpreter.
    """
    os.environ.update(FIXED)
    for name, value in USUAL.items():
        os.environ.setdefault(name, value)
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        return "cuda"
    os.environ["TRITON_INTERPRET"] = "1"
    from hyscale_verify.interpreter import quicken

    quicken()
    return "cpu"


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

    found = environment("attention", "baselines", "hytopk", "indexer", "layer", "replay", "training")
    return {**found, "settings": {name: os.environ.get(name, "") for name in FIXED | USUAL}}

"""What a measuring script sets before torch starts, and what it says about where it ran."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import typer

# NVLink multicast stays off: figures are of NCCL's other algorithms.
FIXED = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
USUAL = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}

# Of a step: those of hyscale_kernels.training.records, which imports torch.
MODES = ("materialised", "hytopk", "hytopk+replay")


def one_of(*allowed: str) -> Callable[[str | None], str | None]:
    """A callback of an option: the value if it is allowed or None, else an error of usage."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{value!r}; allowed: {', '.join(allowed)}")
        return value

    return check


def each_of(*allowed: str) -> Callable[[list[str] | None], list[str] | None]:
    """The same for an option that may be repeated."""
    check = one_of(*allowed)

    def check_each(values: list[str] | None) -> list[str] | None:
        for value in values or ():
            check(value)
        return values

    return check_each


def prepare(device: str | None, *, needs: str = "", gpus: int = 1) -> Literal["cpu", "cuda"]:
    """Call it in every process before torch and hyscale_kernels are imported; gives the device to use.

    device: None for a GPU, or for what runs on either (``needs`` is ""): a GPU if there is one. A CPU runs
    the kernels in Triton's interpreter.
    needs: what was asked for, if it is too large for that. typer.Exit(3), after one line, where it was sent
    to the CPU, or the machine has fewer than ``gpus`` GPUs.
    """
    os.environ.update(FIXED)
    for name, value in USUAL.items():
        os.environ.setdefault(name, value)
    if device == "cpu" and needs:
        raise _stop(f"{needs} needs a GPU; --device cpu is for tiny")
    if device != "cpu":
        import torch

        present = torch.cuda.device_count()
        if present >= gpus:
            return "cuda"
        if device is not None or needs or present:
            wanted = "a GPU" if gpus == 1 else f"{gpus} GPUs"
            found = "none" if present == 0 else f"{present}"
            raise _stop(
                f"{needs or '--device cuda'} needs {wanted}, and PyTorch sees {found} on this machine"
            )
    os.environ["TRITON_INTERPRET"] = "1"
    from hyscale_verify.interpreter import quicken

    quicken()
    return "cpu"


def _stop(message: str) -> typer.Exit:
    """Say why, and the exception that ends the script: the machine is not one to run it on."""
    print(f"{Path(sys.argv[0]).stem}: {message}", file=sys.stderr)
    return typer.Exit(3)


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

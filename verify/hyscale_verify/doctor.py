"""What this machine has, and what can run on it and why not."""

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

from rich.console import Console
from rich.table import Table

from hyscale_ref.command import EXIT_ENVIRONMENT, EXIT_HOLDS
from hyscale_verify.devices import prepare
from hyscale_verify.errors import EnvironmentLackingError

PACKAGES = (
    "hyscale",
    "numpy",
    "torch",
    "triton",
    "hypothesis",
    "simpy",
    "pydantic",
    "flashinfer-python",
    "sgl-deep-gemm",
)


def examined() -> dict[str, Any]:
    """Versions, devices, and what could be run with what stands in its way, null where nothing does."""
    return {
        "schema": 1,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "obstacles": {what: obstacle or None for what, obstacle in _abilities().items()},
    }


def verdict(found: dict[str, Any]) -> int:
    """0 where the suite can run on some device, else 3."""
    return EXIT_ENVIRONMENT if all(found["obstacles"][name] for name in SUITE) else EXIT_HOLDS


def show(found: dict[str, Any], console: Console) -> None:
    """Print what was found."""
    console.print(f"Python {found['python']} on {found['platform']}, {found['cpus']} CPUs")
    console.print(", ".join(f"{name} {version or 'missing'}" for name, version in found["packages"].items()))
    for line in found["devices"] or ["no torch, so no GPU can be seen"]:
        console.print(line)
    table = Table(box=None, pad_edge=False)
    for column in ("what", "runs here", "why"):
        table.add_column(column)
    for what, obstacle in found["obstacles"].items():
        table.add_row(what, "[red]no[/]" if obstacle else "[green]yes[/]", obstacle or "")
    console.print(table)


SUITE = ("hyscale verify --device cpu", "hyscale verify --device cuda")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return [f"no CUDA device (torch {torch.__version__}, built for CUDA {torch.version.cuda or 'none'})"]
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found.append(
            f"cuda:{index} {device.name}, compute capability {device.major}.{device.minor}, "
            f"{device.multi_processor_count} SMs, {device.total_memory / 2**30:.0f} GiB; "
            f"CUDA {torch.version.cuda}"
        )
    return found


def _abilities() -> dict[str, str]:
    """What could be run, and what stands in its way (empty: nothing)."""
    verify = _missing("torch", "triton", "hypothesis")
    abilities = {}
    for command, device in zip(SUITE, ("cpu", "cuda"), strict=True):
        abilities[command] = verify or _obstacle(device)
    cuda = abilities[SUITE[1]]
    abilities["hyscale verify --target flashinfer"] = cuda or _missing("flashinfer")
    abilities["properties of streams, graphs and peak memory"] = cuda
    abilities["properties of a second device"] = cuda or _second_device()
    abilities["hyscale mutants"] = abilities[SUITE[0]] and cuda
    abilities["hyscale profile run, race, trace"] = _missing("torch", "triton") or _obstacle("cuda")
    abilities["plots of hyscale profile show"] = _missing("matplotlib")
    abilities["hyscale simulate, explain, sweep, plan"] = _missing("simpy", "scipy", "pydantic", "pandas")
    return abilities


def _missing(*modules: str) -> str:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def _obstacle(device: str) -> str:
    environment = dict(os.environ)
    try:
        prepare(device)
    except EnvironmentLackingError as error:
        return str(error)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return ""


def _second_device() -> str:
    import torch

    return "" if torch.cuda.device_count() > 1 else "one CUDA device only"

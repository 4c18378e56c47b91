"""What this machine has, and what can run on it and why not."""

import importlib.metadata
import importlib.util
import os
import platform

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


def report(console: Console) -> int:
    """Print versions, devices and abilities; 0 where the suite can run on some device, else 3."""
    console.print(f"Python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs")
    console.print(", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    for line in _devices():
        console.print(line)
    table = Table(box=None, pad_edge=False)
    for column in ("what", "runs here", "why"):
        table.add_column(column)
    abilities = _abilities()
    for what, obstacle in abilities.items():
        table.add_row(what, "[red]no[/]" if obstacle else "[green]yes[/]", obstacle)
    console.print(table)
    return EXIT_HOLDS if not all(abilities[name] for name in SUITE) else EXIT_ENVIRONMENT


SUITE = ("hyscale verify --device cpu", "hyscale verify --device cuda")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _devices() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return ["no torch, so no GPU can be seen"]
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

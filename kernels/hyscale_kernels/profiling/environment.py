"""What the commands share: where messages go, and the answer without a GPU."""

from pathlib import Path

import typer
from rich.console import Console

from hyscale_ref.command import EXIT_ENVIRONMENT
from hyscale_ref.output import check_writable

err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def say(message: str) -> None:
    """One line on standard error."""
    err.print(f"hyscale profile: {message}")


def stop(code: int, message: str) -> typer.Exit:
    """Say why, and the exception that ends the command with ``code``."""
    say(message)
    return typer.Exit(code)


def writable(option: str, path: Path | None) -> None:
    """A usage error, before any work, where a result could not be written."""
    try:
        check_writable(path)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def need_gpu() -> None:
    """End the command with exit code 3 on a machine without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise stop(EXIT_ENVIRONMENT, "needs a CUDA device, and PyTorch sees none on this machine")

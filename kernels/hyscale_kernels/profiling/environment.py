"""What the commands share: exit codes, where messages go, and the answer on a machine without a GPU."""

import typer
from rich.console import Console

EXIT_FAILED, EXIT_USAGE, EXIT_ENVIRONMENT = 1, 2, 3

err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def say(message: str) -> None:
    """One line on standard error."""
    err.print(f"hyscale profile: {message}")


def stop(code: int, message: str) -> typer.Exit:
    """Say why, and the exception that ends the command with ``code``."""
    say(message)
    return typer.Exit(code)


def need_gpu() -> None:
    """End the command with exit code 3 on a machine without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise stop(EXIT_ENVIRONMENT, "needs a CUDA device, and PyTorch sees none on this machine")

"""What the commands share: exit codes, where messages and results go, and the answer without a GPU."""

import json
import sys
from pathlib import Path
from typing import Any

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


def write_json(path: Path, record: dict[str, Any]) -> None:
    """To a file, or to standard output for -."""
    text = json.dumps(record, indent=1) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


def need_gpu() -> None:
    """End the command with exit code 3 on a machine without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise stop(EXIT_ENVIRONMENT, "needs a CUDA device, and PyTorch sees none on this machine")

"""Where a command's result goes: a file, a pipe, or standard output. Standard library only."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def to_standard_output(path: Path | None) -> bool:
    """Whether ``path`` is -, so that nothing else may be printed there."""
    return path is not None and str(path) == "-"


def check_writable(path: Path | None) -> None:
    """Find out before the work, not after, that a result cannot be written: ValueError says why.

    What exists and is no file, a device or a pipe, is taken as it is; None and - always pass.
    """
    if path is None or to_standard_output(path):
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{path} is a folder; allowed: a file name")
    if not folder.is_dir():
        raise ValueError(f"{path}; its folder does not exist")
    if path.exists() and not path.is_file():
        return
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def write_json(path: Path, record: Any, *, allow_nan: bool = True) -> None:
    """To a file, in one step: a reader sees the old one or the whole new one; to standard output for -.

    A device or a pipe is written to, not replaced. Without ``allow_nan`` such a number is a ValueError;
    OSError names the path.
    """
    text = json.dumps(record, indent=1, allow_nan=allow_nan) + "\n"
    if to_standard_output(path):
        sys.stdout.write(text)
        return
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:  # of the file that was asked for, not of the one beside it
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        beside.unlink(missing_ok=True)

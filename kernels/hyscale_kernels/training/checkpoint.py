"""Checkpoints: whole or not at all, and only for the run that they belong to."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from .trainer import Trainer

SCHEMA = 1
PARTS = {"identity": dict, "step": int, "model": dict, "optimizer": dict}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or used for this run; the message says which and why."""


class NotSavedError(CheckpointError):
    """A checkpoint that cannot be written."""


def save(trainer: Trainer, path: Path) -> None:
    """Write the run's state to ``path``: first to a temporary file beside it, which then takes its name.

    Rank 0 writes; every rank must call it. :class:`NotSavedError` on every rank where it cannot (a full
    disk, say): what was at ``path`` is then still there, and the temporary file is not.
    """
    fault = ""
    if trainer.context is None or trainer.context.rank == 0:
        try:
            _write(trainer, path)
        except NotSavedError as error:
            fault = str(error)
    if trainer.context is not None:
        faults: list[Any] = [fault]
        root = distributed.get_global_rank(trainer.context.group, 0)
        distributed.broadcast_object_list(
            faults, src=root, group=trainer.context.group, device=trainer.device
        )
        fault = faults[0]
    if fault:
        raise NotSavedError(fault)


def _write(trainer: Trainer, path: Path) -> None:
    state = {
        "schema": SCHEMA,
        "identity": trainer.identity(),
        "step": trainer.done,
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch's archive writer turns what a stream raises into either
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        full = not isinstance(error, OSError) or error.errno in FULL
        space = f". Free space for about {_size(state) / 2**20:.0f} MiB, or save elsewhere" if full else ""
        kept = "; the earlier checkpoint at this path is untouched" if path.exists() else ""
        raise NotSavedError(f"{path}: not saved: {why}{space}{kept}") from error


def load(trainer: Trainer, path: Path) -> None:
    """Bring ``trainer`` to where the checkpoint was saved.

    How many steps the last phase has may differ: a run can be prolonged. :class:`CheckpointError` for a
    file that is missing or damaged, and for a checkpoint of another configuration, naming the fields that
    differ; the trainer is then as it was.
    """
    try:
        state = torch.load(path, map_location=trainer.device, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no checkpoint") from None
    except Exception as error:  # a damaged archive shows as any of a dozen errors
        raise CheckpointError(f"{path}: not a readable checkpoint, which training.save writes") from error
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise CheckpointError(f"{path}: not a checkpoint of schema {SCHEMA}")
    lacking = [name for name, kind in PARTS.items() if not isinstance(state.get(name), kind)]
    if lacking:
        raise CheckpointError(f"{path}: not a whole checkpoint: it has no {', no '.join(lacking)}")
    ours = trainer.identity()
    last = f"phases.{len(ours['phases']) - 1}.steps"
    found = [text for name, text in differences(state["identity"], ours) if name != last]
    if found:
        raise CheckpointError(f"{path}: of another configuration: " + "; ".join(found))
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.done = state["step"]


def differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(dotted name, "name: <saved> in the checkpoint, <ours> here") of each field that differs."""
    left, right = dict(_leaves(saved)), dict(_leaves(ours))
    return [
        (name, f"{name}: {left.get(name, 'absent')} in the checkpoint, {right.get(name, 'absent')} here")
        for name in sorted(left.keys() | right.keys())
        if left.get(name, ...) != right.get(name, ...)
    ]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{name}.{number}")
    else:
        yield name, value


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0

"""Activation recomputation of a layer: keep everything, recompute all, or recompute all but the selection."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from ..replay import checkpoint_with_replay
from .config import Recompute

P = ParamSpec("P")
R = TypeVar("R")


def recomputed(how: Recompute, label: str, function: Callable[P, R], *args: Any) -> R:
    """``function(*args)``, whose activations are kept or recomputed in the backward pass as ``how`` says.

    ``label`` is attached to errors. Without gradients there is nothing to keep. Records belong to the
    checkpoint frame of this very call, so that microbatches in flight cannot meet.
    """
    if how == "none" or not torch.is_grad_enabled():
        return function(*args)  # type: ignore[call-arg]
    if how == "full":
        whole: R = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        return whole
    return checkpoint_with_replay(function, *args, label=label, preserve_rng_state=False)

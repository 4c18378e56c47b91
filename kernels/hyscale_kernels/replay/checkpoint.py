"""Replay for PyTorch's own checkpointing: a selective policy that keeps the packed record, and only it.

The record belongs to the checkpoint frame: microbatches in flight, nested regions and torch.compile are as
safe as the frame is. PyTorch itself refuses a second backward pass, a changed order of operators and a kept
tensor that was written to.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..hytopk.api import NAMESPACE
from .errors import ReplayError

P = ParamSpec("P")
R = TypeVar("R")
Policy = Callable[..., CheckpointPolicy | bool]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def kept_operators() -> list[Any]:
    """The operators whose results replay keeps: the packed record, and 16 bytes about windows and inputs."""
    operators = getattr(torch.ops, NAMESPACE)
    return [operators.hytopk_record.default, operators.fingerprint.default]


def replay_policy(policy: Policy | None = None) -> Policy:
    """A selective checkpoint policy: keep the record; ask ``policy`` (default: recompute) about all else.

    Raises ReplayError at a plain ``hytopk`` inside the region, which would be selected again.
    """
    kept = kept_operators()
    plain = getattr(torch.ops, NAMESPACE).hytopk.default

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        if operator in kept:
            return CheckpointPolicy.MUST_SAVE
        if operator is plain:
            raise ReplayError(
                "hytopk was called in a region with replay, and would select again in the recomputation: "
                "call hyscale_kernels.replay.select instead"
            )
        if policy is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return policy(context, operator, *args, **kwargs)

    return decide


def replay_context_fn(policy: Policy | None = None) -> Contexts:
    """For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=replay_context_fn)``.

    To combine it with a selective policy of your own: ``functools.partial(replay_context_fn, policy)``.
    """
    contexts: Contexts = create_selective_checkpoint_contexts(replay_policy(policy))
    return contexts


def checkpoint_with_replay(
    function: Callable[P, R],
    *args: Any,
    use_reentrant: bool = False,
    policy: Policy | None = None,
    label: str = "",
    **kwargs: Any,
) -> R:
    """``torch.utils.checkpoint.checkpoint`` that recomputes everything but the selections.

    ``function`` selects by ``replay.select``. ``policy`` is asked about other operators. ``label`` ("layer 3,
    microbatch 1") is attached as a note to errors raised inside. Other keyword arguments go to checkpoint and
    ``function``. Nested regions each need replay: a region that is recomputed without it raises ReplayError.

    Raises ValueError for ``use_reentrant=True``, which runs no policy: use a SelectionTape there.
    """
    if use_reentrant:
        raise ValueError(
            "use_reentrant is True; reentrant checkpointing runs no selective policy, so the selection would "
            "run twice. Pass use_reentrant=False, or record with a SelectionTape"
        )
    if "context_fn" in kwargs:
        raise ValueError(
            "context_fn is given; pass policy=..., or checkpoint with replay_context_fn yourself"
        )
    run = _labelled(function, label) if label and not torch.compiler.is_compiling() else function
    contexts = replay_context_fn if policy is None else _with(policy)
    result: R = checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    return result


def _with(policy: Policy) -> Callable[[], Contexts]:
    return lambda: replay_context_fn(policy)


def _labelled(function: Callable[P, R], label: str) -> Callable[P, R]:
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            error.add_note(f"in the region with replay: {label}")
            raise

    return run

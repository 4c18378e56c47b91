"""Where a training step spends its time: an unbroken line of marks on the stream, each naming what follows.

A mark ends one part and begins the next, so the parts of a step sum to the whole. On a GPU a mark is a CUDA
event on the current stream: nothing waits for the device until :meth:`PartTimer.report`. Waiting for a
collective is a part like any other, so "communication" is what was not hidden behind computation.

The forward pass marks with :func:`part`; :func:`region` also marks the backward pass, by an identity whose
gradient begins the part. A part that runs inside the backward pass without being one is recomputation.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch

R = TypeVar("R")
Pass = Literal["forward", "recompute", "backward"]
Mark = torch.cuda.Event | float

OTHER = "other"


class PartTimer:
    """Milliseconds by part of one step after the other; belongs to the training loop.

    timer = PartTimer(device)
    timer.start(); loss = model(...); loss.backward(); optimizer.step(); timer.report()
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._marks: list[tuple[str, Mark]] = []

    def start(self) -> None:
        """Begin a step; what was marked before is forgotten."""
        self._marks = []
        self.switch(OTHER)

    @property
    def current(self) -> str:
        """The part that is running, with its pass: "selection.recompute"."""
        return self._marks[-1][0] if self._marks else OTHER

    def switch(self, name: str) -> None:
        """End the running part and begin ``name``."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def report(self) -> dict[str, float]:
        """Milliseconds by part, "<part>.<forward|recompute|backward>" or "other", since :meth:`start`.

        Ends the step, and waits for the device. RuntimeError if no step was started.
        """
        if not self._marks:
            raise RuntimeError("no step is running; call start() first")
        self.switch(OTHER)
        marks, self._marks = self._marks, []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spent: dict[str, float] = {}
        for (name, begin), (_, end) in pairwise(marks):
            spent[name] = spent.get(name, 0.0) + _milliseconds(begin, end)
        return spent


@contextmanager
def part(timer: PartTimer | None, name: str, kind: Pass | None = None) -> Iterator[None]:
    """Account the time inside to ``name``; ``kind`` is found out if it is not given."""
    if timer is None:
        yield
        return
    before = timer.current
    timer.switch(f"{name}.{kind or _pass()}")
    try:
        yield
    finally:
        timer.switch(before)


def region(timer: PartTimer | None, name: str, function: Callable[..., R], *inputs: Any) -> R:
    """``function(*inputs)`` as part ``name``, its backward pass included.

    ``function`` returns a tensor, or a tuple with tensors in it; gradients are unchanged.
    """
    if timer is None:
        return function(*inputs)
    with part(timer, name):
        result: Any = function(*inputs)
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    places = [i for i, each in enumerate(parts) if isinstance(each, torch.Tensor) and each.requires_grad]
    if places:
        marked = _Begin.apply(timer, name, *(parts[i] for i in places))
        for i, each in zip(places, marked, strict=True):
            parts[i] = each
    whole: Any = parts[0]
    if not isinstance(result, torch.Tensor):
        whole = type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    rebuilt: R = whole
    return rebuilt


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, timer: PartTimer, name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.timer, ctx.name = timer, name
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.timer.switch(f"{ctx.name}.backward")
        return None, None, *gradients


def _pass() -> Pass:
    return "recompute" if torch._C._current_graph_task_id() != -1 else "forward"


def _milliseconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return (end - begin) * 1e3
    return float(begin.elapsed_time(end))

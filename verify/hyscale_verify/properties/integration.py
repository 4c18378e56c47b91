"""HyTopK as an operator of torch: schema, compilation, checkpointing, streams, graphs, launches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyscale_verify.cases import DTYPES, Tensors
from hyscale_verify.properties.base import FalsifiedError, InapplicableError, Property, Trial, promise
from hyscale_verify.properties.judge import same_bits
from hyscale_verify.strategies import cases
from hyscale_verify.targets import Result, result_of

ORDINARY = ("tie_rich", "random_normal")
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every call of an operator in one namespace."""

    def __init__(self, namespace: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.namespace = namespace
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == self.namespace:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _call(trial: Trial, inputs: Tensors, **options: Any) -> Any:
    return trial.hytopk.api.hytopk(inputs.q, inputs.k, inputs.w, inputs.top_k, **inputs.keywords, **options)


@promise(
    "torch",
    (*ORDINARY, "row_lengths"),
    needs=["hytopk"],
    share=0.2,
    why_few="each example runs the operator a dozen times",
)
def opcheck(trial: Trial) -> None:
    """torch.library.opcheck accepts the operator: schema, fake tensors, autograd registration, tracing."""
    inputs = trial.case.tensors(trial.device)
    with Recorder(trial.hytopk.package) as recorder:
        _call(trial, inputs, return_scores=trial.draw(st.booleans(), "return_scores"))
    if not recorder.calls:
        raise FalsifiedError(f"no operator of the namespace {trial.hytopk.package} was called")
    # The schema test multiplies every input by one, which torch cannot do to float8.
    tests = OPCHECKS[1:] if trial.case.dtype == "fp8" else OPCHECKS
    for operator, args, kwargs in recorder.calls:
        try:
            torch.library.opcheck(operator, args, kwargs, test_utils=tests)
        except Exception as error:
            raise FalsifiedError(f"opcheck of {operator}: {error}") from error


@promise(
    "torch",
    (*ORDINARY, "relu_plateau"),
    needs=["hytopk"],
    share=0.2,
    why_few="each example is compiled",
)
def torch_compile(trial: Trial) -> None:
    """Under torch.compile(fullgraph=True) the same bits come out."""
    _compiled(trial, dynamic=False)


@promise(
    "torch",
    ("tie_rich",),
    needs=["hytopk"],
    share=0.05,
    why_few="each example is compiled with symbolic sizes, which takes many seconds",
)
def torch_compile_dynamic(trial: Trial) -> None:
    """Under torch.compile(fullgraph=True, dynamic=True), sizes unknown, the same bits come out."""
    _compiled(trial, dynamic=True)


def _compiled(trial: Trial, dynamic: bool) -> None:
    trial.assume(trial.case.dtype != "fp8")  # there is no arithmetic on float8 to compile around it
    inputs = trial.case.tensors(trial.device)
    call = trial.hytopk.api.hytopk

    def model(inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        selection = call(
            inputs.q * 1, inputs.k, inputs.w, inputs.top_k, **inputs.keywords, return_scores=True
        )
        return selection.indices + 0, selection.count, selection.scores

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    indices, count, scores = (each.cpu().numpy() for each in compiled(inputs))
    whole = trial.select(trial.case.with_(sizes=None), return_scores=True)
    same_bits(Result(indices, count, scores), whole, "under torch.compile")


@promise("torch", (*ORDINARY, "relu_plateau"), needs=["hytopk"])
def selective_checkpoint(trial: Trial) -> None:
    """A selective checkpoint that saves the operator selects once, and gradients equal those without it."""
    inputs = trial.case.tensors(trial.device)
    T, S = trial.case.num_queries, trial.case.num_keys
    generator = torch.Generator().manual_seed(trial.draw(st.integers(0, 2**31 - 1), "seed"))
    values = torch.randn((T, S), generator=generator).to(trial.device)

    def layer(table: torch.Tensor) -> torch.Tensor:
        selection = _call(trial, inputs)
        chosen = torch.tanh(table).gather(1, selection.indices.clamp(min=0).long())
        return torch.where(selection.indices >= 0, chosen, 0.0).square().sum()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = getattr(operator, "namespace", None) == trial.hytopk.package
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    gradients, selections = [], []
    wrappers: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        layer,
        partial(
            checkpoint,
            layer,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
        ),
    )
    for run in wrappers:
        table = values.clone().requires_grad_()
        with Recorder(trial.hytopk.package) as recorder:
            run(table).backward()  # type: ignore[no-untyped-call]
        gradients.append(table.grad)
        selections.append(len(recorder.calls))
    if selections[1] != selections[0]:
        raise FalsifiedError(f"{selections[1]} selections with the checkpoint, {selections[0]} without")
    first, second = gradients
    assert first is not None
    assert second is not None
    if not torch.equal(first, second):
        raise FalsifiedError("gradients with the checkpoint differ from those without")


@contextmanager
def _compilations() -> Iterator[list[str]]:
    """Names of the Triton kernels compiled inside the block."""
    import triton

    names: list[str] = []

    def note(**event: Any) -> None:
        names.append(str(getattr(event.get("fn"), "name", "a kernel")))

    previous = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = previous


@promise("control", ("random_normal",), needs=["hytopk"], device="cuda")
def no_recompilation(trial: Trial) -> None:
    """Once warmed up for H, D and dtype, no call compiles anything, whatever T, S, K and windows are."""
    T, S = trial.draw(st.integers(1, 300), "T"), trial.draw(st.integers(2000, 20000), "S")
    case = trial.case
    _, H, D = case.q.shape
    trial.hytopk.api.warm_up(H, D, DTYPES[case.dtype], trial.device)
    with _compilations() as compiled:
        trial.select(_resized(trial, case.top_k, T, S))
    if compiled:
        raise FalsifiedError(f"T={T} and S={S} compiled {', '.join(sorted(set(compiled)))}")


def _resized(trial: Trial, top_k: int, rows: int, keys: int) -> Any:
    case = trial.case
    drawn = trial.data.draw(cases("random_normal", trial.space.exactly(rows, keys, top_k), ("ragged",)))
    _, H, D = case.q.shape
    return drawn.with_(
        dtype=case.dtype,
        q=_tiled(case.q, (rows, H, D)),
        k=_tiled(case.k, (keys, D)),
        w=_tiled(case.w, (rows, H)),
        k_scale=None if case.k_scale is None else _tiled(case.k_scale, (keys,)),
        sizes=None,
    )


def _tiled(array: Any, shape: tuple[int, ...]) -> Any:
    return np.resize(array, shape).astype(np.float32)


@promise("control", (*ORDINARY, "nan", "relu_plateau"), needs=["hytopk"], device="cuda")
def no_host_synchronisation(trial: Trial) -> None:
    """The call never waits for the device (torch's synchronisation check set to raise)."""
    inputs = trial.case.tensors(trial.device)
    plan = trial.hytopk.plan(trial.case)
    _call(trial, inputs, plan=plan)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _call(trial, inputs, plan=plan)
    except RuntimeError as error:
        raise FalsifiedError(str(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


@promise("control", (*ORDINARY, "relu_plateau", "packed_windows"), needs=["hytopk"], device="cuda")
def cuda_graph(trial: Trial) -> None:
    """A captured call replays on changed inputs and windows as a fresh call would."""
    case = trial.case
    plan = trial.hytopk.plan(case)
    static = case.tensors(trial.device)
    trial.select()  # compile before capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selection = _call(trial, static, return_scores=True, plan=plan)
    changed = case.with_(
        q=case.q[::-1].copy(), k=-case.k[::-1], start=(case.start * 0), end=case.end - (case.end > 0)
    )
    for step, each in enumerate((case, changed, case)):
        fresh = each.tensors(trial.device)
        for name in ("q", "k", "w", "start", "end"):
            getattr(static, name).copy_(getattr(fresh, name))
        graph.replay()
        torch.cuda.synchronize()
        same_bits(result_of(selection), trial.select(each, return_scores=True), f"replay {step} of the graph")


@promise(
    "control", ORDINARY, needs=["hytopk"], device="cuda", share=0.3, why_few="one device is like another"
)
def another_device(trial: Trial) -> None:
    """On a device that is not the current one: the same bits, and the current device stays."""
    if torch.cuda.device_count() < 2:
        raise InapplicableError("needs two CUDA devices")
    here = trial.select()
    there = trial.case.tensors("cuda:1")
    same_bits(result_of(_call(trial, there, plan=trial.hytopk.plan(trial.case))), here, "on cuda:1")
    if torch.cuda.current_device() != 0:
        raise FalsifiedError(f"the call left cuda:{torch.cuda.current_device()} as the current device")


PROPERTIES: tuple[Property, ...] = (
    opcheck,
    torch_compile,
    torch_compile_dynamic,
    selective_checkpoint,
    no_recompilation,
    no_host_synchronisation,
    cuda_graph,
    another_device,
)

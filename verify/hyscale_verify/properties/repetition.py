"""Determinism: the same bits whatever happens around a call."""

import torch
from hypothesis import strategies as st

from hyscale_verify.cases import LAYOUTS
from hyscale_verify.memory import PATTERNS, watched_allocations
from hyscale_verify.properties.base import FalsifiedError, Property, Trial, promise
from hyscale_verify.properties.judge import own_memory, same_bits
from hyscale_verify.targets import result_of

ANY = ("tie_rich", "random_normal", "duplicated_keys", "relu_plateau", "ulp_neighbours", "nan")


@promise("deterministic", ANY)
def repeated_calls(trial: Trial) -> None:
    """Three calls in a row give the same bits."""
    first = trial.select()
    for _ in range(2):
        same_bits(trial.select(), first, "a repeated call")


@promise("deterministic", (*ANY, "row_lengths", "packed_windows"))
def poisoned_memory(trial: Trial) -> None:
    """Outputs and workspace that start as other bytes give the same bits: nothing unwritten is read."""
    one = trial.draw(st.sampled_from(PATTERNS), "first filling")
    two = trial.draw(st.sampled_from(PATTERNS[::-1]), "second filling")
    with own_memory("over filled memory"):
        with watched_allocations(one):
            first = trial.select()
        with watched_allocations(two):
            second = trial.select()
    same_bits(second, first, "over differently filled memory")


@promise(
    "deterministic", ("exact_integers", "random_normal", "odd_sizes", "strided_storage"), needs=["fused"]
)
def memory_layout(trial: Trial) -> None:
    """Row padding, storage offset and axis order of q and k do not matter."""
    first = trial.select(trial.case.with_(layout="contiguous"))
    for layout in LAYOUTS[1:]:
        same_bits(trial.select(trial.case.with_(layout=layout)), first, layout)


@promise("deterministic", ("tie_rich", "relu_plateau", "random_normal"), needs=["hytopk"])
def gradient_mode(trial: Trial) -> None:
    """With gradients required, without, under no_grad and under inference mode: the same bits."""
    inputs = trial.case.tensors(trial.device)
    trial.assume(trial.case.dtype != "fp8")  # torch has no gradients with respect to float8
    call = trial.hytopk.api.hytopk
    first = trial.select()
    tracked = [each.clone().requires_grad_() for each in (inputs.q, inputs.k, inputs.w)]
    same_bits(result_of(call(*tracked, inputs.top_k, **inputs.keywords)), first, "with gradients required")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same_bits(trial.select(), first, f"under {mode.__name__}")


@promise("deterministic", ("tie_rich", "nan", "strided_storage"), needs=["fused"])
def inputs_stay_as_they_are(trial: Trial) -> None:
    """No argument is written to."""
    before, given = trial.case.tensors(trial.device), trial.case.tensors(trial.device)
    trial.target.select(trial.case, given)
    for name in ("q", "k", "w", "start", "end", "k_scale"):
        one, two = getattr(before, name), getattr(given, name)
        if one is not None and not torch.equal(one.view(torch.uint8), two.view(torch.uint8)):
            raise FalsifiedError(f"{name} was written to")


@promise("deterministic", ANY, needs=["hytopk"], device="cuda")
def second_stream(trial: Trial) -> None:
    """A call on another stream gives the same bits, and so do two calls at once on two streams."""
    first = trial.select()
    side, other = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
    inputs = trial.case.tensors(trial.device)
    torch.cuda.synchronize()
    selections = []
    for stream in (side, other):
        with torch.cuda.stream(stream):
            selections.append(
                trial.hytopk.api.hytopk(inputs.q, inputs.k, inputs.w, inputs.top_k, **inputs.keywords)
            )
    torch.cuda.synchronize()
    for selection in selections:
        same_bits(result_of(selection), first, "on another stream")


PROPERTIES: tuple[Property, ...] = (
    repeated_calls,
    poisoned_memory,
    memory_layout,
    gradient_mode,
    inputs_stay_as_they_are,
    second_stream,
)

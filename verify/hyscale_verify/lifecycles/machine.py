"""A stateful machine for selection replay: drawn schedules, judged by a model that is a dictionary.

The model knows, for each record, the selection that belongs to it and who has replayed it. Every step either
gives exactly what the model says, or is a misuse, which must raise ReplayError and leave everything as it
was.

Shape letters: T queries, S keys, H indexer heads, D indexer head size, K = top_k.
"""

import importlib
import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.utils.checkpoint import checkpoint

from hyscale_verify.properties.base import FalsifiedError

T, S, H, D, K = 3, 12, 1, 16, 4
MICROBATCHES, LAYERS, PROBLEMS = (0, 1, 2), (0, 1, 2), 4
INPUTS = ("dtype", "heads", "head size")  # unknown of a loaded record, and not named by reuse
MISUSES = (
    "top_k",
    "rows",
    "keys",
    "start",
    "end",
    "undeclared",
    "no run",
    "read again",
    "new frame",
    *INPUTS,
)


class _InterruptedError(Exception):
    """Raised inside a region on purpose."""


@dataclass
class Problem:
    """Inputs of one selection, with ties at the cut, and what HyTopK selects."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    indices: torch.Tensor

    @property
    def windows(self) -> dict[str, torch.Tensor]:
        return {"start": self.start, "end": self.end}


@dataclass
class Known:
    """What the model knows of a record; ``near``: whether it is on its device, ``loaded``: from elsewhere."""

    problem: int
    nbytes: int
    consumers: list[int]
    near: bool
    loaded: bool = False
    replayed: list[int] = field(default_factory=list)

    @property
    def waiting(self) -> list[int]:
        return [each for each in self.consumers if each not in self.replayed]


class Kit:
    """The judged package and a few problems that it has solved, shared by all examples."""

    def __init__(self, package: str, device: str) -> None:
        self.replay = importlib.import_module(f"{package}.replay")
        self.hytopk = importlib.import_module(f"{package}.hytopk").hytopk
        generator = np.random.default_rng(7)
        self.device = device

        def integers(*shape: int) -> torch.Tensor:
            return torch.from_numpy(generator.integers(-1, 2, shape).astype(np.float32)).to(device)

        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.problems = []
        for number in range(PROBLEMS):
            q, k, w = integers(T, H, D).to(dtype), integers(S, D).to(dtype), integers(T, H)
            start = torch.tensor([0, number, 2], dtype=torch.int32, device=device)
            end = torch.tensor([S, S - number, 4], dtype=torch.int32, device=device)
            chosen = self.hytopk(q, k, w, K, start=start, end=end).indices
            self.problems.append(Problem(q, k, w, start, end, chosen))
        self.streams: list[Any] = []
        if device != "cpu":
            torch.cuda.synchronize()
            self.streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(2))]  # type: ignore[no-untyped-call]


def _tried_again(call: Callable[[], Any]) -> Any:
    """``call()``, once more if it was interrupted.

    Not while the exception lives: it keeps alive what PyTorch's checkpoint has put on its stack of hooks.
    """
    with suppress(_InterruptedError):
        return call()
    return call()


def machine_of(kit: Kit) -> type[RuleBasedStateMachine]:
    """The machine that judges ``kit``'s package."""
    replay = kit.replay
    microbatches, layers = st.sampled_from(MICROBATCHES), st.sampled_from(LAYERS)
    problems = st.sampled_from(range(PROBLEMS))
    sharing = st.sampled_from(((), (1,), (1, 2), (2,)))

    class Lifecycle(RuleBasedStateMachine):
        """One training step after the other on one tape."""

        @initialize(offload=st.booleans(), prefetch=st.integers(0, 2))
        def start(self, offload: bool, prefetch: int) -> None:
            self.offload, self.prefetch = offload, prefetch
            self.tape = replay.SelectionTape(offload=offload, prefetch=prefetch)
            self.frames: dict[int, Any] = {}
            self.model: dict[tuple[int, int], Known] = {}
            self.exported: list[tuple[int, Any]] = []

        # What a correct use does

        @rule(microbatch=microbatches, layer=st.just(0), problem=problems, others=sharing)
        def forward(self, microbatch: int, layer: int, problem: int, others: tuple[int, ...]) -> None:
            """A forward pass of one layer, whose selection the layers in ``others`` read as well."""
            if self._taken(microbatch, layer):
                return
            frame = self._frame(microbatch)
            with frame.recording():
                self._same(self._select(frame, layer, problem, consumers=others), problem, "recorded")
                for other in others:
                    self._same(self._reuse(frame, other, layer, problem), problem, "read by another layer")
            self._know(microbatch, layer, problem, [layer, *others])

        @rule(
            microbatch=microbatches,
            chosen=st.sampled_from(((1,), (2,), (1, 2), (2, 1))),
            problem=problems,
        )
        def forward_of_later_layers(self, microbatch: int, chosen: tuple[int, ...], problem: int) -> None:
            for layer in chosen:
                if self._taken(microbatch, layer):
                    continue
                frame = self._frame(microbatch)
                with frame.recording():
                    self._same(self._select(frame, layer, problem), problem, "recorded")
                self._know(microbatch, layer, problem, [layer])

        @precondition(lambda self: any(each.waiting for each in self.model.values()))
        @rule(data=st.data(), misuses=st.lists(st.sampled_from(MISUSES), min_size=1, max_size=3))
        def backward(self, data: st.DataObject, misuses: list[str]) -> None:
            """Recomputations of consumers of any records, each after a misuse of the same record."""
            for what in misuses:
                if not any(known.waiting for known in self.model.values()):
                    return
                (microbatch, layer), consumer = self._draw_waiting(data)
                if what not in INPUTS or (consumer == layer and not self.model[microbatch, layer].loaded):
                    self._misused(microbatch, layer, consumer, what)
                if (microbatch, layer) not in self.model:
                    return  # the step was ended to learn what the device found
                self._replay(microbatch, layer, consumer, "replayed")
                self._accounted()

        @rule(
            microbatch=microbatches,
            problem=problems,
            reentrant=st.booleans(),
            inner=st.booleans(),
            failing=st.sampled_from((0, 0, 1, 2, 3)),
        )
        def region(self, microbatch: int, problem: int, reentrant: bool, inner: bool, failing: int) -> None:
            """A region through PyTorch's checkpoint, perhaps with another around it: recorded, replayed, and
            refused to a second backward pass. The run of number ``failing`` raises, and is tried again."""
            if self._taken(microbatch, 0):
                return
            frame = self._frame(microbatch)
            x = torch.ones(2, device=kit.device, requires_grad=True)
            seen: list[torch.Tensor] = []

            def body(x: torch.Tensor) -> torch.Tensor:
                indices = self._select(frame, 0, problem).indices
                seen.append(indices)
                if len(seen) == failing:
                    raise _InterruptedError
                product: torch.Tensor = x.sin() * indices.sum()
                return product

            def checkpointed(x: torch.Tensor) -> torch.Tensor:
                inside: torch.Tensor = checkpoint(frame.region(body), x, use_reentrant=reentrant)
                return inside.cos()

            def forward() -> torch.Tensor:
                if not inner:
                    return checkpointed(x)
                outside: torch.Tensor = checkpoint(frame.region(checkpointed), x, use_reentrant=reentrant)
                return outside

            def backward() -> None:
                loss.backward(retain_graph=True)

            loss = _tried_again(forward).sum()
            if inner and failing == 3:
                # The region around it has been replayed by then, and is not again.
                with suppress(_InterruptedError):
                    backward()
                self._know(microbatch, 0, problem, [0])
                self._fetched(microbatch, 0)
                self._refused(backward, "replayed around a region that failed", None, microbatch)
                return
            _tried_again(backward)
            self._fetched(microbatch, 0)
            for indices in seen:
                if not torch.equal(indices, kit.problems[problem].indices):
                    raise FalsifiedError(f"a region saw {indices.tolist()} in one of its runs")
            if len(seen) < 2:
                raise FalsifiedError("the region was not recomputed")
            self._know(microbatch, 0, problem, [0])
            self.model[microbatch, 0].replayed.append(0)
            self._refused(loss.backward, "a second backward pass", None, microbatch)

        @precondition(lambda self: any(each.waiting for each in self.model.values()))
        @rule(data=st.data(), on_disk=st.booleans())
        def export(self, data: st.DataObject, on_disk: bool) -> None:
            """Take a record out, by way of a file or not."""
            (microbatch, layer), _ = self._draw_waiting(data)
            record = self.frames[microbatch].export(layer)
            self.model[microbatch, layer].near = True
            if on_disk:
                file = io.BytesIO()
                torch.save(record.state_dict(), file)
                file.seek(0)
                record = replay.PackedSelection.from_state_dict(torch.load(file, weights_only=True))
            self.exported.append((self.model[microbatch, layer].problem, record))

        @precondition(lambda self: self.exported)
        @rule(microbatch=microbatches, layer=layers)
        def load(self, microbatch: int, layer: int) -> None:
            """Give a layer a record from elsewhere, and run its forward pass over it; never a second one."""
            problem, record = self.exported.pop()
            frame = self._frame(microbatch)
            if (microbatch, layer) in self.model:
                self._refused(lambda: frame.load(layer, record), "loaded over a record", layer, microbatch)
                return
            frame.load(layer, record)
            with frame.recording():
                self._same(
                    self._select(frame, layer, problem, blind=True), problem, "read from a loaded record"
                )
            self._know(microbatch, layer, problem, [layer], loaded=True)

        @rule(problem=problems, seed=st.integers(0, 2**16), local=st.booleans())
        def bring_in(self, problem: int, seed: int, local: bool) -> None:
            """Import shuffled indices, in the sequence's or the window's coordinates."""
            p = kit.problems[problem]
            order = np.random.default_rng(seed).permuted(np.tile(np.arange(K), (T, 1)), axis=1)
            shuffled = p.indices.gather(1, torch.from_numpy(order).to(kit.device))
            if local:
                shuffled = torch.where(shuffled >= 0, shuffled - p.start[:, None], -1)
            record = replay.import_selection(shuffled, S, **p.windows, local=local)
            self.exported.append((problem, record))

        # Failures in the middle

        @rule(microbatch=microbatches, layer=layers, problem=problems)
        def forward_that_fails(self, microbatch: int, layer: int, problem: int) -> None:
            """An exception after the selection: nothing is recorded, and the pass can be tried again."""
            if self._taken(microbatch, layer):
                return
            frame = self._frame(microbatch)
            try:
                with frame.recording():
                    self._select(frame, layer, problem)
                    raise _InterruptedError
            except _InterruptedError:
                pass

        @precondition(lambda self: any(each.waiting for each in self.model.values()))
        @rule(data=st.data(), again=st.booleans())
        def backward_that_fails(self, data: st.DataObject, again: bool) -> None:
            """An exception in the recomputation: the record is not used up, and serves ``again`` at once or
            later."""
            (microbatch, layer), consumer = self._draw_waiting(data)
            known = self.model[microbatch, layer]
            frame = self.frames[microbatch]
            try:
                with frame.replaying():
                    self._consume(frame, consumer, layer, known.problem)
                    raise _InterruptedError
            except _InterruptedError:
                pass
            self._fetched(microbatch, layer)
            if again:
                self._replay(microbatch, layer, consumer, "replayed after a failure")

        @precondition(lambda self: len(self.model) > 1)
        @rule(microbatch=microbatches)
        def discard(self, microbatch: int) -> None:
            if microbatch not in self.frames:
                return
            self.tape.discard(microbatch)
            self._forget(microbatch)

        # Misuse

        @precondition(lambda self: self.frames)
        @rule(data=st.data(), layer=layers)
        def replay_without_a_record(self, data: st.DataObject, layer: int) -> None:
            microbatch = data.draw(st.sampled_from(sorted(self.frames)))
            if (microbatch, layer) in self.model:
                return
            frame = self.frames[microbatch]
            with frame.replaying():
                self._refused(
                    lambda: self._select(frame, layer, 0), "replayed without a record", layer, microbatch
                )

        @precondition(lambda self: any(each.replayed for each in self.model.values()))
        @rule(data=st.data())
        def replay_twice(self, data: st.DataObject) -> None:
            places = [(place, each) for place, known in self.model.items() for each in known.replayed]
            (microbatch, layer), consumer = data.draw(st.sampled_from(sorted(places)))
            frame, known = self.frames[microbatch], self.model[microbatch, layer]
            with frame.replaying():
                self._refused(
                    lambda: self._consume(frame, consumer, layer, known.problem),
                    "replayed twice",
                    consumer,
                    microbatch,
                )

        @precondition(lambda self: len(self.model) > 2)
        @rule()
        def finish(self) -> None:
            """End the step: an error if and only if something is left; the tape is empty afterwards."""
            left = sorted({microbatch for (microbatch, _), known in self.model.items() if known.waiting})
            if left:
                self._refused(self.tape.finish, "left at the end", None, left[0])
            else:
                self.tape.finish()
            self.frames.clear()
            self.model.clear()

        @precondition(lambda self: bool(kit.streams))
        @rule(data=st.data())
        def switch_stream(self, data: st.DataObject) -> None:
            """What follows runs on another stream of the device."""
            torch.cuda.set_stream(data.draw(st.sampled_from(kit.streams)))

        # Always

        @invariant()
        def bytes_are_accounted(self) -> None:
            """Held bytes are those of the records that wait, each where it should be."""
            if hasattr(self, "tape"):
                self._accounted()

        def _accounted(self) -> None:
            waiting = [known for known in self.model.values() if known.waiting]
            device = sum(known.nbytes for known in waiting if known.near)
            host = sum(known.nbytes for known in waiting) if self.offload else 0
            held = self.tape.held
            if (held.device, held.host) != (device, host):
                raise FalsifiedError(
                    f"{held} is held, not {device} bytes on the device and {host} on the host"
                )

        def teardown(self) -> None:
            if kit.streams:
                torch.cuda.set_stream(kit.streams[0])
            if not hasattr(self, "tape"):
                return
            for microbatch in list(self.frames):
                self.tape.discard(microbatch)
            self.tape.finish()
            if self.tape.held.total:
                raise FalsifiedError(f"{self.tape.held} is held after everything was discarded")

        # Helpers

        def _frame(self, microbatch: int) -> Any:
            if microbatch not in self.frames:
                self.frames[microbatch] = self.tape.frame(microbatch)
            return self.frames[microbatch]

        def _select(
            self, frame: Any, layer: int, problem: int, consumers: tuple[int, ...] = (), blind: bool = False
        ) -> Any:
            p = kit.problems[problem]
            w = torch.full_like(p.w, torch.nan) if blind else p.w  # a selection of its own would be empty
            return frame.select(layer, p.q, p.k, w, K, **p.windows, consumers=consumers)

        def _reuse(self, frame: Any, layer: int, source: int, problem: int) -> Any:
            windows = kit.problems[problem].windows
            return frame.reuse(layer, source, num_rows=T, num_keys=S, top_k=K, **windows)

        def _consume(self, frame: Any, consumer: int, layer: int, problem: int) -> Any:
            """Replay as the recomputation of ``consumer``; its own inputs would select nothing."""
            if consumer == layer:
                return self._select(frame, layer, problem, blind=True)
            return self._reuse(frame, consumer, layer, problem)

        def _taken(self, microbatch: int, layer: int) -> bool:
            """Whether ``layer`` is recorded; a frame with nothing left to replay gives way to a new one."""
            known = [each for (of, _), each in self.model.items() if of == microbatch]
            if known and not any(each.waiting for each in known):
                self._forget(microbatch)
            return (microbatch, layer) in self.model

        def _misused(self, microbatch: int, layer: int, consumer: int, what: str) -> None:
            """A replay that differs in ``what`` is refused, and changes nothing."""
            frame, known = self.frames[microbatch], self.model[microbatch, layer]
            p = kit.problems[known.problem]
            sizes = {"num_rows": T, "num_keys": S, "top_k": K}
            windows = {name: value.clone() for name, value in p.windows.items()}
            if what == "top_k":
                sizes["top_k"] = K + 1
            elif what == "rows":
                sizes["num_rows"] = T - 1
                windows = {name: value[:-1].clone() for name, value in windows.items()}
            elif what == "keys":
                sizes["num_keys"] = S + 1
            elif what in windows:
                windows[what][2] += 1
            elif what == "undeclared":
                consumer = 9

            def call() -> Any:
                if consumer == layer:
                    q = p.q[: sizes["num_rows"]]
                    k = torch.cat([p.k, p.k])[: sizes["num_keys"]]
                    w = p.w[: sizes["num_rows"]]
                    if what == "dtype":
                        q, k = q.half(), k.half()
                    elif what == "heads":
                        q, w = torch.cat([q, q], dim=1), torch.cat([w, w], dim=1)
                    elif what == "head size":
                        q, k = q[..., :-1], k[:, :-1]
                    return frame.select(layer, q, k, w, sizes["top_k"], **windows)
                return frame.reuse(consumer, layer, **sizes, **windows)

            if what == "no run":
                self._refused(call, "replayed outside a run", consumer, microbatch)
            elif what == "read again":
                with frame.recording():
                    self._refused(call, "read twice in the forward pass", consumer, microbatch)
            elif what == "new frame":
                self._refused(lambda: self.tape.frame(microbatch), "opened again", None, microbatch)
            elif what in windows and kit.device != "cpu":
                # A device cannot raise in the middle of a step: the end of the step says so.
                with frame.replaying():
                    call()
                for each in list(self.frames):
                    self.tape.discard(each)
                self._refused(self.tape.finish, f"replayed with other {what}", consumer, microbatch)
                self.frames.clear()
                self.model.clear()
            else:
                with frame.replaying():
                    self._refused(call, f"replayed with other {what}", consumer, microbatch)
            known.near = known.near or what in windows

        def _replay(self, microbatch: int, layer: int, consumer: int, what: str) -> None:
            """The recomputation of ``consumer``, which must give the record and uses its share of it up."""
            known, frame = self.model[microbatch, layer], self.frames[microbatch]
            with frame.replaying():
                got = self._consume(frame, consumer, layer, known.problem)
                self._same(got, known.problem, f"{what} by {consumer}")
            self._fetched(microbatch, layer)
            known.replayed.append(consumer)

        def _fetched(self, microbatch: int, layer: int) -> None:
            """A replay of ``layer`` has brought its record near, and those of the ``prefetch`` before it."""
            names = [each for of, each in self.model if of == microbatch]
            place = names.index(layer) if layer in names else len(names)
            for each in names[max(0, place - self.prefetch) : place + 1]:
                self.model[microbatch, each].near = True

        def _draw_waiting(self, data: st.DataObject) -> tuple[tuple[int, int], int]:
            places = [(place, each) for place, known in self.model.items() for each in known.waiting]
            drawn: tuple[tuple[int, int], int] = data.draw(st.sampled_from(sorted(places)), label="of")
            return drawn

        def _know(
            self, microbatch: int, layer: int, problem: int, consumers: list[int], loaded: bool = False
        ) -> None:
            """A record that all its consumers have read: with offload it has left the device."""
            nbytes = 4 * T * replay.record.RowLayout(S, K).words + 16
            self.model[microbatch, layer] = Known(problem, nbytes, consumers, not self.offload, loaded)

        def _forget(self, microbatch: int) -> None:
            del self.frames[microbatch]
            for place in [each for each in self.model if each[0] == microbatch]:
                del self.model[place]

        def _same(self, got: Any, problem: int, what: str) -> None:
            wanted = kit.problems[problem].indices
            if not torch.equal(got.indices, wanted):
                raise FalsifiedError(f"{what}: {got.indices.tolist()}, not {wanted.tolist()}")

        def _refused(self, call: Callable[[], Any], what: str, layer: int | None, microbatch: int) -> None:
            """``call`` must raise ReplayError, naming the microbatch and the layer, and change nothing."""
            try:
                call()
            except replay.ReplayError as error:
                named = f"microbatch {microbatch}" in str(error)
                if layer is not None:
                    named = named and f"layer {layer}" in str(error)
                if not named:
                    raise FalsifiedError(
                        f"{what}: the error names neither or the wrong one: {error}"
                    ) from error
            else:
                raise FalsifiedError(f"{what}, and no error came")

    return Lifecycle


def run_machine(
    package: str, device: str, seed: int, *, examples: int = 6, steps: int = 20, shrink: bool = False
) -> None:
    """Run ``examples`` drawn schedules of at most ``steps`` steps; FalsifiedError tells the one that failed.

    ``shrink`` looks for the shortest schedule that fails, which can take minutes.
    """
    configure = settings(
        max_examples=examples,
        stateful_step_count=steps,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        database=None,
        derandomize=False,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    kit = Kit(package, device)
    machine = seeded(seed)(machine_of(kit))
    try:
        run_state_machine_as_test(machine, settings=configure)
    except (FalsifiedError, kit.replay.ReplayError, ValueError) as error:
        wrong = "" if isinstance(error, FalsifiedError) else "a correct use was refused: "
        told = "; ".join(line for note in getattr(error, "__notes__", ()) for line in note.splitlines())
        raise FalsifiedError(f"{wrong}{error} [{told}]") from error

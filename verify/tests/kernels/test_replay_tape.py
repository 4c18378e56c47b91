"""The tape: pipeline schedules, failing microbatches, sharing, offload, and the messages of every misuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hyscale_kernels.indexer import selected_scores
from hyscale_kernels.replay import Frame, Held, ReplayError, SelectionTape
from hyscale_verify.lifecycles.machine import run_machine

T, H, D, K, LAYERS = 5, 1, 16, 3, 2


def problem(device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, w = (torch.randn(shape, generator=generator) for shape in [(T, H, D), (T, D), (T, H)])
    low = torch.float32 if device == "cpu" else torch.bfloat16
    return q.to(device, low), k.to(device, low), w.abs().to(device)


def forward(frame: Frame, microbatch: int, x: torch.Tensor, reentrant: bool = True) -> torch.Tensor:
    """Two checkpointed layers that weigh by scores at the selected keys."""
    for number in range(LAYERS):
        q, k, w = problem(str(x.device.type), 10 * microbatch + number)

        def layer(x: torch.Tensor, number: int = number, q: Any = q, k: Any = k, w: Any = w) -> torch.Tensor:
            indices = frame.select(number, q, k, w, K).indices
            p = selected_scores(q, k, w, indices).softmax(dim=1)
            return torch.tanh(x + (p * x[indices.clamp(min=0)]).sum(dim=1))

        x = checkpoint(frame.region(layer), x, use_reentrant=reentrant)
    return x


def inputs(device: str, microbatch: int) -> torch.Tensor:
    return torch.linspace(-1, 1, T, device=device).mul(microbatch + 1).requires_grad_()


@pytest.fixture(scope="module")
def alone(device: str) -> list[torch.Tensor]:
    """The gradient of each of four microbatches when it is the only one."""
    found = []
    for microbatch in range(4):
        tape, x = SelectionTape(), inputs(device, microbatch)
        forward(tape.frame(0), microbatch, x).sum().backward()
        tape.finish()
        assert x.grad is not None
        found.append(x.grad)
    return found


SCHEDULES = {
    "F1 F2 B1 B2": "F0 F1 B0 B1",
    "F1 F2 B2 B1": "F0 F1 B1 B0",
    "1F1B, 4 microbatches": "F0 F1 F2 B0 F3 B1 B2 B3",
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("offload", [False, True], ids=["near", "offloaded"])
def test_every_schedule_gives_each_microbatch_its_own_gradient(
    device: str, alone: list[torch.Tensor], schedule: str, offload: bool
) -> None:
    tape = SelectionTape(offload=offload)
    xs, outs = {}, {}
    for step in schedule.split():
        microbatch = int(step[1:])
        if step[0] == "F":
            xs[microbatch] = inputs(device, microbatch)
            outs[microbatch] = forward(tape.frame(microbatch), microbatch, xs[microbatch])
        else:
            outs.pop(microbatch).sum().backward()
            assert torch.equal(xs[microbatch].grad, alone[microbatch])
    tape.finish()
    assert tape.held == Held(0, 0)
    one = tape.peak.host if offload else tape.peak.device
    assert one % LAYERS == 0
    assert one > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_microbatch_that_fails_leaves_the_others_right(
    device: str, alone: list[torch.Tensor], reentrant: bool
) -> None:
    tape = SelectionTape()
    xs = [inputs(device, each) for each in (0, 1, 2)]
    first = forward(tape.frame(0), 0, xs[0], reentrant)
    frame = tape.frame(1)
    failing = frame.region(lambda x: x / (1 // 0))
    middle = forward(frame, 1, xs[1], reentrant)
    with pytest.raises(ZeroDivisionError):
        checkpoint(failing, middle, use_reentrant=reentrant)
    last = forward(tape.frame(2), 2, xs[2], reentrant)
    for out, x, want in ((last, xs[2], alone[2]), (first, xs[0], alone[0])):
        out.sum().backward()
        assert torch.equal(x.grad, want)
    with pytest.raises(ReplayError, match="microbatch 1: layer 0 awaits replay by 0; layer 1 awaits"):
        tape.finish()
    assert tape.held.total == 0


def test_a_failed_microbatch_can_be_discarded(device: str) -> None:
    tape = SelectionTape()
    forward(tape.frame(0), 0, inputs(device, 0))
    tape.discard(0)
    tape.finish()
    assert tape.held.total == 0


def test_a_recomputation_that_stops_early_uses_everything_up(device: str) -> None:
    tape, x = SelectionTape(), inputs(device, 0)
    frame = tape.frame(0)
    q, k, w = problem(device, 0)

    def region(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos()
        frame.select("late", q, k, w, K)  # nothing after it is saved
        return y

    checkpoint(frame.region(region), x, use_reentrant=False).sum().backward()
    tape.finish()


@pytest.mark.parametrize("offload", [False, True], ids=["near", "offloaded"])
def test_layers_share_a_record_and_the_last_one_frees_it(device: str, offload: bool) -> None:
    tape = SelectionTape(offload=offload)
    frame = tape.frame(0)
    q, k, w = problem(device, 0)
    sizes = {"num_rows": T, "num_keys": T, "top_k": K}
    with frame.recording():
        first = frame.select(0, q, k, w, K, consumers=(1, 2)).indices
        assert all(torch.equal(frame.reuse(each, 0, **sizes).indices, first) for each in (1, 2))
    assert (tape.held.host if offload else tape.held.device) > 0
    for consumer in (2, 1):
        with frame.replaying():
            assert torch.equal(frame.reuse(consumer, 0, **sizes).indices, first)
        assert tape.held.total > 0
    with frame.replaying():
        assert torch.equal(frame.select(0, q, k, w, K).indices, first)
    assert tape.held.total == 0
    tape.finish()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_replay_fetches_the_records_before_it(device: str, prefetch: int) -> None:
    tape = SelectionTape(offload=True, prefetch=prefetch)
    frame = tape.frame(0)
    for number in range(4):
        with frame.recording():
            frame.select(number, *problem(device, number), K)
    one = frame.export(0).nbytes  # which brings it near
    assert tape.held == Held(one, 4 * one)
    with frame.replaying():
        frame.select(3, *problem(device, 3), K)
    near = {0, *range(3 - prefetch, 3)}
    assert tape.held == Held(len(near) * one, 3 * one)
    frame.prefetch(1)
    assert tape.held == Held(len(near | {1}) * one, 3 * one)
    frame.clear()


def test_bytes_are_those_of_the_records(device: str) -> None:
    tape = SelectionTape()
    frame = tape.frame("a")
    for number in range(3):
        with frame.recording():
            frame.select(number, *problem(device, number), K)
    assert tape.held.device == sum(frame.export(number).nbytes for number in range(3))
    frame.clear()
    assert tape.held.total == 0


def misuse() -> dict[str, tuple[Callable[[SelectionTape, Frame, Any], Any], str]]:
    def recorded(frame: Frame, p: Any, **options: Any) -> None:
        with frame.recording():
            frame.select(7, *p, K, **options)

    def twice_recorded(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        recorded(frame, p)

    def without_record(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        with frame.replaying():
            frame.select(8, *p, K)

    def twice_replayed(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        for _ in range(2):
            with frame.replaying():
                frame.select(7, *p, K)

    def other_top_k(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        with frame.replaying():
            frame.select(7, *p, K + 1)

    def other_dtype(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        with frame.replaying():
            frame.select(7, p[0].half(), p[1].half(), p[2], K)

    def other_heads(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        with frame.replaying():
            frame.select(7, torch.cat([p[0]] * 2, dim=1), p[1], torch.cat([p[2]] * 2, dim=1), K)

    def late_consumer(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        with frame.replaying():
            frame.select(7, *p, K, consumers=(9,))

    def loaded_over(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        frame.load(7, frame.export(7))

    def other_rows(tape: SelectionTape, frame: Frame, p: Any) -> None:
        end = torch.full((T,), T, dtype=torch.int32, device=p[0].device)
        recorded(frame, p, end=end)
        with frame.replaying():
            frame.select(7, p[0][1:], p[1], p[2][1:], K, end=end[1:])

    def other_windows(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        with frame.replaying():
            frame.select(7, *p, K, end=torch.full((T,), T, dtype=torch.int32, device=p[0].device))
        tape.finish()

    def undeclared(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        with frame.replaying():
            frame.reuse(9, 7, num_rows=T, num_keys=T, top_k=K)

    def unread(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p, consumers=(9,))
        with frame.replaying():
            frame.reuse(9, 7, num_rows=T, num_keys=T, top_k=K)

    def outside(tape: SelectionTape, frame: Frame, p: Any) -> None:
        frame.select(7, *p, K)

    def left(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        tape.finish()

    def reopened(tape: SelectionTape, frame: Frame, p: Any) -> None:
        recorded(frame, p)
        tape.frame(5)

    def region_thrice(tape: SelectionTape, frame: Frame, p: Any) -> None:
        region = frame.region(lambda: frame.select(7, *p, K))
        for _ in range(3):
            region()

    def not_asked_for(tape: SelectionTape, frame: Frame, p: Any) -> None:
        calls: list[int] = []
        region = frame.region(
            lambda: calls.append(1) or (frame.select(7, *p, K) if len(calls) == 1 else None)
        )
        region()
        region()

    return {
        "recorded twice": (twice_recorded, "microbatch 5, layer 7: is recorded already: one frame records"),
        "no record": (without_record, r"microbatch 5, layer 8: has no record \(recorded: 7\)"),
        "replayed twice": (twice_replayed, "microbatch 5, layer 7: has replayed it already"),
        "other top_k": (
            other_top_k,
            "layer 7: asks for something else than was recorded: top_k 3 then, 4 now",
        ),
        "other dtype": (
            other_dtype,
            r"layer 7: asks for something else .*: dtype torch\.\w+ then, torch.float16",
        ),
        "other heads": (
            other_heads,
            r"layer 7: asks for something else than was recorded: heads 1 then, 2 now",
        ),
        "late consumer": (late_consumer, "layer 7: names the consumers 9, but was recorded for 7. Name them"),
        "loaded over": (loaded_over, "layer 7: has a record already: load before the forward pass"),
        "other rows": (other_rows, "layer 7: asks for something else than was recorded: rows 5 then, 4 now"),
        "other windows": (other_windows, "microbatch 5, layer 7: "),
        "undeclared": (undeclared, r"layer 9, record of layer 7: was not declared for it \(declared: 7\)"),
        "unread": (unread, "layer 9, record of layer 7: replays it without having read it in the forward"),
        "outside a run": (outside, "microbatch 5, layer 7: was reached outside a run: wrap"),
        "left at the end": (left, "records are left at the end of the step .microbatch 5: layer 7 awaits"),
        "frame opened again": (reopened, "microbatch 5 has a frame whose records are not all replayed"),
        "region run thrice": (region_thrice, "microbatch 5: a region is replayed a second time"),
        "not asked for": (
            not_asked_for,
            "layer 7: was recorded by this region, and its recomputation did not",
        ),
    }


@pytest.mark.parametrize(("act", "message"), misuse().values(), ids=misuse())
def test_misuse_is_an_error_that_names_the_place(
    device: str, act: Callable[[SelectionTape, Frame, Any], Any], message: str
) -> None:
    tape = SelectionTape()
    with pytest.raises(ReplayError, match=message):
        act(tape, tape.frame(5), problem(device, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": None}, "w must be a torch.Tensor"),
        ({"top_k": 0}, "top_k is 0"),
        ({"end": torch.ones(T)}, "end is float32; allowed: int32"),
    ],
)
@pytest.mark.parametrize("replaying", [False, True])
def test_wrong_arguments_are_refused_in_every_run_with_a_note_of_the_place(
    device: str, change: dict[str, Any], message: str, replaying: bool
) -> None:
    frame = SelectionTape().frame(5)
    arguments = dict(zip(("q", "k", "w"), problem(device, 0), strict=True)) | {"top_k": K}
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in change.items()}
    if replaying:
        with frame.recording():
            frame.select(7, **arguments)
    run = frame.replaying() if replaying else frame.recording()
    with pytest.raises((TypeError, ValueError), match=message) as caught, run:
        frame.select(7, **(arguments | moved))
    assert caught.value.__notes__ == ["in microbatch 5, layer 7"]


@pytest.mark.parametrize("prefetch", [-1, 1.5, True])
def test_a_wrong_prefetch_is_named(prefetch: Any) -> None:
    with pytest.raises(ValueError, match="prefetch is"):
        SelectionTape(prefetch=prefetch)


@pytest.mark.slow
def test_drawn_schedules_agree_with_the_model(device: str) -> None:
    run_machine("hyscale_kernels", device, seed=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_records_cross_streams_and_come_back_from_the_host() -> None:
    tape = SelectionTape(offload=True)
    frame = tape.frame(0)
    wanted = []
    for number in range(4):
        with torch.cuda.stream(torch.cuda.Stream()), frame.recording():
            wanted.append(frame.select(number, *problem("cuda", number), K).indices)
    torch.cuda.synchronize()
    assert tape.held.device == 0
    for number in reversed(range(4)):
        with torch.cuda.stream(torch.cuda.Stream()), frame.replaying():
            assert torch.equal(frame.select(number, *problem("cuda", number), K).indices, wanted[number])
    tape.finish()

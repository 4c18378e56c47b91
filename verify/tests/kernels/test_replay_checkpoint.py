"""Replay under PyTorch's own checkpointing: nested regions, schedules, compilation, and every misuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hyscale_kernels import replay
from hyscale_kernels.hytopk import api, hytopk
from hyscale_kernels.indexer import selected_scores

T, HIDDEN, H, D, K = 6, 8, 2, 16, 3
LAYERS = 2


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at every selection."""
    seen: list[int] = []
    launch = api.launch_prepare
    monkeypatch.setattr(api, "launch_prepare", lambda *a: (seen.append(1), launch(*a))[1])
    return seen


@pytest.fixture
def weights(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (HIDDEN, H * D + D + H)
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for _ in range(LAYERS)]


def start(device: str, seed: int = 1) -> torch.Tensor:
    return torch.randn(T, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()


Select = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def kept(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return replay.select(q, k, w, K).indices


def plain(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return hytopk(q, k, w, K).indices


def layer(x: torch.Tensor, weight: torch.Tensor, select: Select) -> torch.Tensor:
    """Scores at selected keys weigh the keys' hidden states."""
    low = torch.float32 if x.device.type == "cpu" else torch.bfloat16
    q, k, w = (x @ weight).split([H * D, D, H], dim=1)
    q, k, w = q.reshape(T, H, D).to(low).contiguous(), k.to(low).contiguous(), w.contiguous()
    indices = select(q, k, w)
    p = selected_scores(q, k, w, indices, dk="fixed_point").softmax(dim=1)
    return torch.tanh(x + (p[..., None] * x[indices.clamp(min=0)]).sum(dim=1))


def gradients(out: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [out.detach(), *torch.autograd.grad((out**2).sum(), [x, *weights])]


def chain(
    x: torch.Tensor, weights: list[torch.Tensor], run: Callable[..., Any], select: Select
) -> torch.Tensor:
    for weight in weights:
        x = run(layer, x, weight, select)
    return x


@pytest.fixture
def wanted(device: str, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Result and gradients without any checkpointing."""
    x = start(device)
    return gradients(chain(x, weights, lambda f, *a: f(*a), plain), x, weights)


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_selection_runs_once_a_layer_and_nothing_changes(
    device: str, weights: list[torch.Tensor], wanted: list[torch.Tensor], launches: list[int]
) -> None:
    x = start(device)
    out = chain(x, weights, lambda f, *a: checkpoint(f, *a, use_reentrant=False), plain)
    assert same(gradients(out, x, weights), wanted)
    assert len(launches) == 2 * LAYERS
    launches.clear()
    out = chain(x, weights, replay.checkpoint_with_replay, kept)
    assert same(gradients(out, x, weights), wanted)
    assert len(launches) == LAYERS


def test_nested_regions_select_once(
    device: str, weights: list[torch.Tensor], wanted: list[torch.Tensor], launches: list[int]
) -> None:
    x = start(device)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return chain(x, weights, replay.checkpoint_with_replay, kept)

    assert same(gradients(replay.checkpoint_with_replay(whole, x), x, weights), wanted)
    assert len(launches) == LAYERS


def test_two_microbatches_in_flight_do_not_meet(device: str, weights: list[torch.Tensor]) -> None:
    inputs = [start(device, seed) for seed in (1, 2)]
    alone = [gradients(chain(x, weights, lambda f, *a: f(*a), plain), x, weights) for x in inputs]
    outs = [chain(x, weights, replay.checkpoint_with_replay, kept) for x in inputs]  # F1 F2
    for out, x, want in zip(outs, inputs, alone, strict=True):  # B1 B2
        assert same(gradients(out, x, weights), want)


def test_a_policy_of_one_s_own_is_asked_as_well(device: str, weights: list[torch.Tensor]) -> None:
    asked: list[Any] = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append(operator)
        return operator is torch.ops.aten.mm.default

    x = start(device)
    replay.checkpoint_with_replay(layer, x, weights[0], kept, policy=policy).sum().backward()
    assert torch.ops.aten.mm.default in asked
    assert not [each for each in asked if "hytopk_record" in str(each)]


def test_compiles_without_a_graph_break_and_selects_once(
    device: str, weights: list[torch.Tensor], wanted: list[torch.Tensor], launches: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    x = start(device)

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return chain(x, list(weights), replay.checkpoint_with_replay, kept)

    out = torch.compile(run, backend="aot_eager", fullgraph=True)(x, *weights)
    assert same(gradients(out, x, weights), wanted)
    assert len(launches) == LAYERS


def test_nested_regions_compile_and_select_once(
    device: str, weights: list[torch.Tensor], wanted: list[torch.Tensor], launches: list[int]
) -> None:
    x = start(device)

    def whole(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return chain(x, list(weights), replay.checkpoint_with_replay, kept)

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return replay.checkpoint_with_replay(whole, x, *weights)

    out = torch.compile(run, backend="aot_eager", fullgraph=True)(x, *weights)
    assert same(gradients(out, x, weights), wanted)
    assert len(launches) == LAYERS


def test_recomputing_without_replay_is_an_error(device: str, weights: list[torch.Tensor]) -> None:
    out = checkpoint(layer, start(device), weights[0], kept, use_reentrant=False)
    with pytest.raises(replay.ReplayError, match=r"would select twice\. Checkpoint it"):
        out.sum().backward()


def test_an_outer_region_without_replay_is_an_error(device: str, weights: list[torch.Tensor]) -> None:
    def whole(x: torch.Tensor) -> torch.Tensor:
        return chain(x, weights, replay.checkpoint_with_replay, kept)

    out = checkpoint(whole, start(device), use_reentrant=False)
    with pytest.raises(replay.ReplayError, match="and every region around it"):
        out.sum().backward()


def test_plain_hytopk_in_a_region_with_replay_is_an_error(device: str, weights: list[torch.Tensor]) -> None:
    with pytest.raises(replay.ReplayError, match=r"call hyscale_kernels\.replay\.select"):
        replay.checkpoint_with_replay(layer, start(device), weights[0], plain)


def test_a_second_backward_is_an_error_that_names_the_region(
    device: str, weights: list[torch.Tensor]
) -> None:
    out = replay.checkpoint_with_replay(layer, start(device), weights[0], kept, label="layer 3, microbatch 1")
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward") as caught:
        out.sum().backward()
    assert any("layer 3, microbatch 1" in note for note in getattr(caught.value, "__notes__", ()))


def test_windows_written_to_in_between_are_an_error(device: str) -> None:
    end = torch.arange(1, T + 1, dtype=torch.int32, device=device)
    q = torch.randn(T, H, D, generator=torch.Generator().manual_seed(0)).to(device)
    q = (q if device == "cpu" else q.bfloat16()).requires_grad_()
    k, w = q[:, 0].detach().contiguous(), torch.ones(T, H, device=device)

    def region(q: torch.Tensor) -> torch.Tensor:
        indices = replay.select(q, k, w, K, end=end, validate=True).indices
        return selected_scores(q, k, w, indices).masked_fill(indices < 0, 0).tanh()

    out = replay.checkpoint_with_replay(region, q)
    end[-1] -= 1  # another microbatch's windows in the same buffer
    with pytest.raises(replay.ReplayError, match="windows differ from those of the record"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, w: (q.half(), k.half(), w, K), replay.ReplayError, "dtype, heads, head size or top_k"),
        (lambda q, k, w: (q[:, :1], k, w[:, :1], K), replay.ReplayError, "dtype, heads, head size or top_k"),
        (
            lambda q, k, w: (q[..., :8], k[:, :8], w, K),
            replay.ReplayError,
            "dtype, heads, head size or top_k",
        ),
        (lambda q, k, w: (q, k, w, K + 1), ValueError, r"words has shape \[6, 4\]; for 6 keys and top_k 4"),
        (lambda q, k, w: (q, k.repeat(40, 1), w, K), replay.ReplayError, "windows differ from those of"),
        (lambda q, k, w: (q[:4], k, w[:4], K), ValueError, r"end has shape \[4\] on .*; it must be \[6\]"),
    ],
    ids=["dtype", "heads", "head size", "top_k", "keys", "rows"],
)
def test_other_arguments_in_the_recomputation_are_an_error_that_names_the_place(
    device: str, change: Callable[..., Any], error: type[Exception], message: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.float32 if device == "cpu" else torch.bfloat16
    q, k = (torch.randn(shape, generator=generator).to(device, low) for shape in [(T, H, D), (T, D)])
    w = torch.ones(T, H, device=device)
    runs = []
    for arguments in ((q, k, w, K), change(q, k, w)):
        end = torch.full((len(arguments[0]),), T, dtype=torch.int32, device=device)
        runs.append((arguments, end))
    left = iter(runs)

    def region(x: torch.Tensor) -> torch.Tensor:
        arguments, end = next(left)
        selection = replay.select(*arguments, end=end, validate=True, label="layer 3, microbatch 1")
        return x.sin() * selection.count.sum()

    out = replay.checkpoint_with_replay(region, torch.ones(1, device=device, requires_grad=True))
    with pytest.raises(error, match=message) as caught:
        out.backward()
    assert any("layer 3, microbatch 1" in note for note in caught.value.__notes__)


def test_unsupported_modes_are_refused(device: str, weights: list[torch.Tensor]) -> None:
    x = start(device)
    with pytest.raises(ValueError, match="use_reentrant is True"):
        replay.checkpoint_with_replay(layer, x, weights[0], kept, use_reentrant=True)
    with pytest.raises(ValueError, match="context_fn is given"):
        replay.checkpoint_with_replay(layer, x, weights[0], kept, context_fn=replay.replay_context_fn)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 1, 16, dtype=torch.float64)}, TypeError, "q is float64"),
        ({"k": torch.zeros(2, 8)}, ValueError, r"k has shape \[2, 8\]"),
        ({"top_k": 0}, ValueError, "top_k is 0"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int"),
        ({"end": torch.tensor([1, 9], dtype=torch.int32)}, ValueError, r"window of row 1 is \[0, 9\)"),
    ],
)
def test_select_refuses_what_hytopk_refuses(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"q": torch.zeros(2, 1, 16), "k": torch.zeros(2, 16), "w": torch.zeros(2, 1)}
    if torch.cuda.is_available():
        pytest.skip("CPU tensors are refused on a machine that runs the compiled kernels")
    with pytest.raises(error, match=message):
        replay.select(**(arguments | {"top_k": 1} | change))

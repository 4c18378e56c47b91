"""Train a small sparse-attention model under full recomputation, with and without selection replay.

    python examples/replay_training.py                # a GPU if there is one, else Triton's interpreter
    python examples/replay_training.py --device cpu

Every layer is checkpointed. Without replay its backward pass selects again; with replay it decodes the record
that the forward pass kept. The script trains the same model in three ways and shows that losses and gradients
are equal bit for bit, and how often the selection ran:

    twice    torch.utils.checkpoint, hytopk in the layer
    replay   checkpoint_with_replay, replay.select in the layer: two lines differ
    tape     a SelectionTape with reentrant checkpointing, as frameworks with their own checkpoint functions
    use it

Tokens carry no positions and come from a small vocabulary, so that many keys are equal and the k-th score is
tied: the case in which a selection without a tie rule differs from pass to pass.

Shape letters: T tokens (queries and keys), H indexer heads, D indexer head size, K = top_k.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WAYS = ("twice", "replay", "tape")


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the run."""

    tokens: int
    vocabulary: int
    hidden: int
    heads: int
    head_dim: int
    indexer_heads: int
    indexer_dim: int
    top_k: int
    layers: int = 2
    steps: int = 3
    learning_rate: float = 0.5
    indexer_loss: float = 0.1


CPU = Config(
    tokens=16, vocabulary=6, hidden=16, heads=2, head_dim=8, indexer_heads=2, indexer_dim=16, top_k=5
)
GPU = Config(
    tokens=8192, vocabulary=512, hidden=256, heads=4, head_dim=64, indexer_heads=8, indexer_dim=64,
    top_k=256, steps=20,
)  # fmt: skip


@dataclass
class History:
    """What one way of training did: the loss and the gradients of every step, and selections a step."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    selections_per_step: float = 0.0
    peak_bytes: int = 0
    record_bytes: int = 0


Select = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """An indexer, attention over the keys it selects, and its loss."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        c = config

        def linear(size: int) -> nn.Linear:
            return nn.Linear(c.hidden, size, bias=False, dtype=dtype)

        self.index_q = linear(c.indexer_heads * c.indexer_dim)
        self.index_k = linear(c.indexer_dim)
        self.index_w = linear(c.indexer_heads)
        self.q = linear(c.heads * c.head_dim)
        self.kv = linear(c.head_dim)
        self.out = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor, select: Select) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + attention [T, hidden], the layer's indexer loss), with keys chosen by ``select(q, k, w)``."""
        from hyscale_kernels.indexer import indexer_loss

        c, T = self.config, x.shape[0]
        seen = x.detach()  # the indexer learns from its own loss alone
        q = self.index_q(seen).view(T, c.indexer_heads, c.indexer_dim)
        k = self.index_k(seen)
        w = self.index_w(seen).float() * (c.indexer_heads * c.indexer_dim) ** -0.5
        indices = select(q, k, w)
        attended, target = self.attend(x, indices)
        loss = indexer_loss(q, k, w, indices, target, coefficient=1.0 / T)
        return x + attended, loss.sum()

    def attend(self, x: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the selected keys, and its distribution over them, summed over heads to 1."""
        c, T = self.config, x.shape[0]
        q = self.q(x).view(T, c.heads, c.head_dim)
        chosen = self.kv(x)[indices.clamp(min=0)]  # [T, K, head_dim]
        logits = torch.einsum("thd,tkd->thk", q, chosen).float() * c.head_dim**-0.5
        p = logits.masked_fill((indices < 0)[:, None], float("-inf")).softmax(dim=-1)
        out = torch.einsum("thk,tkd->thd", p.to(x.dtype), chosen)
        return self.out(out.flatten(1)), p.detach().mean(dim=1).contiguous()


class Model(nn.Module):
    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, dtype) for _ in range(config.layers))
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False, dtype=dtype)

    def forward(self, tokens: torch.Tensor, run: Callable[..., Any]) -> torch.Tensor:
        """The loss of predicting each next token; ``run(number, layer, x)`` runs one checkpointed layer."""
        x = self.embedding(tokens)
        extra = torch.zeros((), device=tokens.device)
        for number, layer in enumerate(self.layers):
            x, loss = run(number, layer, x)
            extra = extra + loss
        logits = self.head(x[:-1]).float()
        return nn.functional.cross_entropy(logits, tokens[1:]) + self.layers[0].config.indexer_loss * extra


def runner(way: str, config: Config, frame: Any) -> Callable[..., Any]:
    """How one layer runs under each way of checkpointing."""
    from hyscale_kernels import replay
    from hyscale_kernels.hytopk import hytopk

    def select_plain(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return hytopk(q, k, w, config.top_k).indices

    def select_kept(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return replay.select(q, k, w, config.top_k).indices

    def twice(number: int, layer: Layer, x: torch.Tensor) -> Any:
        return checkpoint(layer, x, select_plain, use_reentrant=False)

    def replayed(number: int, layer: Layer, x: torch.Tensor) -> Any:
        return replay.checkpoint_with_replay(layer, x, select_kept, label=f"layer {number}")

    def taped(number: int, layer: Layer, x: torch.Tensor) -> Any:
        def select_taped(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return frame.select(number, q, k, w, config.top_k).indices  # type: ignore[no-any-return]

        return checkpoint(frame.region(layer), x, select_taped, use_reentrant=True)

    return {"twice": twice, "replay": replayed, "tape": taped}[way]


def train(way: str, config: Config, device: str, seed: int = 0, keep_gradients: bool = True) -> History:
    """Train ``config.steps`` steps and report; one seed, one model and one sequence."""
    from hyscale_kernels.replay import SelectionTape

    torch.manual_seed(seed)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = Model(config, dtype).to(device)
    tokens = torch.randint(config.vocabulary, (config.tokens,)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    tape = SelectionTape()
    history = History()
    with counted_selections() as selections:
        for step in range(config.steps):
            if device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats()
            loss = model(tokens, runner(way, config, tape.frame(microbatch=step)))
            loss.backward()
            tape.finish()
            if device.startswith("cuda"):
                history.peak_bytes = max(history.peak_bytes, torch.cuda.max_memory_allocated())
            history.losses.append(loss.detach())
            if keep_gradients:
                history.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
    history.selections_per_step = selections() / config.steps
    history.record_bytes = tape.peak.total
    return history


@contextmanager
def counted_selections() -> Iterator[Callable[[], int]]:
    """Counts how often HyTopK's kernels are launched, whoever asks for them, in any thread."""
    from hyscale_kernels.hytopk import api

    launched = 0
    launch = api.launch_prepare  # the first kernel of every selection

    def counting(*args: Any) -> Any:
        nonlocal launched
        launched += 1
        return launch(*args)

    api.launch_prepare = counting
    try:
        yield lambda: launched
    finally:
        api.launch_prepare = launch


def same_bits(one: History, other: History) -> bool:
    """Whether all losses and all gradients of all steps are equal, bit for bit."""
    pairs = list(zip(one.losses, other.losses, strict=True))
    for mine, theirs in zip(one.gradients, other.gradients, strict=True):
        pairs += zip(mine, theirs, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Training with and without selection replay.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"cpu or cuda (default: {default})")
    parser.add_argument("--steps", type=int, help="training steps (default: 20 on a GPU, 3 on a CPU)")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
        from hyscale_verify.interpreter import quicken

        quicken()
    config = GPU if arguments.device.startswith("cuda") else CPU
    if arguments.steps is not None:
        config = replace(config, steps=arguments.steps)
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    histories = {way: train(way, config, arguments.device) for way in WAYS}
    base = histories["twice"]
    for way, history in histories.items():
        first, last = float(history.losses[0]), float(history.losses[-1])
        equal = "" if way == "twice" else f", losses and gradients equal: {same_bits(base, history)}"
        print(
            f"{way:7} loss {first:.6f} -> {last:.6f}, "
            f"{history.selections_per_step / config.layers:g} selection(s) a layer and step{equal}"
        )
    return 0 if all(same_bits(base, history) for history in histories.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

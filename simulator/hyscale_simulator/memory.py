"""Memory of the fullest rank: weights, gradients, optimizer, activations, selection records, workspaces.

Activation counts follow Korthikanti et al. 2022, section 4 (two bytes a value, one a dropout mask), extended
item by item to gated feed-forwards, grouped and latent attention, experts and selection.  An eager framework
allocates gradients when they are due and casts weights when they are read; a framework of fused kernels holds
both all the time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hyscale_simulator.layout import Plan, plan
from hyscale_simulator.model import Grouped, Latent
from hyscale_simulator.scenario import Scenario
from hyscale_simulator.work import Rank
from hyscale_simulator.work.eager import HEAD_ROWS
from hyscale_simulator.work.feed_forward import expert_tokens
from hyscale_simulator.work.layer import LayerKind, layer_kind
from hyscale_simulator.work.selection import chunk_rows, record_bytes

__all__ = ["Memory", "activation_bytes", "memory", "what_would_fit"]

GIB = 2**30
CONTEXT_BYTES = 2.5e9
"""CUDA context, NCCL channels and cuBLAS workspaces of one process."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak of the fullest stage.

    items: (name, bytes), largest first; they add up to ``peak_bytes``.
    """

    stage: int
    items: tuple[tuple[str, float], ...]
    capacity_bytes: float

    @property
    def peak_bytes(self) -> float:
        """All items together."""
        return sum(size for _, size in self.items)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the capacity."""
        return self.peak_bytes <= self.capacity_bytes

    def gib(self, *names: str) -> float:
        """Some items, or all, in GiB."""
        return sum(size for name, size in self.items if not names or name in names) / GIB


def memory(scenario: Scenario, laid_out: Plan | None = None) -> Memory:
    """The fullest rank of the fullest stage."""
    laid_out = laid_out or plan(scenario)
    rank = Rank(scenario, laid_out)
    capacity = scenario.gpu_description.memory_gb * 1e9
    moments = (
        Memory(stage, tuple(sorted(_moment(rank, stage, ahead), key=lambda item: -item[1])), capacity)
        for stage in range(laid_out.pipeline)
        for ahead in _moments(rank, stage)
    )
    return max(moments, key=lambda found: found.peak_bytes)


def _eager(rank: Rank) -> bool:
    return rank.scenario.kernels.framework == "eager"


def _moments(rank: Rank, stage: int) -> Iterator[list[int]]:
    """The layers whose backward pass is not over, at each moment that may be the stage's fullest.

    All of them, where gradients have buffers of their own or stay from one microbatch to the next.  Else a
    layer that is done has left its gradients and given its input back: which moment is fullest depends on the
    length.
    """
    layers = rank.cut.layers_of(stage)
    if _eager(rank) and rank.cut.microbatches == 1:
        for last in range(1, len(layers)):
            yield layers[:last]
    yield layers


def parameters_of(rank: Rank, stage: int) -> tuple[float, float]:
    """(dense, expert) parameters of one rank of a stage."""
    model, cut = rank.scenario.model_description, rank.cut
    dense, expert = _layer_parameters(rank, cut.layers_of(stage))
    pieces = len(cut.pieces)
    last = model.layers - 1
    for piece in cut.pieces_of(stage):
        if piece == 0:
            dense += model.embedding_parameters / cut.tensor
        if piece == pieces - 1:
            dense += (model.head_parameters or model.embedding_parameters * (pieces > 1)) / cut.tensor
            for _ in range(rank.scenario.mtp_layers):
                dense += (model.dense_parameters(last) + 2 * model.hidden**2) / cut.tensor
                expert += model.expert_parameters(last) / cut.expert
    return dense, expert


def _layer_parameters(rank: Rank, layers: Sequence[int]) -> tuple[float, float]:
    """(dense, expert) parameters of one rank's share of some layers."""
    model, cut = rank.scenario.model_description, rank.cut
    dense = expert = 0.0
    for layer in layers:
        dense += model.dense_parameters(layer) / cut.tensor
        expert += model.expert_parameters(layer) / cut.expert
    return dense, expert


def _moment(rank: Rank, stage: int, ahead: Sequence[int]) -> Iterator[tuple[str, float]]:
    """What a stage holds in the backward pass of the last of the layers ``ahead``."""
    scenario, cut = rank.scenario, rank.cut
    precision, zero = scenario.precision, scenario.layout.zero_stage
    shards = (cut.context * cut.data, cut.expert_data)

    def held(bytes_each: float, from_zero: int, parameters: tuple[float, float]) -> float:
        split = zero >= from_zero
        return bytes_each * sum(
            each / (shard if split else 1) for each, shard in zip(parameters, shards, strict=True)
        )

    whole = read = graded = parameters_of(rank, stage)
    if _eager(rank):
        # Parameters are the optimizer's master weights.  Copies belong to the graph that reads them.
        graphs = [each for each in ahead if each == ahead[-1] or not layer_kind(rank, each).recomputed]
        read = _layer_parameters(rank, graphs)
        if cut.microbatches == 1:
            graded = _layer_parameters(rank, [each for each in cut.layers_of(stage) if each not in ahead])
    yield "weights", held(precision.weight_bytes, 3, read)
    yield "gradients", held(precision.gradient_bytes, 2, graded)
    yield "optimizer", held(precision.optimizer_bytes, 1, whole)
    yield "activations", _activations(rank, stage, ahead)
    if scenario.recompute.replay and not scenario.offload.selection:
        yield (
            "selection records",
            _in_flight(rank, stage, ahead, lambda kind: kind.selects * kind.recomputed * record_bytes(rank)),
        )
    yield from _workspaces(rank, stage, ahead)
    yield "context and libraries", CONTEXT_BYTES


def _in_flight(rank: Rank, stage: int, ahead: Sequence[int], bytes_of: Callable[[LayerKind], float]) -> float:
    """Bytes kept for the layers ``ahead`` by the microbatches that a stage holds at its peak."""
    cut = rank.cut
    held = cut.schedule.activations_in_flight(stage)
    per_stage = sum(bytes_of(layer_kind(rank, layer)) for layer in ahead)
    return held * per_stage / max(len(cut.pieces_of(stage)), 1)


def _activations(rank: Rank, stage: int, ahead: Sequence[int]) -> float:
    scenario, cut = rank.scenario, rank.cut
    kept = _in_flight(rank, stage, ahead, lambda kind: kept_bytes(rank, kind))
    kept *= 1 - scenario.offload.activations
    held = cut.schedule.activations_in_flight(stage)
    model = scenario.model_description
    if 0 in cut.pieces_of(stage) and scenario.kernels.dropout:
        kept += held * rank.rows * model.hidden  # mask of the embedding's dropout
    return kept


def kept_bytes(rank: Rank, kind: LayerKind) -> float:
    """What one layer keeps of one microbatch from its forward to its backward pass."""
    if kind.recomputed:
        return 2.0 * rank.rows * rank.scenario.model_description.hidden
    return activation_bytes(rank, kind)


def activation_bytes(rank: Rank, kind: LayerKind) -> float:
    """All that a layer's backward pass needs, without what selective recomputation repeats."""
    return sum(size for _, size in _layer_items(rank, kind))


def _layer_items(rank: Rank, kind: LayerKind) -> Iterator[tuple[str, float]]:
    scenario = rank.scenario
    repeats = scenario.recompute.repeats
    model, cut = scenario.model_description, rank.cut
    rows, tokens, hidden = rank.rows, rank.tokens, model.hidden
    mask = 1.0 if scenario.kernels.dropout else 0.0
    operand = 1.0 if rank.linear_dtype == "fp8" else 2.0  # what a product keeps of its input
    yield "norm inputs", 2 * 2.0 * rows * hidden
    yield "residual masks", 2 * mask * rows * hidden
    if not repeats("layernorm"):
        yield "attention and feed-forward inputs", 2 * operand * rows * hidden
    attention = model.attention
    heads = attention.heads // cut.tensor
    if isinstance(attention, Grouped):
        width = (heads + 2 * max(attention.kv_heads // cut.tensor, 1)) * attention.head_dim
        yield "q, k, v", 2.0 * tokens * width
    else:
        yield (
            "latents",
            2.0 * tokens * (attention.q_rank + attention.kv_width)
            + operand * tokens * (attention.q_rank + attention.kv_rank),
        )
        if model.indexer is not None:  # absorbed
            yield "queries", 2.0 * tokens * heads * (attention.qk_dim + attention.kv_width)
            yield "latent output", 2.0 * tokens * heads * attention.kv_rank
        elif not repeats("mla_up_proj"):
            yield "q, k, v", 2.0 * tokens * heads * (2 * attention.qk_dim + attention.value_dim)
    yield (
        "attention output",
        (2.0 if scenario.kernels.attention == "flash" else operand) * tokens * heads * (attention.value_dim),
    )
    if model.indexer is not None and kind.selects:
        indexer = model.indexer
        yield "index", tokens * (2.0 * indexer.heads * indexer.head_dim + 2.0 * indexer.head_dim)
        yield "indices", 8.0 * tokens * min(indexer.top_k, scenario.batch.sequence_tokens)
    if not repeats("core_attn") and scenario.kernels.attention == "unfused":
        table = scenario.batch.sequences_per_microbatch * heads * scenario.batch.sequence_tokens**2
        yield "attention table", (2.0 + 3 * mask) * table
    elif scenario.kernels.attention == "flash":
        yield "softmax statistics", 4.0 * tokens * heads
    if kind.experts and model.experts is not None:
        copies = expert_tokens(rank, model.experts, slowest=True) * (model.experts.experts // cut.expert)
        ups = model.matrices - 1
        yield "expert inputs", operand * copies * hidden
        # Router weights multiply the activation, so what leaves the experts need not be kept.
        kept = operand * ups if repeats("activation") else 2.0 * ups + operand
        yield "expert inner", copies * model.experts.width * kept
        shared = model.experts.shared_experts * model.experts.width // cut.tensor
        yield "shared inner", tokens * shared * (2.0 * ups + operand)
    else:
        part = model.feed_forward // cut.tensor
        kept = 0.0 if repeats("activation") else operand
        if scenario.kernels.framework == "eager":  # silu(gate) besides its product with up
            kept += 2.0
        yield "inner", tokens * part * (2.0 * (model.matrices - 1) + kept)


AFTER_SELECTION = (
    "latent output", "attention output", "softmax statistics", "expert inputs", "expert inner",
    "shared inner", "inner",
)  # fmt: skip


def _after_selection(rank: Rank, kind: LayerKind) -> float:
    """Bytes of a layer's activations that do not exist yet while it selects."""
    return sum(size for name, size in _layer_items(rank, kind) if name in AFTER_SELECTION)


def _gradients_of_inner(rank: Rank, kind: LayerKind) -> float:
    """Gradients inside a feed-forward while the activation's are computed, without one in the place of its
    result, which is no longer needed: of that result, of silu(gate) and of up, say."""
    model, cut = rank.scenario.model_description, rank.cut
    if kind.experts and model.experts is not None:
        copies = expert_tokens(rank, model.experts, slowest=True) * (model.experts.experts // cut.expert)
        shared = model.experts.shared_experts * model.experts.width // cut.tensor
        inner = copies * model.experts.width + rank.tokens * shared
    else:
        inner = rank.tokens * (model.feed_forward // cut.tensor)
    return 2.0 * inner * (model.matrices - 1)


def _workspaces(rank: Rank, stage: int, ahead: Sequence[int]) -> Iterator[tuple[str, float]]:
    scenario = rank.scenario
    model, cut = scenario.model_description, rank.cut
    kinds = {layer_kind(rank, layer) for layer in ahead}
    if any(kind.recomputed for kind in kinds):
        yield "recomputed layer", max(activation_bytes(rank, kind) for kind in kinds if kind.recomputed)
    if _eager(rank):
        yield "inner gradients", max((_gradients_of_inner(rank, kind) for kind in kinds), default=0.0)
    if len(cut.pieces) - 1 in cut.pieces_of(stage):
        part = -(-model.vocabulary // cut.tensor)
        rows = min(rank.tokens, HEAD_ROWS) if _eager(rank) else rank.tokens
        yield "logits", rows * part * (2.0 if scenario.kernels.fused_cross_entropy else 6.0)
    if model.indexer is not None:
        if isinstance(model.attention, Latent) and cut.context > 1:
            width = model.attention.kv_width + model.indexer.head_dim
            yield "gathered keys", 2 * 2.0 * rank.tokens * cut.context * width
        # A layer frees them before it allocates what follows its selection: only what is larger counts.
        after = min((_after_selection(rank, kind) for kind in kinds if kind.selects), default=0.0)
        if scenario.selection.table:
            keys = scenario.batch.sequence_tokens // model.indexer.key_ratio
            tables = 1 + (model.indexer.heads if scenario.selection.scoring_dtype == "fp32" else 0)
            yield "score table", max(4.0 * chunk_rows(rank) * keys * tables - after, 0.0)
        else:  # the selection contract's bound: a bitmap and candidate lists, in row blocks
            most = min(16.0 * rank.tokens * model.indexer.top_k + 64 * 2**20, 4.0e9)
            yield "selection workspace", max(most - after, 0.0)
    if any(kind.experts for kind in kinds) and model.experts is not None and cut.expert > 1:
        yield "dispatch buffers", 2 * 2.0 * rank.rows * model.experts.top_k * model.hidden * rank.imbalance
    if scenario.layout.zero_stage == 3:
        largest = max(
            (model.dense_parameters(layer) / cut.tensor + model.expert_parameters(layer) / cut.expert)
            for layer in ahead
        )
        yield "gathered weights", 2 * scenario.precision.weight_bytes * largest


REMEDIES: tuple[tuple[str, dict[str, object]], ...] = (
    ("bound the score table to 1 GiB (selection.table_rows = 0)", {"selection.table_rows": 0}),
    ("pack the selection records (selection.record = 'packed')", {"selection.record": "packed"}),
    ("keep selection records on the host (offload.selection = true)", {"offload.selection": True}),
    ("shard gradients (layout.zero_stage = 2)", {"layout.zero_stage": 2}),
    ("recompute every layer (recompute.policy = 'full')", {
        "recompute.policy": "full", "recompute.layers_fraction": 1.0,
    }),
    ("move kept activations to the host (offload.activations = 1)", {"offload.activations": 1.0}),
    ("shard weights (layout.zero_stage = 3)", {"layout.zero_stage": 3}),
)  # fmt: skip


def what_would_fit(scenario: Scenario) -> tuple[str, ...]:
    """Changes after which the scenario fits: one if one suffices, else several; empty if none do."""
    tried: list[tuple[str, dict[str, object]]] = []
    for name, change in REMEDIES:
        changed = scenario.with_(**change)
        if changed == scenario:
            continue
        if memory(changed).fits:
            return (name,)
        tried.append((name, change))
    together: dict[str, object] = {}
    names: list[str] = []
    before = memory(scenario).peak_bytes
    for name, change in tried:
        changed = scenario.with_(**{**together, **change})
        after = memory(changed).peak_bytes
        if after < before:
            together |= change
            names.append(name)
            before = after
            if memory(changed).fits:
                return tuple(names)
    return ()

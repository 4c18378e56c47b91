"""Which rank holds what: parallel sizes, stages and microbatches, and the rules a layout must obey."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from hyscale_simulator.descriptions import DescriptionError
from hyscale_simulator.model import Grouped
from hyscale_simulator.scenario import Scenario
from hyscale_simulator.schedules import Schedule, dualpipe, gpipe, interleaved, one_f_one_b, zb_h1

__all__ = ["MOST_SMS", "LayoutError", "Plan", "plan"]

MOST_PASSES = 2**18
"""Forward passes of one step, over all pieces of the pipeline: some ten seconds of our own time."""

MOST_SMS = 0.9
"""Share of its SMs that communication may take from a GPU, so that kernels go on."""


class LayoutError(DescriptionError):
    """A layout that cannot run; names the rule it breaks."""


@dataclass(frozen=True)
class Plan:
    """A legal layout, resolved.

    chunks[i]: the layers of the i-th piece of the model along the pipeline.  A stage holds one piece, several
    (interleaved), or two, its own and its mirror's (DualPipe).
    """

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    microbatches: int
    chunks: tuple[range, ...]
    schedule: Schedule

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.tensor * self.context * self.data // self.expert

    def piece(self, stage: int, chunk: int) -> int:
        """Which piece of the model a stage holds as its ``chunk``."""
        return self._pieces[stage, chunk]

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], int]:
        return {place: at for route in self.schedule.routes for at, place in enumerate(route)}

    def pieces_of(self, stage: int) -> tuple[int, ...]:
        """The pieces on a stage, by chunk."""
        return tuple(self.piece(stage, chunk) for chunk in range(self.schedule.num_chunks))

    def layers_of(self, stage: int) -> list[int]:
        """Every layer on a stage."""
        return [layer for piece in self.pieces_of(stage) for layer in self.chunks[piece]]


def plan(scenario: Scenario) -> Plan:
    """The resolved layout; :class:`LayoutError` names the first rule that is broken."""
    layout, batch, model = scenario.layout, scenario.batch, scenario.model_description
    cluster = scenario.cluster_description

    def refuse(field: str, value: object, rule: str) -> LayoutError:
        return LayoutError(f"scenario {scenario.name}: {field} = {value}: {rule}")

    if scenario.gpus > cluster.gpus:
        raise refuse("gpus", scenario.gpus, f"the cluster {cluster.name} has {cluster.gpus}")
    tensor, context, pipeline = layout.tensor_parallel, layout.context_parallel, layout.pipeline_parallel
    model_ranks = tensor * context * pipeline
    if scenario.gpus % model_ranks:
        raise refuse(
            "gpus", scenario.gpus,
            f"must be a multiple of tensor x context x pipeline = {tensor} x {context} x {pipeline}",
        )  # fmt: skip
    data = scenario.gpus // model_ranks
    if tensor > cluster.gpus_per_node:
        raise refuse("layout.tensor_parallel", tensor, f"must fit in a node of {cluster.gpus_per_node}")
    _check_widths(scenario)

    tokens = batch.sequence_tokens
    parts = context * (2 if layout.context_split == "zigzag" and context > 1 else 1)
    parts *= tensor if layout.sequence_parallel and tensor > 1 else 1
    if tokens % parts:
        raise refuse(
            "batch.sequence_tokens", tokens,
            f"must be a multiple of {parts} (context ranks, halves of a zig-zag, sequence-parallel ranks)",
        )  # fmt: skip
    per_wave = data * batch.sequences_per_microbatch
    if batch.sequences_per_step % per_wave:
        raise refuse(
            "batch.sequences_per_step", batch.sequences_per_step,
            f"must be a multiple of data-parallel ranks x sequences_per_microbatch = {per_wave}",
        )  # fmt: skip
    microbatches = batch.sequences_per_step // per_wave

    if model.experts is None:
        if layout.expert_parallel != 1:
            raise refuse("layout.expert_parallel", layout.expert_parallel, f"{model.name} has no experts")
    else:
        ranks = tensor * context * data
        if ranks % layout.expert_parallel:
            raise refuse(
                "layout.expert_parallel", layout.expert_parallel,
                f"must divide tensor x context x data = {ranks}",
            )  # fmt: skip
        if model.experts.experts % layout.expert_parallel:
            raise refuse(
                "layout.expert_parallel", layout.expert_parallel,
                f"must divide the {model.experts.experts} experts",
            )  # fmt: skip
        if tensor > 1 and not layout.sequence_parallel:
            raise refuse("layout.sequence_parallel", False, "experts with tensor parallelism need it")
        counts = scenario.routing.counts
        if counts and len(counts) != model.experts.experts:
            raise refuse(
                "routing.counts", f"{len(counts)} numbers", f"one for each of {model.experts.experts} experts"
            )
    most = int(MOST_SMS * scenario.gpu_description.sms)
    if scenario.overlap.communication_sms > most:
        raise refuse(
            "overlap.communication_sms", scenario.overlap.communication_sms,
            f"at most {most} of the {scenario.gpu_description.sms} SMs: kernels need the rest",
        )  # fmt: skip
    if scenario.recompute.replay and model.indexer is None:
        raise refuse("recompute.replay", True, f"{model.name} has no indexer")

    chunks = _chunks(scenario)
    if microbatches * len(chunks) > MOST_PASSES:
        raise refuse(
            "batch.sequences_per_step", batch.sequences_per_step,
            f"{microbatches:,} microbatches through {len(chunks)} pieces of the model are more than "
            f"{MOST_PASSES:,} passes; larger microbatches or more data-parallel ranks make them fewer",
        )  # fmt: skip
    indexer = model.indexer
    if indexer is not None and indexer.computing_layers and not indexer.dense_ratio:
        for index, layers in enumerate(chunks):
            if len(layers) and not model.selects(layers[0]):
                raise refuse(
                    "layout.stage_layers", [len(c) for c in chunks],
                    f"chunk {index} begins with layer {layers[0]}, which reuses an earlier selection: "
                    "a pipeline stage must begin with a layer that selects",
                )  # fmt: skip
    try:
        schedule = _schedule(layout.schedule, pipeline, layout.virtual_stages, microbatches)
    except ValueError as error:
        raise LayoutError(
            f"scenario {scenario.name}: layout.schedule = {layout.schedule!r}: {error}"
        ) from None
    return Plan(
        tensor=tensor,
        context=context,
        data=data,
        pipeline=pipeline,
        expert=layout.expert_parallel,
        microbatches=microbatches,
        chunks=chunks,
        schedule=schedule,
    )


def _check_widths(scenario: Scenario) -> None:
    layout, model = scenario.layout, scenario.model_description
    tensor = layout.tensor_parallel
    attention = model.attention

    def refuse(what: str, size: int) -> LayoutError:
        return LayoutError(
            f"scenario {scenario.name}: layout.tensor_parallel = {tensor}: must divide the {size} {what}"
        )

    if attention.heads % tensor:
        raise refuse("attention heads", attention.heads)
    if isinstance(attention, Grouped) and attention.kv_heads % tensor and tensor % attention.kv_heads:
        raise refuse("key-value heads (or be a multiple of them)", attention.kv_heads)
    if model.feed_forward % tensor:
        raise refuse("columns of the feed-forward", model.feed_forward)
    if layout.context_exchange == "all_to_all":
        ranks = tensor * layout.context_parallel
        if attention.heads % ranks:
            raise LayoutError(
                f"scenario {scenario.name}: layout.context_parallel = {layout.context_parallel}: exchanging "
                f"heads needs tensor x context = {ranks} to divide the {attention.heads} heads"
            )
        if model.indexer is not None:
            raise LayoutError(
                f"scenario {scenario.name}: layout.context_exchange = 'all_to_all': the indexer shares one "
                "key among its heads, so only 'all_gather' is possible"
            )
    gpu = scenario.gpu_description
    if (
        model.indexer is not None
        and scenario.selection.scoring_dtype == "fp8"
        and gpu.tensor_tflops.fp8 is None
    ):
        raise LayoutError(
            f"scenario {scenario.name}: selection.scoring_dtype = 'fp8': {gpu.name} has no fp8 tensor cores"
        )
    if scenario.precision.linear == "fp8" and gpu.tensor_tflops.fp8 is None:
        raise LayoutError(
            f"scenario {scenario.name}: precision.linear = 'fp8': {gpu.name} has no fp8 tensor cores"
        )


def _chunks(scenario: Scenario) -> tuple[range, ...]:
    layout, model = scenario.layout, scenario.model_description
    stages, virtual = layout.pipeline_parallel, layout.virtual_stages
    if layout.schedule == "dualpipe":
        if virtual != 1:
            raise LayoutError(
                f"scenario {scenario.name}: layout.virtual_stages = {virtual}: dualpipe needs 1"
            )
    elif virtual > 1 and layout.schedule != "interleaved":
        raise LayoutError(
            f"scenario {scenario.name}: layout.virtual_stages = {virtual}: only the interleaved schedule has "
            "them"
        )
    pieces = stages * virtual
    sizes = list(layout.stage_layers)
    if not sizes:
        if model.layers < pieces:
            raise LayoutError(
                f"scenario {scenario.name}: layout.pipeline_parallel x virtual_stages = {pieces}: "
                f"more pieces than the {model.layers} layers"
            )
        small, extra = divmod(model.layers, pieces)
        # The last piece holds the head and the first the embedding: the others take the remainder first.
        order = [*range(1, pieces - 1), 0, pieces - 1] if pieces > 1 else [0]
        larger = set(order[:extra])
        sizes = [small + (piece in larger) for piece in range(pieces)]
    if len(sizes) != pieces or sum(sizes) != model.layers:
        raise LayoutError(
            f"scenario {scenario.name}: layout.stage_layers = {sizes}: needs {pieces} numbers that add up to "
            f"{model.layers} layers"
        )
    if 0 in sizes[1:-1]:
        raise LayoutError(
            f"scenario {scenario.name}: layout.stage_layers = {sizes}: only the first piece (embedding) and "
            "the last (head) may hold no layer"
        )
    chunks, first = [], 0
    for size in sizes:
        chunks.append(range(first, first + size))
        first += size
    return tuple(chunks)


@lru_cache(maxsize=64)
def _schedule(kind: str, stages: int, virtual: int, microbatches: int) -> Schedule:
    if kind == "gpipe":
        return gpipe(stages, microbatches)
    if kind == "interleaved":
        return interleaved(stages, microbatches, virtual)
    if kind == "zero_bubble":
        return zb_h1(stages, microbatches)
    if kind == "dualpipe":
        return dualpipe(stages, microbatches)
    return one_f_one_b(stages, microbatches)

"""Which rank holds what: parallel sizes, stages and microbatches, and the rules a layout must obey."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

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

    pieces[i]: the layers of the i-th piece of the model along the pipeline.  A stage holds one piece, several
    (interleaved), or two, its own and its mirror's (DualPipe).
    """

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    microbatches: int
    pieces: tuple[range, ...]
    schedule: Schedule

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.tensor * self.context * self.data // self.expert

    def piece(self, stage: int, chunk: int) -> int:
        """Which piece of the model a stage holds as its ``chunk``."""
        return self._piece_at[stage, chunk]

    @cached_property
    def _piece_at(self) -> dict[tuple[int, int], int]:
        return {place: at for route in self.schedule.routes for at, place in enumerate(route)}

    def pieces_of(self, stage: int) -> tuple[int, ...]:
        """The pieces on a stage, by chunk."""
        return tuple(self.piece(stage, chunk) for chunk in range(self.schedule.num_chunks))

    def layers_of(self, stage: int) -> list[int]:
        """Every layer on a stage."""
        return [layer for piece in self.pieces_of(stage) for layer in self.pieces[piece]]


def plan(scenario: Scenario) -> Plan:
    """The resolved layout; :class:`LayoutError` names the first rule that is broken."""
    layout, batch, model = scenario.layout, scenario.batch, scenario.model_description
    cluster = scenario.cluster_description
    if scenario.gpus > cluster.gpus:
        raise _refused(scenario, "gpus", scenario.gpus, f"the cluster {cluster.name} has {cluster.gpus}")
    tensor, context, pipeline = layout.tensor_parallel, layout.context_parallel, layout.pipeline_parallel
    model_ranks = tensor * context * pipeline
    if scenario.gpus % model_ranks:
        raise _refused(
            scenario, "gpus", scenario.gpus,
            f"must be a multiple of tensor x context x pipeline = {tensor} x {context} x {pipeline}",
        )  # fmt: skip
    data = scenario.gpus // model_ranks
    if tensor > cluster.gpus_per_node:
        raise _refused(
            scenario, "layout.tensor_parallel", tensor, f"must fit in a node of {cluster.gpus_per_node}"
        )
    _check_widths(scenario)
    _check_tokens(scenario)
    per_wave = data * batch.sequences_per_microbatch
    if batch.sequences_per_step % per_wave:
        raise _refused(
            scenario, "batch.sequences_per_step", batch.sequences_per_step,
            f"must be a multiple of data-parallel ranks x sequences_per_microbatch = {per_wave}",
        )  # fmt: skip
    microbatches = batch.sequences_per_step // per_wave
    _check_experts(scenario)
    most = int(MOST_SMS * scenario.gpu_description.sms)
    if scenario.overlap.communication_sms > most:
        raise _refused(
            scenario, "overlap.communication_sms", scenario.overlap.communication_sms,
            f"at most {most} of the {scenario.gpu_description.sms} SMs: kernels need the rest",
        )  # fmt: skip
    if scenario.recompute.replay and model.indexer is None:
        raise _refused(scenario, "recompute.replay", True, f"{model.name} has no indexer")
    pieces = _pieces(scenario)
    if microbatches * len(pieces) > MOST_PASSES:
        raise _refused(
            scenario, "batch.sequences_per_step", batch.sequences_per_step,
            f"{microbatches:,} microbatches through {len(pieces)} pieces of the model are more than "
            f"{MOST_PASSES:,} passes; larger microbatches or more data-parallel ranks make them fewer",
        )  # fmt: skip
    _check_starts(scenario, pieces)
    try:
        schedule = _schedule(layout.schedule, pipeline, layout.virtual_stages, microbatches)
    except ValueError as error:
        raise _refused(scenario, "layout.schedule", repr(layout.schedule), str(error)) from None
    return Plan(
        tensor=tensor,
        context=context,
        data=data,
        pipeline=pipeline,
        expert=layout.expert_parallel,
        microbatches=microbatches,
        pieces=pieces,
        schedule=schedule,
    )


def _refused(scenario: Scenario, field: str, value: object, rule: str) -> LayoutError:
    """What a broken ``rule`` is raised as; a string ``value`` comes with its quotes if it should have any."""
    return LayoutError(f"scenario {scenario.name}: {field} = {value}: {rule}")


def _check_widths(scenario: Scenario) -> None:
    layout, model = scenario.layout, scenario.model_description
    tensor, attention = layout.tensor_parallel, model.attention

    def indivisible(what: str, size: int) -> LayoutError:
        return _refused(scenario, "layout.tensor_parallel", tensor, f"must divide the {size} {what}")

    if attention.heads % tensor:
        raise indivisible("attention heads", attention.heads)
    if isinstance(attention, Grouped) and attention.kv_heads % tensor and tensor % attention.kv_heads:
        raise indivisible("key-value heads (or be a multiple of them)", attention.kv_heads)
    if model.feed_forward % tensor:
        raise indivisible("columns of the feed-forward", model.feed_forward)
    if layout.context_exchange == "all_to_all":
        ranks = tensor * layout.context_parallel
        if attention.heads % ranks:
            raise _refused(
                scenario, "layout.context_parallel", layout.context_parallel,
                f"exchanging heads needs tensor x context = {ranks} to divide the {attention.heads} heads",
            )  # fmt: skip
        if model.indexer is not None:
            raise _refused(
                scenario, "layout.context_exchange", "'all_to_all'",
                "the indexer shares one key among its heads, so only 'all_gather' is possible",
            )  # fmt: skip
    gpu = scenario.gpu_description
    if gpu.tensor_tflops.fp8 is None:
        lacking = f"{gpu.name} has no fp8 tensor cores"
        if model.indexer is not None and scenario.selection.scoring_dtype == "fp8":
            raise _refused(scenario, "selection.scoring_dtype", "'fp8'", lacking)
        if scenario.precision.linear == "fp8":
            raise _refused(scenario, "precision.linear", "'fp8'", lacking)


def _check_tokens(scenario: Scenario) -> None:
    layout, tokens = scenario.layout, scenario.batch.sequence_tokens
    tensor, context = layout.tensor_parallel, layout.context_parallel
    parts = context * (2 if layout.context_split == "zigzag" and context > 1 else 1)
    parts *= tensor if layout.sequence_parallel and tensor > 1 else 1
    if tokens % parts:
        raise _refused(
            scenario, "batch.sequence_tokens", tokens,
            f"must be a multiple of {parts} (context ranks, halves of a zig-zag, sequence-parallel ranks)",
        )  # fmt: skip


def _check_experts(scenario: Scenario) -> None:
    layout, model = scenario.layout, scenario.model_description
    if model.experts is None:
        if layout.expert_parallel != 1:
            raise _refused(
                scenario, "layout.expert_parallel", layout.expert_parallel, f"{model.name} has no experts"
            )
        return
    ranks, experts = scenario.gpus // layout.pipeline_parallel, model.experts.experts
    if ranks % layout.expert_parallel:
        raise _refused(
            scenario, "layout.expert_parallel", layout.expert_parallel,
            f"must divide tensor x context x data = {ranks}",
        )  # fmt: skip
    if experts % layout.expert_parallel:
        raise _refused(
            scenario, "layout.expert_parallel", layout.expert_parallel, f"must divide the {experts} experts"
        )
    if layout.tensor_parallel > 1 and not layout.sequence_parallel:
        raise _refused(scenario, "layout.sequence_parallel", False, "experts with tensor parallelism need it")
    counts = scenario.routing.counts
    if counts and len(counts) != experts:
        raise _refused(
            scenario, "routing.counts", f"{len(counts)} numbers", f"one for each of {experts} experts"
        )


def _check_starts(scenario: Scenario, pieces: Sequence[range]) -> None:
    model = scenario.model_description
    indexer = model.indexer
    if indexer is None or not indexer.computing_layers or indexer.dense_ratio:
        return
    for index, layers in enumerate(pieces):
        if len(layers) and not model.selects(layers[0]):
            raise _refused(
                scenario, "layout.stage_layers", [len(piece) for piece in pieces],
                f"chunk {index} begins with layer {layers[0]}, which reuses an earlier selection: "
                "a pipeline stage must begin with a layer that selects",
            )  # fmt: skip


def _pieces(scenario: Scenario) -> tuple[range, ...]:
    layout, model = scenario.layout, scenario.model_description
    stages, virtual = layout.pipeline_parallel, layout.virtual_stages
    if layout.schedule == "dualpipe":
        if virtual != 1:
            raise _refused(scenario, "layout.virtual_stages", virtual, "dualpipe needs 1")
    elif virtual > 1 and layout.schedule != "interleaved":
        raise _refused(scenario, "layout.virtual_stages", virtual, "only the interleaved schedule has them")
    count = stages * virtual
    sizes = list(layout.stage_layers)
    if not sizes:
        if model.layers < count:
            raise _refused(
                scenario, "layout.pipeline_parallel x virtual_stages", count,
                f"more pieces than the {model.layers} layers",
            )  # fmt: skip
        small, extra = divmod(model.layers, count)
        # The last piece holds the head and the first the embedding: the others take the remainder first.
        order = [*range(1, count - 1), 0, count - 1] if count > 1 else [0]
        larger = set(order[:extra])
        sizes = [small + (piece in larger) for piece in range(count)]
    if len(sizes) != count or sum(sizes) != model.layers:
        raise _refused(
            scenario, "layout.stage_layers", sizes,
            f"needs {count} numbers that add up to {model.layers} layers",
        )  # fmt: skip
    if 0 in sizes[1:-1]:
        raise _refused(
            scenario, "layout.stage_layers", sizes,
            "only the first piece (embedding) and the last (head) may hold no layer",
        )  # fmt: skip
    ends = list(accumulate(sizes))
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))


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

"""A scenario: which model trains on which cluster, laid out how, with which kernels and policies.

Immutable and hashable.  ``scenario.with_(**{"layout.context_parallel": 32})`` gives a changed copy, checked
like the original; ``scenario.hash`` identifies it in results.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hyscale_simulator.descriptions import (
    DATA,
    Count,
    Description,
    DescriptionError,
    Fraction,
    Positive,
    Rate,
    Several,
    Share,
    find,
    parse,
    read_toml,
    shipped,
)
from hyscale_simulator.hardware import Cluster, Gpu
from hyscale_simulator.model import Model

__all__ = ["Scenario", "length_scenario", "load", "presets", "tokens_label"]


class Layout(Description):
    """How the model and the batch are cut.  What remains of the GPUs is data parallel."""

    tensor_parallel: Positive = 1
    context_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    expert_parallel: Positive = 1
    virtual_stages: Positive = 1
    """Model chunks a stage holds, for the interleaved schedule."""
    stage_layers: Several[Count] = ()
    """Layers of each chunk along the pipeline; empty: as even as possible."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipe"] = "1f1b"
    sequence_parallel: bool = True
    """Norms and residuals split over the tensor-parallel ranks."""
    context_split: Literal["contiguous", "zigzag"] = "zigzag"
    context_exchange: Literal["all_gather", "all_to_all"] = "all_gather"
    """Keys gathered by every rank, or heads exchanged (Ulysses)."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    scatter_gather: bool = False
    """Pipeline messages split over tensor-parallel ranks without sequence parallelism (Megatron-LM)."""


class Batch(Description):
    """What one step consumes."""

    sequence_tokens: Positive
    sequences_per_step: Positive
    sequences_per_microbatch: Positive = 1


class Precision(Description):
    """Number formats."""

    linear: Literal["bf16", "fp8"] = "bf16"
    attention: Literal["bf16"] = "bf16"
    dispatch: Literal["bf16", "fp8"] = "bf16"
    """Tokens sent to experts (what comes back is bf16)."""
    gradient_bytes: Literal[2, 4] = 4
    gradient_reduce_bytes: Literal[2, 4] = 4
    optimizer_bytes: Positive = 12
    """Master weight and moments of one parameter."""
    weight_bytes: Positive = 2
    """One parameter as the kernels read it, with copies kept beside it (bf16 2; fp8, transposed too: 2)."""


class Selection(Description):
    """How the top-k keys are found."""

    table: bool = True
    """Whether the score table is written to memory (materialised)."""
    scorer: str = ""
    """Preferred profile of ``index_scores``; "" for any."""
    selector: Literal["torch.topk", "flashinfer", "sglang", "hytopk"] = "hytopk"
    scoring_dtype: Literal["bf16", "fp8", "fp32"] = "bf16"
    square: bool = False
    """Whether the causal half that is masked is scored, written and searched as well."""
    mask_pass: bool = False
    """A separate pass that writes -inf over the masked half of the table."""
    scores: Literal["trained", "untrained"] = "untrained"
    skipped_fraction: Fraction = 0.0
    """Keys whose scoring a bound makes unnecessary."""
    record: Literal["int32", "packed"] = "int32"
    """How indices are kept between forward and backward."""
    row_starts: bool = False
    """Whether the selector is told where each row's keys start, as packed documents need (FlashInfer then
    loads one score at a time)."""
    table_rows: Count = 0
    """Rows scored at a time; 0: as many as keep the table within 1 GiB."""
    shard_rows: bool = False
    """Whether tensor-parallel ranks share the rows and gather the indices; otherwise each selects for all."""
    loss: bool = True
    """Whether the indexer is trained (KL over the selected keys)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.table and self.selector != "hytopk":
            raise ValueError(f"selector = {self.selector!r}: reads a score table, but table = false")
        if self.table and self.selector == "hytopk":
            raise ValueError("selector = 'hytopk': never writes a score table; set table = false")
        if self.table and self.skipped_fraction:
            raise ValueError("skipped_fraction: a materialised table skips nothing; set it to 0")
        if not self.table and self.square:
            raise ValueError("square: only a materialised table covers the masked half")
        return self


class Recompute(Description):
    """What is computed again in the backward pass."""

    policy: Literal["none", "selective", "full"] = "full"
    """selective: only ``modules``."""
    modules: Several[Literal["core_attn", "layernorm", "mla_up_proj", "activation"]] = ("core_attn",)
    """What selective recomputation repeats: the attention core (scores, softmax, dropout, PV), the norms,
    latent attention's up projections, the feed-forward's activation function."""
    layers_fraction: Fraction = 1.0
    """Share of the layers it applies to."""
    replay: bool = False
    """The forward's selection is kept and reused, so that recomputation does not select again."""
    reentrant: bool = True
    """Reentrant checkpointing (Megatron-LM's) runs the first forward pass without gradients, hence without
    the indexer's loss; PyTorch's non-reentrant one runs all of it, and the loss twice."""

    def repeats(self, module: str) -> bool:
        """Whether the backward pass repeats that module alone."""
        return self.policy == "selective" and module in self.modules

    @model_validator(mode="after")
    def _replay_needs_full(self) -> Self:
        if self.replay and self.policy != "full":
            raise ValueError(
                f"replay: needs policy = 'full', not {self.policy!r} (nothing is selected twice)"
            )
        return self


class Offload(Description):
    """What is moved to host memory between forward and backward."""

    activations: Fraction = 0.0
    """Share of the kept activations."""
    selection: bool = False


class Overlap(Description):
    """Which communication runs beneath computation."""

    tensor: Literal["none", "backward", "full"] = "backward"
    """backward: gather and reduction beneath dgrad and wgrad (Megatron-LM); full: each product pipelined
    with its collective (user buffers)."""
    context: bool = True
    expert: bool = False
    gradients: bool = True
    parameters: bool = True
    pipeline: bool = True
    communication_sms: Count = 20
    """SMs that a running collective takes from overlapped kernels."""


class Routing(Description):
    """How evenly tokens reach the experts."""

    distribution: Literal["balanced", "power_law", "counts"] = "balanced"
    exponent: Rate = 0.5
    """Load of the i-th busiest expert is proportional to i^-exponent."""
    counts: Several[Count] = ()
    max_nodes: Count = 0
    """Most nodes that a token's experts may lie on; 0: any."""

    @model_validator(mode="after")
    def _counts_given(self) -> Self:
        if (self.distribution == "counts") != bool(self.counts):
            raise ValueError("counts: needed with distribution = 'counts', and only then")
        if self.counts and not sum(self.counts):
            raise ValueError("counts: no token is routed anywhere")
        return self


class Faults(Description):
    """What is wrong with the cluster; nothing by default."""

    jitter_fraction: Fraction = 0.0
    """Relative standard deviation of every task of the step (log-normal, mean 1)."""
    seed: Count = 0
    slow_stage: Count = 0
    slow_stage_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """A straggler: every task of that pipeline stage takes so many times as long."""
    network_level: Literal["nvlink", "leaf", "spine"] = "leaf"
    network_bandwidth_fraction: Share = 1.0
    """What is left of that level's bandwidth."""
    ports_lost: Count = 0
    """Failed ports (NICs) of every node at that level."""


class Kernels(Description):
    """Which kernels the framework runs."""

    attention: Literal["flash", "unfused"] = "flash"
    framework: Literal["fused", "eager"] = "fused"
    """fused: one kernel each for rotary positions, activation, quantisation and update; weights in bf16.
    eager: PyTorch's operators one by one over float32 parameters, as hyscale_kernels.layer runs them."""
    product_rows: Count = 0
    """Rows of one product of a forward pass, in an eager framework; 0: all at once."""
    attention_implementation: str = ""
    """Preferred profile of ``attention``, sparse or not; "" for any."""
    dispatcher: Literal["deepep", "all_to_all"] = "deepep"
    """One copy to each node that a token's experts are on, or one to each expert."""
    dropout: bool = False
    fused_cross_entropy: bool = True


class Scenario(Description):
    """One training step to predict."""

    name: str
    description: str = ""
    source: str = ""
    model: str | Model
    """Name of a model description, a .toml file, or the description itself."""
    cluster: str | Cluster
    """Name of a cluster description, a .toml file, or the description itself."""
    gpus: Positive
    mtp_layers: Count = 0
    """Multi-token-prediction layers that are trained; they sit with the head."""
    layout: Layout = Field(default_factory=Layout)
    batch: Batch
    precision: Precision = Field(default_factory=Precision)
    selection: Selection = Field(default_factory=lambda: Selection(table=False))
    recompute: Recompute = Field(default_factory=Recompute)
    offload: Offload = Field(default_factory=Offload)
    overlap: Overlap = Field(default_factory=Overlap)
    routing: Routing = Field(default_factory=Routing)
    kernels: Kernels = Field(default_factory=Kernels)
    faults: Faults = Field(default_factory=Faults)

    @cached_property
    def model_description(self) -> Model:
        """The model."""
        if isinstance(self.model, Model):
            return self.model
        return find(Model, "models", self.model, f"scenario {self.name}: model")

    @cached_property
    def cluster_description(self) -> Cluster:
        """The cluster."""
        if isinstance(self.cluster, Cluster):
            return self.cluster
        return find(Cluster, "clusters", self.cluster, f"scenario {self.name}: cluster")

    @cached_property
    def gpu_description(self) -> Gpu:
        """The GPU of the cluster."""
        return self.cluster_description.gpu_description()

    @cached_property
    def hash(self) -> str:
        """SHA-256 (first 16 hex digits) of the resolved scenario: its fields and the descriptions they name.

        Name and prose are left out: equal hashes mean equal results on equal profiles.
        """
        resolved = {
            "scenario": self.model_dump(mode="json", exclude={"name", "description", "source"}),
            "model": self.model_description.model_dump(mode="json"),
            "cluster": self.cluster_description.model_dump(mode="json"),
            "gpu": self.gpu_description.model_dump(mode="json"),
        }
        text = json.dumps(resolved, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_(self, **changes: Any) -> "Scenario":
        """A copy with fields replaced, by dotted path; :class:`DescriptionError` names a bad one.

        ``model.``, ``cluster.`` and ``cluster.gpu.`` reach into the descriptions that the scenario names.
        """
        fields: dict[str, Any] = self.model_dump()
        for path, value in changes.items():
            if path.startswith("model.") and isinstance(fields["model"], str):
                fields["model"] = self.model_description.model_dump()
            if path.startswith("cluster.") and isinstance(fields["cluster"], str):
                fields["cluster"] = self.cluster_description.model_dump()
            if path.startswith("cluster.gpu.") and isinstance(fields["cluster"]["gpu"], str):
                fields["cluster"]["gpu"] = self.gpu_description.model_dump()
            table: Any = fields
            *outer, last = path.split(".")
            for part in outer:
                table = table.get(part) if isinstance(table, dict) else None
            if not isinstance(table, dict) or last not in table:
                raise DescriptionError(f"scenario {self.name}: {path}: no such field; {_near(fields, outer)}")
            table[last] = value
        return parse(Scenario, fields, f"scenario {self.name}")


def _near(fields: Mapping[str, Any], outer: list[str]) -> str:
    table: Any = fields
    for part in outer:
        if not isinstance(table, dict) or not isinstance(table.get(part), dict):
            return f"there are: {', '.join(fields)}"
        table = table[part]
    where = ".".join(outer)
    return f"there are: {', '.join(f'{where}.{name}' if where else name for name in table)}"


def length_scenario(scenario: Scenario, tokens: int) -> Scenario:
    """``scenario`` at another sequence length, with the same tokens in a microbatch and a step where the
    length allows; longer sequences come one to a microbatch and as many to a step."""
    base = scenario.batch
    whole = base.sequence_tokens * base.sequences_per_microbatch
    each = max(whole // tokens, 1)
    microbatches = base.sequences_per_step // base.sequences_per_microbatch
    return scenario.with_(
        **{
            "batch.sequence_tokens": tokens,
            "batch.sequences_per_microbatch": each,
            "batch.sequences_per_step": each * microbatches,
        }
    )


def tokens_label(tokens: int) -> str:
    """32768 as 32K, 1048576 as 1M."""
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 2**10}K"


def presets() -> tuple[str, ...]:
    """Names of the shipped scenarios, those of the validation cases left out."""
    return shipped("scenarios")


def load(name: str) -> Scenario:
    """A preset by name, or a scenario from a ``.toml`` file."""
    if name.endswith(".toml"):
        return parse(Scenario, read_toml(Path(name)), name)
    if name not in presets():
        raise DescriptionError(f"preset {name!r}: not shipped; there are: {', '.join(presets())}")
    text = (DATA / "scenarios" / f"{name}.toml").read_text(encoding="utf-8")
    return parse(Scenario, tomllib.loads(text), f"data/scenarios/{name}.toml")

"""What a layer is and how it runs, in one frozen dataclass; and what one call of it is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from hyscale_ref.shapes import ModelShape

from ..attention.inputs import MAX_HEADS as MAX_QUERY_HEADS
from ..attention.inputs import MAX_REST, MAX_VALUE
from ..hytopk.api import MAX_HEAD_SIZE, MAX_HEADS
from ..hytopk.plan import MAX_TOP_K
from .rows import Rows
from .timer import PartTimer

if TYPE_CHECKING:
    from .attention import Observation
    from .context_parallel import ContextParallel

SelectionName = Literal["hytopk", "materialised", "deepgemm+flashinfer", "own-table"]
Recompute = Literal["none", "full", "full+replay"]
IndexerDtype = Literal["as layer", "fp8"]
Stage = Literal["sparse", "warmup"]


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A sparse-attention layer: its shape, and how it selects, recomputes and computes.

    shape              sizes; ``hyscale_ref.shapes`` has the published ones
    selection          "hytopk"; "materialised": a score table in PyTorch and torch.topk;
                       "deepgemm+flashinfer": a score table by DeepGEMM, selected by FlashInfer (fp8 only);
                       "own-table": HyTopK's own scores as a table, sorted, which must give HyTopK's bits
    recompute          of each layer, in the sparse stage. "none": keep activations; "full": keep the layer's
                       input, and select again; "full+replay": keep the input and the packed selection
    dtype              of activations and products, torch.bfloat16, or on a CPU torch.float32; parameters are
                       float32
    indexer_dtype      "as layer", or "fp8": the selection and the sparse loss see e4m3 queries and keys
    kl_coefficient     of the indexer's loss, a mean over rows
    temperature        of the indexer's softmax in that loss
    sink               whether each head has an attention sink, a learned logit without a value
    row_block          projections run in blocks of so many rows: every product then has the same shape
                       however a sequence is split, so that a row's result cannot depend on the number of
                       ranks. None: in one piece
    table_bytes        of the score table of a materialised selection, at a time
    tile_bytes         of one tile of logits in the warm-up stage

    Raises TypeError or ValueError naming the field, what came and what is allowed.
    """

    shape: ModelShape
    selection: SelectionName = "hytopk"
    recompute: Recompute = "full+replay"
    dtype: torch.dtype = torch.bfloat16
    indexer_dtype: IndexerDtype = "as layer"
    kl_coefficient: float = 1.0
    temperature: float = 1.0
    sink: bool = False
    row_block: int | None = None
    table_bytes: int = 8 * 2**30
    tile_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        if not isinstance(self.shape, ModelShape):
            raise TypeError(f"shape: {type(self.shape).__name__}; allowed: hyscale_ref.shapes.ModelShape")
        _one_of("selection", self.selection, get_args(SelectionName))
        _one_of("recompute", self.recompute, get_args(Recompute))
        _one_of("indexer_dtype", self.indexer_dtype, get_args(IndexerDtype))
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype: {self.dtype}; allowed: torch.bfloat16, torch.float32 (on a CPU)")
        _check_kernels(self.shape)
        if self.recompute == "full+replay" and self.selection != "hytopk":
            raise ValueError(
                f"recompute: 'full+replay' with selection {self.selection!r}; allowed: with 'hytopk', whose "
                "selections are what replay keeps"
            )
        if self.selection == "deepgemm+flashinfer" and self.indexer_dtype != "fp8":
            raise ValueError(
                f"indexer_dtype: {self.indexer_dtype!r} with selection 'deepgemm+flashinfer'; allowed: 'fp8'"
            )
        if not 0 <= self.kl_coefficient < float("inf"):
            raise ValueError(f"kl_coefficient: {self.kl_coefficient}; allowed: finite, 0 or more")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature: {self.temperature}; allowed: finite, above 0")
        for name in ("row_block", "table_bytes", "tile_bytes"):
            value = getattr(self, name)
            if value is None and name == "row_block":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {value!r}; allowed: an integer, 1 or more")

    @property
    def absorbed(self) -> bool:
        """Whether heads have up-projections of their own from the latent, which attention absorbs."""
        return self.shape.qk_nope_dim is not None

    @property
    def query_dim(self) -> int:
        """Size of a head's query as projected (before absorption)."""
        nope = self.shape.qk_nope_dim
        return self.shape.latent_dim if nope is None else nope + self.shape.rope_dim

    @property
    def scale(self) -> float:
        """Factor of the attention logits."""
        return float(self.query_dim**-0.5)


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What one forward pass runs under; the same for all layers of a microbatch.

    rows      the rows of this rank, and what they see
    context   the context-parallel group, or None for the whole sequence on one rank
    stage     "sparse"; or "warmup": dense attention without gradients, only the indexers train
    timer     where to account time, or None
    observer  called by each layer that selects with what it computed; see ``Decoder.observe``
    """

    rows: Rows
    context: "ContextParallel | None" = None
    stage: Stage = "sparse"
    timer: PartTimer | None = None
    observer: "Callable[[Observation], None] | None" = None

    def __post_init__(self) -> None:
        _one_of("stage", self.stage, get_args(Stage))
        rows, context = self.rows, self.context
        theirs = (rows.num_ranks, rows.rank, rows.split)
        ours = (1, 0, rows.split) if context is None else (context.size, context.rank, context.split)
        if theirs != ours:
            raise ValueError(
                f"rows: of (ranks, rank, split) = {theirs}; allowed with this context: {ours}. Make them "
                "with ContextParallel.rows, or with Rows.of for one rank"
            )


def _check_kernels(shape: ModelShape) -> None:
    """Refuse sizes that no kernel takes when the layer is described, not in the middle of a step."""
    rest = shape.latent_dim - shape.value_dim
    limits = (
        ("heads", shape.heads, 1, MAX_QUERY_HEADS),
        ("value_dim", shape.value_dim, 1, MAX_VALUE),
        ("latent_dim - value_dim", rest, 0, MAX_REST),
        ("indexer.heads", shape.indexer.heads, 1, MAX_HEADS),
        ("indexer.head_dim", shape.indexer.head_dim, 1, MAX_HEAD_SIZE),
        ("indexer.top_k", shape.indexer.top_k, 1, MAX_TOP_K),
    )
    for name, value, low, high in limits:
        if not low <= value <= high:
            raise ValueError(f"shape: {name} of {shape.name} is {value}; allowed: {low} to {high}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {value!r}; allowed: {', '.join(map(repr, allowed))}")

"""What a training run is: everything that its losses depend on, in one frozen record."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args

import torch

from hyscale_ref.shapes import GLM_5_1, IndexerShape, ModelShape

from ..layer import DecoderConfig, LayerConfig
from ..layer.config import IndexerDtype, Recompute, SelectionName, Stage
from .text import VOCABULARY

DtypeName = Literal["bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a run.

    stage          "warmup": dense attention, only the indexers train; "sparse"
    steps          how many
    sequence       bytes of a step
    document       bytes of each document in it; None: one document. Documents of at most top_k bytes make the
                   sparse stage dense: every visible key is selected
    learning_rate  reached after ``RunConfig.ramp_steps`` steps
    """

    stage: Stage
    steps: int
    sequence: int
    document: int | None = None
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.stage not in get_args(Stage):
            raise ValueError(f"stage: {self.stage!r}; allowed: {', '.join(map(repr, get_args(Stage)))}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise ValueError(f"steps: {self.steps!r}; allowed: an integer, 0 or more")
        if not 0 <= self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate: {self.learning_rate}; allowed: finite, 0 or more")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run. Fields of the layer are as in ``hyscale_kernels.layer.LayerConfig``.

    shape        of the model's attention; its ``layers`` layers are all sparse
    mlp          inner size of each layer's SwiGLU
    phases       one after the other
    text_bytes   how much of the text to use; None: all
    clip         largest norm of the gradient
    deterministic    bit-equal gradients: torch.use_deterministic_algorithms
    """

    shape: ModelShape
    mlp: int
    phases: tuple[Phase, ...]
    selection: SelectionName = "hytopk"
    recompute: Recompute = "full+replay"
    dtype: DtypeName = "bfloat16"
    indexer_dtype: IndexerDtype = "as layer"
    kl_coefficient: float = 1.0
    row_block: int | None = None
    table_bytes: int = 8 * 2**30
    tile_bytes: int = 256 * 2**20
    text_bytes: int | None = None
    ramp_steps: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    deterministic: bool = False

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("phases: none; allowed: one or more")
        self.decoder()  # refuses what the layer refuses

    def decoder(self) -> DecoderConfig:
        """The model."""
        layer = LayerConfig(
            shape=self.shape, selection=self.selection, recompute=self.recompute,
            dtype=getattr(torch, self.dtype), indexer_dtype=self.indexer_dtype,
            kl_coefficient=self.kl_coefficient, row_block=self.row_block, table_bytes=self.table_bytes,
            tile_bytes=self.tile_bytes,
        )  # fmt: skip
        return DecoderConfig(layer=layer, vocabulary=VOCABULARY, mlp=self.mlp)

    @property
    def steps(self) -> int:
        """Of all phases."""
        return sum(phase.steps for phase in self.phases)

    def place(self, step: int) -> tuple[Phase, int]:
        """The phase of a step, counted from 0, and how many of the phase's steps come before it.

        IndexError past the end.
        """
        for phase in self.phases:
            if step < phase.steps:
                return phase, step
            step -= phase.steps
        raise IndexError(f"the run has {self.steps} steps")

    def as_json(self) -> dict[str, Any]:
        """Numbers, strings, lists and objects; :meth:`from_json` reads them."""
        record: dict[str, Any] = _plain(asdict(self))
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Raises TypeError for fields that are unknown or missing."""
        values = dict(record)
        shape = dict(values["shape"])
        shape["indexer"] = IndexerShape(**shape["indexer"])
        for name in ("selecting_layers", "sparse_layers"):
            shape[name] = tuple(shape[name])
        values["shape"] = ModelShape(**shape)
        values["phases"] = tuple(Phase(**phase) for phase in values["phases"])
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def first_layers(shape: ModelShape, layers: int) -> ModelShape:
    """The first ``layers`` layers of a model whose layers are all sparse.

    ValueError for more layers than it has.
    """
    if not 1 <= layers <= shape.layers:
        raise ValueError(f"layers: {layers}; allowed for {shape.name}: 1 to {shape.layers}")
    return replace(
        shape,
        layers=layers,
        selecting_layers=tuple(each for each in shape.selecting_layers if each < layers),
        sparse_layers=tuple(each for each in shape.sparse_layers if each < layers),
    )


def glm_layers(layers: int) -> ModelShape:
    """GLM-5.1's attention, so many layers deep; ValueError for more than it has."""
    return replace(first_layers(GLM_5_1, layers), name=f"glm-5.1-{layers}-layers")


# For a CPU: Triton's interpreter takes a fraction of a second for a row and layer that selects. The second
# layer shares the first one's selection.
TINY = RunConfig(
    shape=ModelShape(
        name="tiny", hidden=32, layers=2, heads=2, q_lora_rank=16, latent_dim=24, value_dim=16, rope_dim=8,
        qk_nope_dim=8, v_dim=8, indexer=IndexerShape(heads=2, head_dim=16, top_k=4, rope_dim=8),
        selecting_layers=(0,), sparse_layers=(0, 1),
    ),
    mlp=32, dtype="float32", text_bytes=2**16, ramp_steps=2,
    phases=(
        Phase(stage="warmup", steps=2, sequence=16, learning_rate=1e-2),
        Phase(stage="sparse", steps=4, sequence=16, learning_rate=1e-2),
    ),
)  # fmt: skip

# A language model of code that one GPU trains in minutes, with GLM-5.1's indexer: 32 heads of 128.
SMALL = RunConfig(
    shape=ModelShape(
        name="small-code-model", hidden=768, layers=4, heads=16, q_lora_rank=512, latent_dim=128 + 64,
        value_dim=128, rope_dim=64, qk_nope_dim=64, v_dim=64,
        indexer=IndexerShape(heads=32, head_dim=128, top_k=2048),
        selecting_layers=(0, 1, 2, 3), sparse_layers=(0, 1, 2, 3), rope_theta=1e6,
    ),
    mlp=3072,
    phases=(
        Phase(stage="sparse", steps=200, sequence=32768, document=2048),
        Phase(stage="warmup", steps=100, sequence=8192),
        Phase(stage="sparse", steps=200, sequence=32768, learning_rate=3e-4),
    ),
)  # fmt: skip

# Two layers of GLM-5.1's attention and dense feed-forward: what a step of the large model repeats.
GLM = RunConfig(
    shape=glm_layers(2),
    mlp=12288,
    indexer_dtype="fp8",
    row_block=4096,
    phases=(Phase(stage="sparse", steps=10, sequence=65536, learning_rate=1e-4),),
)

PRESETS = {"tiny": TINY, "small": SMALL, "glm": GLM}

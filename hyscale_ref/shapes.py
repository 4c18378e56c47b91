"""Shapes of published models with learned sparse attention, and two small ones.

A shape here is what attention and its indexer need; what else a model has (experts, vocabulary) matters to
the simulator alone. Sources are the models' public configuration files unless a comment says otherwise.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class IndexerShape:
    """The indexer of one layer: H heads of size D score every visible key, and the K best are kept."""

    heads: int  # H
    head_dim: int  # D, shared by all heads' queries and the one key of a token
    top_k: int  # K
    rope_dim: int = 64  # how many of the D elements are rotary
    key_ratio: int = 1  # positions for one (compressed) key


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Attention of a model in absorbed form: one latent key per position, shared by all query heads.

    ``latent_dim`` is the size of that key (the compressed part and the rotary part) and ``value_dim`` its
    leading part that serves as the value. The MLA projections around it are described by ``q_lora_rank``,
    ``qk_nope_dim`` and ``v_dim``; ``qk_nope_dim`` and ``v_dim`` are None for a model that has no such
    per-head expansion. Its heads' outputs then go through a low-rank projection: ``output_groups`` groups of
    heads, each to ``output_lora_rank`` elements, and these to the hidden size.

    ``selecting_layers`` run an indexer. A layer of ``sparse_layers`` that does not reuses the selection of
    the nearest selecting layer below it. Layers in neither attend some other way.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    q_lora_rank: int
    latent_dim: int
    value_dim: int
    rope_dim: int
    qk_nope_dim: int | None
    v_dim: int | None
    indexer: IndexerShape
    selecting_layers: tuple[int, ...]
    sparse_layers: tuple[int, ...]
    output_groups: int | None = None
    output_lora_rank: int | None = None
    rope_theta: float = 1e4  # base of the rotary frequencies, of the indexer as well
    norm_eps: float = 1e-6  # of the RMS norms

    def source_layer(self, layer: int) -> int:
        """The layer whose selection ``layer`` uses; ValueError if it uses none."""
        if layer not in self.sparse_layers:
            raise ValueError(
                f"layer: {layer}; allowed for {self.name}: its sparse layers {self.sparse_layers}"
            )
        return max(source for source in self.selecting_layers if source <= layer)


_EVERY_78 = tuple(range(78))

GLM_5_1 = ModelShape(
    name="glm-5.1",
    hidden=6144,
    layers=78,
    heads=64,
    q_lora_rank=2048,
    latent_dim=512 + 64,
    value_dim=512,
    rope_dim=64,
    qk_nope_dim=192,
    v_dim=256,
    indexer=IndexerShape(heads=32, head_dim=128, top_k=2048),
    selecting_layers=_EVERY_78,
    sparse_layers=_EVERY_78,
    rope_theta=1e6,
    norm_eps=1e-5,
)

# Index sharing: index_topk_freq 4, index_skip_topk_offset 3.
GLM_5_2 = replace(GLM_5_1, name="glm-5.2", selecting_layers=(0, 1, *range(2, 78, 4)), rope_theta=8e6)

DEEPSEEK_V3_2 = ModelShape(
    name="deepseek-v3.2",
    hidden=7168,
    layers=61,
    heads=128,
    q_lora_rank=1536,
    latent_dim=512 + 64,
    value_dim=512,
    rope_dim=64,
    qk_nope_dim=128,
    v_dim=128,
    indexer=IndexerShape(heads=64, head_dim=128, top_k=2048),
    selecting_layers=tuple(range(61)),
    sparse_layers=tuple(range(61)),
)

# 21 of 43 layers select among keys compressed 4:1; the other layers use a sliding window and keys compressed
# 128:1. The counts are public; that the selecting layers are every second one is assumed.
DEEPSEEK_V4_FLASH = ModelShape(
    name="deepseek-v4-flash",
    hidden=4096,
    layers=43,
    heads=64,
    q_lora_rank=1024,
    latent_dim=512,
    value_dim=512,
    rope_dim=64,
    qk_nope_dim=None,
    v_dim=None,
    indexer=IndexerShape(heads=64, head_dim=128, top_k=512, key_ratio=4),
    selecting_layers=tuple(range(2, 43, 2)),
    sparse_layers=tuple(range(2, 43, 2)),
    output_groups=8,
    output_lora_rank=1024,
)

# The README gives depth, heads, ranks and indexer; the head sizes are assumed to be GLM-5.1's, and every
# layer is taken to select, because the pattern of its shared layers is not public.
HY4 = replace(GLM_5_1, name="hy4")

TINY = ModelShape(
    name="tiny",
    hidden=64,
    layers=2,
    heads=4,
    q_lora_rank=32,
    latent_dim=32 + 16,
    value_dim=32,
    rope_dim=16,
    qk_nope_dim=16,
    v_dim=16,
    indexer=IndexerShape(heads=4, head_dim=16, top_k=16, rope_dim=8),
    selecting_layers=(0, 1),
    sparse_layers=(0, 1),
)

SMALL = ModelShape(
    name="small",
    hidden=512,
    layers=4,
    heads=16,
    q_lora_rank=256,
    latent_dim=128 + 64,
    value_dim=128,
    rope_dim=64,
    qk_nope_dim=64,
    v_dim=64,
    indexer=IndexerShape(heads=16, head_dim=64, top_k=256, rope_dim=32),
    selecting_layers=(0, 1, 2, 3),
    sparse_layers=(0, 1, 2, 3),
)

MODELS = {
    shape.name: shape for shape in (GLM_5_1, GLM_5_2, DEEPSEEK_V3_2, DEEPSEEK_V4_FLASH, HY4, TINY, SMALL)
}


def model_shape(name: str) -> ModelShape:
    """The shape called ``name``; ValueError, with the names there are, if it is none of them."""
    if name not in MODELS:
        raise ValueError(f"model: {name!r}; allowed: {', '.join(MODELS)}")
    return MODELS[name]

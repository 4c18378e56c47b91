"""Sparse-attention layers of the DSA family, whole: training stages, recomputation, context parallelism."""

from .attention import DsaAttention, LayerOutput, Observation
from .config import LayerConfig, Step
from .context_parallel import ContextParallel
from .model import Decoder, DecoderConfig, Losses, next_tokens
from .recall import Recall, attention_recall
from .recompute import recomputed
from .rows import Rows
from .timer import PartTimer, part

__all__ = [
    "ContextParallel",
    "Decoder",
    "DecoderConfig",
    "DsaAttention",
    "LayerConfig",
    "LayerOutput",
    "Losses",
    "Observation",
    "PartTimer",
    "Recall",
    "Rows",
    "Step",
    "attention_recall",
    "next_tokens",
    "part",
    "recomputed",
]

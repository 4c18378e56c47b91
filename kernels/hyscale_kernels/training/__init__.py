"""Training a small language model with sparse-attention layers: the run, its text, checkpoints."""

from .checkpoint import CheckpointError, NotSavedError, load, save
from .config import PRESETS, Phase, RunConfig, first_layers, glm_layers
from .text import Text, draw, library_text
from .trainer import StepResult, Trainer, retargeted

__all__ = [
    "PRESETS",
    "CheckpointError",
    "NotSavedError",
    "Phase",
    "RunConfig",
    "StepResult",
    "Text",
    "Trainer",
    "draw",
    "first_layers",
    "glm_layers",
    "library_text",
    "load",
    "retargeted",
    "save",
]

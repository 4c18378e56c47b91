"""HyTopK: exact top-k selection for learned sparse attention, fused with its scoring."""

from .api import default_plan, dense_scores, hytopk, warm_up, workspace_bytes
from .plan import Plan
from .selection import Selection, Stats

__all__ = [
    "Plan",
    "Selection",
    "Stats",
    "default_plan",
    "dense_scores",
    "hytopk",
    "warm_up",
    "workspace_bytes",
]

"""Training the indexer on selected keys: differentiable scores and the KL loss."""

from .api import backward_workspace_bytes, indexer_loss, selected_scores
from .plan import IndexerPlan

__all__ = ["IndexerPlan", "backward_workspace_bytes", "indexer_loss", "selected_scores"]

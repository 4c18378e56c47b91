"""Model FLOPs: what the mathematics asks for, without recomputation, masks or padding.  MFU is counted by it.

Per token: 6 for each parameter of a product that the token meets (forward 2, backward 4), and three times the
forward of the attention core: causal pairs only, selected keys only where attention is sparse; scoring counts
its causal pairs once (its gradient exists only at the selected keys).
"""

from hyscale_simulator.model import Latent, Model

__all__ = ["model_flops"]


def model_flops(model: Model, sequence_tokens: int, sequences: int, mtp_layers: int = 0) -> float:
    """Model FLOPs of one step."""
    per_token = 6.0 * model.hidden * model.vocabulary * (1 + mtp_layers)
    for at in range(model.layers + mtp_layers):
        layer = min(at, model.layers - 1)
        per_token += _layer(model, layer, sequence_tokens)
    return per_token * sequence_tokens * sequences


def _layer(model: Model, layer: int, length: int) -> float:
    experts = 0
    if model.experts is not None:
        experts = model.expert_parameters(layer) * model.experts.top_k // model.experts.experts
    linear = 6.0 * (model.dense_parameters(layer) + experts - 2 * model.norm_parameters)
    attention, indexer = model.attention, model.indexer
    width = attention.qk_dim + attention.value_dim
    pairs = (length + 1) / 2
    if indexer is None or (indexer.dense_ratio and not model.selects(layer)):
        ratio = indexer.dense_ratio if indexer is not None and indexer.dense_ratio else 1
        return linear + 3 * 2.0 * attention.heads * width * pairs / ratio
    assert isinstance(attention, Latent)
    chosen = min(indexer.top_k + indexer.window, pairs)
    core = 3 * 2.0 * attention.heads * width * chosen
    if not model.selects(layer):
        return linear + core
    scoring = 2.0 * indexer.heads * indexer.head_dim * pairs / indexer.key_ratio
    return linear + core + scoring + 2 * 2.0 * indexer.heads * indexer.head_dim * chosen

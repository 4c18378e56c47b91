"""The same attention in plain torch, on any device and differentiable by autograd.

It gathers the selected keys of every row, [T, K, D], and holds all probabilities, [T, Hq, K]: a yardstick for
accuracy and a baseline for speed, not a way to run a long sequence.

Shape letters: T queries, S keys, K places of a row, Hq query heads, D key size, Dv value size.
"""

import torch


def eager_sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hq, Dv], log_sum_exp [T, Hq]), products in the tensors' dtype, softmax in float32 or wider.

    A row that selected nothing gives zeros and -inf.
    """
    logits, keys = _logits(q, latent, indices, scale)
    log_sum_exp = torch.logsumexp(logits, dim=2)
    p = _probabilities(logits, log_sum_exp, sink)
    out = torch.einsum("thk,tkv->thv", p.to(q.dtype), keys[..., :value_dim])
    return out, log_sum_exp.detach()


def eager_attention_mass(
    q: torch.Tensor,
    latent: torch.Tensor,
    indices: torch.Tensor,
    log_sum_exp: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Probabilities at the selected places, summed over heads: [T, K], 0 where unused."""
    logits, _ = _logits(q, latent, indices, scale)
    return _probabilities(logits, log_sum_exp, sink).sum(dim=1)


def _logits(
    q: torch.Tensor, latent: torch.Tensor, indices: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, Hq, K] in float32 or wider, -inf at unused places, and the gathered keys [T, K, D]."""
    used = indices >= 0
    if latent.shape[0] == 0:
        keys = latent.new_zeros((*indices.shape, latent.shape[1]))
    else:
        keys = latent[indices.clamp(min=0).long()]
    keys = keys.masked_fill(~used[..., None], 0)  # an unused place must not see a NaN of key 0
    logits = torch.einsum("thd,tkd->thk", q, keys)
    wide = torch.promote_types(q.dtype, torch.float32)
    return (logits.to(wide) * scale).masked_fill(~used[:, None], float("-inf")), keys


def _probabilities(
    logits: torch.Tensor, log_sum_exp: torch.Tensor, sink: torch.Tensor | None
) -> torch.Tensor:
    """softmax of logits [T, Hq, K]; the sink [Hq] takes its share; 0 in rows that selected nothing."""
    total = log_sum_exp if sink is None else torch.logaddexp(log_sum_exp, sink.to(log_sum_exp.dtype))
    total = total.masked_fill(total == float("-inf"), 0)
    return torch.exp(logits - total[..., None])

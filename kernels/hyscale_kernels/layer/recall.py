"""How good a selection is: the attention mass that it recalls, against a random one of the same size.

Shape letters: n sampled rows, S keys, Hq query heads.
"""

from typing import NamedTuple

import torch

from .attention import Observation


class Recall(NamedTuple):
    """Means over sampled rows that have more keys to choose from than places, float64; NaN without such rows.

    selected  share of the dense attention's mass (mean over heads) that lies on the selected keys
    random    the same for as many of the row's keys drawn at random: the expected share, count / keys
    best      the same for the keys that carry most: what no selection of that size can exceed
    """

    selected: float
    random: float
    best: float


@torch.no_grad()
def attention_recall(seen: Observation, *, sample: int = 64) -> Recall:
    """Recall of ``sample`` of the observed rows, drawn with a fixed seed (fewer if there are fewer).

    Waits for the device, and needs [sample, Hq, S] float32 of memory.
    """
    start, end = (each.long() for each in seen.rows.windows)
    chosen = (seen.indices >= 0).sum(dim=1)
    open_rows = (end - start > chosen).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(open_rows.shape[0], generator=generator)[:sample].to(open_rows.device)
    rows = open_rows[order]
    if rows.numel() == 0:
        return Recall(float("nan"), float("nan"), float("nan"))
    q, latent = seen.q[rows], seen.latent
    logits = torch.einsum("nhc,sc->nhs", q, latent).float() * seen.scale
    key = torch.arange(latent.shape[0], device=q.device)
    hidden = (key < start[rows, None]) | (key >= end[rows, None])
    mass = logits.masked_fill_(hidden[:, None], float("-inf")).softmax(dim=2).mean(dim=1)
    indices, count = seen.indices[rows].long(), chosen[rows]
    selected = mass.gather(1, indices.clamp(min=0)).masked_fill(indices < 0, 0).sum(dim=1)
    random = count / (end[rows] - start[rows])
    heaviest = mass.topk(min(indices.shape[1], mass.shape[1]), dim=1).values.sum(dim=1)
    return Recall(*(float(each.double().mean()) for each in (selected, random, heaviest)))

"""Both ends of the model: the embedding, and the head with its loss."""

from hyscale_simulator.kernels import kernel
from hyscale_simulator.work.attention import norm
from hyscale_simulator.work.eager import embedding_as_run, head_as_run, head_backward_as_run
from hyscale_simulator.work.items import Collective, Communicate, Compute, Item, in_phase, stream
from hyscale_simulator.work.parallel import column, column_backward
from hyscale_simulator.work.rank import Rank

__all__ = ["embedding", "embedding_backward", "head", "head_backward"]


def embedding(rank: Rank) -> list[Item]:
    """Lookup, summed over tensor ranks (each holds part of the vocabulary)."""
    items: list[Item] = [embedding_as_run(rank, _lookup(rank, "embedding"))]
    if rank.cut.tensor > 1:
        items.append(_sum(rank, "embedding.reduce"))
    return in_phase(items, "forward")


def embedding_backward(rank: Rank) -> list[Item]:
    """Scatter of the gradients."""
    items: list[Item] = []
    if rank.sequence_parallel:
        whole = rank.tokens * rank.scenario.model_description.hidden * 2.0
        items.append(Communicate("embedding.gather", "tensor comm", "all_gather", "tensor", whole))
    return in_phase([*items, embedding_as_run(rank, _lookup(rank, "embedding_bwd"))], "backward")


def head(rank: Rank) -> list[Item]:
    """Final norm, logits and cross-entropy."""
    return in_phase(head_as_run(rank, _head(rank)), "forward")


def _head(rank: Rank) -> list[Item]:
    model = rank.scenario.model_description
    part = -(-model.vocabulary // rank.cut.tensor)
    loss = "cross_entropy" if rank.scenario.kernels.fused_cross_entropy else "cross_entropy_unfused"
    return [
        norm(rank, "head.norm"),
        *column(rank, "head", "head", part, model.hidden),
        stream("cross_entropy", loss, rank.tokens, part, "head"),
    ]


def head_backward(rank: Rank) -> list[Item]:
    """Gradients of :func:`head` (the cross-entropy's own is computed with it)."""
    model, tensor = rank.scenario.model_description, rank.cut.tensor
    part = -(-model.vocabulary // tensor)
    items = [*column_backward(rank, "head", "head", part, model.hidden), norm(rank, "head.norm", True)]
    return in_phase(head_backward_as_run(rank, _head(rank), items), "backward")


def _lookup(rank: Rank, op: str) -> Compute:
    call = kernel(op, "bf16", rows=rank.tokens, width=rank.scenario.model_description.hidden)
    return Compute(op, "embedding", call)


def _sum(rank: Rank, name: str) -> Communicate:
    whole = rank.tokens * rank.scenario.model_description.hidden * 2.0
    way: Collective = "reduce_scatter" if rank.sequence_parallel else "all_reduce"
    return Communicate(name, "tensor comm", way, "tensor", whole)

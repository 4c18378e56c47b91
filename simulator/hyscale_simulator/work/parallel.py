"""Linear layers cut over tensor-parallel ranks, with the collectives that join them."""

from hyscale_simulator.work.items import Collective, Communicate, Item, backward_linear, linear
from hyscale_simulator.work.rank import Rank

__all__ = ["column", "column_backward", "row", "row_backward"]

KIND = "tensor comm"


def column(rank: Rank, name: str, kind: str, n: int, k: int) -> list[Item]:
    """Output columns split (``n`` on this rank); with sequence parallelism the input is gathered first."""
    items = linear(name, kind, rank.tokens, n, k, rank.linear_dtype)
    if not rank.sequence_parallel:
        return items
    return [*_pipelined(rank, f"{name}.gather", "all_gather", k, f">{name}"), *items]


def row(rank: Rank, name: str, kind: str, n: int, k: int) -> list[Item]:
    """Input columns split (``k`` on this rank); partial sums are reduced."""
    items = linear(name, kind, rank.tokens, n, k, rank.linear_dtype)
    if rank.cut.tensor == 1:
        return items
    if rank.scenario.overlap.tensor == "full" and rank.sequence_parallel:
        # The reduction follows the product tile by tile: all but the last share runs beneath it.
        whole = rank.tokens * n * 2.0
        last = whole / rank.cut.tensor
        early = Communicate(
            f"{name}.reduce", KIND, "reduce_scatter", "tensor", whole - last, until=f">{name}"
        )
        return [early, *items, Communicate(f"{name}.reduce.last", KIND, "reduce_scatter", "tensor", last)]
    return [*items, _reduce(rank, f"{name}.reduce", n)]


def row_backward(rank: Rank, name: str, kind: str, n: int, k: int) -> list[Item]:
    """Gradients of :func:`row`: the incoming gradient is gathered first."""
    dx, dw = backward_linear(name, kind, rank.tokens, n, k, rank.linear_dtype)
    if not rank.sequence_parallel:
        return [*dx, *dw]
    return [*_pipelined(rank, f"{name}.gather", "all_gather", n, f">{name}.dgrad"), *dx, *dw]


def column_backward(rank: Rank, name: str, kind: str, n: int, k: int) -> list[Item]:
    """Gradients of :func:`column`: the input is gathered again for the weight gradient, and its own gradient
    reduced.  Unless overlap is off, the gather runs beneath dgrad and the reduction beneath wgrad, as
    Megatron-LM does."""
    dx, dw = backward_linear(name, kind, rank.tokens, n, k, rank.linear_dtype)
    if rank.cut.tensor == 1:
        return [*dx, *dw]
    beneath = rank.scenario.overlap.tensor != "none"
    items: list[Item] = []
    if rank.sequence_parallel:
        whole = rank.tokens * k * 2.0
        until = f"{name}.wgrad" if beneath else ""
        items.append(Communicate(f"{name}.gather", KIND, "all_gather", "tensor", whole, until=until))
    reduce = _reduce(rank, f"{name}.reduce", k, until=f">{name}.wgrad" if beneath else "")
    return [*items, *dx, reduce, *dw]


def _reduce(rank: Rank, name: str, width: int, until: str = "") -> Communicate:
    collective: Collective = "reduce_scatter" if rank.sequence_parallel else "all_reduce"
    whole = rank.tokens * width * 2.0
    return Communicate(name, KIND, collective, "tensor", whole, until=until)


def _pipelined(rank: Rank, name: str, collective: Collective, width: int, until: str) -> list[Item]:
    """A gather ahead of a product; overlapped, all but the first rank's share runs beneath it."""
    whole = rank.tokens * width * 2.0
    if rank.scenario.overlap.tensor != "full":
        return [Communicate(name, KIND, collective, "tensor", whole)]
    first = whole / rank.cut.tensor
    return [
        Communicate(f"{name}.first", KIND, collective, "tensor", first),
        Communicate(name, KIND, collective, "tensor", whole - first, until=until),
    ]

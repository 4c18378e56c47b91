"""The feed-forward of one layer: dense, or routed experts with their exchange."""

from hyscale_simulator.kernels import BYTES, Kernel, kernel
from hyscale_simulator.model import Experts
from hyscale_simulator.work.attention import norm, norm_backward, residual
from hyscale_simulator.work.items import (
    Communicate,
    Compute,
    Item,
    accumulate,
    backward_linear,
    linear,
    stream,
)
from hyscale_simulator.work.parallel import column, column_backward, row, row_backward
from hyscale_simulator.work.rank import Rank

__all__ = ["expert_tokens", "feed_forward", "feed_forward_backward"]

DENSE, EXPERTS = "feed-forward", "experts"


def feed_forward(rank: Rank, *, experts: bool) -> list[Item]:
    """Norm, feed-forward and residual."""
    model = rank.scenario.model_description
    inside = _routed(rank, model.experts) if experts and model.experts else _dense(rank, model.feed_forward)
    return [norm(rank, "feed_forward.norm"), *inside, residual(rank, "feed_forward.residual")]


def feed_forward_backward(rank: Rank, *, experts: bool) -> list[Item]:
    """Gradients of :func:`feed_forward`."""
    model = rank.scenario.model_description
    if experts and model.experts:
        inside = _routed_backward(rank, model.experts)
    else:
        inside = _dense_backward(rank, model.feed_forward)
    return [residual(rank, "feed_forward.residual", True), *inside, *norm_backward(rank, "feed_forward.norm")]


def expert_tokens(rank: Rank, experts: Experts, *, slowest: bool) -> int:
    """Token copies that each local expert receives: of the busiest rank, or on average."""
    mean = rank.rows * experts.top_k * rank.cut.expert / experts.experts
    return max(round(mean * (rank.imbalance if slowest else 1.0)), 1)


def _activation(rank: Rank, name: str, rows: int, width: int, backward: bool = False) -> Compute:
    op = "swiglu" if rank.scenario.model_description.gated else "gelu"
    return stream(name, f"{op}{'_bwd' if backward else ''}", rows, width)


def _dense(rank: Rank, width: int) -> list[Item]:
    model, tensor = rank.scenario.model_description, rank.cut.tensor
    part, ups = max(width // tensor, 1), model.matrices - 1
    return [
        *column(rank, "up", DENSE, ups * part, model.hidden),
        _activation(rank, "activation", rank.tokens, part),
        *row(rank, "down", DENSE, model.hidden, part),
    ]


def _dense_backward(rank: Rank, width: int) -> list[Item]:
    model, tensor = rank.scenario.model_description, rank.cut.tensor
    part, ups = max(width // tensor, 1), model.matrices - 1
    repeats = rank.scenario.recompute.repeats("activation")
    return [
        *([_activation(rank, "activation", rank.tokens, part)] if repeats else []),
        *row_backward(rank, "down", DENSE, model.hidden, part),
        _activation(rank, "activation", rank.tokens, part, True),
        *column_backward(rank, "up", DENSE, ups * part, model.hidden),
    ]


def _routed(rank: Rank, experts: Experts) -> list[Item]:
    model = rank.scenario.model_description
    shared = experts.shared_experts * experts.width
    return [
        *linear("router", EXPERTS, rank.rows, experts.experts, model.hidden, "bf16"),
        stream("permute", "permute", rank.rows * experts.top_k, model.hidden, EXPERTS),
        _exchange(rank, "dispatch", "dispatch"),
        *_grouped(rank, "experts.up", experts, (model.matrices - 1) * experts.width, model.hidden),
        _expert_activation(rank, experts, False),
        *_grouped(rank, "experts.down", experts, model.hidden, experts.width),
        _exchange(rank, "combine", "combine"),
        stream("unpermute", "permute", rank.rows * experts.top_k, model.hidden, EXPERTS),
        *(_dense(rank, shared) if shared else []),
    ]


def _routed_backward(rank: Rank, experts: Experts) -> list[Item]:
    model = rank.scenario.model_description
    shared = experts.shared_experts * experts.width
    ups = (model.matrices - 1) * experts.width
    router_dx, router_dw = backward_linear(
        "router", EXPERTS, rank.rows, experts.experts, model.hidden, "bf16"
    )
    return [
        *(_dense_backward(rank, shared) if shared else []),
        stream("unpermute", "permute", rank.rows * experts.top_k, model.hidden, EXPERTS),
        _exchange(rank, "combine.bwd", "dispatch"),
        *(
            [_expert_activation(rank, experts, False)]
            if rank.scenario.recompute.repeats("activation")
            else []
        ),
        *_grouped_backward(rank, "experts.down", experts, model.hidden, experts.width),
        _expert_activation(rank, experts, True),
        *_grouped_backward(rank, "experts.up", experts, ups, model.hidden),
        _exchange(rank, "dispatch.bwd", "combine"),
        stream("permute", "permute", rank.rows * experts.top_k, model.hidden, EXPERTS),
        *router_dx,
        *router_dw,
    ]


def _exchange(rank: Rank, name: str, way: str) -> Communicate:
    """Tokens to their experts (in the dispatch format) or back (bf16)."""
    size = BYTES[rank.scenario.precision.dispatch] if way == "dispatch" else 2
    model = rank.scenario.model_description
    token_bytes = float(model.hidden * size)
    if rank.scenario.kernels.dispatcher == "all_to_all":
        assert model.experts is not None
        held = rank.rows * model.experts.top_k * token_bytes * rank.imbalance
        return Communicate(name, "expert comm", "all_to_all", "expert", held)
    return Communicate(
        name, "expert comm", "dispatch" if way == "dispatch" else "combine", "expert", token_bytes,
        tokens=rank.rows,
    )  # fmt: skip


def _product(rank: Rank, name: str, experts: Experts, n: int, k: int, *, weights: bool = False) -> Compute:
    """One grouped product over the local experts, of the busiest rank and of the mean one."""
    groups = experts.experts // rank.cut.expert

    def call(slowest: bool) -> Kernel:
        m = expert_tokens(rank, experts, slowest=slowest)
        shape = {"m": n, "n": k, "k": m} if weights else {"m": m, "n": n, "k": k}
        return kernel("grouped_gemm", rank.linear_dtype, groups=groups, **shape)

    slow, mean = call(True), call(False)
    return Compute(name, EXPERTS, slow, mean=None if mean == slow else mean, weights=weights)


def _grouped(rank: Rank, name: str, experts: Experts, n: int, k: int) -> list[Item]:
    return [*_quantised(rank, name, experts, k), _product(rank, name, experts, n, k)]


def _grouped_backward(rank: Rank, name: str, experts: Experts, n: int, k: int) -> list[Item]:
    return [
        *_quantised(rank, name, experts, n),
        _product(rank, f"{name}.dgrad", experts, k, n),
        _product(rank, f"{name}.wgrad", experts, n, k, weights=True),
        accumulate(f"{name}.wgrad", EXPERTS, n * experts.experts // rank.cut.expert, k),
    ]


def _quantised(rank: Rank, name: str, experts: Experts, width: int) -> list[Item]:
    if rank.linear_dtype != "fp8":
        return []
    return [stream(f"{name}.quantise", "cast_transpose", rank.rows * experts.top_k, width)]


def _expert_activation(rank: Rank, experts: Experts, backward: bool) -> Compute:
    copies = rank.rows * experts.top_k
    mean = _activation(rank, "experts.activation", copies, experts.width, backward)
    if rank.imbalance == 1.0:
        return mean
    slow = _activation(rank, "experts.activation", round(copies * rank.imbalance), experts.width, backward)
    return Compute(slow.name, slow.kind, slow.call, mean=mean.call)

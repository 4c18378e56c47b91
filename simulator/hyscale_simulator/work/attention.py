"""Attention of one layer: projections, the core, and what the ranks exchange for it."""

from hyscale_simulator.kernels import Kernel, kernel
from hyscale_simulator.model import Grouped, Latent
from hyscale_simulator.work.items import (
    Collective,
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
from hyscale_simulator.work.selection import (
    index_backward,
    index_loss,
    index_projections,
    selection,
)

__all__ = ["attention", "attention_backward"]

PROJECTIONS = "projections"


def attention(rank: Rank, *, selects: bool, recomputed: bool, again: bool, trains: bool) -> list[Item]:
    """Norm, attention and residual.

    selects: the layer runs its own selection.  recomputed: it runs again in the backward pass, and again:
    this is that run (replay skips the selection).  trains: gradients are on, so the indexer's loss is
    computed.
    """
    model = rank.scenario.model_description
    if isinstance(model.attention, Grouped):
        inside = _grouped(rank, model.attention)
    elif model.indexer is not None and (selects or not model.indexer.dense_ratio):
        inside = _sparse(
            rank, model.attention, selects=selects, recomputed=recomputed, again=again, trains=trains
        )
    else:
        inside = _latent(rank, model.attention)
    return [norm(rank, "attention.norm"), *inside, residual(rank, "attention.residual")]


def attention_backward(rank: Rank, *, selects: bool) -> list[Item]:
    """Gradients of :func:`attention`, with what selective recomputation repeats."""
    model = rank.scenario.model_description
    if isinstance(model.attention, Grouped):
        inside = _grouped_backward(rank, model.attention)
    elif model.indexer is not None and (selects or not model.indexer.dense_ratio):
        inside = _sparse_backward(rank, model.attention, selects)
    else:
        inside = _latent_backward(rank, model.attention)
    return [residual(rank, "attention.residual", True), *inside, *norm_backward(rank, "attention.norm")]


def norm(rank: Rank, name: str, backward: bool = False) -> Compute:
    """The layer's normalisation."""
    model = rank.scenario.model_description
    return stream(name, f"{model.norm}{'_bwd' if backward else ''}", rank.rows, model.hidden)


def norm_backward(rank: Rank, name: str) -> list[Item]:
    """Its gradient, after the norm itself where that is repeated."""
    again = [norm(rank, f"{name}.again")] if rank.scenario.recompute.repeats("layernorm") else []
    return [*again, norm(rank, name, True)]


def residual(rank: Rank, name: str, backward: bool = False) -> Compute:
    """Dropout and residual addition; in backward the addition is that of the two branches' gradients."""
    width = rank.scenario.model_description.hidden
    if rank.scenario.kernels.dropout:
        return stream(name, "dropout_add_bwd" if backward else "dropout_add", rank.rows, width)
    return stream(name, "add", rank.rows, width)


# Grouped-query and multi-head attention.


def _grouped(rank: Rank, shape: Grouped) -> list[Item]:
    tensor, hidden, tokens = rank.cut.tensor, rank.scenario.model_description.hidden, rank.tokens
    heads, kv = shape.heads // tensor, max(shape.kv_heads // tensor, 1)
    width = (heads + 2 * kv) * shape.head_dim
    return [
        *column(rank, "qkv", PROJECTIONS, width, hidden),
        *_positions(rank, (heads + kv) * shape.head_dim),
        *([stream("qk_norm", "rmsnorm", tokens, (heads + kv) * shape.head_dim)] if shape.qk_norm else []),
        *_exchange(rank, 2 * kv * shape.head_dim, width, "core"),
        *_core(rank, heads, kv, shape.head_dim, shape.head_dim),
        *_exchange_out(rank, heads * shape.head_dim),
        *row(rank, "out", PROJECTIONS, hidden, heads * shape.head_dim),
    ]


def _grouped_backward(rank: Rank, shape: Grouped) -> list[Item]:
    tensor, hidden, tokens = rank.cut.tensor, rank.scenario.model_description.hidden, rank.tokens
    heads, kv = shape.heads // tensor, max(shape.kv_heads // tensor, 1)
    width = (heads + 2 * kv) * shape.head_dim
    return [
        *row_backward(rank, "out", PROJECTIONS, hidden, heads * shape.head_dim),
        *_exchange_out(rank, heads * shape.head_dim),
        *(_core(rank, heads, kv, shape.head_dim, shape.head_dim) if _repeats_core(rank) else []),
        *_exchange(rank, 2 * kv * shape.head_dim, width, "core.bwd"),
        *_core_backward(rank, heads, kv, shape.head_dim, shape.head_dim),
        *_exchange_back(rank, 2 * kv * shape.head_dim, width),
        *([stream("qk_norm", "rmsnorm_bwd", tokens, (heads + kv) * shape.head_dim)] if shape.qk_norm else []),
        *_positions(rank, (heads + kv) * shape.head_dim),
        *column_backward(rank, "qkv", PROJECTIONS, width, hidden),
    ]


def _positions(rank: Rank, width: int) -> list[Item]:
    if rank.scenario.model_description.learned_positions:
        return []
    return [stream("rope", "rope", rank.tokens, width)]


# Latent attention as trained densely: keys and values are expanded for every head.


def _latent(rank: Rank, shape: Latent) -> list[Item]:
    tensor, hidden = rank.cut.tensor, rank.scenario.model_description.hidden
    heads = shape.heads // tensor
    return [
        *_down(rank, shape),
        *_expand(rank, shape, heads),
        *_exchange(rank, shape.kv_width, heads * (2 * shape.qk_dim + shape.value_dim), "core"),
        *_core(rank, heads, heads, shape.qk_dim, shape.value_dim),
        *_exchange_out(rank, heads * shape.value_dim),
        *row(rank, "out", PROJECTIONS, hidden, heads * shape.value_dim),
    ]


def _expand(rank: Rank, shape: Latent, heads: int) -> list[Item]:
    """Queries, keys and values of every head, from the latents."""
    tokens, dtype = rank.tokens, rank.linear_dtype
    expanded = heads * (shape.nope_dim + shape.value_dim)
    return [
        *linear("q_up", PROJECTIONS, tokens, heads * shape.qk_dim, shape.q_rank, dtype),
        *linear("kv_up", PROJECTIONS, tokens, expanded, shape.kv_rank, dtype),
        stream("rope", "rope", tokens, heads * 2 * shape.qk_dim),
    ]


def _repeats_core(rank: Rank) -> bool:
    return rank.scenario.recompute.repeats("core_attn")


def _latent_backward(rank: Rank, shape: Latent) -> list[Item]:
    tensor, hidden, tokens = rank.cut.tensor, rank.scenario.model_description.hidden, rank.tokens
    heads, dtype = shape.heads // tensor, rank.linear_dtype
    expanded = heads * (shape.nope_dim + shape.value_dim)
    q_dx, q_dw = backward_linear("q_up", PROJECTIONS, tokens, heads * shape.qk_dim, shape.q_rank, dtype)
    kv_dx, kv_dw = backward_linear("kv_up", PROJECTIONS, tokens, expanded, shape.kv_rank, dtype)
    return [
        *row_backward(rank, "out", PROJECTIONS, hidden, heads * shape.value_dim),
        *_exchange_out(rank, heads * shape.value_dim),
        *(_expand(rank, shape, heads) if rank.scenario.recompute.repeats("mla_up_proj") else []),
        *(_core(rank, heads, heads, shape.qk_dim, shape.value_dim) if _repeats_core(rank) else []),
        *_exchange(rank, shape.kv_width, heads * (2 * shape.qk_dim + shape.value_dim), "core.bwd"),
        *_core_backward(rank, heads, heads, shape.qk_dim, shape.value_dim),
        *_exchange_back(rank, shape.kv_width, heads * (2 * shape.qk_dim + shape.value_dim)),
        stream("rope", "rope", tokens, heads * 2 * shape.qk_dim),
        *q_dx, *kv_dx, *q_dw, *kv_dw,
        *_down_backward(rank, shape),
    ]  # fmt: skip


def _down(rank: Rank, shape: Latent) -> list[Item]:
    """Both down projections and their norms, repeated on no tensor rank where the sequence is split."""
    hidden, rows = rank.scenario.model_description.hidden, rank.rows
    gathered = rank.tokens * (shape.q_rank + shape.kv_width) * 2.0
    items = [
        *linear("q_down", PROJECTIONS, rows, shape.q_rank, hidden, rank.linear_dtype),
        *linear("kv_down", PROJECTIONS, rows, shape.kv_width, hidden, rank.linear_dtype),
        stream("latent.norm", "rmsnorm", rows, shape.q_rank + shape.kv_rank),
    ]
    if rank.sequence_parallel:
        items.append(Communicate("latent.gather", "tensor comm", "all_gather", "tensor", gathered))
    return items


def _down_backward(rank: Rank, shape: Latent) -> list[Item]:
    hidden, rows = rank.scenario.model_description.hidden, rank.rows
    reduced = rank.tokens * (shape.q_rank + shape.kv_width) * 2.0
    q_dx, q_dw = backward_linear("q_down", PROJECTIONS, rows, shape.q_rank, hidden, rank.linear_dtype)
    kv_dx, kv_dw = backward_linear("kv_down", PROJECTIONS, rows, shape.kv_width, hidden, rank.linear_dtype)
    items: list[Item] = []
    if rank.cut.tensor > 1:
        way: Collective = "reduce_scatter" if rank.sequence_parallel else "all_reduce"
        items.append(Communicate("latent.reduce", "tensor comm", way, "tensor", reduced))
    norm_backward = stream("latent.norm", "rmsnorm_bwd", rows, shape.q_rank + shape.kv_rank)
    return [*items, norm_backward, *q_dx, *kv_dx, *q_dw, *kv_dw]


# The core: all keys.


def _core(rank: Rank, heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> list[Item]:
    if rank.scenario.kernels.attention == "unfused":
        return _unfused_core(rank, heads, qk_dim, v_dim)
    return [_flash(rank, "core", "attention", heads, kv_heads, qk_dim, v_dim)]


def _core_backward(rank: Rank, heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> list[Item]:
    if rank.scenario.kernels.attention == "unfused":
        return _unfused_core_backward(rank, heads, qk_dim, v_dim)
    return [_flash(rank, "core.bwd", "attention_bwd", heads, kv_heads, qk_dim, v_dim)]


def _flash(rank: Rank, name: str, op: str, heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> Compute:
    batch = rank.scenario.batch
    indexer = rank.scenario.model_description.indexer
    ratio = indexer.dense_ratio if indexer is not None and indexer.dense_ratio else 1
    exchanged = rank.scenario.layout.context_exchange == "all_to_all"
    ranks = rank.cut.context
    queries = batch.sequence_tokens if exchanged else batch.sequence_tokens // ranks
    spread = ranks if exchanged else 1
    # One block of a rank's causal work is triangular, the rest full: with many ranks it counts as full.
    regime = "causal" if ranks == 1 or exchanged else "full"

    def call(keys: int) -> Kernel:
        return kernel(
            op, "bf16", rank.scenario.kernels.attention_implementation, regime,
            batch=batch.sequences_per_microbatch,
            heads=max(heads // spread, 1), kv_heads=max(kv_heads // spread, 1), queries=queries,
            keys=max(keys // ratio, 1), qk_dim=qk_dim, v_dim=v_dim,
        )  # fmt: skip

    mean = call(rank.keys_mean)
    slowest = mean if exchanged else call(rank.keys_slowest)
    return Compute(name, "attention", slowest, mean=None if slowest == mean else mean)


def _unfused_core(rank: Rank, heads: int, qk_dim: int, v_dim: int) -> list[Item]:
    """Scores, scaled masked softmax, dropout and the product with V, each through memory."""
    batch, length = rank.scenario.batch.sequences_per_microbatch * heads, rank.scenario.batch.sequence_tokens
    table = {"rows": batch * length, "width": length}
    items: list[Item] = [
        Compute(
            "scores", "attention", kernel("batched_gemm", "bf16", batch=batch, m=length, n=length, k=qk_dim)
        ),
        stream("softmax", "softmax", **table, kind="attention"),
    ]
    if rank.scenario.kernels.dropout:
        items.append(stream("softmax.dropout", "dropout", **table, kind="attention"))
    values = kernel("batched_gemm", "bf16", batch=batch, m=length, n=v_dim, k=length)
    return [*items, Compute("values", "attention", values)]


def _unfused_core_backward(rank: Rank, heads: int, qk_dim: int, v_dim: int) -> list[Item]:
    batch, length = rank.scenario.batch.sequences_per_microbatch * heads, rank.scenario.batch.sequence_tokens
    table = {"rows": batch * length, "width": length}

    def product(name: str, m: int, n: int, k: int) -> Compute:
        return Compute(name, "attention", kernel("batched_gemm", "bf16", batch=batch, m=m, n=n, k=k))

    items: list[Item] = [
        product("values.dgrad", length, length, v_dim),
        product("values.vgrad", length, v_dim, length),
    ]
    if rank.scenario.kernels.dropout:
        items.append(stream("softmax.dropout", "dropout_bwd", **table, kind="attention"))
    return [
        *items,
        stream("softmax", "softmax_bwd", **table, kind="attention"),
        product("scores.qgrad", length, qk_dim, length),
        product("scores.kgrad", length, qk_dim, length),
    ]


# Exchange between context-parallel ranks.


def _exchange(rank: Rank, kv_width: int, all_width: int, needed_by: str) -> list[Item]:
    """Keys and values gathered (beneath the core, chunk by chunk, where overlapped), or heads exchanged."""
    if rank.cut.context == 1:
        return []
    if rank.scenario.layout.context_exchange == "all_to_all":
        held = rank.tokens * all_width * 2.0
        return [Communicate("heads.in", "context comm", "all_to_all", "context", held)]
    whole = rank.tokens * rank.cut.context * kv_width * 2.0
    if not rank.scenario.overlap.context:
        return [Communicate("keys.gather", "context comm", "all_gather", "context", whole)]
    first = whole / rank.cut.context
    return [
        Communicate("keys.first", "context comm", "all_gather", "context", first),
        Communicate(
            "keys.rest", "context comm", "all_gather", "context", whole - first, until=f">{needed_by}"
        ),
    ]


def _exchange_out(rank: Rank, width: int) -> list[Item]:
    if rank.cut.context == 1 or rank.scenario.layout.context_exchange != "all_to_all":
        return []
    return [Communicate("heads.out", "context comm", "all_to_all", "context", rank.tokens * width * 2.0)]


def _exchange_back(rank: Rank, kv_width: int, all_width: int) -> list[Item]:
    """Gradients of the gathered keys and values, reduced to their owners."""
    if rank.cut.context == 1:
        return []
    if rank.scenario.layout.context_exchange == "all_to_all":
        held = rank.tokens * all_width * 2.0
        return [Communicate("heads.back", "context comm", "all_to_all", "context", held)]
    whole = rank.tokens * rank.cut.context * kv_width * 2.0
    until = "end" if rank.scenario.overlap.context else ""
    return [Communicate("keys.reduce", "context comm", "reduce_scatter", "context", whole, until=until)]


# Learned sparse attention: absorbed latent attention over the selected keys.


def _sparse(
    rank: Rank, shape: Latent, *, selects: bool, recomputed: bool, again: bool, trains: bool
) -> list[Item]:
    tensor, hidden, tokens = rank.cut.tensor, rank.scenario.model_description.hidden, rank.tokens
    heads, dtype = shape.heads // tensor, rank.linear_dtype
    indexer = rank.scenario.model_description.indexer
    assert indexer is not None
    index_width = indexer.head_dim if selects else 0
    replayed = again and rank.scenario.recompute.replay
    needs_keys = f"{'select' if selects and not replayed else 'core'}"
    return [
        *_down(rank, shape),
        *(index_projections(rank, shape) if selects else []),
        *_gather_latents(rank, shape.kv_width + index_width, needs_keys),
        *linear("q_up", PROJECTIONS, tokens, heads * shape.qk_dim, shape.q_rank, dtype),
        _absorbed(rank, "q_absorb", heads, shape.kv_rank, shape.nope_dim),
        stream("rope", "rope", tokens, heads * shape.rope_dim),
        *(selection(rank, again=again, recomputed=recomputed) if selects else []),
        Compute("core", "attention", _sparse_call(rank, "sparse_attention", shape, heads)),
        *(index_loss(rank, shape) if selects and trains and rank.scenario.selection.loss else []),
        _absorbed(rank, "v_absorb", heads, shape.value_dim, shape.kv_rank),
        *row(rank, "out", PROJECTIONS, hidden, heads * shape.value_dim),
    ]


def _sparse_backward(rank: Rank, shape: Latent, selects: bool) -> list[Item]:
    tensor, hidden, tokens = rank.cut.tensor, rank.scenario.model_description.hidden, rank.tokens
    heads, dtype = shape.heads // tensor, rank.linear_dtype
    q_dx, q_dw = backward_linear("q_up", PROJECTIONS, tokens, heads * shape.qk_dim, shape.q_rank, dtype)
    return [
        *row_backward(rank, "out", PROJECTIONS, hidden, heads * shape.value_dim),
        *_absorbed_backward(rank, "v_absorb", heads, shape.value_dim, shape.kv_rank),
        Compute("core.bwd", "attention", _sparse_call(rank, "sparse_attention_bwd", shape, heads)),
        *_reduce_latents(rank, shape.kv_width),
        *(index_backward(rank, shape) if selects else []),
        stream("rope", "rope", tokens, heads * shape.rope_dim),
        *_absorbed_backward(rank, "q_absorb", heads, shape.kv_rank, shape.nope_dim),
        *q_dx, *q_dw,
        *_down_backward(rank, shape),
    ]  # fmt: skip


def _sparse_call(rank: Rank, op: str, shape: Latent, heads: int) -> Kernel:
    indexer = rank.scenario.model_description.indexer
    assert indexer is not None
    keys = max(rank.scenario.batch.sequence_tokens // indexer.key_ratio, 1)
    most = min(indexer.top_k + indexer.window, keys)
    attended = most - most * (most - 1) // (2 * keys)  # on average: the first rows see fewer
    return kernel(
        op, "bf16", rank.scenario.kernels.attention_implementation,
        rows=rank.tokens, heads=heads, qk_dim=shape.kv_width, v_dim=shape.kv_rank, top_k=attended,
        keys=rank.keys_seen,
    )  # fmt: skip


def _absorbed(rank: Rank, name: str, heads: int, n: int, k: int) -> Compute:
    call = kernel("batched_gemm", "bf16", batch=heads, m=rank.tokens, n=n, k=k)
    return Compute(name, PROJECTIONS, call)


def _absorbed_backward(rank: Rank, name: str, heads: int, n: int, k: int) -> list[Item]:
    tokens = rank.tokens
    dgrad = kernel("batched_gemm", "bf16", batch=heads, m=tokens, n=k, k=n)
    wgrad = kernel("batched_gemm", "bf16", batch=heads, m=n, n=k, k=tokens)
    return [
        Compute(f"{name}.dgrad", PROJECTIONS, dgrad),
        Compute(f"{name}.wgrad", PROJECTIONS, wgrad, weights=True),
        accumulate(f"{name}.wgrad", PROJECTIONS, heads * n, k),
    ]


def _gather_latents(rank: Rank, width: int, needed_by: str) -> list[Item]:
    """Every rank needs every token's latent and index key (Megatron-LM's all-gather context parallelism)."""
    if rank.cut.context == 1:
        return []
    whole = rank.tokens * rank.cut.context * width * 2.0
    until = needed_by if rank.scenario.overlap.context else ""
    return [Communicate("latents.gather", "context comm", "all_gather", "context", whole, until=until)]


def _reduce_latents(rank: Rank, width: int) -> list[Item]:
    if rank.cut.context == 1:
        return []
    whole = rank.tokens * rank.cut.context * width * 2.0
    until = "kv_down.dgrad" if rank.scenario.overlap.context else ""
    return [Communicate("latents.reduce", "context comm", "reduce_scatter", "context", whole, until=until)]

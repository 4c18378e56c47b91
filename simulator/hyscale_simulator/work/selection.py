"""Selection of one layer: index projections, scores, top-k, the kept record, replay, and the indexer's loss.

What the implementations do to memory, and how often, is ``scenario.selection``; sources in
simulator/README.md.
"""

from hyscale_simulator.kernels import BYTES, Kernel, kernel
from hyscale_simulator.model import Indexer, Latent
from hyscale_simulator.work.items import Communicate, Compute, Item, backward_linear, linear, stream
from hyscale_simulator.work.rank import Rank

__all__ = ["chunk_rows", "index_backward", "index_loss", "index_projections", "record_bytes", "selection"]

PROJECTIONS = "index projections"
SELECTION = "selection"
LOSS = "index loss"

TABLE_LIMIT_BYTES = 2**30
"""Score-table workspace of implementations that bound it (Megatron-LM's cuDNN path)."""


def index_projections(rank: Rank, shape: Latent) -> list[Item]:
    """Queries from the latent, one shared key from the hidden state, its LayerNorm, head weights, rotary.

    Every tensor rank computes them for all of its tokens (Megatron-LM, slime), unless the rows are shared.
    """
    indexer, hidden, tokens = _indexer(rank), rank.scenario.model_description.hidden, _rows(rank)
    width, dtype = indexer.heads * indexer.head_dim, rank.linear_dtype
    return [
        *linear("index.q", PROJECTIONS, tokens, width, shape.q_rank, dtype),
        *linear("index.k", PROJECTIONS, tokens, indexer.head_dim, hidden, "bf16"),
        *linear("index.w", PROJECTIONS, tokens, indexer.heads, hidden, "bf16"),
        stream("index.k_norm", "layernorm", tokens, indexer.head_dim, PROJECTIONS),
        stream("index.rope", "rope", tokens, width + indexer.head_dim, PROJECTIONS),
        *_shared(rank, "index.keys", 2.0 * indexer.head_dim),
    ]


def selection(rank: Rank, *, again: bool, recomputed: bool) -> list[Item]:
    """Top-k for every row of this rank, or (in a recomputation) its replay.

    recomputed: the layer runs again in the backward pass, so that there is something to replay.
    """
    replays = recomputed and rank.scenario.recompute.replay
    operands = _operands(rank)
    if again and replays:  # whose loss scores the selected keys
        return [*(operands if rank.scenario.selection.loss else []), *_recall(rank)]
    items = [*operands, *_score_and_choose(rank), *_shared(rank, "select.gather", 4.0 * _chosen(rank))]
    return [*items, *_record(rank)] if replays else items


def index_loss(rank: Rank, shape: Latent) -> list[Item]:
    """The indexer's loss, after attention: its teacher, scores at the selected keys, and their divergence."""
    tokens, chosen = rank.tokens, _chosen(rank)
    mass = kernel(
        "attention_mass", "bf16", rank.scenario.kernels.attention_implementation,
        rows=tokens, heads=shape.heads // rank.cut.tensor, qk_dim=shape.kv_width, top_k=chosen,
        keys=rank.keys_seen,
    )  # fmt: skip
    items: list[Item] = [Compute("loss.teacher", LOSS, mass)]
    if rank.cut.tensor > 1:  # the teacher's probabilities are a sum over all heads
        whole = tokens * chosen * 4.0
        items.append(Communicate("loss.reduce", "tensor comm", "all_reduce", "tensor", whole))
    items.append(stream("loss.target", "index_target", _rows(rank), chosen, LOSS))
    items.append(_at_selected(rank, "loss.divergence", "indexer_loss"))
    return items


def index_backward(rank: Rank, shape: Latent) -> list[Item]:
    """The loss's gradient: at the selected keys, and of the index weights.  Inputs are detached: no dgrad."""
    if not rank.scenario.selection.loss:
        return []
    indexer, hidden, tokens = _indexer(rank), rank.scenario.model_description.hidden, _rows(rank)
    width, dtype = indexer.heads * indexer.head_dim, rank.linear_dtype
    items: list[Item] = [
        stream("loss.bwd", "index_loss_bwd", tokens, _chosen(rank), LOSS),
        _at_selected(rank, "loss.scores_bwd", "selected_scores_bwd"),
    ]
    if rank.scenario.selection.scoring_dtype == "fp8":
        items.append(stream("loss.unscale", "index_unscale", tokens, width, LOSS))
    if rank.cut.context > 1:  # gradients of the gathered index keys go back to their owners, in fp32
        whole = rank.tokens * rank.cut.context * indexer.head_dim * 4.0
        until = "end" if rank.scenario.overlap.context else ""
        items.append(
            Communicate("loss.reduce", "context comm", "reduce_scatter", "context", whole, until=until)
        )
    items.append(stream("index.rope", "rope", tokens, width + indexer.head_dim, PROJECTIONS))
    items.append(stream("index.k_norm", "layernorm_bwd", tokens, indexer.head_dim, PROJECTIONS))
    for name, n, k, kind in (
        ("index.q", width, shape.q_rank, dtype),
        ("index.k", indexer.head_dim, hidden, "bf16"),
        ("index.w", indexer.heads, hidden, "bf16"),
    ):
        _, dw = backward_linear(name, PROJECTIONS, tokens, n, k, kind, input_gradient=False)
        items += dw
    return items


def record_bytes(rank: Rank) -> float:
    """Bytes of one layer's kept selection for one microbatch on this rank."""
    rows, chosen = rank.tokens, _chosen(rank)
    if rank.scenario.selection.record == "int32":
        return rows * (4.0 * chosen + 4)
    call = _codec(rank, "record_encode")
    return call.cost.bytes - 4.0 * rows * chosen + 4.0 * rows


def chunk_rows(rank: Rank) -> int:
    """Rows whose scores are in memory at a time, where a table is written."""
    options = rank.scenario.selection
    rows = options.table_rows or max(TABLE_LIMIT_BYTES // (4 * _keys(rank)), 1)
    return min(rows, _rows(rank))


def _indexer(rank: Rank) -> Indexer:
    indexer = rank.scenario.model_description.indexer
    assert indexer is not None
    return indexer


def _rows(rank: Rank) -> int:
    """Rows that one rank selects for."""
    shared = rank.scenario.selection.shard_rows
    return max(rank.tokens // rank.cut.tensor, 1) if shared else rank.tokens


def _shared(rank: Rank, name: str, row_bytes: float) -> list[Item]:
    """Rows that tensor ranks worked out for each other, gathered."""
    if not rank.scenario.selection.shard_rows or rank.cut.tensor == 1:
        return []
    return [Communicate(name, "tensor comm", "all_gather", "tensor", rank.tokens * row_bytes)]


def _chosen(rank: Rank) -> int:
    indexer = _indexer(rank)
    return min(indexer.top_k, _keys(rank))


def _operands(rank: Rank) -> list[Item]:
    """Queries and keys quantised, where they are scored in fp8."""
    indexer = _indexer(rank)
    if rank.scenario.selection.scoring_dtype != "fp8":
        return []
    width = indexer.heads * indexer.head_dim
    return [stream("select.quantise", "quantise", _rows(rank), width, SELECTION)]


def _score_and_choose(rank: Rank) -> list[Item]:
    indexer = _indexer(rank)
    items: list[Item] = []
    slowest = _passes(rank, rank.keys_slowest // indexer.key_ratio)
    mean = _passes(rank, rank.keys_mean // indexer.key_ratio)
    for (name, call, count), (_, average, _) in zip(slowest, mean, strict=True):
        items.append(
            Compute(f"select.{name}", SELECTION, call, count, mean=None if average == call else average)
        )
    return items


def _passes(rank: Rank, visible: int) -> list[tuple[str, Kernel, int]]:
    """(name, kernel, count) of one selection when a row sees ``visible`` keys on average."""
    options, indexer = rank.scenario.selection, _indexer(rank)
    whole = _keys(rank)
    visible, top_k, dtype = max(visible, 1), _chosen(rank), options.scoring_dtype
    scored = {"heads": indexer.heads, "dim": indexer.head_dim}
    if not options.table:
        return _fused(rank, visible, top_k, scored)
    count = -(-_rows(rank) // chunk_rows(rank))
    rows = -(-_rows(rank) // count)  # in even chunks
    keys = whole if options.square else visible
    searched = whole if options.square or options.mask_pass else visible
    passes = [
        ("scores", kernel("index_scores", dtype, options.scorer, rows=rows, keys=keys, **scored), count)
    ]
    if dtype == "fp32":  # torch: an einsum for each head, then element by element
        unfused = kernel("index_unfused", "fp32", rows=rows * indexer.heads, width=keys)
        passes.append(("unfused", unfused, count))
    if options.mask_pass and whole > visible:
        passes.append(("mask", kernel("fill", "fp32", rows=rows, width=whole - visible), count))
    regime = f"{options.scores}, row starts" if options.row_starts else options.scores
    top = kernel("index_select", "fp32", options.selector, regime, rows=rows, keys=searched, top_k=top_k)
    return [*passes, ("topk", top, count)]


def _fused(rank: Rank, visible: int, top_k: int, scored: dict[str, int]) -> list[tuple[str, Kernel, int]]:
    options, rows = rank.scenario.selection, _rows(rank)
    skipped = options.skipped_fraction
    scanned = {"scanned": max(round(visible * (1 - skipped)), 1)} if skipped else {}
    shape = {"rows": rows, "keys": visible, "top_k": top_k, **scored, **scanned}
    # A zig-zag rank's rows see as many keys, from few to all, as those of the whole sequence.
    zigzag = rank.cut.context == 1 or rank.scenario.layout.context_split == "zigzag"
    regime = f"{options.scores}, causal" if zigzag else options.scores
    return [("hytopk", kernel("hytopk", options.scoring_dtype, "", regime, **shape), 1)]


def _at_selected(rank: Rank, name: str, op: str) -> Compute:
    """Scores at the selected keys with their loss, or their gradient."""
    indexer, dtype = _indexer(rank), rank.scenario.selection.scoring_dtype
    operands = dtype if BYTES[dtype] <= 2 else "bf16"
    call = kernel(
        op, operands, rows=_rows(rank), top_k=_chosen(rank), heads=indexer.heads, dim=indexer.head_dim,
        keys=rank.keys_seen,
    )  # fmt: skip
    return Compute(name, LOSS, call)


def _keys(rank: Rank) -> int:
    """Keys of the whole sequence."""
    return max(rank.scenario.batch.sequence_tokens // _indexer(rank).key_ratio, 1)


def _codec(rank: Rank, op: str) -> Kernel:
    return kernel(op, "fp32", rows=rank.tokens, top_k=_chosen(rank), keys=_keys(rank))


def _record(rank: Rank) -> list[Item]:
    """Keeping the selection: packed if asked for, moved to the host if asked for.

    The record is all that selecting hands on, so the forward pass unpacks it too.
    """
    items: list[Item] = []
    if rank.scenario.selection.record == "packed":
        items.append(Compute("select.encode", SELECTION, _codec(rank, "record_encode")))
        items.append(Compute("select.decode", SELECTION, _codec(rank, "record_decode")))
    if rank.scenario.offload.selection:
        moved = record_bytes(rank)
        items.append(Communicate("select.store", "host copies", "host", "host", moved, until="end"))
    return items


def _recall(rank: Rank) -> list[Item]:
    items: list[Item] = []
    if rank.scenario.offload.selection:
        moved = record_bytes(rank)
        needed = "select.decode" if rank.scenario.selection.record == "packed" else "core"
        items.append(
            Communicate("select.load", "host copies", "host", "host", moved, until=needed, start="block")
        )
    if rank.scenario.selection.record == "packed":
        items.append(Compute("select.decode", SELECTION, _codec(rank, "record_decode")))
    return items

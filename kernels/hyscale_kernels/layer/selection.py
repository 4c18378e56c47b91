"""Choosing the keys of each row, and carrying the choice to where it is needed again.

What a layer hands on is a *carrier*: the packed record under replay, else the indices. A layer that shares
another's selection takes its indices from the carrier; a region that is recomputed with replay decodes it
instead of selecting again.

Shape letters: T rows, S keys, K = top_k.
"""

import torch

from .. import replay
from ..baselines import materialised_topk
from ..baselines.materialised import BYTES_PER_SCORE
from ..baselines.rivals import ascending, deepgemm_scores, flashinfer_top_k, with_spare_row
from ..baselines.scoring import NEVER, ordered_keys
from ..hytopk import dense_scores, hytopk
from ..replay import PackedSelection
from .config import LayerConfig
from .indexer import Scored
from .rows import Rows
from .timer import PartTimer, part

Carrier = torch.Tensor | PackedSelection

# The score, its ordered key, sorted with int64 indices, and the sort's own scratch.
BYTES_PER_SORTED_SCORE = 32


def select(config: LayerConfig, scored: Scored, rows: Rows, timer: PartTimer | None = None) -> Carrier:
    """The selection of each row among the keys that it sees, by ``config.selection``."""
    q, k, w = (each.detach() for each in scored[:3])
    top_k, (start, end), k_scale = config.shape.indexer.top_k, rows.bounds, scored.k_scale
    if config.selection == "materialised":
        return _materialised(q, k, w, k_scale, top_k, rows, config.table_bytes)
    if config.selection == "own-table":
        return _own_table(q, k, w, k_scale, top_k, rows, config.table_bytes)
    if config.selection == "deepgemm+flashinfer":
        assert k_scale is not None
        return _deepgemm_flashinfer(q, k, w, k_scale, top_k, rows, config.table_bytes, timer)
    if config.recompute == "full+replay":
        return replay.record_selection(q, k, w, top_k, start=start, end=end, k_scale=k_scale)
    return hytopk(q, k, w, top_k, start=start, end=end, k_scale=k_scale).indices


def indices_of(carrier: Carrier, rows: Rows) -> torch.Tensor:
    """int32 [T, K], ascending, -1 at the tail."""
    if isinstance(carrier, torch.Tensor):
        return carrier
    start, end = rows.bounds
    return replay.decode_record(carrier, start=start, end=end).indices


def _materialised(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    k_scale: torch.Tensor | None,
    top_k: int,
    rows: Rows,
    table_bytes: int,
) -> torch.Tensor:
    """torch.topk of a table of scores, a block of rows at a time, without the keys that none of them sees."""
    start, end = rows.windows
    indices = torch.empty((q.shape[0], top_k), dtype=torch.int32, device=q.device)
    for block, keys in rows.blocks(max(1, table_bytes // max(1, BYTES_PER_SCORE * rows.num_keys))):
        indices[block] = materialised_topk(
            q[block], k[:keys], w[block], top_k, start=start[block], end=end[block],
            k_scale=None if k_scale is None else k_scale[:keys], chunk_bytes=table_bytes,
        ).indices  # fmt: skip
    return indices


def _own_table(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    k_scale: torch.Tensor | None,
    top_k: int,
    rows: Rows,
    table_bytes: int,
) -> torch.Tensor:
    """A stable sort of the very scores that HyTopK ranks: slow, and equal to it bit for bit."""
    indices = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    for block, keys in rows.blocks(max(1, table_bytes // max(1, BYTES_PER_SORTED_SCORE * rows.num_keys))):
        if keys == 0:
            continue
        start, end = (each[block] for each in rows.windows)
        scores = dense_scores(
            q[block], k[:keys], w[block], start=start, end=end,
            k_scale=None if k_scale is None else k_scale[:keys],
        )  # fmt: skip
        ordered = ordered_keys(scores, start, end)
        best = ordered.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        best = best.masked_fill(ordered.gather(1, best) == NEVER, keys).sort(dim=1).values
        indices[block, : best.shape[1]] = best.masked_fill(best == keys, -1).int()
    return indices


def _deepgemm_flashinfer(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    k_scale: torch.Tensor,
    top_k: int,
    rows: Rows,
    table_bytes: int,
    timer: PartTimer | None,
) -> torch.Tensor:
    """fp8 scores by DeepGEMM, deterministic top-k by FlashInfer, as in ``profiling.contenders``.

    The loss wants ascending rows, which FlashInfer does not promise: ordering them is a part of its own,
    "ordering", so that it need not be held against the two. ModuleNotFoundError where they are missing.
    """
    indices = torch.empty((q.shape[0], top_k), dtype=torch.int32, device=q.device)
    for block, keys in rows.blocks(max(1, table_bytes // (4 * max(1, rows.num_keys)))):
        if keys == 0:
            indices[block] = -1
            continue
        start, end = (with_spare_row(each[block]) for each in rows.windows)
        table = deepgemm_scores(
            with_spare_row(q[block]), k[:keys], k_scale[:keys], with_spare_row(w[block]), start, end
        )
        chosen = flashinfer_top_k(table, start[:-1], end[:-1] - start[:-1], top_k, from_zero=not rows.packed)
        del table
        with part(timer, "ordering"):
            indices[block] = ascending(chosen)
    return indices

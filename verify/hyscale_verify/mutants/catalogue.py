"""Planted bugs: small edits of the real kernels, each a mistake that a kernel author could make.

An edit replaces ``old``, which must occur exactly once in the file, by ``new``. Edits that change nothing but
speed are not bugs: the threshold only filters, so a wrong rank, a shifted sample or a threshold for rows that
need none is repaired, and would survive for good reason.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    name, words  what it is called and what went wrong, in one line
    stage        the stage of HyTopK it sits in
    file         path inside the package of kernels
    old, new     the edit
    likely       properties to try first; the others follow
    """

    name: str
    stage: str
    file: str
    old: str
    new: str
    words: str
    likely: tuple[str, ...] = ()


def _in(stage: str, file: str | None = None) -> "_Stage":
    return _Stage(stage, f"hytopk/{file or stage}.py")


class _Stage:
    """Builds the mutants of one stage."""

    def __init__(self, stage: str, file: str) -> None:
        self.stage = stage
        self.file = file

    def __call__(self, name: str, old: str, new: str, words: str, *likely: str) -> Mutant:
        return Mutant(name, self.stage, self.file, old, new, words, likely)


_windows, _score, _threshold, _scan = _in("windows", "prepare"), _in("score"), _in("threshold"), _in("scan")
_compact, _rescore, _select, _rank = _in("compact"), _in("rescore"), _in("select"), _in("select", "rank")
_table, _filter = _in("table", "score"), _in("table", "filter")
_prune = _in("scan", "prune")
_plateau, _repair, _call = _in("plateau"), _in("repair"), _in("call", "api")
_sizes, _values, _inputs = _in("call", "plan"), _in("call", "selection"), _in("call", "problem")

OWN, EXACT = "exact_set_of_own_scores", "exact_set_of_exact_inputs"
TABLE, CAUSAL, PRUNE = "table_and_scan_agree", "causal_passes", "pruning_changes_nothing"

MUTANTS: tuple[Mutant, ...] = (
    _windows(
        "causal_diagonal_lost",
        "hi = (rows + 1).to(tl.int32)",
        "hi = rows.to(tl.int32)",
        "the default window ends before the row's own position",
        "windows_left_out",
    ),
    _windows(
        "window_end_included",
        "tl.store(hi_ptr + rows, tl.where(invalid, 0, hi), mask=mask)",
        "tl.store(hi_ptr + rows, tl.where(invalid, 0, tl.minimum(hi + 1, S)), mask=mask)",
        "the key at end[t] counts as inside",
        "window_edges_count",
        "window_is_respected",
    ),
    _score(
        "weights_of_the_next_head",
        "b_w = tl.load(p_w + h)",
        "b_w = tl.load(p_w + (h + 1) % H)",
        "each head is weighted with its neighbour's weight",
        EXACT,
    ),
    _score(
        "relu_drops_nan",
        "return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        "return tl.where(x > 0.0, x, 0.0)",
        "relu turns NaN into 0",
        "dense_scores_within_bounds",
    ),
    _score(
        "negative_zero_kept",
        "bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)",
        "bits = score.to(tl.int32, bitcast=True)",
        "-0 orders below +0 and is returned as -0",
        "negative_zero_is_zero",
        "returned_scores",
    ),
    _score(
        "nan_admitted",
        "return tl.where(score == score, key, NEVER)",
        "return key",
        "a NaN score is ordered as a number",
        "nan_never_selected",
    ),
    _score(
        "low_bits_dropped",
        "key = bits ^ ((bits >> 31) & 0x7FFFFFFF)",
        "key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) & ~7",
        "the three lowest bits of a score do not take part in its order",
        OWN,
    ),
    _score(
        "int32_offset_of_keys",
        "pointers = k_ptr + keys[None, :] * k_stride + o_d[:, None]",
        "pointers = k_ptr + keys[None, :].to(tl.int32) * k_stride + o_d[:, None]",
        "the offset of a key is computed in 32 bits",
        "offsets_beyond_int32",
    ),
    _score(
        "int32_offset_of_queries",
        "p_q = q_ptr + rows[:, None] * q_stride_t + o_d[None, :]",
        "p_q = q_ptr + rows[:, None].to(tl.int32) * q_stride_t + o_d[None, :]",
        "the offset of a query row is computed in 32 bits",
        "offsets_beyond_int32",
    ),
    _score(
        "last_head_left_out",
        "for h in tl.range(0, H, num_stages=STAGES):",
        "for h in tl.range(0, H - (H > 2), num_stages=STAGES):",
        "with three heads or more the last is not summed",
        EXACT,
    ),
    _threshold(
        "sample_beyond_the_window",
        "keys = sample_keys(o_i, first, last, samples).to(tl.int64)",
        "keys = sample_keys(o_i, first, last, samples).to(tl.int64) + 1",
        "the last sampled key lies one past the window",
        "only_its_own_memory",
    ),
    _threshold(
        "stale_candidate_count",
        "tl.store(filled_ptr + o_r, tl.zeros((ROWS,), tl.int32), mask=live)",
        "tl.store(filled_ptr + o_r, tl.zeros((ROWS,), tl.int32), mask=live & (length > capacity))",
        "rows that need no threshold start from whatever the counter held",
        "poisoned_memory",
    ),
    _threshold(
        "start_of_the_window_counted_twice",
        "sample_keys(o_i, lo[:, None], hi[:, None], samples), mask=taken)",
        "lo[:, None] + sample_keys(o_i, lo[:, None], hi[:, None], samples), mask=taken)",
        "samples of a table are taken from beyond the window, and beyond the table",
        TABLE,
    ),
    _table(
        "table_of_the_first_chunk",
        "rows = (row0 + o_r).to(tl.int64)",
        "rows = o_r.to(tl.int64)",
        "every chunk of rows tabulates the queries of the first",
        TABLE,
    ),
    _table(
        "last_tile_of_a_window_skipped",
        "finish = tl.minimum(finish, last)",
        "finish = tl.minimum(finish, last - BS // 2)",
        "a tile that the windows meet by less than half is not tabulated",
        TABLE,
        CAUSAL,
    ),
    _filter(
        "filter_reaches_over_the_end",
        "inside = (o_c >= lo[:, None]) & (o_c < hi[:, None])",
        "inside = (o_c >= lo[:, None]) & (o_c <= hi[:, None])",
        "the filter lets in the key at end[t]",
        TABLE,
        "window_edges_count",
    ),
    _filter(
        "filter_of_the_first_chunk",
        "lo = tl.load(lo_ptr + row0 + o_r)",
        "lo = tl.load(lo_ptr + o_r)",
        "every chunk of rows is filtered from where the windows of the first begin",
        TABLE,
    ),
    _filter(
        "filter_drops_equals",
        "kept = (inside & ((key >= bar[:, None]) | (key == NEVER))).to(tl.int32)",
        "kept = (inside & ((key > bar[:, None]) | (key == NEVER))).to(tl.int32)",
        "a score equal to the threshold is filtered out, -inf included",
        "internal_sizes",
        "infinities_are_ordinary",
        "as_many_as_there_are",
    ),
    _filter(
        "filter_drops_nan",
        "kept = (inside & ((key >= bar[:, None]) | (key == NEVER))).to(tl.int32)",
        "kept = (inside & (key >= bar[:, None])).to(tl.int32)",
        "NaN does not pass the filter, so it is not counted",
        TABLE,
        "nan_never_selected",
    ),
    _filter(
        "filter_overflow_truncated",
        "    tl.store(filled_ptr + o_r, filled, mask=live)",
        "    tl.store(filled_ptr + o_r, tl.minimum(filled, capacity), mask=live)",
        "candidates beyond the buffer are dropped without a word",
        TABLE,
    ),
    _filter(
        "filter_counts_in_six_bits",
        "position = filled[:, None] + tl.cumsum(kept, axis=1) - kept",
        "position = filled[:, None] + (tl.cumsum(kept, axis=1) & 63) - kept",
        "the 64th candidate of a block is put where the first is",
        "production_sizes",
        OWN,
    ),
    _filter(
        "table_rows_too_narrow",
        "table.shape[1],",
        "problem.num_keys,",
        "rows of a table are taken to lie as near as their keys, without the padding",
        TABLE,
        OWN,
    ),
    _scan(
        "threshold_not_reached_by_equals",
        "kept = tl.where(score < threshold[:, None], 0, 1).to(tl.uint32)",
        "kept = tl.where(score <= threshold[:, None], 0, 1).to(tl.uint32)",
        "a score equal to the threshold is filtered out, -inf included",
        "infinities_are_ordinary",
        "as_many_as_there_are",
    ),
    _scan(
        "nan_filtered_by_the_scan",
        "kept = tl.where(score < threshold[:, None], 0, 1).to(tl.uint32)",
        "kept = tl.where(score >= threshold[:, None], 1, 0).to(tl.uint32)",
        "NaN does not pass the scan, so it is not counted",
        "nan_never_selected",
    ),
    _scan(
        "last_tile_missing",
        "tiles = (finish - begin + BS - 1) // BS",
        "tiles = (finish - begin) // BS",
        "a partial tile at the end of a segment is not scanned",
        OWN,
    ),
    _scan(
        "bits_reach_over_the_end",
        "above = tl.minimum(tl.maximum(hi - first, 0), 32).to(tl.uint64)",
        "above = tl.minimum(tl.maximum(hi - first + 1, 0), 32).to(tl.uint64)",
        "the bitmap marks the key at end[t]",
        "window_is_respected",
        "window_edges_count",
    ),
    _scan(
        "rows_of_the_first_chunk",
        "rows = (row0 + o_r).to(tl.int64)",
        "rows = o_r.to(tl.int64)",
        "every chunk of rows scans the queries of the first",
        "internal_sizes",
        "chunks_of_rows",
    ),
    _prune(
        "radius_of_the_mean",
        "radius = tl.max(farthest, axis=0)",
        "radius = tl.sum(farthest, axis=0) / (BS // 2)",
        "the ball of a block reaches as far as its keys on average",
        PRUNE,
    ),
    _prune(
        "ball_without_scales",
        "k = k * key_scale(k_scale_ptr, keys)[:, None]",
        "k = k * 1.0",
        "fp8 keys are bounded without their scales",
        PRUNE,
    ),
    _prune(
        "nan_pruned",
        "return tl.max((sees & ~(bound < threshold)).to(tl.int32), axis=0) != 0",
        "return tl.max((sees & (bound >= threshold)).to(tl.int32), axis=0) != 0",
        "a block whose bound is NaN is left out",
        PRUNE,
        "nan_never_selected",
    ),
    _prune(
        "bound_of_negative_weights",
        "lowers = w < 0.0",
        "lowers = w > 0.0",
        "heads of positive weight are left out of a bound instead of those of negative weight",
        PRUNE,
    ),
    _prune(
        "bitmap_not_cleared",
        "tl.store(p_word, 0, mask=o_w < words)",
        "tl.store(p_word, 0, mask=o_w < 0)",
        "a tile left out keeps the bits that its memory held before",
        PRUNE,
    ),
    _prune(
        "queries_of_the_first_chunk",
        "rows = (row0 + o_r).to(tl.int64)",
        "rows = o_r.to(tl.int64)",
        "every chunk of rows is bounded by the queries and windows of the first",
        PRUNE,
    ),
    _scan(
        "share_rounded_down",
        "share = (length + tl.num_programs(1) - 1) // tl.num_programs(1)",
        "share = tl.maximum(length // tl.num_programs(1), 1)",
        "the last blocks of a list that its programs cannot share evenly are not scanned",
        PRUNE,
    ),
    _compact(
        "keys_of_the_first_chunk",
        "key = key0 + o_w[None, :] * 32 + bit",
        "key = o_w[None, :] * 32 + bit",
        "candidates of later key chunks are numbered as in the first",
        "internal_sizes",
    ),
    _compact(
        "overflow_truncated",
        "    tl.store(filled_ptr + o_r, filled, mask=live)",
        "    tl.store(filled_ptr + o_r, tl.minimum(filled, capacity), mask=live)",
        "candidates beyond the buffer are dropped without a word",
        "forced_overflow_of_candidates",
    ),
    _compact(
        "overflow_into_the_next_row",
        "mask=(word != 0) & (position < capacity))",
        "mask=(word != 0) & (position < 2 * capacity))",
        "an overflowing row writes into the next row's buffer",
        "row_independence",
        "internal_sizes",
    ),
    _compact(
        "last_word_missing",
        "last = tl.where(some, (hi + 31) // 32, 0)",
        "last = tl.where(some, hi // 32, 0)",
        "the last, partial word of the bitmap is not read",
        OWN,
    ),
    _rescore(
        "scale_forgotten",
        "score = score * key_scale(k_scale_ptr, keys)",
        "score = score * 1.0",
        "candidates are rescored without k_scale",
        "certified_set",
        "internal_sizes",
    ),
    _rescore(
        "last_gather_missing",
        "for c in tl.range(0, filled, N, num_stages=STAGES):",
        "for c in tl.range(0, tl.maximum(filled - N + 1, 1), N, num_stages=STAGES):",
        "a partial last step of candidates keeps the scores that were in the buffer",
        "poisoned_memory",
        OWN,
    ),
    _rescore(
        "query_of_the_first_chunk",
        "row = (row0 + r).to(tl.int64)",
        "row = r.to(tl.int64)",
        "candidates of later row chunks are scored with the queries of the first",
        "internal_sizes",
    ),
    _rank(
        "ties_from_the_right",
        "seen_equal = equal[:, None] + (seen >> 16)",
        "seen_equal = equal[:, None] + tl.sum(same, axis=1)[:, None] - (seen >> 16) + same",
        "of equal scores in a block the largest key indices are taken",
        "tie_rule",
    ),
    _rank(
        "one_tie_too_many",
        "tl.where(tied, top_k - over, 0)",
        "tl.where(tied, top_k - over + 1, 0)",
        "one more of the equal scores is taken than there is room for",
        "only_its_own_memory",
        OWN,
    ),
    _rank(
        "cut_left_out",
        "tl.where(crowded & ~tied, bar - 1, bar)",
        "tl.where(crowded & ~tied, bar, bar)",
        "a key whose score is the very value that K keys reach is lost",
        EXACT,
        "tie_rule",
    ),
    _rank(
        "ties_counted_on_the_wrong_side",
        "over = tl.where(down, count, over)",
        "over = tl.where(up, count, over)",
        "of equal scores at the cut as many are taken as are above it by too low a count",
        "tie_rule",
    ),
    _rank(
        "positions_swapped",
        "position = seen_above + tl.minimum(seen_equal, room[:, None]) - 1",
        "position = (seen_above + tl.minimum(seen_equal, room[:, None]) - 1) ^ (room[:, None] > 1)",
        "neighbouring indices of a row are written in swapped order",
        "ascending_and_unique",
    ),
    _rank(
        "counts_in_seven_bits",
        "    seen = tl.cumsum(over + (same << 16), axis=1)\n"
        "    seen_above = above[:, None] + (seen & 0xFFFF)\n"
        "    seen_equal = equal[:, None] + (seen >> 16)\n",
        "    seen = tl.cumsum(over + (same << 7), axis=1)\n"
        "    seen_above = above[:, None] + (seen & 0x7F)\n"
        "    seen_equal = equal[:, None] + (seen >> 7)\n",
        "128 keys of a block that are all better than the cut are counted as one tie",
        "production_sizes",
    ),
    _select(
        "tail_of_one_block",
        "for i in range(tl.min(count), top_k, BLOCK):",
        "for i in range(tl.min(count), tl.minimum(tl.min(count) + BLOCK, top_k), BLOCK):",
        "of a long tail only the first block is written",
        "production_sizes",
    ),
    _select(
        "tail_begins_late",
        "tail = live[:, None] & (o_k >= count[:, None]) & (o_k < top_k)",
        "tail = live[:, None] & (o_k > count[:, None]) & (o_k < top_k)",
        "the first entry after the selected keys is never written",
        "poisoned_memory",
        "tail_is_minus_one",
    ),
    _select(
        "tail_of_scores_is_zero",
        'tl.store(p_score + o_k, float("-inf"), mask=tail)',
        "tl.store(p_score + o_k, 0.0, mask=tail)",
        "returned scores end in 0 instead of -inf",
        "returned_scores",
    ),
    _select(
        "underflow_accepted",
        "pending = ~whole | ((count < tl.minimum(hi - lo, top_k)) & ~complete)",
        "pending = ~whole | ((count < tl.minimum(hi - lo, 1)) & ~complete)",
        "too few candidates pass for a full answer",
        "forced_underflow",
    ),
    _select(
        "nan_not_counted",
        "tl.store(nan_ptr + rows, last - present, mask=live)",
        "tl.store(nan_ptr + rows, tl.zeros((ROWS,), tl.int32), mask=live)",
        "the statistics know of no NaN",
        "nan_never_selected",
    ),
    _select(
        "count_of_all_candidates",
        "count = tl.minimum(present, top_k)",
        "count = tl.minimum(present, top_k + 1)",
        "a crowded row reports one key more than K",
        "as_many_as_there_are",
    ),
    _plateau(
        "plateau_ignores_the_window",
        "s = lo\n",
        "s = tl.maximum(lo - 1, 0)\n",
        "filling from a plateau starts one key before the window",
        "forced_flood_by_a_plateau",
    ),
    _plateau(
        "plateau_overfilled",
        "equal = tl.where(tl.cumsum(equal, axis=0) <= missing, equal, 0)",
        "equal = tl.where(tl.cumsum(equal, axis=0) <= missing + 1, equal, 0)",
        "one key too many is taken from a plateau",
        "forced_flood_by_a_plateau",
    ),
    _plateau(
        "right_of_the_plateau_lost",
        "right = ((key != NEVER) & (index >= s)).to(tl.int32)",
        "right = ((key != NEVER) & (index > s)).to(tl.int32)",
        "the first key held to the right of the walked part is dropped",
        "forced_flood_by_a_plateau",
    ),
    _repair(
        "repair_buffer_overrun",
        "if used + N > capacity:",
        "if used > capacity:",
        "the repair buffer is cut back one step too late",
        "forced_refill_of_the_repair_buffer",
    ),
    _repair(
        "first_part_only",
        "last = none + splits * capacity",
        "last = none + capacity",
        "of a row shared by several programs only the first part is merged",
        "forced_refill_of_the_repair_buffer",
    ),
    _repair(
        "stale_keys_behind_a_part",
        "tl.store(p_key + o_c, NEVER, mask=o_c < capacity)",
        "tl.store(p_key + o_c, NEVER, mask=o_c < used)",
        "what the buffer held before is merged with a part that is not full",
        "forced_overflow_of_candidates",
        "forced_underflow",
    ),
    _repair(
        "part_reaches_into_the_next",
        "last = tl.minimum(first.to(tl.int64) + size, hi).to(tl.int32)",
        "last = tl.minimum(first.to(tl.int64) + size + 1, hi).to(tl.int32)",
        "the parts of a row overlap by a key, which can be selected twice",
        "ascending_and_unique",
        "forced_refill_of_the_repair_buffer",
    ),
    _repair(
        "nan_of_the_last_step_only",
        "nans += tl.sum(((o_s < last) & (key == NEVER)).to(tl.int32))",
        "nans = tl.sum(((o_s < last) & (key == NEVER)).to(tl.int32))",
        "repair counts the NaN of its last step only",
        "nan_never_selected",
    ),
    _call(
        "score_table_for_everyone",
        "if plan.table_keys >= part.keys:",
        "if plan.table_keys >= 0:",
        "long rows are scored into a table as well",
        "no_score_table",
    ),
    _call(
        "fake_of_another_shape",
        "    return _outputs(q, top_k, return_scores)\n\n\ndef _outputs",
        "    return _outputs(q, top_k + 1, return_scores)\n\n\ndef _outputs",
        "the operator's fake answers with one column more",
        "torch_compile",
        "opcheck",
    ),
    _call(
        "weights_written_to",
        "problem = Problem(q, k, w, k_scale, lo, hi)\n        for",
        "problem = Problem(q, k, w.abs_(), k_scale, lo, hi)\n        for",
        "the caller's weights are changed in place",
        "inputs_stay_as_they_are",
    ),
    _call(
        "dtype_of_k_unchecked",
        "    if k.dtype != q.dtype:\n",
        "    if k.dtype.itemsize > 8:\n",
        "k of another dtype than q is accepted",
        "wrong_arguments",
    ),
    _values(
        "window_end_unchecked",
        "bad = ((lo < 0) | (hi > num_keys) | (lo > hi)).nonzero()",
        "bad = ((lo < 0) | (lo > hi)).nonzero()",
        "a window that ends after the last key is accepted",
        "wrong_windows",
    ),
    _values(
        "scale_unchecked",
        "bad = (~((k_scale > 0) & k_scale.isfinite())).nonzero()",
        "bad = (~(k_scale >= 0)).nonzero()",
        "a scale of 0 or infinity is accepted",
        "wrong_scales",
    ),
    _inputs(
        "head_stride_assumed",
        "return self.q.stride(0), self.q.stride(1), self.k.stride(0), self.w.stride(0)",
        "return self.q.stride(0), self.q.shape[2], self.k.stride(0), self.w.stride(0)",
        "heads are taken to lie next to each other",
        "memory_layout",
    ),
    _sizes(
        "causal_pass_too_short",
        "min(S, row0 + rows) if causal else S",
        "min(S, row0 + max(rows - 1, 1)) if causal else S",
        "a pass of a causal call leaves out the last key of its last row",
        CAUSAL,
        "windows_left_out",
    ),
    _sizes(
        "workspace_unbounded",
        "budget = workspace_bound(T, top_k) - CALL_ROW_BYTES * T - TOTAL_BYTES",
        "budget = workspace_bound(T, top_k) - CALL_ROW_BYTES * T - TOTAL_BYTES + T * S // 8",
        "chunks grow with the number of keys",
        "workspace_is_bounded",
    ),
)

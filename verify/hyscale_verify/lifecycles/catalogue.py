"""Planted bugs of replay and of the indexer's gradients, in the form of ``hyscale_verify.mutants``.

The lifecycle bugs are those of public frameworks: another microbatch's indices, a stale record, a record that
serves twice, windows that changed in between, a failed pass that leaves its record behind.
"""

from hyscale_verify.mutants.catalogue import Mutant

LIFE = "records_live_as_they_should"
WORDS, CASES, CORRUPT, WINDOWS = (
    "rows_of_any_size_follow_the_format",
    "packed_words_follow_the_format",
    "corrupt_words_are_refused",
    "changed_windows_are_refused",
)
INPUTS = "changed_inputs_are_refused"
SCORES, GRADIENTS, ORDER = (
    "selected_scores_are_the_selections",
    "selected_gradients_within_bounds",
    "fixed_point_does_not_depend_on_order",
)
RECOMPUTED, LOSS = "recomputation_changes_nothing", "indexer_loss_is_the_divergence"


def _in(stage: str, file: str) -> "_Stage":
    return _Stage(stage, f"{file}.py")


class _Stage:
    """Builds the mutants of one file."""

    def __init__(self, stage: str, file: str) -> None:
        self.stage = stage
        self.file = file

    def __call__(self, name: str, old: str, new: str, words: str, *likely: str) -> Mutant:
        return Mutant(name, self.stage, self.file, old, new, words, likely)


_encode, _decode = _in("encode", "replay/encode"), _in("decode", "replay/decode")
_windows, _policy = _in("fingerprint", "replay/fingerprint"), _in("policy", "replay/checkpoint")
_tape, _store, _record = (
    _in("tape", "replay/tape"),
    _in("store", "replay/store"),
    _in("record", "replay/record"),
)
_rows, _scatter = _in("gradients", "indexer/rows"), _in("gradients", "indexer/scatter")
_call = _in("gradients", "indexer/api")
_loss, _scores = _in("loss", "indexer/loss"), _in("scores", "indexer/selected")

MUTANTS: tuple[Mutant, ...] = (
    _encode(
        "position_off_by_one",
        "        bit = (value >> LOW_BITS) + place - o_w * 32\n"
        "        inside = (place < count) & (bit < 32)\n"
        "        while",
        "        bit = (value >> LOW_BITS) + place + 1 - o_w * 32\n"
        "        inside = (place < count) & (bit < 32)\n        while",
        "the first high bit of each word is set one place too far",
        WORDS,
    ),
    _encode(
        "last_place_of_a_word_lost",
        "for j in tl.static_range((31 + LOW_BITS - 1) // LOW_BITS + 1):",
        "for j in tl.static_range((31 + LOW_BITS - 1) // LOW_BITS):",
        "the low bits of the value that straddles two words are cut off",
        WORDS,
    ),
    _encode(
        "start_ignored",
        "    if HAS_START:\n        start = tl.load(start_ptr + rows)\n    p_index = index_ptr + rows * K\n",
        "    p_index = index_ptr + rows * K\n",
        "values are not taken relative to the row's start",
        WORDS,
    ),
    _decode(
        "checksum_not_compared",
        "difference = summed.to(tl.int32)[:, None] != checksum",
        "difference = summed.to(tl.int32)[:, None] != summed.to(tl.int32)[:, None]",
        "a changed low bit goes unnoticed",
        CORRUPT,
    ),
    _decode(
        "corrupt_row_kept",
        "    return tl.where(corrupt, 0, count)",
        "    return count",
        "a refused row keeps its count",
        CORRUPT,
    ),
    _decode(
        "fingerprints_not_compared",
        "differ = tl.where(tl.load(mark_ptr) != tl.load(seen_ptr), 32, 0)",
        "differ = tl.where(tl.load(mark_ptr) != tl.load(mark_ptr), 32, 0)",
        "a record decodes under windows that have changed",
        WINDOWS,
        LIFE,
    ),
    _decode(
        "inputs_not_compared",
        "(then != now) & (then != 0)",
        "(then != then) & (then != 0)",
        "a record is replayed to another dtype, other heads or another top_k",
        INPUTS,
    ),
    _windows(
        "ends_left_out",
        "end * 0x3F58476D1CE4E5B9",
        "(end - end) * 0x3F58476D1CE4E5B9",
        "the fingerprint does not see the windows' ends",
        WINDOWS,
    ),
    _windows(
        "rows_overwritten",
        "total += tl.where(tl.arange(0, BLOCK) == 0, size",
        "total = tl.where(tl.arange(0, BLOCK) == 0, size",
        "the fingerprint is that of the numbers of rows and keys: it sees no window",
        WINDOWS,
    ),
    _policy(
        "record_not_kept",
        "        if operator in kept:\n            return CheckpointPolicy.MUST_SAVE\n",
        "        if operator in kept:\n            return CheckpointPolicy.PREFER_RECOMPUTE\n",
        "the policy recomputes the selection",
        RECOMPUTED,
    ),
    _policy(
        "policy_not_passed_on",
        "use_reentrant=False, context_fn=contexts, **kwargs)",
        "use_reentrant=False, **kwargs)",
        "checkpoint_with_replay checkpoints without the policy: nothing is kept",
        RECOMPUTED,
    ),
    _tape(
        "one_frame_for_all",
        "        frame = self._frames[microbatch] = Frame(self, microbatch)\n",
        "        shared = next(iter(self._frames.values()), None)\n"
        "        frame = self._frames[microbatch] = shared or Frame(self, microbatch)\n",
        "microbatches in flight share one frame: the second meets the first one's records",
        LIFE,
    ),
    _tape(
        "record_survives_its_use",
        "            state.replayed = True\n",
        "",
        "a record is not used up: it serves a second backward pass, and stays",
        LIFE,
    ),
    _tape(
        "first_consumer_takes_all",
        "all(each.replayed for each in entry.consumers.values())",
        "any(each.replayed for each in entry.consumers.values())",
        "the first of several consumers drops the record",
        LIFE,
    ),
    _tape(
        "failed_forward_leaves_its_record",
        "        for layer in run.recorded:\n",
        "        for layer in ():\n",
        "a pass that failed leaves its record behind",
        LIFE,
    ),
    _tape(
        "failed_backward_uses_up",
        "            elif run.kind is Run.REPLAY:\n"
        "                entry.consumers[consumer].replayed = False\n",
        "",
        "a recomputation that failed has used its record up",
        LIFE,
    ),
    _tape(
        "sizes_not_compared",
        "if name in entry.facts and entry.facts[name] != now",
        'if name == "device" and entry.facts.get(name, now) != now',
        "another top_k, or other numbers of rows and keys, replay without an error",
        LIFE,
    ),
    _tape(
        "inputs_not_noted",
        '        facts |= {"dtype": q.dtype, "heads": H, "head size": D}\n',
        "",
        "a tape replays a record to another dtype, other heads or another head size",
        LIFE,
    ),
    _tape(
        "loaded_over_a_record",
        "        if layer in self._entries:\n            raise self._error(\n",
        "        if self._runs:\n            raise self._error(\n",
        "a loaded record takes the place of one that waits for its backward pass",
        LIFE,
    ),
    _tape(
        "nothing_fetched_ahead",
        "            self._fetch_ahead(source)\n",
        "",
        "offloaded records come back when they are asked for, and the recomputation waits",
        LIFE,
    ),
    _tape(
        "leftovers_forgotten",
        '        if left:\n            raise ReplayError(\n                f"records are left',
        '        if not frames:\n            raise ReplayError(\n                f"records are left',
        "a step ends in silence although a backward pass is missing",
        LIFE,
    ),
    _tape(
        "preview_consumes",
        "        if around in (Run.REPLAY, Run.PREVIEW):\n            kind = Run.PREVIEW\n",
        "        if around in (Run.REPLAY, Run.PREVIEW):\n            kind = Run.REPLAY\n",
        "a nested region is used up by the recomputation of the region around it",
        LIFE,
    ),
    _store(
        "host_copy_not_counted",
        "self._store._count(self, near=-1, far=1)",
        "self._store._count(self, near=-1, far=0)",
        "bytes in host memory are not accounted",
        LIFE,
    ),
    _store(
        "copy_on_the_device_kept",
        "        self._store._count(self, near=-1, far=1)\n        self._near = None\n",
        "        self._store._count(self, near=-1, far=1)\n",
        "an offloaded record stays on the device as well, and leaves the account twice",
        LIFE,
    ),
    _record(
        "local_indices_taken_as_they_are",
        "keys = torch.where(used & (keys >= 0), keys + low[:, None], keys)",
        "keys = torch.where(used & (keys >= 0), keys + low[:1, None], keys)",
        "imported local coordinates are shifted by the first row's start",
        LIFE,
    ),
    _record(
        "imported_as_they_come",
        "torch.iinfo(torch.int64).max).sort(dim=1).values",
        "torch.iinfo(torch.int64).max)",
        "imported indices are packed in the order in which they come",
        LIFE,
    ),
    _scores(
        "unused_place_scores",
        'return tl.where(sound, tl.where(used, score, float("-inf")), float("nan"))',
        'return tl.where(sound, score, float("nan"))',
        "unused places get the score of key 0",
        SCORES,
    ),
    _scores(
        "next_key_refused",
        "used & (index > left) &",
        "used & (index > left + 1) &",
        "a key right after the one before it counts as out of order: its score is NaN",
        SCORES,
    ),
    _rows(
        "relu_gradient_at_zero",
        "positive = (x > 0.0) & used[:, None]",
        "positive = (x >= 0.0) & used[:, None]",
        "relu passes a gradient at 0",
        GRADIENTS,
    ),
    _rows(
        "low_term_dropped",
        "tl.join(x_high, x - x_high)",
        "tl.join(x_high, x_high - x_high)",
        "dq loses the second term of the coefficients: bfloat16 accuracy",
        GRADIENTS,
    ),
    _scatter(
        "scatter_to_the_place",
        "p_dk = dk_ptr + index.to(tl.int64)[:, None] * D",
        "p_dk = dk_ptr + place.to(tl.int64)[:, None] * D",
        "dk is added at the place in the row instead of the key",
        GRADIENTS,
    ),
    _scatter(
        "scale_of_keys_forgotten",
        "            c = coefficients(grad_ptr + row * K, k_scale_ptr, keys, place, used, HAS_SCALE)\n",
        "            c = coefficients(grad_ptr + row * K, k_scale_ptr, keys, place, used, False)\n",
        "dk leaves out the scale of fp8 keys",
        GRADIENTS,
    ),
    _scatter(
        "chunk_boundary_lost",
        "below = tl.where((index >= 0) & (index < boundary), probe, below)",
        "below = tl.where((index >= 0) & (index <= boundary), probe, below)",
        "the key at a chunk's lower boundary is left to the chunk before it: key 0 to none",
        GRADIENTS,
    ),
    _scatter(
        "steps_too_coarse",
        "biased = tl.minimum(SUM_BITS - 1 - exponent, 126) + 127",
        "biased = tl.minimum(SUM_BITS - 15 - exponent, 126) + 127",
        "fixed-point sums keep 16 bits instead of 30",
        GRADIENTS,
    ),
    _call(
        "fixed_point_not_used",
        'return dk == "fixed_point" or (dk == "auto" and deterministic)',
        "return False",
        "dk is added up in float32 although an order-independent sum is asked for",
        ORDER,
    ),
    _loss(
        "target_not_subtracted",
        "(tl.exp(score) / whole * mass - target)",
        "(tl.exp(score) / whole * mass)",
        "the loss's gradient is the softmax alone",
        LOSS,
    ),
    _loss(
        "temperature_once",
        "grad = coefficient / temperature * (",
        "grad = coefficient * (",
        "the loss's gradient forgets the temperature",
        LOSS,
    ),
)

"""Selection replay: select once, keep the packed record, decode it wherever the selection is needed again.

``select`` is HyTopK for a region that is checkpointed: in the forward pass it selects and packs; in the
recomputation, under ``checkpoint_with_replay`` (checkpoint.py) or a ``SelectionTape`` (tape.py), the kept
record is decoded instead. Both passes decode the same words, so both see the same keys, bit for bit.

Shape letters: T queries, S keys, H heads, D head size, K = top_k.
"""

from dataclasses import dataclass

import torch

from hyscale_ref.codec import RowLayout

from ..hytopk import Plan, hytopk
from ..hytopk.api import NAMESPACE, check_call, check_top_k
from ..hytopk.selection import check_scales, check_windows
from .encode import launch_encode
from .errors import ReplayError
from .fingerprint import describe, launch_fingerprint
from .record import PackedSelection, check_bounds, raise_faults, unpack
from .tiling import Tiling

Optional = torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ReplayedSelection:
    """The selected keys of each query row, decoded from a record.

    indices   int32 [T, K], strictly ascending in each row, -1 beyond ``count``
    count     int32 [T]
    status    int32 [T], 0 where all is well, else what the decoder found (decode.FAULTS); such a row
              selects nothing, and with changed windows no row selects anything
    """

    indices: torch.Tensor
    count: torch.Tensor
    status: torch.Tensor

    def check(self) -> None:
        """Wait for the device and raise CorruptRecordError or ReplayError if a row was refused."""
        raise_faults(self.status)


def select(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    top_k: int,
    *,
    start: Optional = None,
    end: Optional = None,
    k_scale: Optional = None,
    validate: bool = False,
    label: str = "",
    plan: Plan | None = None,
) -> ReplayedSelection:
    """``hytopk``'s selection by way of its packed record. Arguments as for ``hytopk``.

    Inside a region under ``checkpoint_with_replay`` or ``replay_context_fn``, the selection kernels run in
    the forward pass alone. Anywhere else it is ``hytopk`` with a detour of two short kernels.
    ``label`` ("layer 3, microbatch 1") is a note on every error, and stands in what a device asserts.

    Raises what ``hytopk`` raises, and ReplayError when the selection kernels are about to run inside a
    backward pass: the region is then recomputed without replay and would select twice. A record that does not
    decode, or was made with other windows, dtype, heads, head size or top_k, raises CorruptRecordError or
    ReplayError with ``validate`` (which waits for the device) and always on a CPU; on a GPU it otherwise
    stops the device by an assertion, because there is no way to go on that is not wrong.
    """
    try:
        record = record_selection(q, k, w, top_k, start=start, end=end, k_scale=k_scale, plan=plan)
        if validate:
            check_windows(start, end, k.shape[0])
            check_scales(k_scale)
        return _decode(record, start, end, validate, True, describe(q, top_k), label)
    except (TypeError, ValueError, ReplayError) as error:
        if label:
            error.add_note(f"in the selection of {label}")
        raise


def record_selection(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    top_k: int,
    *,
    start: Optional = None,
    end: Optional = None,
    k_scale: Optional = None,
    plan: Plan | None = None,
) -> PackedSelection:
    """The record of ``hytopk``'s selection, alone. Arguments and errors as for ``select``."""
    check_call(q, k, w, start, end, k_scale)
    sizes = [] if plan is None else plan.as_ints()
    words = _hytopk_record(q.detach(), k.detach(), w.detach(), check_top_k(top_k), start, end, k_scale, sizes)
    mark = _fingerprint(q.detach(), start, end, k.shape[0], top_k)
    return PackedSelection(words, mark, k.shape[0], top_k)


def decode_record(
    record: PackedSelection,
    *,
    start: Optional = None,
    end: Optional = None,
    validate: bool = False,
    hold: bool = True,
) -> ReplayedSelection:
    """The selection in ``record``, which must have been made under the windows ``start``, ``end``.

    Errors as for ``select``; TypeError or ValueError for windows that cannot be the record's. Without
    ``hold`` a GPU goes on, and the caller must look at ``status``.
    """
    return _decode(record, start, end, validate, hold, 0, "")


def _decode(
    record: PackedSelection,
    start: Optional,
    end: Optional,
    validate: bool,
    hold: bool,
    inputs: int,
    label: str,
) -> ReplayedSelection:
    check_bounds(start, end, record.num_rows, record.num_keys, record.words.device)
    indices, count, status = _decode_selection(
        record.words, record.fingerprint, start, end, record.num_keys, record.top_k, inputs,
        hold and not validate, label,
    )  # fmt: skip
    selection = ReplayedSelection(indices, count, status)
    if validate:
        selection.check()
    return selection


@torch.library.custom_op(f"{NAMESPACE}::hytopk_record", mutates_args=())
def _hytopk_record(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    top_k: int,
    start: Optional,
    end: Optional,
    k_scale: Optional,
    plan: list[int],
) -> torch.Tensor:
    """Selection and packing in one operator, whose one result is all that a selective policy has to keep."""
    if torch._C._current_graph_task_id() != -1:  # inside a backward pass
        raise ReplayError(
            "the selection kernels were about to run in a backward pass: this region is recomputed without "
            "replay and would select twice. Checkpoint it, and every region around it, with "
            "checkpoint_with_replay, pass context_fn=replay_context_fn, or use a SelectionTape"
        )
    sizes = Plan.from_ints(plan) if plan else None
    selection = hytopk(q, k, w, top_k, start=start, end=end, k_scale=k_scale, plan=sizes)
    with torch.cuda.device_of(q):
        return launch_encode(selection.indices, selection.count, start, k.shape[0], Tiling.default(q.device))


@_hytopk_record.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    top_k: int,
    start: Optional,
    end: Optional,
    k_scale: Optional,
    plan: list[int],
) -> torch.Tensor:
    return q.new_empty((q.shape[0], RowLayout(k.shape[0], top_k).words), dtype=torch.int32)


@torch.library.custom_op(f"{NAMESPACE}::fingerprint", mutates_args=())
def _fingerprint(q: torch.Tensor, start: Optional, end: Optional, num_keys: int, top_k: int) -> torch.Tensor:
    with torch.cuda.device_of(q):
        return launch_fingerprint(start, end, q.shape[0], num_keys, q.device, describe(q, top_k))


@_fingerprint.register_fake
def _(q: torch.Tensor, start: Optional, end: Optional, num_keys: int, top_k: int) -> torch.Tensor:
    return q.new_empty((2,), dtype=torch.int64)


@torch.library.custom_op(f"{NAMESPACE}::decode_selection", mutates_args=())
def _decode_selection(
    words: torch.Tensor,
    fingerprint: torch.Tensor,
    start: Optional,
    end: Optional,
    num_keys: int,
    top_k: int,
    inputs: int,
    hold: bool,
    label: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices, count and status; ``hold`` stops the device where a row is refused, and names ``label``."""
    indices, count, status = unpack(words, fingerprint, start, end, num_keys, top_k, inputs)
    if words.device.type == "cpu":
        raise_faults(status)
    elif hold:
        torch._assert_async(
            (status == 0).all(),
            f"{label or 'replay'}: a packed selection is corrupt, or its windows or inputs have changed "
            "since the forward pass (validate=True says more)",
        )
    return indices, count, status


@_decode_selection.register_fake
def _(
    words: torch.Tensor,
    fingerprint: torch.Tensor,
    start: Optional,
    end: Optional,
    num_keys: int,
    top_k: int,
    inputs: int,
    hold: bool,
    label: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    T = words.shape[0]
    return words.new_empty((T, top_k)), words.new_empty((T,)), words.new_empty((T,))

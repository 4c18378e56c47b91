"""Selection replay: select once in the forward pass, reuse it in the recomputation."""

from hyscale_ref.codec import CorruptRecordError

from .api import ReplayedSelection, decode_record, record_selection, select
from .checkpoint import checkpoint_with_replay, replay_context_fn, replay_policy
from .errors import ReplayError
from .record import PackedSelection, import_selection
from .store import Held
from .tape import Frame, SelectionTape

__all__ = [
    "CorruptRecordError",
    "Frame",
    "Held",
    "PackedSelection",
    "ReplayError",
    "ReplayedSelection",
    "SelectionTape",
    "checkpoint_with_replay",
    "decode_record",
    "import_selection",
    "record_selection",
    "replay_context_fn",
    "replay_policy",
    "select",
]

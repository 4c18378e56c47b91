"""Records: packing, importing, serialising, and refusing what is no selection."""

import io
from typing import Any

import numpy as np
import pytest
import torch

from hyscale_kernels.replay import (
    CorruptRecordError,
    PackedSelection,
    ReplayError,
    decode_record,
    import_selection,
    record_selection,
)
from hyscale_ref import codec
from hyscale_ref.windows import packed

S, K = 40, 5
WINDOWS = packed([0, 3, 3, 20, 40], 40)


@pytest.fixture(scope="module")
def windows(device: str) -> dict[str, torch.Tensor]:
    return {
        "start": torch.from_numpy(WINDOWS.start).to(device),
        "end": torch.from_numpy(WINDOWS.end).to(device),
    }


@pytest.fixture(scope="module")
def record(device: str, windows: dict[str, torch.Tensor]) -> PackedSelection:
    generator = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(shape, generator=generator) for shape in [(S, 2, 16), (S, 16), (S, 2)])
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k = q.to(device, dtype), k.to(device, dtype)
    return record_selection(q, k, w.to(device), K, **windows)


def test_a_record_decodes_to_a_selection_inside_its_windows(
    record: PackedSelection, windows: dict[str, torch.Tensor]
) -> None:
    selection = decode_record(record, **windows, validate=True)
    lengths = WINDOWS.end - WINDOWS.start
    assert selection.count.cpu().tolist() == np.minimum(lengths, K).tolist()
    for t, row in enumerate(selection.indices.cpu().tolist()):
        keys = row[: int(selection.count[t])]
        assert keys == sorted(set(keys))
        assert all(WINDOWS.start[t] <= key < WINDOWS.end[t] for key in keys)
        assert row[len(keys) :] == [-1] * (K - len(keys))


def test_rows_decode_by_themselves(record: PackedSelection) -> None:
    whole, _ = codec.decode(record.words.cpu().numpy(), WINDOWS.start, S, K)
    for t in (0, 7, 39):
        one, _ = codec.decode(record.words[t : t + 1].cpu().numpy(), WINDOWS.start[t : t + 1], S, K)
        assert (one[0] == whole[t]).all()


def test_size_is_the_reference_s_and_never_above_int32(record: PackedSelection) -> None:
    assert record.words.shape == (S, codec.row_words(S, K))
    assert record.nbytes == 4 * S * codec.row_words(S, K) + 16
    assert codec.packed_bits_per_index(2**20, 2048) <= 11.1
    for keys in (1, 2, 5, 31, 1000, 2**20, 2**31 - 1):
        for top_k in (1, 2, 3, 64, 2048, 8192):
            assert codec.row_words(keys, top_k) <= top_k + 1


def test_a_record_survives_a_file(record: PackedSelection, windows: dict[str, torch.Tensor]) -> None:
    file = io.BytesIO()
    torch.save(record.state_dict(), file)
    file.seek(0)
    loaded = PackedSelection.from_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(decode_record(loaded, **windows).indices, decode_record(record, **windows).indices)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_imported_indices_in_any_order_are_the_selection(
    record: PackedSelection, windows: dict[str, torch.Tensor], local: bool, dtype: torch.dtype
) -> None:
    indices = decode_record(record, **windows).indices
    order = torch.rand(indices.shape, generator=torch.Generator().manual_seed(1)).argsort(dim=1)
    shuffled = indices.gather(1, order.to(indices.device)).to(dtype)
    if local:
        shuffled = torch.where(shuffled >= 0, shuffled - windows["start"][:, None].to(dtype), -1)
    again = import_selection(shuffled, S, **windows, local=local)
    assert torch.equal(again.words, record.words)
    assert again.fingerprint.tolist() == [record.fingerprint[0], 0], "its inputs are not known"


def changed(place: tuple[int, int], value: int) -> torch.Tensor:
    indices = torch.full((2, 3), -1, dtype=torch.int32)
    indices[0] = torch.tensor([2, 0, 1])
    indices[place] = value
    return indices


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (changed((0, 1), 2), "row 0: index 2 appears twice"),
        (changed((0, 1), 8), r"row 0: index 8 lies outside the row's window \[0, 8\)"),
        (changed((1, 2), 4), r"row 1: index 4 lies outside the row's window \[1, 4\)"),
        (changed((1, 0), 0), r"row 1: index 0 lies outside the row's window \[1, 4\)"),
        (changed((0, 0), -2), "row 0: index -2 lies outside"),
    ],
)
def test_an_import_that_is_no_selection_is_refused(device: str, indices: torch.Tensor, message: str) -> None:
    start = torch.tensor([0, 1], dtype=torch.int32, device=device)
    end = torch.tensor([8, 4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=message):
        import_selection(indices.to(device), 8, start=start, end=end)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[1]], 8), TypeError, "indices must be a torch.Tensor"),
        ((torch.zeros(1, 1), 8), TypeError, "indices is torch.float32; allowed: torch.int32, torch.int64"),
        ((torch.zeros(3, dtype=torch.int32), 8), ValueError, r"indices has shape \[3\]"),
        ((torch.zeros(3, 1, dtype=torch.int32), 8), ValueError, "start and end are missing"),
        ((torch.zeros(3, 1, dtype=torch.int32), -1), ValueError, "num_keys: -1"),
    ],
)
def test_import_names_a_wrong_argument(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        import_selection(*arguments)


def test_a_corrupt_record_names_its_first_row(
    record: PackedSelection, windows: dict[str, torch.Tensor]
) -> None:
    words = record.words.clone()
    words[30, 1] += 1
    words[33, 0] = 99
    with pytest.raises(CorruptRecordError, match=r"packed row 30 is corrupt: the checksum differs; 2 row"):
        decode_record(PackedSelection(words, record.fingerprint, S, K), **windows, validate=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"end": torch.ones(S, dtype=torch.int64)}, TypeError, "end is torch.int64; allowed: torch.int32"),
        (
            {"start": torch.ones(3, dtype=torch.int32)},
            ValueError,
            r"start has shape \[3\] on .*; it must be \[40\]",
        ),
    ],
)
def test_windows_that_cannot_be_the_record_s_are_refused(
    record: PackedSelection,
    windows: dict[str, torch.Tensor],
    change: dict[str, Any],
    error: Any,
    message: str,
) -> None:
    moved = {name: value.to(record.words.device) for name, value in change.items()}
    with pytest.raises(error, match=message):
        decode_record(record, **(windows | moved))


@pytest.mark.parametrize("bound", ["start", "end"])
def test_changed_windows_are_an_error(
    record: PackedSelection, windows: dict[str, torch.Tensor], bound: str
) -> None:
    other = {name: value.clone() for name, value in windows.items()}
    other[bound][25] -= 1
    with pytest.raises(ReplayError, match="windows differ from those of the record"):
        decode_record(record, **other, validate=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"words": torch.zeros(2, 3)}, TypeError, "words is torch.float32; allowed: torch.int32"),
        (
            {"words": torch.zeros(2, 3, dtype=torch.int32)},
            ValueError,
            r"words has shape \[2, 3\]; for 40",
        ),
        ({"fingerprint": torch.zeros(1, dtype=torch.int64)}, ValueError, r"fingerprint has shape \[1\]"),
        (
            {"num_keys": 41_000},
            ValueError,
            r"for 41000 keys and top_k 5 it must be \[T, 6\]",
        ),
    ],
)
def test_a_record_names_what_does_not_fit(
    record: PackedSelection, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PackedSelection.from_state_dict(record.state_dict() | change)


def test_a_state_with_other_entries_is_refused(record: PackedSelection) -> None:
    with pytest.raises(ValueError, match="state has the entries"):
        PackedSelection.from_state_dict({"words": record.words})

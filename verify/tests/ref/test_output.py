"""Where results go: whole files, pipes, standard output; and what is refused before the work."""

import json
import os
from pathlib import Path

import pytest

from hyscale_ref.output import check_writable, write_json


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("x" * 1000)
    write_json(path, {"schema": 1})
    assert json.loads(path.read_text()) == {"schema": 1}
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(path, {"schema": object()})
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_dash_is_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check_writable(Path("-"))
    write_json(Path("-"), {"schema": 1})
    assert json.loads(capsys.readouterr().out) == {"schema": 1}
    assert os.listdir(tmp_path) == []


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(path)
        write_json(path, {"schema": 1})
        assert json.loads(os.read(reader, 1 << 16)) == {"schema": 1}
        assert path.is_fifo()
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/", "is a folder"),
        ("/no/such/folder/r.json", "its folder does not exist"),
        ("/proc/r.json", "/proc/r.json cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_beforehand(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_writable(Path(path))


def test_checking_leaves_no_trace(tmp_path: Path) -> None:
    check_writable(tmp_path / "r.json")
    check_writable(None)
    assert os.listdir(tmp_path) == []

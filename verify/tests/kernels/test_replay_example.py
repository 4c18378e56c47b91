"""examples/replay_training.py: what it promises to show."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "examples" / "replay_training.py"


@pytest.mark.slow
def test_three_ways_of_training_are_equal_and_replay_selects_once(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("replay_training", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", device, "--steps", "2"])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        assert script.main() == 0
    finally:
        torch.use_deterministic_algorithms(False)
    twice, replay, tape = capsys.readouterr().out.splitlines()
    assert "2 selection(s) a layer and step" in twice
    for line in (replay, tape):
        assert "1 selection(s) a layer and step, losses and gradients equal: True" in line
        assert line.split()[2:5] == twice.split()[2:5], "the same losses"

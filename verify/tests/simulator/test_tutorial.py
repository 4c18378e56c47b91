"""The tutorial runs as written, top to bottom, in one folder."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from hyscale_simulator import commands, explain_commands

TUTORIAL = Path(__file__).parents[3] / "simulator" / "TUTORIAL.md"
VERBS: dict[str, Callable[[list[str]], int]] = {
    "presets": commands.presets,
    "simulate": commands.simulate,
    "explain": explain_commands.explain,
    "sweep": explain_commands.sweep,
    "plan": explain_commands.plan,
}


def test_the_tutorial_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(console|python)\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)
    ran = 0
    for kind, text in blocks:
        if kind == "python":
            exec(compile(text, str(TUTORIAL), "exec"), {})
            continue
        for line in text.splitlines():
            assert line.startswith("$ hyscale "), line
            verb, *arguments = shlex.split(line.removeprefix("$ hyscale "))
            code = VERBS[verb](arguments)
            assert code == 0, f"{line}\n{capsys.readouterr().err}"
            ran += 1
    assert ran >= 10
    assert {"explain.json", "explain.html", "mine.jsonl", "sweep.csv", "plan.json"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_the_pictures_it_shows_exist() -> None:
    for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", TUTORIAL.read_text(encoding="utf-8")):
        assert (TUTORIAL.parent / target).is_file(), target

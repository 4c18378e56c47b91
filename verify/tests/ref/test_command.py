"""The dispatcher: help at once, verbs by entry point, one line where something is missing."""

import resource
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from hyscale_ref import command
from hyscale_ref.command import main

HELP = """
import sys
from hyscale_ref.command import main
code = main(["--help"])
heavy = {"torch", "triton", "simpy", "numpy", "scipy", "typer"} & sys.modules.keys()
sys.exit(code or f"imported: {heavy}" if heavy else code)
"""


def test_help_answers_at_once_and_imports_nothing_heavy() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3
    for verb in ("verify", "mutants", "doctor", "profile", "simulate", "explain"):
        assert f"\n  {verb} " in done.stdout


@pytest.mark.parametrize(
    ("argv", "code", "out", "err"),
    [
        ([], 2, "usage: hyscale VERB", ""),
        (["-h"], 0, "usage: hyscale VERB", ""),
        (["--version"], 0, "hyscale ", ""),
        (["prove"], 2, "", "hyscale: no verb 'prove'; there are: verify, mutants, doctor"),
    ],
)
def test_the_command_itself(
    argv: list[str], code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    said = capsys.readouterr()
    assert said.out.startswith(out)
    assert said.err.startswith(err)


@pytest.mark.parametrize("when", ["loaded", "run"])
def test_a_missing_extra_is_one_line_and_exit_code_3(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the verb's module needs it, or what it imports once it runs."""
    missing = "raise ModuleNotFoundError(\"No module named 'torch.cuda'\", name='torch.cuda')\n"
    indent = "" if when == "loaded" else "    "
    (tmp_path / f"verb_{when}.py").write_text(f"def prove(argv):\n    pass\n{indent}{missing}")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = EntryPoint("prove", f"verb_{when}:prove", command.GROUP)
    monkeypatch.setattr(command, "entry_points", lambda group: [entry])
    assert main(["prove"]) == 3
    said = capsys.readouterr().err
    assert said == (
        "hyscale prove: needs the package 'torch', which is not installed; pip install 'hyscale[kernels]'\n"
    )


def test_any_other_missing_module_is_a_fault_and_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("prove", "no_such_module_of_ours:prove", command.GROUP)
    monkeypatch.setattr(command, "entry_points", lambda group: [entry])
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_ours"):
        main(["prove"])

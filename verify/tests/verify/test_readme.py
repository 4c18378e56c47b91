"""The README's figures are those of recorded runs, and what it names exists."""

import itertools
import json
import re
from functools import cache
from pathlib import Path

import pytest

from hyscale_verify.mutants import matrix

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "*/*.md", "kernels/hyscale_kernels/*/README.md")
    for path in ROOT.glob(pattern)
)

MODES = ("materialised", "hytopk", "hytopk+replay")


def reads(value: float, printed: str) -> bool:
    """Whether ``value``, rounded to as many places as are printed, is what is printed."""
    digits = printed.replace(",", "")
    return f"{value:.{len(digits.partition('.')[2])}f}" == digits


def table(first: str) -> list[list[str]]:
    """The cells of the table whose first column is headed ``first``, without thousands' commas."""
    lines = iter(README.splitlines())
    next(line for line in lines if line.startswith(f"| {first} |"))
    next(lines)  # the rule
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip().replace(",", "") for cell in row.strip("|").split("|")] for row in rows]


@cache
def raced() -> dict[tuple[object, ...], float]:
    """Milliseconds of every contender of the recorded races of random inputs and full windows."""
    lines = (ROOT / "benchmarks/results/race_hytopk.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        (record["rows"], record["keys"], record["dtype"], record["contender"]): record["median_ms"]
        for record in map(json.loads, lines)
        if (record["regime"], record["windows"], record["status"]) == ("random", "full", "ok")
    }


@pytest.mark.parametrize("cells", table("keys"), ids=lambda cells: f"{cells[1]}x{cells[0]}")
def test_selections_took_what_the_races_recorded(cells: list[str]) -> None:
    keys, rows, *columns = cells
    for dtype, rival, (ours, other, gain) in (
        ("fp8", "deepgemm+flashinfer", columns[:3]),
        ("bf16", "triton+flashinfer", columns[3:]),
    ):
        times = [raced().get((int(rows), int(keys), dtype, name)) for name in ("hytopk", rival)]
        if ours:
            assert times[0] is not None
            assert times[1] is not None
            assert reads(times[0], ours)
            assert reads(times[1], other)
            assert reads(times[1] / times[0], gain)
        else:
            assert (times, other, gain) == ([None, None], "", "")


def by_mode(file: str, value: str, **which: object) -> dict[str, float]:
    """``value`` of each mode's record with these fields; a record with a note is not quoted."""
    lines = (ROOT / "benchmarks/results" / file).read_text(encoding="utf-8").splitlines()
    return {
        record["mode"]: record[value]
        for record in map(json.loads, lines)
        if "note" not in record and all(record[name] == wanted for name, wanted in which.items())
    }


@pytest.mark.parametrize("cells", table("shape"), ids=lambda cells: f"{cells[0]} {cells[1]}")
def test_layers_took_what_is_recorded(cells: list[str]) -> None:
    shape, tokens, *times, gain = cells
    here = by_mode("layer_gains.jsonl", "ms", model=shape.lower(), tokens=int(tokens))
    for mode, said in zip(MODES, times, strict=True):
        assert reads(here[mode], said), mode
    assert reads(here["materialised"] / here["hytopk+replay"], gain)


@pytest.mark.parametrize("cells", table("tokens"), ids=lambda cells: cells[0])
def test_steps_took_what_is_recorded(cells: list[str]) -> None:
    tokens, gpus, *times, gain = cells
    here = by_mode("train_step.jsonl", "step_ms", sequence=int(tokens), gpus=int(gpus))
    for mode, said in zip(MODES, times, strict=True):
        assert reads(here[mode], said) if said else mode not in here, mode
    assert reads(here["materialised"] / here["hytopk+replay"], gain) if gain else "materialised" not in here


def test_the_tables_have_rows() -> None:
    assert len(table("keys")) >= 5
    assert len(table("tokens")) >= 3


def test_the_planted_bugs_are_counted_as_recorded() -> None:
    found = json.loads((ROOT / "benchmarks/kill_matrix.json").read_text())
    living = sum(map(matrix.survives_random_normal, found["mutants"]))
    assert f"all {len(found['mutants'])} are convicted, {living} of them" in " ".join(README.split())


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert link.startswith("http") or (path.parent / link).exists(), link

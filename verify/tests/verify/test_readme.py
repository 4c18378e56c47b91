"""The README's figures are those of recorded runs, and what it names exists."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hyscale_verify.mutants import matrix

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RACES = [
    record
    for record in map(json.loads, (ROOT / "benchmarks/results/race_hytopk.jsonl").read_text().splitlines())
    if record["status"] == "ok" and record["regime"] == "random"
]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "*/*.md", "kernels/hyscale_kernels/*/README.md")
    for path in ROOT.glob(pattern)
)


def reads(value: float, printed: str) -> bool:
    """Whether ``value``, rounded to as many places as are printed, is what is printed."""
    digits = printed.replace(",", "")
    return f"{value:.{len(digits.partition('.')[2])}f}" == digits


def table() -> list[tuple[int, int, list[str]]]:
    """(rows, keys, cells) of the table of races."""
    found = []
    for line in README.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        where = re.fullmatch(r"([\d,]+)(?: x ([\d,]+)| causal)", cells[0])
        if where is not None and len(cells) == 5:
            rows, keys = (int((text or where[1]).replace(",", "")) for text in where.groups())
            found.append((rows, keys, cells))
    return found


@pytest.mark.parametrize(("rows", "keys", "cells"), table(), ids=lambda value: str(value)[:20])
def test_a_row_of_the_table_is_one_recorded_race(rows: int, keys: int, cells: list[str]) -> None:
    windows = "causal" if "causal" in cells[0] else "full"
    here = [r for r in RACES if (r["rows"], r["keys"], r["windows"]) == (rows, keys, windows)]

    def timed(who: str, dtype: str, printed: str) -> list[dict[str, Any]]:
        return [
            r for r in here if (r["contender"], r["dtype"]) == (who, dtype) and reads(r["median_ms"], printed)
        ]

    ours, rivals = timed("hytopk", "fp8", cells[1]), timed("deepgemm+flashinfer", "fp8", cells[2])
    assert {r["time_utc"] for r in ours} & {r["time_utc"] for r in rivals}, "no race has both times"
    assert not cells[3] or timed("hytopk", "bf16", cells[3])
    units = {"MiB": 2**20, "GiB": 2**30}
    mine, _, theirs = cells[4].partition(" / ")
    unit = theirs.split()[-1]
    for printed, found in ((mine if " " in mine else f"{mine} {unit}", ours), (theirs, rivals)):
        size, name = printed.split()
        said = float(size.replace(",", "")) * units[name]
        assert any(abs(r["peak_extra_bytes"] - said) <= units[name] for r in found), printed


def test_the_table_has_rows() -> None:
    assert len(table()) >= 5


def test_the_planted_bugs_are_counted_as_recorded() -> None:
    found = json.loads((ROOT / "benchmarks/kill_matrix.json").read_text())
    living = sum(map(matrix.survives_random_normal, found["mutants"]))
    assert f"all {len(found['mutants'])} are convicted, {living} of them" in " ".join(README.split())


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert link.startswith("http") or (path.parent / link).exists(), link

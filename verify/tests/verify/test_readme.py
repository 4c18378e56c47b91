"""The README's figures are those of recorded runs, and what it names exists."""

import itertools
import json
import re
from functools import cache
from pathlib import Path

import pytest

from hyscale_ref.profile import ProfilePoint, read_profile
from hyscale_verify.mutants import matrix

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "*/*.md", "kernels/hyscale_kernels/*/README.md")
    for path in ROOT.glob(pattern)
)


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


def profiled(op: str, implementation: str, dtype: str, regime: str, **shape: int) -> float:
    """Milliseconds of the shipped profile's point; there is one."""
    found = [
        point.median_us / 1e3
        for point in profile()
        if (point.op, point.implementation, point.dtype, point.regime) == (op, implementation, dtype, regime)
        and shape.items() <= dict(point.shape).items()
    ]
    assert len(found) == 1, (op, implementation, dtype, regime, shape)
    return found[0]


@cache
def profile() -> list[ProfilePoint]:
    return list(read_profile(ROOT / "simulator/hyscale_simulator/data/profiles/h200-own.jsonl.gz"))


@pytest.mark.parametrize("cells", table("keys"), ids=lambda cells: cells[0])
def test_selections_take_what_the_profile_says(cells: list[str]) -> None:
    keys, fp8, rival_fp8, gain_fp8, bf16, rival_bf16, gain_bf16 = cells
    shape = {"rows": 4096, "keys": int(keys)}
    select = profiled("index_select", "flashinfer", "fp32", "untrained", **shape)
    for dtype, scorer, ours, rival, gain in (
        ("fp8", "deepgemm", fp8, rival_fp8, gain_fp8),
        ("bf16", "triton", bf16, rival_bf16, gain_bf16),
    ):
        took = profiled("hytopk", "hytopk", dtype, "untrained", **shape, top_k=2048)
        other = profiled("index_scores", scorer, dtype, "", **shape) + select
        assert reads(took, ours)
        assert reads(other, rival)
        assert reads(other / took, gain)


@pytest.mark.parametrize("cells", table("tokens"), ids=lambda cells: cells[0])
def test_steps_took_what_is_recorded(cells: list[str]) -> None:
    tokens, gpus, *times, gain = cells
    lines = (ROOT / "benchmarks/results/train_step.jsonl").read_text().splitlines()
    here = {
        record["mode"]: record["step_ms"]
        for record in map(json.loads, lines)
        if (record["sequence"], record["gpus"]) == (int(tokens), int(gpus)) and "note" not in record
    }
    printed = dict(zip(("materialised", "hytopk", "hytopk+replay"), times, strict=True))
    for mode, said in printed.items():
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

"""Held against published steps: the promised accuracy, on every case."""

from pathlib import Path

import pytest

from hyscale_simulator.published import sources
from hyscale_simulator.validation import Comparison, compare, compare_chunk, summarise


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    return compare()


def test_all_published_rows_are_compared(comparisons: list[Comparison]) -> None:
    assert len(comparisons) == 37
    assert sum(not row.compared for row in comparisons) == 2


def test_the_accuracy_that_is_promised(comparisons: list[Comparison]) -> None:
    summary = summarise(comparisons)
    assert summary.mape_pct <= 10
    assert abs(summary.worst_pct) <= 25
    assert abs(summary.bias_pct) <= 5
    assert summary.spearman >= 0.95


def test_what_a_source_leaves_open_is_said_once() -> None:
    for source in sources():
        assert source.left_open
        assert source.url.startswith("https://")


def test_deepseeks_overlapped_chunk_is_met() -> None:
    assert abs(compare_chunk().error_pct) <= 10


def test_the_documents_explain_every_large_miss(comparisons: list[Comparison]) -> None:
    """By the row's own figure, so that an explanation does not outlive what it explains."""
    text = (Path(__file__).parents[3] / "simulator/README.md").read_text()
    for row in comparisons:
        if not row.compared or abs(row.error_pct) > 15:
            assert f"{row.error_pct:+.0f} %".replace("-", "−") in text, row.name
            assert row.compared or row.note

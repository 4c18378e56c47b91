"""The page stands alone: no request, no script, every chart with its numbers, readable at any width."""

import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hyscale_simulator.evaluate import evaluator
from hyscale_simulator.explanation import Explanation, explain
from hyscale_simulator.report import page
from hyscale_simulator.report.charts import Bar, Line, bars, lines, stacked, table
from hyscale_simulator.switches import BASELINES

SECTIONS = (
    "shares", "consistency", "stages", "timeline", "causes", "memory", "dependence", "lengths", "public",
    "certainty", "claims", "provenance",
)  # fmt: skip
VOID = {"meta", "link", "br", "rect", "line", "circle", "polyline"}


class Page(HTMLParser):
    """Collects tags and attributes, and checks that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another element"


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    base = next(b for b in BASELINES if b.letter == "C")
    return explain(base.scenario(), base.improved(), evaluator(), study=True, samples=8)


@pytest.fixture(scope="module")
def html(explanation: Explanation) -> str:
    return page(explanation)


def test_the_page_asks_for_nothing(html: str) -> None:
    parsed = Page(html)
    assert not parsed.open
    for banned in ("script", "img", "iframe", "object", "embed"):
        assert parsed.tags[banned] == 0
    for tag, name, value in parsed.attributes:
        if name in ("src", "href", "srcset", "action"):
            assert value.startswith("#") or (tag == "link" and value == "data:,"), (tag, name, value)
    assert not re.search(r"url\(|@import|https?://", html)
    assert len(html) < 400_000


def test_every_section_is_there_and_linked(html: str) -> None:
    parsed = Page(html)
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert tuple(ids) == SECTIONS
    assert [v for t, n, v in parsed.attributes if (t, n) == ("a", "href")] == [f"#{i}" for i in ids]


def test_every_chart_has_its_numbers_and_command(html: str) -> None:
    for section in html.split("<section ")[1:]:
        charts = section.count("<svg") + section.count('class="bars"') + section.count('class="stacks"')
        if charts:
            assert "numbers and command" in section, section[:60]
            assert "hyscale " in section


def test_the_page_says_what_the_explanation_found(explanation: Explanation, html: str) -> None:
    assert explanation.study is not None
    assert f"{explanation.attribution.speedup:.2f}x" in html
    hits = sum(cell.consistent for case in explanation.study.cases for cell in case.cells)
    assert html.count('<td class="hit">') == hits
    assert html.count('data-name="Falsified by"') == len(explanation.study.claims)
    for warning in explanation.attribution.baseline.warnings:
        assert warning in html


def test_a_comparison_of_its_own_has_no_claim(tmp_path: Path) -> None:
    base = BASELINES[4]
    found = explain(base.scenario(), base.improved(), evaluator(), study=False, samples=2)
    text = page(found)
    assert 'id="consistency"' not in text
    assert not Page(text).open


def test_bars_share_one_scale_and_escape_their_labels() -> None:
    text = bars([Bar("<a>", 0.0, 4.0, "4"), Bar("b", 4.0, 3.0, "-1")])
    assert "&lt;a&gt;" in text
    assert "left:0.000%;width:100.000%" in text
    assert "left:75.000%;width:25.000%" in text


def test_a_stack_is_as_long_as_its_parts() -> None:
    text = stacked([("row", [("x", 1.0), ("y", 3.0), ("none", 0.0)], "4")], {"x": "#1", "y": "#2"}, 8.0)
    assert [float(w) for w in re.findall(r"width:([\d.]+)%", text)] == [12.5, 37.5]


def test_curves_lie_inside_their_frame() -> None:
    text = lines("t", [Line("a", [(0.0, 1.0), (1.0, 9.0)])], [(0.0, "low"), (1.0, "high")], "y")
    points = [tuple(map(float, p.split(","))) for p in re.findall(r'points="([^"]+)"', text)[0].split()]
    assert all(38 <= x <= 328 and 22 <= y <= 156 for x, y in points)
    assert points[0][1] > points[1][1]


def test_tables_escape_their_cells() -> None:
    assert "<td>&lt;b&gt;</td>" in table(("a",), [("<b>",)])


@pytest.mark.parametrize("width", [390, 1400])
def test_chromium_shows_it_without_errors(html: str, width: int, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium: apt-get install chromium")
    probe = (
        "<script>document.addEventListener('DOMContentLoaded', () => { const wide = [...document.body."
        "querySelectorAll('*')].filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right > "
        "innerWidth + 1).length; document.title = ['WIDE', wide, 'REQUESTS', performance.getEntriesByType("
        "'resource').length, 'SECTIONS', document.querySelectorAll('section').length].join(' '); });</script>"
    )
    path = tmp_path / "page.html"
    path.write_text(html.replace("</head>", probe + "</head>"), encoding="utf-8")
    ran = subprocess.run(
        [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},2000",
         "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", ran.stdout)
    assert title is not None, ran.stderr[-2000:]
    assert title[1] == f"WIDE 0 REQUESTS 0 SECTIONS {len(SECTIONS)}"
    assert "CONSOLE" not in ran.stderr

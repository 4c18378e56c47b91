"""Small charts as HTML and inline SVG: no script, no outside resource, readable on a phone and in print.

Colours are those of Okabe and Ito, which colour-blind readers tell apart; nothing is told by colour alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["COLOURS", "GREY", "Bar", "Line", "bars", "legend", "lines", "numbers", "stacked", "timeline"]

BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, YELLOW, GREY = (
    "#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#f0e442", "#b8bec5",
)  # fmt: skip
COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, YELLOW, "#000000")


@dataclass(frozen=True)
class Bar:
    """A bar from ``start`` to ``end`` on a common scale, its label, and the figure beside it."""

    label: str
    start: float
    end: float
    text: str
    colour: str = BLUE


def bars(items: Sequence[Bar]) -> str:
    """Horizontal bars on one scale; a hairline marks zero."""
    low = min(0.0, *(min(item.start, item.end) for item in items))
    high = max(0.0, *(max(item.start, item.end) for item in items))
    span = (high - low) or 1.0
    zero = 100 * -low / span
    cells = []
    for item in items:
        left, right = sorted((item.start, item.end))
        cells.append(
            f'<div class="label">{escape(item.label)}</div>'
            f'<div class="track"><div class="bar" style="left:{100 * (left - low) / span:.3f}%;'
            f'width:{100 * (right - left) / span:.3f}%;background:{item.colour}"></div>'
            f'<div class="zero" style="left:{zero:.3f}%"></div></div>'
            f'<div class="value">{escape(item.text)}</div>'
        )
    return f'<div class="bars" role="img">{"".join(cells)}</div>'


def stacked(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]], str]], colours: dict[str, str], longest: float
) -> str:
    """Rows of (label, parts, figure); ``longest`` is as wide as the page."""
    cells = []
    for label, parts, text in rows:
        pieces = "".join(
            f'<i style="width:{100 * size / longest:.3f}%;background:{colours[name]}" '
            f'title="{escape(name)} {size:.2f}"></i>'
            for name, size in parts
            if size > 0
        )
        cells.append(f'<div>{escape(label)}</div><div class="stack">{pieces}</div><div>{escape(text)}</div>')
    return f'<div class="stacks" role="img">{"".join(cells)}</div>'


def legend(colours: dict[str, str]) -> str:
    """Names of colours, in order."""
    items = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items()
    )
    return f'<div class="legend">{items}</div>'


@dataclass(frozen=True)
class Line:
    """Points (x in 0..1, y); joined unless x is no scale, dashed if told so, bare if it is only a guide."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = BLUE
    dashed: bool = False
    joined: bool = True
    bare: bool = False


WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 340, 190, 38, 34, 22, 12


def lines(
    title: str,
    series: Sequence[Line],
    ticks: Sequence[tuple[float, str]],
    y_name: str,
    marked: float | None = None,
    y_low: float | None = None,
    y_high: float | None = None,
) -> str:
    """Curves with every tick labelled; ``marked``: an x to ring."""
    values = [y for line in series for _, y in line.points]
    low = min(values) if y_low is None else y_low
    high = max(values) if y_high is None else y_high
    pad = 0.06 * (high - low or 1.0)
    low, high = (low - pad if y_low is None else low), high + pad

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (0.03 + 0.94 * x)
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)

    parts = []
    for value in _nice(low, high):
        y = place(0, value)[1]
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>'
            f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    parts.append(f'<text x="2" y="12">{escape(y_name)}</text>')
    for at, (x, label) in enumerate(ticks):
        across = place(x, low)[0]
        # Long labels of neighbours take turns on two lines.
        down = HEIGHT - BOTTOM + 14 + (13 if at % 2 and any(len(t) > 6 for _, t in ticks) else 0)
        anchor = "start" if at == 0 and len(label) > 6 else "end" if x > 0.97 and len(label) > 6 else "middle"
        parts.append(f'<text x="{across:.1f}" y="{down}" text-anchor="{anchor}">{escape(label)}</text>')
    for line in series:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        if line.joined:
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>'
            )
        for point in () if line.bare else line.points:
            x, y = place(*point)
            ring = marked is not None and abs(point[0] - marked) < 1e-9
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{5 if ring else 3}" '
                f'fill="{"#ffffff" if ring else line.colour}" stroke="{line.colour}" stroke-width="2"/>'
            )
    return (
        f"<figure><figcaption><b>{escape(title)}</b></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
        "</figure>"
    )


def _nice(low: float, high: float) -> list[float]:
    """Three to six round values within a range."""
    step = 10.0**-9
    while (high - low) / step > 6:
        for factor in (1, 2, 5):
            candidate = step * factor
            if (high - low) / candidate <= 6:
                step = candidate
                break
        else:
            step *= 10
    first = -(-low // step)
    return [round((first + i) * step, 9) for i in range(8) if (first + i) * step <= high]


def timeline(spans: Sequence[tuple[float, float, str]], end: float, colours: dict[str, str]) -> str:
    """Spans (start, end, kind) of one stream, from 0 to ``end``, stretched over the page."""
    rects = "".join(
        f'<rect x="{1000 * start / end:.3f}" y="0" width="{max(1000 * (stop - start) / end, 0.3):.3f}" '
        f'height="20" fill="{colours[kind]}" stroke="#ffffff" stroke-width="0.4"/>'
        for start, stop, kind in spans
    )
    return (
        '<div class="timeline"><svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" '
        f'aria-label="timeline">{rects}</svg></div>'
    )


def numbers(columns: Sequence[str], rows: Sequence[Sequence[str]], command: str) -> str:
    """The numbers behind a chart, and the command that gives them."""
    return (
        "<details><summary>numbers and command</summary>"
        f"{table(columns, rows)}<p><code>{escape(command)}</code></p></details>"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A plain table; its first column is text."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )

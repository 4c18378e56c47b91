"""The page: its sections in reading order, from the answer to the evidence."""

from html import escape
from importlib import resources

from hyscale_simulator.explanation import Explanation
from hyscale_simulator.report import claim_sections, sections

__all__ = ["page"]


def page(found: Explanation) -> str:
    """The explanation as HTML: no script, no request, readable on a phone, in print, and without colours."""
    parts = [
        sections.shares(found),
        *([claim_sections.consistency(found.study)] if found.study else []),
        sections.stages(found),
        sections.timelines(found),
        sections.causes(found),
        sections.memory(found),
        *(
            [
                claim_sections.dependence(found.study),
                claim_sections.lengths(found.study),
                claim_sections.public_figures(found.study),
            ]
            if found.study
            else []
        ),
        sections.certainty(found),
        *([claim_sections.claims(found.study)] if found.study else []),
        sections.provenance(found),
    ]
    style = (resources.files("hyscale_simulator.report") / "style.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{part.anchor}">{escape(part.title)}</a>' for part in parts)
    body = "".join(
        f'<section id="{part.anchor}"><h2>{escape(part.title)}</h2>{part.html}</section>' for part in parts
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>HyScale: where a speed-up comes from</title><style>{style}</style></head><body>"
        f"<header>{sections.headline(found)}<nav>{links}</nav></header><main>{body}</main></body></html>\n"
    )

"""The report: one self-contained HTML page that opens offline."""

from .page import page

__all__ = ["page"]

"""Show the atlas as one HTML file that needs no network: a table to search and filter."""

from __future__ import annotations

from importlib import resources

PLACE = "/*DATA*/null"


def html(data: str) -> str:
    """Return the page for an atlas, given as JSON text."""
    page = resources.files("fusec.atlas").joinpath("page.html").read_text(encoding="utf-8")
    before, _, after = page.partition(PLACE)
    # a script of HTML ends at the first `</`, also within a string of JSON
    return before + data.replace("</", "<\\/").strip() + after

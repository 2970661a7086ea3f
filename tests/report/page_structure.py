"""Read a page, and check what every page must hold: balanced tags, ids that links reach, no network."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

VOID = {"meta", "br", "input", "link", "img", "hr"}
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "header", "nav", "main", "section", "article", "footer"),
    *("script",),
    *("h1", "h2", "h3", "h4", "p", "br", "div", "span", "strong", "em", "b", "a", "code", "pre", "ul", "ol", "li"),
    *("table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
    *("svg", "path", "circle", "rect", "line", "text"),
}  # fmt: skip


class Page(HTMLParser):
    """A page: its tags, ids, links, and the text of each element that has an id."""

    def __init__(self, source: str):
        super().__init__()
        self.source = source
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, str] = {}
        self.text = ""
        self.scripts: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(source)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in given.items()]
        if "id" in given:
            self.ids.append(given["id"])
            self.texts[given["id"]] = ""
        if "href" in given:
            self.links.append(given["href"])
        if tag not in VOID:
            self._open.append((tag, given.get("id")))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1][0] == tag, (tag, self._open[-3:], self.getpos())
        self._open.pop()

    def handle_data(self, data: str) -> None:
        within = [tag for tag, _ in self._open]
        if "script" in within:
            self.scripts[-1] += data
        elif "style" not in within:
            self.text += data
            for _, name in self._open:
                if name is not None:
                    self.texts[name] += data


def checked(source: str) -> Page:
    """Parse a page, and check what holds for every page."""
    page = Page(source)
    assert source.startswith("<!doctype html>")
    assert set(page.tags) <= ALLOWED, set(page.tags) - ALLOWED
    assert len(set(page.ids)) == len(page.ids)
    for link in page.links:
        assert link.startswith("#") and link[1:] in page.ids, link
    loads = [(tag, name) for tag, name, _ in page.attributes if name in ("src", "srcset", "action", "data", "poster")]
    handlers = [(tag, name) for tag, name, _ in page.attributes if name.startswith("on")]
    assert not loads and not handlers
    assert not [value for _, _, value in page.attributes if "://" in value or value.startswith("javascript:")]
    (style,) = re.findall(r"<style>(.*?)</style>", source, re.DOTALL)
    assert "url(" not in style and "@import" not in style
    (script,) = page.scripts
    assert not re.search(r"fetch|XMLHttpRequest|import\(|innerHTML|eval", script)
    policy = next(v for tag, name, v in page.attributes if (tag, name) == ("meta", "content") and "default-src" in v)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    return page

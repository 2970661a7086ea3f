"""Escape what a terminal obeys in texts that hold names from a model.

A name is a stranger's text: an escape sequence in it can rewrite the screen, a bidi override can swap its words.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape every character that is not printable, newlines too, as `repr` does; the result is one line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Escape the same characters but keep line breaks, for a text whose lines fusec wrote itself."""
    return "\n".join(printable(line) for line in text.split("\n"))

"""Escape control characters in texts that contain names from a model.

Names are untrusted: an escape sequence can rewrite the screen, and a bidi override can change the order of words.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape all characters that are not printable, as `repr` does. The result is one line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Escape the same characters except line breaks, for a text whose line breaks come from fusec."""
    return "\n".join(printable(line) for line in text.split("\n"))

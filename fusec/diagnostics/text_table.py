"""Format text tables and numbers for people: columns aligned, long cells shortened or wrapped to the width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fusec.system.printable import printable

WIDTH = 118  # of the lines of a report, by default
GAP = "  "
ELLIPSIS = "…"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table: a header, a rule, the rows. Columns in `right` are aligned to the right."""
    rows = [list(map(printable, cells)) for cells in rows]
    widths = [max(len(cells[i]) for cells in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return GAP.join(padded).rstrip()

    return [line(header), GAP.join("─" * w for w in widths).rstrip(), *map(line, rows)]


def shortened(text: str, width: int) -> str:
    """Shorten a text to at most `width` characters."""
    return text if len(text) <= width else text[: width - 1] + ELLIPSIS


def listed(names: Sequence[str], width: int) -> str:
    """Return as many of the names as fit, and how many more there are."""
    names = list(map(printable, names))
    best = ""
    for count in range(1, len(names) + 1):
        more = f" +{len(names) - count}" if count < len(names) else ""
        shown = ", ".join(names[:count])
        if count == 1:
            best = shortened(shown, width - len(more)) + more
        elif len(shown) + len(more) <= width:
            best = shown + more
        elif len(shown) > width:
            break
    return best


def wrapped(text: str, indent: str, width: int) -> list[str]:
    """Wrap a text to lines of at most `width`, all but the first indented two characters more."""
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [indent.rstrip()]


def bytes_text(count: int) -> str:
    """Return a number of bytes with a unit: 0, 512 B, 1.5 KiB, 3.2 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return "0" if count == 0 else f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")

"""Test the parser's messages for bad text: tests/errors/*.txt hold the text and the message, caret included."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fusec.errors import ModelError
from fusec.text import parse

FILES = sorted(Path(__file__).parent.glob("text_*.txt"))
WEIGHTS = {"w": np.ones((4, 5), np.float32)}


def cases(path: Path) -> list[tuple[str, str, str]]:
    """Title, text and message of each case: `== title`, text, `=>`, message."""
    found: list[tuple[str, str, str]] = []
    for part in re.split(r"^== ", path.read_text(), flags=re.MULTILINE)[1:]:
        head, _, message = part.partition("\n=>\n")
        title, _, text = head.partition("\n")
        found.append((title, text, message.rstrip("\n")))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_messages(path: Path, request: pytest.FixtureRequest) -> None:
    now: list[tuple[str, str, str]] = []
    for title, text, _ in cases(path):
        with pytest.raises(ModelError) as error:
            parse(text, WEIGHTS)
        now.append((title, text, str(error.value)))
    if request.config.getoption("--accept"):
        path.write_text("\n".join(f"== {title}\n{text}\n=>\n{message}\n" for title, text, message in now))
    assert cases(path) == now, "run pytest --accept to write what is said now"


def test_titles_are_unique() -> None:
    titles = [title for path in FILES for title, _, _ in cases(path)]
    assert len(set(titles)) == len(titles) > 30


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_carets_stand_below_what_they_mean(path: Path) -> None:
    """Line and column in words, the line as it is, the caret under that column."""
    for title, text, message in cases(path):
        match = re.match(r"line (\d+), column (\d+): ", message)
        assert match, f"{title}: no place in {message!r}"
        line, caret = message.split("\n")[-2:]
        assert line == "  " + text.split("\n")[int(match[1]) - 1], title
        assert caret == " " * (1 + int(match[2])) + "^", title

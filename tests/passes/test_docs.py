"""docs/passes.md holds the pipeline and the rules as the code prints them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusec.passes.__main__ import markdown

DOC = Path(__file__).parents[2] / "docs" / "passes.md"
BEGIN, END = "<!-- begin: python -m fusec.passes -->\n", "\n<!-- end -->"


def test_the_list_in_the_docs_is_that_of_the_code(request: pytest.FixtureRequest) -> None:
    text = DOC.read_text()
    before, _, rest = text.partition(BEGIN)
    listed, _, after = rest.partition(END)
    if request.config.getoption("--accept"):
        DOC.write_text(before + BEGIN + markdown() + END + after)
    else:
        assert listed == markdown(), "run pytest --accept to write it anew"


def test_every_pass_has_a_summary() -> None:
    assert not re.findall(r"\| *\|$", markdown(), re.MULTILINE)

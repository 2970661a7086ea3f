"""Test that docs/ir.md has the tables that the code prints, and graphs that parse."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fusec.ir import NUMBERS
from fusec.ops import ALL, Reduce
from fusec.ops.__main__ import markdown
from fusec.ops.reduction import _KINDS  # the list the docs repeat
from fusec.text import parse

DOC = Path(__file__).parents[2] / "docs" / "ir.md"
BEGIN, END = "<!-- begin: python -m fusec.ops -->\n", "\n<!-- end -->"


def test_the_tables_in_the_docs_are_those_of_the_registry(request: pytest.FixtureRequest) -> None:
    before, _, rest = DOC.read_text().partition(BEGIN)
    listed, _, after = ("\n" + rest).partition(END)
    if request.config.getoption("--accept"):
        DOC.write_text(before + BEGIN + markdown() + END + after)
    else:
        assert listed == "\n" + markdown(), "run pytest --accept to write them anew"


def test_every_op_is_in_the_tables_and_says_what_it_means() -> None:
    for op in ALL:
        (row,) = re.findall(rf"^\| `{op.name}` .*$", markdown(), re.MULTILINE)
        assert hasattr(op, "row") or not row.endswith("|  |"), op.name
    assert set(_KINDS) <= set(re.findall(r"\w+", Reduce.__doc__ or ""))


def test_graphs_in_the_docs_parse_and_print_the_same_text() -> None:
    blocks = re.findall(r"^```\n(graph .*?)\n```$", DOC.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        assert str(parse(block, {"layer1.weight": np.ones((64, 64, 3, 3), np.float32)})) == block


def test_element_types_in_the_docs_are_all_there_are() -> None:
    (line,) = re.findall(r"^- Element types: (.*)\.$", DOC.read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", line) == [d.value for d in NUMBERS]

"""Test that docs/passes.md holds the pipeline and the rules as the code prints them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fusec.passes.__main__ import markdown
from fusec.passes.rewriting.rewriter import rewrite
from fusec.text import parse

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


@pytest.mark.parametrize(("slope", "op"), [(0.1, "leaky_relu"), (2.0, "max")])
def test_the_example_of_a_rule_runs(slope: float, op: str) -> None:
    names: dict[str, Any] = {}
    page = re.search(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert page is not None
    exec(compile(page[1], str(DOC), "exec", dont_inherit=True), names)
    graph = parse(f"""graph "g" (%x: f32[2,3]) {{
  %a = constant [{slope}] : f32[]
  %s = mul(%x, %a)
  %y = max(%x, %s)
  return %y
}}""")
    rewrite(graph, [names["leaky_relu_max"]], frozenset())
    graph.prune()
    assert [node.op.name for node in graph.nodes][-1] == op

"""Check that docs/onnx.md has the table of ops as the code prints it, and the recorded results of onnx's suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from onnx_suite.suite import RECORD, counts

from benchmarks.checks.onnx_suite import table
from benchmarks.pages.results_of_costs import read
from fusec.frontends.onnx.__main__ import REFUSED, contrib_markdown, imports, markdown
from fusec.frontends.onnx.other_domains import contrib_functions

DOC = Path(__file__).parents[3] / "docs" / "onnx.md"


def _counted() -> str:
    lines = ["| Family of cases | Passed | Of |", "|---|---|---|"]
    lines += [f"| {family} | {passed} | {all_} |" for family, (passed, all_) in counts(RECORD.read_text()).items()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("begin", "end", "made"),
    [
        ("<!-- begin: counts -->\n", "<!-- end: counts -->", _counted),
        ("<!-- begin: runs -->\n", "<!-- end: runs -->", lambda: table(read("onnx_suite.json")["rows"])),
        ("<!-- begin: python -m fusec.frontends.onnx -->\n", "<!-- end -->", lambda: markdown() + "\n"),
        ("<!-- begin: ops of onnxruntime -->\n", "<!-- end: ops of onnxruntime -->", lambda: contrib_markdown() + "\n"),
    ],
    ids=["counts", "runs", "ops", "contrib"],
)
def test_generated_parts_match_the_code(
    begin: str, end: str, made: Callable[[], str], request: pytest.FixtureRequest
) -> None:
    before, _, rest = DOC.read_text().partition(begin)
    listed, _, after = rest.partition(end)
    if request.config.getoption("--accept"):
        DOC.write_text(before + begin + made() + end + after)
    else:
        assert listed == made(), "run pytest --accept to write it anew"


def test_every_op_that_is_not_imported_has_a_reason() -> None:
    assert [name for name, way in imports().items() if not way] == []


def test_only_known_ops_have_limits() -> None:
    assert set(REFUSED) <= {name for _, name in contrib_functions()}

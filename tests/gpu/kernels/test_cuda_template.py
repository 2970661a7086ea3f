"""Test CUDA C in `.cuh` files: fragments with holes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusec.gpu.kernels.codegen import cuda_template
from fusec.gpu.kernels.codegen.cuda_template import NOT_HOLES, CudaTemplate, indented
from fusec.gpu.kernels.codegen.kernel import prelude
from fusec.ops.recurrent import GATES

FOLDER = Path(cuda_template.__file__).parents[1]
WHOLE = ("prelude.cuh", "narrow_types.cuh", "stage_ring.cuh")  # files that kernels take as they are
TEMPLATES = [file for file in FOLDER.rglob("*.cuh") if file.name not in WHOLE]

TEXT = """// A file's comment.

FRAGMENT(sum) {
  float sums[VECTOR];
  // A comment that stays in the file.
  for (u32 i = 0; i < COUNTu; ++i) {
    BODY
  }
  if (INFINITE > PLACE + 1) return;
}
"""


def test_a_hole_takes_a_number_an_expression_or_statements() -> None:
    template = CudaTemplate(lambda: TEXT).bind(VECTOR=4, COUNT=32)
    assert template("sum", PLACE="at * 2", BODY=["a();", "b();"]) == [
        "  float sums[4];",
        "  for (u32 i = 0; i < 32u; ++i) {",
        "    a();",
        "b();",
        "  }",
        "  if (INFINITE > at * 2 + 1) return;",
    ]
    assert len(template("sum", PLACE="0", BODY=[])) == 4, "no statements leave no line"


def test_a_hole_without_a_filling_is_an_error() -> None:
    with pytest.raises(KeyError, match="WIDTH"):
        CudaTemplate(lambda: "FRAGMENT(one) {\n  x = WIDTHu;\n}\n")("one")


def test_a_text_is_read_once_and_not_before_the_first_fragment() -> None:
    reads: list[str] = []

    def read() -> str:
        reads.append(TEXT)
        return TEXT

    template = CudaTemplate(read)
    bound = template.bind(VECTOR=4, COUNT=32, PLACE="at", BODY=[])
    assert not reads
    assert bound("sum") == bound("sum")
    assert set(template.fragments) == {"sum"}
    assert len(reads) == 1


def test_bodies_are_indented_by_their_braces() -> None:
    lines = ["if (a) {", "      b();", "} else {", "{ c(); }", "}", "d();"]
    assert indented(lines).split("\n") == ["  if (a) {", "    b();", "  } else {", "    { c(); }", "  }", "  d();"]


CELLS = frozenset(GATES)  # a recurrent cell's fragment has its name


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_a_file_is_made_of_fragments_that_its_package_uses(file: Path) -> None:
    package = ".".join(("fusec.gpu.kernels", *file.parent.relative_to(FOLDER).parts))
    template = cuda_template.cuda_template(package, file.name)
    text = file.read_text(encoding="utf-8")
    assert template.fragments and len(template.fragments) == text.count("FRAGMENT("), "one of them is not closed"
    code = "".join(module.read_text(encoding="utf-8") for module in file.parent.glob("*.py"))
    assert not [name for name in template.fragments if f'"{name}"' not in code and name not in CELLS]


def test_names_of_the_prelude_are_no_holes() -> None:
    assert all(re.search(rf"\b{name}\b", prelude()) for name in NOT_HOLES if name != "ENTRY")

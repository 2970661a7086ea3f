"""Test how executables look at a prompt and in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from cli.command import tiny
from cli.test_hostile_names import EVIL, name, save
from segments.models import non_zero
from test_runtime import executable

from fusec import driver

TAGS = {"div", "strong", "table", "tr", "th", "td", "details", "summary"}


class Cells(HTMLParser):
    """Collects the tags of a page, and the text of each cell."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


def test_a_program_tells_what_it_is() -> None:
    net = executable()
    totals = net.explain().totals
    text = repr(net)
    assert text.startswith('<fusec.Executable "net" for h200 in fp32, simulated: ')
    assert f"{totals['launches']} launches ({totals['cudnn']} cuDNN, {totals['kernels']} other)" in text
    assert "x float32[2, 3, 8, 8], k float32[1, 4, 1, 1] -> flat float32[1, 64], map float32[2, 4, 8, 8]" in text
    assert "\n" not in text


def test_a_notebook_shows_every_step() -> None:
    net = executable()
    page = Cells(net._repr_html_())
    explained = net.explain()
    assert set(page.tags) <= TAGS and page.tags.count("details") == 1
    assert explained.summary in page.cells
    for step in explained.steps:
        first = page.cells.index(str(step.index))
        assert page.cells[first + 1 : first + 3] == [step.runs_as, step.ops]


def test_a_model_with_symbolic_dims_tells_its_programs(tmp_path: Path) -> None:
    net = driver.compile_dynamic(tiny(tmp_path), target="cpu", shapes={"N": "1..4"})
    assert repr(net) == (
        f"<fusec.DynamicExecutable {tmp_path}/tiny.onnx, simulated: x float32[N, 8, 8, 8] -> y float32[N, 16, 8, 8]; "
        "0 programs compiled>"
    )
    net.at({"N": 2})
    net.at({"N": 3})
    page = Cells(net._repr_html_())
    assert {"N: 1 to 4", "2 programs compiled", "[2, 8, 8, 8]", "[3, 8, 8, 8]"} <= set(page.cells)
    assert net.shapes == [{"x": (2, 8, 8, 8)}, {"x": (3, 8, 8, 8)}]  # nothing was compiled to show it


def test_a_model_with_host_steps_tells_its_programs() -> None:
    net = driver.compile(non_zero().proto, target="cpu")
    assert repr(net) == (
        "<fusec.SegmentedExecutable <ModelProto>, cpu: x float32[4, 5] -> y float32[?], s int64[?], nz int64[?]; "
        "1 program compiled, with host steps between them>"
    )
    page = Cells(net._repr_html_())
    assert set(page.tags) <= TAGS
    assert "1 program compiled, with host steps between them" in page.cells
    assert any(cell.startswith("x float32[4, 5] -> ") and "nz" not in cell for cell in page.cells), page.cells


@pytest.mark.parametrize("dynamic", [False, True])
def test_names_of_strangers_are_escaped(tmp_path: Path, dynamic: bool) -> None:
    model = save(tmp_path)
    net = driver.compile_dynamic(model, target="cpu") if dynamic else None
    net = net or driver.compile(model, target="cpu", shapes={name("x"): (1, 3, 8, 8)})
    assert "FORGED" in repr(net) and "FORGED" in net._repr_html_()
    assert repr(net).isprintable() and net._repr_html_().isprintable()
    assert EVIL not in net._repr_html_()


def test_markup_in_names_is_text() -> None:
    text = """graph "<script>alert(1)</script>" (%"<b onload='x'>": f32[2,3]) {
      %"</td>&amp;" = exp(%"<b onload='x'>")
      return %"</td>&amp;"
    }"""
    page = Cells(executable(text)._repr_html_())
    assert set(page.tags) <= TAGS
    assert any("<script>alert(1)</script>" in cell for cell in page.cells)
    assert any("<b onload='x'> float32[2, 3]" in cell for cell in page.cells)
    assert any("</td>&amp; float32[2, 3]" in cell for cell in page.cells)

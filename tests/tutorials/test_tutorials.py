"""Run the tutorials: what a reader copies works, and the output is what the page shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from helpers import quick
from tutorials.run_page import run

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))


@pytest.mark.cudnn
@pytest.mark.parametrize(
    "page", quick(PAGES, [p for p in PAGES if p.stem not in ("first-model", "own-pass")]), ids=lambda page: page.stem
)
def test_a_tutorial_runs(page: Path, tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "own-pass" and importlib.util.find_spec("hypothesis") is None:
        pytest.skip("hypothesis is not installed")
    if page.stem == "serving":
        pytest.importorskip("aiohttp")
        pytest.importorskip("tritonclient.http")
    monkeypatch.chdir(tmp_path)
    run(page, tmp_path)


def test_a_wrong_output_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ fusec targets\nt4 ... Tesla V100\n...\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:2: fusec targets"):
        run(page, tmp_path)


def test_dots_stand_for_text_and_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ fusec targets\n...\nl4 ... 8.9 derived ...\n...\nh200 ...\n...\n```\n")
    run(page, tmp_path)
    page.write_text("```console\n$ fusec targets\n...\nh200 ...\n...\nl4 ...\n...\n```\n")
    with pytest.raises(AssertionError, match="fusec targets"):
        run(page, tmp_path)


def test_a_wrong_status_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ fusec targets\n...\n$ echo $?\n1\n```\n")
    with pytest.raises(AssertionError, match="the status is 0"):
        run(page, tmp_path)


def test_a_process_in_the_background_is_compared(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ fusec targets &\n... compute ...\n$ kill %1\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:2: fusec targets"):
        run(page, tmp_path)
    page.write_text("```console\n$ fusec explain missing.onnx &\n$ kill %1\n```\n")
    with pytest.raises(AssertionError, match="it ended with status"):
        run(page, tmp_path)

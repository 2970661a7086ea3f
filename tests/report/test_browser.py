"""Test that a real browser opens the pages: the script runs, the policy holds, and a step opens by its link."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from report import programs
from report.programs import BLOCK, program

from fusec.ir import quote_string
from fusec.report import difference, difference_page, report_page

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FOUND = next((path for path in map(shutil.which, BROWSERS) if path), "")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not FOUND, reason="no browser: apt-get install chromium-headless-shell"),
]


def opened(folder: Path, page: str, *options: str, place: str = "") -> tuple[str, str]:
    """Open a page; return the document that the browser made of it, and what the browser logged about the page."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [
            *(FOUND, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", *options),
            f"file://{file}{place}",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    log = "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    return done.stdout, log


def test_the_script_adds_a_search_and_marks_the_step(tmp_path: Path) -> None:
    document, log = opened(tmp_path, report_page("model.onnx", [program()]), place="#step-1")
    assert not log  # no error, and nothing that the policy refused
    assert 'class="find"' in document and 'role="button"' in document
    assert document.count('class="here"') == 1
    assert '<a href="#step-1" class="here">' in document


def test_a_step_opens_without_a_script(tmp_path: Path) -> None:
    page = re.sub(r"<script>.*</script>", "", report_page("model.onnx", [program()]), flags=re.DOTALL)
    pictures: list[bytes] = []
    for place in ("#step-1", "#step-1", "#step-2"):
        picture = tmp_path / "page.png"
        opened(tmp_path, page, f"--screenshot={picture}", "--window-size=1200,900", place=place)
        pictures.append(picture.read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


def test_names_of_strangers_do_not_run(tmp_path: Path) -> None:
    evil = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    programs.WEIGHTS[f"w{evil}"] = programs.WEIGHTS["w"]
    try:
        text = BLOCK.replace('"w"', quote_string(f"w{evil}")).replace('"gate0"', quote_string(f"gate0{evil}"))
        found = replace(program(text), title=evil)
    finally:
        del programs.WEIGHTS[f"w{evil}"]
    for page in (report_page(evil, [found]), difference_page(difference(found, found, (evil, "new")))):
        document, log = opened(tmp_path, page)
        assert "<title>owned" not in document and not log
        assert "<img" not in document and document.count("<script") == 1


def test_a_screenshot_shows_something(tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    opened(tmp_path, report_page("model.onnx", [program()]), f"--screenshot={picture}", "--window-size=1440,1400")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000  # an empty page of this size takes 8 kB

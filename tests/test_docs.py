"""Test that the documentation agrees with the files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fusec
import fusec.testing
from benchmarks.checks import quantized_accuracy, suite_times
from benchmarks.common.result_files import RESULTS
from benchmarks.pages import kernel_table, results_page

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def _result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def test_results_are_generated() -> None:
    assert (ROOT / "docs" / "results.md").read_text() == results_page.main()


@pytest.mark.parametrize(
    ("name", "command", "made"),
    [
        (
            "tests.md",
            "python benchmarks/checks/suite_times.py",
            lambda: suite_times.tables(_result("suite_times.json")),
        ),
        ("kernels.md", "python benchmarks/pages/kernel_table.py", kernel_table.page_part),
        (
            "quantize-a-model.md",
            "python -m benchmarks.checks.quantized_accuracy",
            lambda: quantized_accuracy.tables(_result("quantization.json")),
        ),
    ],
    ids=lambda part: part if isinstance(part, str) and part.endswith(".md") else "",
)
def test_tables_of_results_are_generated(
    name: str, command: str, made: Callable[[], str], request: pytest.FixtureRequest
) -> None:
    page, begin, end = ROOT / "docs" / name, f"<!-- begin: {command} -->\n", "<!-- end -->"
    new = made().rstrip("\n") + "\n"
    before, _, rest = page.read_text().partition(begin)
    listed, _, after = rest.partition(end)
    if request.config.getoption("--accept"):
        page.write_text(before + begin + new + end + after)
    else:
        assert listed == new, "run pytest --accept to write it anew"


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda p: p.name)
def test_a_script_writes_each_result(file: Path) -> None:
    """A result that was typed by hand has none."""
    scripts = (path for path in (ROOT / "benchmarks").rglob("*.py") if path.parent.name != "pages")
    assert any(file.name in path.read_text() for path in scripts)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link, place in re.findall(r"\]\(([^)#:]*?)(?:#([^)]*))?\)", page.read_text()):
        goal = page.parent / link if link else page
        assert goal.exists(), f"{page.name} links to {link}"
        assert not place or place in _anchors(goal), f"{page.name} links to {link}#{place}"


def _anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


SPEED = re.compile(
    r"\d ?(?:us|µs|ms|s|seconds|milliseconds|microseconds|minutes|hours)\b|times (?:as )?(?:fast|slow|quick)|TFLOP"
)
# What tells no speed: examples of output, generated tables and code.
UNTOLD = re.compile(r"```.*?```|<!-- begin:.*?<!-- end.*?-->|`[^`\n]*`", re.DOTALL)
MAY_TELL = {"fusec/passes/partition/cost_model.py"}  # constants that are such quotients


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_only_results_state_speed(page: Path) -> None:
    """A figure on another page would be typed, and grow old."""
    if page.name in ("results.md", "fuzzing-results.md"):  # generated
        return
    told = [line for line in UNTOLD.sub("", page.read_text()).splitlines() if SPEED.search(line)]
    assert not told


def test_code_does_not_state_speed() -> None:
    told: list[str] = []
    for path in sorted((ROOT / "fusec").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        words = [t.string for t in _tokens(path) if t.type in (tokenize.COMMENT, tokenize.STRING)]
        if name not in MAY_TELL:
            told += [
                f"{name}: {text}"
                for text in words
                if re.search(r"\d ?(?:us|µs|ms)\b|\d times (?:as )?(?:fast|slow)", text)
            ]
    assert not told


def _tokens(path: Path) -> list[tokenize.TokenInfo]:
    with path.open("rb") as file:
        return list(tokenize.tokenize(file.readline))


@pytest.mark.slow
@pytest.mark.cudnn
def test_the_first_program_of_the_readme_runs_on_the_model_of_the_demo(tmp_path: Path) -> None:
    """As a new user has it: the command above it, then the program, word by word."""
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"`\.venv/bin/python (examples/demo\.py --save resnet50\.onnx)`", text)
    script, *options = command.split()
    program = next(iter(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    (tmp_path / "first.py").write_text(program)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FUSEC_DEVICE": "none"}
    for args in ([str(ROOT / script), *options], ["first.py"]):
        run = subprocess.run(
            [sys.executable, *args], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
    assert "conv+bias+add+relu" in run.stdout and "h200: " in run.stdout


def test_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_the_guide_names_files_and_tests_that_exist() -> None:
    """CONTRIBUTING.md sends a newcomer to them."""
    named = re.findall(r"`((?:fusec|tests|benchmarks|docs)/[^`\s*<>]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 40
    for name in named:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert f"def {test}(" in (ROOT / path).read_text() if test else True, name


def test_every_environment_variable_is_on_its_page() -> None:
    """Also macros and codes of refusals, which look like variables but are none."""
    page = (ROOT / "docs" / "environment.md").read_text()
    named: set[str] = set()
    for path in sorted((ROOT / "fusec").rglob("*")):
        if path.suffix in (".py", ".cuh", ".cu", ".h"):
            text = path.read_text()
            named |= set(re.findall(r"\bFUSEC_[A-Z0-9_]+\b", text))
            named |= set(re.findall(r"""(?:environ(?:\.get\(|\[)|getenv\()\s*["']([A-Z][A-Z0-9_]*)""", text))
    for path in (*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "Makefile"):
        named |= set(re.findall(r"\bFUSEC_(?:REQUIRE|TEST|SUITE)[A-Z_]*\b", path.read_text()))
    assert {"FUSEC_CACHE", "NO_COLOR", "FUSEC_TEST_SEED"} <= named
    missing = {name for name in named if f"`{name}`" not in page}
    assert not missing
    gone = set(re.findall(r"`(FUSEC_[A-Z_]+)`", page)) - named
    assert not gone, "the page names what nothing reads"


def test_every_logger_is_on_its_page() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    loggers: set[str] = set()
    for path in (ROOT / "fusec").rglob("*.py"):
        text = path.read_text()
        loggers |= set(re.findall(r'getLogger\("(fusec\.[\w.]+)"\)', text))
        if "getLogger(__name__)" in text:
            loggers.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert loggers == set(re.findall(r"^\| `(fusec\.[a-z_.]+)`", page, re.MULTILINE))


def test_the_index_leads_to_every_page() -> None:
    """A newcomer starts there; make docs fails for a page that no menu has."""
    docs = ROOT / "docs"
    links = re.findall(r"\]\(([^)#:]+)", (docs / "index.md").read_text())
    missing = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {"index.md", *links}
    assert not missing


def test_the_index_names_every_example() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    missing = {path.name for path in (ROOT / "examples").glob("*.py") if f"(../examples/{path.name})" not in index}
    assert not missing


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^\.\. auto\w+:: ([\w.]+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert {*listed} >= {*fusec.__all__, *fusec.testing.__all__} - {"__version__", "PROPERTIES"}

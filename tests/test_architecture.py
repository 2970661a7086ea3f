"""Hold the package to its layout: few files in a folder, plain docstrings, a map that is true."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import architecture

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "fusec").rglob("*.py"))
FOLDERS = sorted({path.parent for path in (*SOURCES, *(ROOT / "tests").rglob("*.py"))})

AT_THE_TOP = 12
IN_A_FOLDER = 20
PARAMETERS = 6

# Questions open a riddle, where a docstring should say what the code does.
QUESTIONS = {"What", "Which", "Whether", "Where", "How", "Who", "Whose", "Why", "When"}
# Words that mean too many things, with the plain one. "behind" and "beside" said where an op is in a graph.
WORDS_OUT = {"behind": "after", "beside": "next to", "in earnest": "for certain", "foresee": "prepare"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_the_map_is_generated(request: pytest.FixtureRequest) -> None:
    for name, made in architecture.main().items():
        page = ROOT / "docs" / name
        if request.config.getoption("--accept"):
            page.write_text(made)
        assert page.read_text() == made, "run pytest --accept to write it anew"


def test_few_modules_are_at_the_top() -> None:
    assert len(list((ROOT / "fusec").glob("*.py"))) <= AT_THE_TOP


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_folder_has_few_files(folder: Path) -> None:
    files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= IN_A_FOLDER, files


def test_every_package_and_module_says_what_it_does() -> None:
    silent = [str(path.relative_to(ROOT)) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


def test_docstrings_do_not_open_with_a_question() -> None:
    told = [f"{where}: {text}" for where, text in docstrings() if text.split()[0].strip(",.:") in QUESTIONS]
    assert not told


@pytest.mark.parametrize("word", WORDS_OUT)
def test_words_that_are_out(word: str) -> None:
    """Another word says it better; see docs/glossary.md."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"\b{word}\b", line)
    ]
    assert not found, f"write {WORDS_OUT[word]!r}"


def test_classes_have_names_of_their_own() -> None:
    """Two classes of one name make a reader open two files."""
    named = Counter(
        node.name
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in named.items() if count > 1]


# Where parameters are given from outside: attributes of ONNX ops, options of commands, names in a rule's equation, a C
# library's arguments, and public functions that numpy, torch and onnxruntime users know in this form.
SIGNATURES = (
    *(
        "frontends/onnx",
        "cli",
        "passes/rules",
        "gpu/cublaslt/bindings.py",
        "builder/builder.py",
        "training/optimizers.py",
    ),
    *("driver.py", "dynamic_shapes/executable.py", "session/inference_session.py", "testing/fuzz.py"),
)


def test_functions_have_few_parameters() -> None:
    """An options object holds more. Keyword-only options do not count, because a call names them."""
    many = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {count}"
        for path in SOURCES
        if not str(path.relative_to(ROOT / "fusec")).startswith(SIGNATURES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, Function) and (count := parameters(node)) > PARAMETERS
    ]
    assert not many


def parameters(node: Function) -> int:
    """Count the parameters that a call may give by position, without `self` and `cls`."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place and text of each docstring in the package."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, *Function.__args__)) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text

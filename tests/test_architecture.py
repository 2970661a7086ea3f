"""Hold the package to its layout: few files in a folder, plain docstrings, a map that is true."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.pages import architecture

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "fusec").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FOLDERS = sorted({path.parent for path in (*SOURCES, *TESTS, *BENCHMARKS)})

AT_THE_TOP = 12
IN_A_FOLDER = 20
PARAMETERS = 6

# Questions open a riddle, where a docstring should say what the code does.
QUESTIONS = {"What", "Which", "Whether", "Where", "How", "Who", "Whose", "Why", "When"}
# Words that mean too many things, with plain ones. "behind" and "beside" said where an op is in a graph.
WORDS_OUT = {
    "behind": "after",
    "beside": "next to",
    "alike": "same, in the same way",
    "turned": "transposed",
    "kept": "stored, cached, in registers",
    "told": "the noun for what it is: summary, message, step",
    "believed": "assumed",
    "at once": "immediately, in one graph",
    "spelt": "spelled",
    "mended": "fixed",
    "met": "seen, given",
    "meets": "sees, gets",
    "in earnest": "for certain",
    "foresee": "prepare",
}
WORDS_LEFT = ROOT / "tests" / "words_left.json"  # how often each part of the project still has them
COMMON = {"kept", "told", "met", "meets", "turned"}  # tests have them in hundreds of names of variables, which may stay
PARTS = {
    "fusec": [p for p in (ROOT / "fusec").rglob("*") if p.suffix in (".py", ".cuh")],
    "tests": [p for p in (ROOT / "tests").rglob("*") if p.suffix in (".py", ".txt")],
    "benchmarks and examples": [*BENCHMARKS, *(ROOT / "examples").rglob("*.py")],
    # Pages that are made of docstrings and of names of tests repeat their words.
    "docs": [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
        *(p for p in (ROOT / "docs").rglob("*.md") if p.name not in ("files.md", "mutants.md")),
    ],
}

# A file of tests opens with what it does; "Test that ..." says what must hold.
OPENINGS = ("Ask", "Check", "Compare", "Compile", "Export", "Hold", "Import", "Load", "Read", "Run", "Search", "Test")

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


def test_every_folder_of_benchmarks_has_a_question() -> None:
    assert [path.name for path in BENCHMARKS if path.parent.name == "benchmarks"] == ["__init__.py"]


def test_every_package_and_module_says_what_it_does() -> None:
    silent = [str(path.relative_to(ROOT)) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


def test_docstrings_do_not_open_with_a_question() -> None:
    told = [f"{where}: {text}" for where, text in docstrings() if text.split()[0].strip(",.:") in QUESTIONS]
    assert not told, "\n".join(told)


def test_parameters_have_a_noun() -> None:
    """As in `rows: rows of a block`, because a reader of `rows: of a block` has to guess what it counts."""
    bare = re.compile(r"^ *\w+(, \w+)*: (of|that of|those of) ", re.MULTILINE)
    assert not [f"{where}: {found[0]}" for where, text in docstrings() for found in bare.finditer(text)]


def test_files_of_tests_open_with_a_verb() -> None:
    texts = {
        path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in TESTS if path.stem.startswith("test_")
    }
    assert not [
        f"{path.relative_to(ROOT)}: {text}" for path, text in texts.items() if text.split(" ")[0] not in OPENINGS
    ]


@pytest.mark.parametrize("part", PARTS)
def test_words_that_are_out(part: str, request: pytest.FixtureRequest) -> None:
    """Another word says it better; see docs/glossary.md. The numbers of words_left.json may only become smaller."""
    left: dict[str, dict[str, int]] = json.loads(WORDS_LEFT.read_text())
    banned = WORDS_OUT.keys() - COMMON if part == "tests" else WORDS_OUT.keys()
    words = re.compile(rf"(?<![a-z])({'|'.join(banned)})(?![a-z])", re.IGNORECASE)
    places: dict[str, list[str]] = {word: [] for word in WORDS_OUT}
    for path in sorted(PARTS[part]):
        if path != Path(__file__):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                for word in words.findall(line):
                    places[word.lower()].append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    counts = {word: len(found) for word, found in places.items() if found}
    for word, count in counts.items():
        allowed = left[part].get(word, 0)
        found = "\n".join(places[word])
        assert count <= allowed, f"{count} times {word!r} where {allowed} are left; write: {WORDS_OUT[word]}\n{found}"
    if request.config.getoption("--accept"):
        left[part] = counts
        WORDS_LEFT.write_text(json.dumps(left, indent=1) + "\n")
    assert counts == left[part], "fewer than words_left.json allows: run pytest --accept to lower the numbers"


def test_classes_have_names_of_their_own() -> None:
    """Two classes of one name make a reader open two files."""
    named = Counter(
        node.name
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in named.items() if count > 1]


STANDARD_DATACLASSES = {"system/dataclass.py", "serving/server/worker/queued_request.py"}  # the second has slots


def test_classes_compile_nothing_while_they_are_imported() -> None:
    """The standard decorator compiles up to six methods of each class; most processes never call them."""
    standard = {
        str(path.relative_to(ROOT / "fusec"))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        if any(each.name in ("dataclass", "make_dataclass") for each in node.names)
    }
    assert standard == STANDARD_DATACLASSES


# Where parameters are given from outside: attributes of ONNX ops, options of commands, names in a rule's equation, a C
# library's arguments, and public functions that numpy, torch and onnxruntime users know in this form.
SIGNATURES = (
    *(
        "frontends/onnx",
        "frontends/torch_fast_paths.py",
        "torch_backend/backward_ops.py",
        "cli",
        "passes/rules",
        "gpu/cublaslt/bindings.py",
        "builder/op_methods.py",
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
    """Yield the place and text of each docstring."""
    for path in (*SOURCES, *TESTS, *BENCHMARKS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def test_files_whose_types_are_not_checked_exist() -> None:
    """Otherwise a new file of that name would not be checked either."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert options["include"] == ["fusec", "tests"]
    named = [name for name in options["exclude"] if "*" not in name]
    assert not [name for name in named if not (ROOT / name).is_file()]

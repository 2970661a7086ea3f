"""Read and write the answers of cuDNN that tests take from a file, because most of the suite's time went into them.

A verdict is keyed by the graph, the target, the versions of the libraries and the rules of `fusec.lowering.known_bugs`.
So a changed graph, library or rule is asked about anew. The file also names the code that asks. After an edit of it
all is asked anew, and a test fails until the answers are recorded again. tests/gpu/cudnn always asks.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path

from fusec.gpu import cudnn
from fusec.gpu.cudnn.legality.verdict_keys import verdict_environment
from fusec.plans.sqlite_cache import Store
from fusec.targets.target import load, names

FOLDER = Path(cudnn.__file__).parent
ASKING = ("legality.oracle", "worker")  # the process that asks, and the process that asks cuDNN for it
FILE = Path(__file__).with_name("recorded_answers.json.gz")
NEW = "python benchmarks/checks/cudnn_answers.py records them anew"


def recorded() -> dict[str, str]:
    """Read the texts of the verdicts by their keys; there is none if other code asks today."""
    held = json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else {}
    return held["answers"] if held.get("code") == code_digest() else {}


def write(answers: Mapping[str, str], file: Path = FILE) -> None:
    """Write a file of verdicts. Equal verdicts give equal bytes."""
    text = json.dumps({"code": code_digest(), "answers": dict(sorted(answers.items()))}, indent=0)
    file.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def seed(folder: Path) -> None:
    """Put the recorded verdicts into a cache folder."""
    if texts := recorded():
        folder.mkdir(parents=True, exist_ok=True)
        Store(folder / "answers.sqlite").put(texts)


def asked(folder: Path) -> dict[str, str]:
    """Read the verdicts of cuDNN without a device from a cache folder."""
    with closing(sqlite3.connect(folder / "answers.sqlite")) as connection:
        texts = dict(connection.execute("SELECT key, text FROM answers"))
    return {key: text for key, text in texts.items() if key.partition(":")[0].removesuffix("-listed") in environments()}


@cache
def environments() -> frozenset[str]:
    """Return what keys begin with here: one digest for each target."""
    return frozenset(verdict_environment(load(name), False) for name in names())


def summary() -> str:
    """Say in a line how many answers are read from the file, and what to do where there is none."""
    count = sum(key.partition(":")[0].removesuffix("-listed") in environments() for key in recorded())
    return f"recorded answers of cuDNN: {count}" if count else f"cuDNN is asked everything: {NEW}"


@cache
def code_digest() -> str:
    """Return a digest of the code that asks cuDNN, without its comments and docstrings."""
    digest = hashlib.sha256()
    for tree in asking_modules().values():
        for node in ast.walk(tree):
            if isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ) and ast.get_docstring(node):
                node.body = node.body[1:]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


def asking_modules() -> dict[str, ast.Module]:
    """Parse the modules of `fusec.gpu.cudnn` that an answer goes through, by name: ASKING and what they import."""
    parsed: dict[str, ast.Module] = {}
    left = list(ASKING)
    while left:
        name = left.pop()
        file = FOLDER.joinpath(*name.split(".")).with_suffix(".py")
        if name in parsed or not file.exists():
            continue
        parsed[name] = ast.parse(file.read_text())
        for node in ast.walk(parsed[name]):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(cudnn.__name__):
                place = node.module.removeprefix(cudnn.__name__).strip(".")
                left += [place, *(f"{place}.{each.name}".strip(".") for each in node.names)]
    return dict(sorted(parsed.items()))

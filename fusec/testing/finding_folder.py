"""Save, load and check a finding as a folder: the graph, its inputs, its results, and a script that replays it.

A folder appears whole or not at all. Reading it needs no Hypothesis and no unpickling.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from fusec import __version__
from fusec.errors import FusecError
from fusec.ir import Graph, HostArray
from fusec.system import atomic_write
from fusec.system.dataclass import dataclass
from fusec.system.untrusted import read_json
from fusec.testing.case import Case
from fusec.testing.example_codec import load_npz, save_npz, text_of
from fusec.testing.failure import Failure, SkippedError, attempt, ops_of, signature
from fusec.testing.resolve import absolute, property_of
from fusec.text import parse

REPLAY = """from fusec.testing.findings import replay

raise SystemExit(replay(__file__))
"""
PACKAGES = ("hypothesis", "onnx", "onnxruntime", "ml_dtypes", "nvidia-cudnn-frontend", "cupy-cuda12x", "cupy-cuda13x")


@dataclass(frozen=True, eq=False)
class Finding:
    """A property that fails on a graph.

    origin: where the fuzzer found the failure: seed, chunk, hash seed, and number of nodes before reduction.
    versions: the versions of the packages that were installed then.
    """

    property: str
    graph: Graph
    case: Case
    failure: Failure
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])
    versions: Mapping[str, str] = field(default_factory=lambda: versions())

    @functools.cached_property
    def signature(self) -> str:
        """Return the signature; findings of one signature are counted as one."""
        return signature(self.property, self.failure, ops_of(self.graph))


def versions() -> dict[str, str]:
    """Return the versions that a finding may depend on.

    fusec's commit is not among them, because an installed package does not know it.
    """
    found = {"fusec": __version__, "python": platform.python_version(), "numpy": np.__version__}
    return {**found, **_packages()}


@functools.cache
def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"]).lower()
        if name.replace("_", "-") in {p.replace("_", "-") for p in PACKAGES} or name.startswith("nvidia-cudnn-cu"):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _folder_name(finding: Finding) -> str:
    """Name the folder: `finding-` or `doubt-`, the property, and a digest of the signature and the graph."""
    place, _, function = finding.property.rpartition(":")
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{Path(place).stem}-{function}" if place else function)
    text = f"{finding.signature}\n{text_of(finding.graph)[0]}"
    kind = "doubt" if finding.failure.doubt else "finding"
    return f"{kind}-{words}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def save(finding: Finding, folder: Path) -> Path:
    """Write a finding as a new folder inside `folder`, which is created if needed, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write.folder(folder) as made:
        _write(finding, made)
        return move(made, folder / _folder_name(finding))


def move(made: Path, goal: Path) -> Path:
    """Move a complete folder to `goal`, and replace a folder of that name."""
    with atomic_write.folder(goal.parent) as aside:
        while True:
            try:
                return made.replace(goal)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            with contextlib.suppress(FileNotFoundError):  # another process moved it first
                goal.replace(aside / os.urandom(8).hex())


def copy(made: Path, folder: Path) -> Path:
    """Copy a finding's folder into `folder`, and return the path of the copy."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write.folder(folder) as twin:
        shutil.copytree(made, twin, dirs_exist_ok=True)
        return move(twin, folder / made.name)


def _write(finding: Finding, folder: Path) -> None:
    """Write the files of a finding, and describe in finding.json what could not be written."""
    text, weights = text_of(finding.graph)
    (folder / "graph.txt").write_text(text + "\n", encoding="utf-8")
    failure = finding.failure
    # Inputs are saved as the property draws them, because a later version may draw other ones.
    tables = {"weights": weights, "got": failure.got, "expected": failure.want}
    problem = ""
    try:
        tables["inputs"] = finding.case.inputs(finding.graph)
    except Exception as error:  # noqa: BLE001  # a graph without valid inputs is a finding, too: the file records it
        problem = f"{type(error).__name__}: {error}"
    special = {name: save_npz(folder / f"{name}.npz", arrays) for name, arrays in tables.items() if arrays}
    missing = _write_onnx(finding.graph, folder / "graph.onnx")
    data = {
        "property": absolute(finding.property),
        "how": failure.how,
        "error": failure.error,
        "where": failure.where,
        "message": failure.message,
        "oracle": failure.oracle,
        "doubt": failure.doubt,
        "signature": finding.signature,
        "ops": dict(ops_of(finding.graph)),
        "target": finding.case.target,
        "case": finding.case.to_json(),
        "origin": dict(finding.origin),
        "versions": dict(finding.versions),
        "element_types": special,
        "no_onnx": missing,
        "no_inputs": problem,
        "traceback": failure.traceback,
    }
    (folder / "finding.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / "replay.py").write_text(REPLAY, encoding="utf-8")


def _write_onnx(graph: Graph, path: Path) -> str:
    """Write the graph as ONNX; return the reason if that failed, else an empty text."""
    try:
        from fusec.exporters.onnx import to_onnx  # imported here because importing onnx is slow

        path.write_bytes(to_onnx(graph).SerializeToString())
    except Exception as error:  # noqa: BLE001  # recorded in finding.json: an error of the exporter must not hide the finding
        return f"{type(error).__name__}: {error}"
    return ""


def summary(finding: Finding, folder: Path) -> dict[str, Any]:
    """Summarise a finding for a message: its property, failure, signature and folder."""
    return {
        "folder": str(folder),
        "property": finding.property,
        "message": finding.failure.message,
        "how": finding.failure.how,
        "kind": finding.failure.kind,
        "ops": dict(ops_of(finding.graph)),
        "signature": finding.signature,
        "doubt": finding.failure.doubt,
    }


def load(folder: Path) -> Finding:
    """Load the finding in a folder.

    Raises FusecError if the folder cannot be read; the message names the file.
    """
    try:
        data = read_json((folder / "finding.json").read_text(encoding="utf-8"))
        tables: dict[str, dict[str, HostArray]] = {
            name: load_npz(folder / f"{name}.npz", data["element_types"].get(name, {}))
            for name in ("weights", "inputs", "got", "expected")
            if (folder / f"{name}.npz").exists()
        }
        graph = parse((folder / "graph.txt").read_text(encoding="utf-8"), tables.get("weights"))
        feeds = None if data["no_inputs"] else tables.get("inputs", {})
        case = Case.from_json(data["case"], feeds)
        words = {name: data[name] for name in ("how", "error", "message", "where", "traceback", "oracle")}
    except FusecError as error:
        raise FusecError(f"{folder}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FusecError(f"{folder}: no finding that can be read ({type(error).__name__}: {error})") from error
    failure = Failure(**words, got=tables.get("got", {}), want=tables.get("expected", {}))
    return Finding(data["property"], graph, case, failure, data["origin"], data["versions"])


def folders(place: Path) -> list[Path]:
    """Return the folder itself if it is a finding, else the findings inside it."""
    if (place / "finding.json").exists():
        return [place]
    if not place.is_dir():
        raise FusecError(f"{place}: no such folder")
    found = sorted(path.parent for path in place.glob("*/finding.json") if not path.parent.name.startswith("."))
    if not found:
        raise FusecError(f"{place}: holds no finding (a folder with finding.json)")
    return found


def check(finding: Finding) -> Failure | None:
    """Run the property once more, in this process, on the saved graph and inputs.

    Returns None if the property holds now.
    """
    try:
        return attempt(property_of(finding.property), finding.graph, finding.case)
    except SkippedError as error:
        return Failure("error", "SkippedError", f"the property no longer applies: {error}")

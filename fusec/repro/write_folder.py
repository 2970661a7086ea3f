"""Write one step of a compiled model as a folder for a bug report: a script for cudnn and cupy, data, and versions.

Nothing in the folder needs fusec. `write` takes a step of a compilation, `write_body` any body with its lowered graph.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fusec import __version__
from fusec.errors import FusecError, writing
from fusec.execution.compilation import Compiled
from fusec.gpu.cudnn.without_driver import deviceless
from fusec.gpu.device import device_name
from fusec.ir import Graph
from fusec.lower_cudnn import Lowered
from fusec.repro import data, texts
from fusec.repro.source import script
from fusec.schedule.program import Kind, Program
from fusec.system import atomic_write
from fusec.system.installed import installed_version
from fusec.system.printable import printable
from fusec.targets.target import Target


def write(compiled: Compiled, index: int, folder: Path, seed: int = 0) -> Path:
    """Write the folder of a step with random inputs, and return its path. Readers never see half of the folder.

    index: number of the step in `fusec explain`.

    Raises FusecError if the step is not a cuDNN graph, or the folder is not empty.
    """
    check_folder(folder)
    check_step(compiled.program, index)
    compiled.require_answers(f"step {index}: a report about it")
    step, lowered = compiled.program.steps[index], compiled.lowered[index]
    assert lowered is not None  # a cuDNN step
    what = f"step {index} of {compiled.source.name}: {step.signature}"
    spelled = f", spelled {', '.join(step.spelling)}" if step.spelling else ""
    title = f"{what}{spelled}, for {compiled.target.device_name} in {compiled.options.precision}"
    return write_body(step.body, lowered, folder, compiled.target, title, seed=seed)


def write_body(
    body: Graph,
    lowered: Lowered,
    folder: Path,
    target: Target,
    title: str,
    *,
    seed: int = 0,
    feeds: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write the folder of a body and its lowered graph. `feeds`: inputs by name; None for random inputs."""
    goal = check_folder(folder)
    contents = data.make(body, lowered, seed, feeds)
    files = {
        "repro.py": script(lowered, contents.allowed, title),
        "test_repro.py": texts.TEST,
        "graph.txt": f"{body}\n",
        "graph.json": json.dumps(lowered.graph.to_json(), indent=1) + "\n",
        "versions.json": json.dumps(versions(target), indent=1) + "\n",
    }
    model, missing = _onnx(body)
    files["README.txt"] = texts.readme(title, target, seed if feeds is None else None, missing)
    with writing(printable(str(folder))), atomic_write.folder(goal.parent) as made:
        for name, text in files.items():
            (made / name).write_text(text, encoding="utf-8")
        if model is not None:
            (made / "partition.onnx").write_bytes(model)
        data.save(made / "inputs.npz", contents.before)
        data.save(made / "expected.npz", contents.expected)
        made.rename(goal)
    return folder


def check_folder(folder: Path) -> Path:
    """Return the resolved path of the folder. Raises FusecError unless it is new or empty, and can be made."""
    named = printable(str(folder))
    try:
        goal = folder.resolve()
        if goal.exists() and not goal.is_dir():
            raise FusecError(f"{named}: exists and is not a folder; name another one")
        if goal.is_dir() and any(goal.iterdir()):
            raise FusecError(f"{named}: exists and is not empty; name another folder, or remove it")
        if not goal.parent.is_dir():
            raise FusecError(f"{named}: there is no folder {printable(str(goal.parent))}")
        if not os.access(goal.parent, os.W_OK):
            raise FusecError(f"{named}: the folder {printable(str(goal.parent))} cannot be written")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise FusecError(f"{named}: {error}") from error
    return goal


def check_step(program: Program, index: int) -> None:
    """Check that a step is a cuDNN graph. Raises FusecError if it is not."""
    cudnn = [str(i) for i, step in enumerate(program.steps) if step.kind is Kind.CUDNN]
    remedy = f"cuDNN steps are {', '.join(cudnn)}" if cudnn else "this program has no cuDNN step"
    if not 0 <= index < len(program.steps):
        raise FusecError(f"there is no step {index}: steps are 0 to {len(program.steps) - 1}; {remedy}")
    step = program.steps[index]
    if step.kind is not Kind.CUDNN:
        raise FusecError(f"step {index} ({step.signature}) runs as a {step.kind.value}, not by cuDNN; {remedy}")


def versions(target: Target) -> dict[str, str | None]:
    """Return the versions of everything that made the folder. None: not installed, or no GPU."""
    return {
        "fusec": __version__,
        "cudnn": deviceless.cudnn_version() or None,
        "cudnn_frontend": _installed("nvidia-cudnn-frontend"),
        "cupy": _installed("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "target": target.name,
        "gpu": device_name(),
    }


def _installed(*packages: str) -> str | None:
    return next((version for package in packages if (version := installed_version(package)) is not None), None)


def _onnx(body: Graph) -> tuple[bytes | None, str]:
    """Return the body as an ONNX model, or the reason why there is none."""
    from fusec.exporters.onnx import to_onnx  # here, because onnx takes long to import

    try:
        return to_onnx(body).SerializeToString(), ""
    except FusecError as error:
        return None, str(error)

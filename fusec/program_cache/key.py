"""Compute what a cached program depends on, for its key."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import fusec
from fusec.execution.compile_options import CompileOptions
from fusec.gpu import device
from fusec.gpu.cudnn.legality.verdict_keys import verdict_environment
from fusec.plans.plan_filter import PlanFilter
from fusec.system.installed import installed_version
from fusec.targets.target import Target

LOADED_NS = time.time_ns()  # when this process loaded the code
FORMAT = 1  # of an entry: raise it when the meaning of its data changes
_LIBRARIES = ("numpy", "ml-dtypes", "onnx")  # which read the model and compute its constants
# Options that change neither the graph nor its steps; the target is in the key with all its figures.
_APART = ("budget_s", "lock", "progress", "simulate", "target")


def program_key(content: str, options: CompileOptions, shapes: Mapping[str, Sequence[int]] | None) -> str:
    """Return a digest of what a program depends on, apart from its environment. No GPU is asked for it.

    content: digest of the model (`ModelFiles`).
    shapes: shapes by name of an input.
    """
    given = {each.name: _plain(getattr(options, each.name)) for each in fields(options) if each.name not in _APART}
    sizes = {name: list(map(operator.index, shape)) for name, shape in (shapes or {}).items()}
    versions = [sys.version, *map(installed_version, _LIBRARIES), _code()[1]]
    return _digest([FORMAT, content, given, sizes, versions])


def program_environment(target: Target, plan_filter: PlanFilter) -> str:
    """Return a digest of the GPU of this machine, and of the libraries that say what fuses on it."""
    return _digest([target.figures_digest, device.device_name(), verdict_environment(target, True, plan_filter)])


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return the value of an option as plain data. Sets are sorted; mappings keep their order, which may matter."""
    match value:
        case Mapping():
            return [[name, _plain(each)] for name, each in value.items()]
        case frozenset() | set():
            return sorted(value)
        case tuple() | list():
            return list(map(_plain, value))
        case _:
            return value


def is_code_as_loaded() -> bool:
    """Tell if no file of fusec is newer than the code that this process runs."""
    return _code()[0] <= LOADED_NS


@cache
def _code() -> tuple[int, str]:
    """Return when a file of fusec changed last, and a digest of its version and of name, size and time of each file.

    Python itself decides by size and time if compiled code is of a source. Reading all files would take longer.
    """
    try:
        files = sorted(_files(str(Path(fusec.__file__).parent)))
    except OSError:  # such as of a package in a zip file
        return 1 << 64, ""  # later than any file
    return max(changed for _, _, changed in files), _digest([fusec.__version__, files])


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _files(entry.path)
            else:
                state = entry.stat()
                yield entry.path, state.st_size, state.st_mtime_ns

"""Arrays in and out of `fusec run`: .npy files, random inputs, output files, a comparison with onnxruntime."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fusec.cli.output import check_writable, note
from fusec.errors import ExecutionError, FusecError
from fusec.explain.table import table
from fusec.ir import DType, TensorType, quote
from fusec.runtime import Executable
from fusec.verify import random_array, relative_l2

Array = np.ndarray[Any, Any]

# Whole networks: what rounding of every stored tensor amounts to after some tens of layers.
ALLOWED = {"fp32": 1e-4, "tf32": 5e-3, "fp16": 1e-2, "bf16": 5e-2}


def read(path: Path) -> Array:
    """The array of an .npy file. It is mapped, so a header that lies about its size costs no memory."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ExecutionError(f"{path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise ExecutionError(f"{path}: is no .npy file ({error})") from error
    if not isinstance(array, np.ndarray):
        raise ExecutionError(f"{path}: holds several arrays; --input takes an .npy file of one")
    return array


def feeds(executable: Executable, given: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """The given arrays, and random numbers for the other inputs, of which a note tells."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = dict(given)
    for spec in executable.inputs:
        if spec.name not in given:
            feeds[spec.name] = random_array(rng, TensorType(spec.shape, DType.of(spec.dtype)))
            note(f"input {quote(spec.name)} is random numbers (seed {seed})")
    return feeds


class Places:
    """Where outputs are written: an .npz file, or one .npy file each in a folder."""

    def __init__(self, path: Path):
        self.path = path
        self.single = path.suffix == ".npz"
        if self.single:
            check_writable(path)
        elif path.exists() and not path.is_dir():
            raise FusecError(f"{path}: is neither a folder nor an .npz file")
        elif not path.exists():
            check_writable(path)

    def of(self, names: Sequence[str]) -> list[Path]:
        """The files, in the order of the names; the folder is made if need be."""
        if self.single:
            return [self.path]
        self.path.mkdir(exist_ok=True)
        files = [re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "_" for name in names]
        unique = [f"{file}.{i}" if file in files[:i] else file for i, file in enumerate(files)]
        return [self.path / f"{file}.npy" for file in unique]

    def write(self, files: Sequence[IO[bytes]], arrays: Mapping[str, Array]) -> None:
        if self.single:
            np.savez(files[0], **dict(arrays))  # pyright: ignore[reportArgumentType]  # its one keyword is not an array
            return
        for file, array in zip(files, arrays.values(), strict=True):
            np.save(file, array)


def describe(name: str, array: Array) -> dict[str, Any]:
    """Facts by which one output can be told from another."""
    wide = array.astype(np.float64)
    return {
        "name": name,
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "min": float(wide.min()) if wide.size else None,
        "max": float(wide.max()) if wide.size else None,
        "mean": float(wide.mean()) if wide.size else None,
        "finite": bool(np.isfinite(wide).all()),
    }


def described(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same as a table."""

    def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
        numbers = tuple("" if row[k] is None else f"{row[k]:.6g}" for k in ("min", "mean", "max"))
        return (row["name"], f"{row['dtype']}{row['shape']}", *numbers, "" if row["finite"] else "NOT FINITE")

    return "\n".join(table(("output", "type", "min", "mean", "max", ""), [cells(r) for r in rows], right=(2, 3, 4)))


class Onnxruntime:
    """The model in onnxruntime on the CPU, which has no part in fusec: a judge from outside."""

    def __init__(self, model: Path):
        try:
            # by name: an optional package, and none that fusec builds on
            runtime = importlib.import_module("onnxruntime")
            state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
        except ImportError as error:
            raise FusecError("--compare onnxruntime: not installed; pip install 'fusec[demo]'") from error
        self._errors = tuple(e for e in vars(state).values() if isinstance(e, type) and issubclass(e, Exception))
        try:
            self._session = runtime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        except self._errors as error:
            raise FusecError(f"{model}: onnxruntime does not take it: {error}") from error

    def distances(self, feeds: Mapping[str, Array], got: Mapping[str, Array]) -> dict[str, float]:
        """Relative L2 distance of each output."""
        names = list(got)
        try:
            want = self._session.run(names, {name: np.asarray(array) for name, array in feeds.items()})
        except (*self._errors, ValueError) as error:
            raise FusecError(f"onnxruntime cannot run the model: {error}") from error
        return {name: relative_l2(got[name], array) for name, array in zip(names, want, strict=True)}

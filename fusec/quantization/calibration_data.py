"""Read calibration data as batches that fit the model's inputs: from .npz and .npy files, or Python objects."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fusec.errors import FusecError
from fusec.frontends import Declaration
from fusec.ir import HostArray

Batch = Mapping[str, HostArray]
Item: TypeAlias = HostArray | Mapping[str, Any] | Sequence[Any]
CalibrationData: TypeAlias = "str | os.PathLike[str] | Item | Iterable[Item] | Callable[[], Iterable[Item]]"

ROWS = 8  # samples of a batch where the model leaves the batch size open


def batches(data: CalibrationData, inputs: Sequence[Declaration]) -> Iterator[Batch]:
    """Iterate over batches, arrays by input name.

    data: a folder or file of `.npz` (arrays by input name) or `.npy` (a model with one input); such arrays in memory;
        an iterable of batches, each an array, arrays by name, or arrays in the order of the inputs; or a function
        that returns such an iterable.

    Arrays of files, and arrays given by themselves, may hold many samples along the first dim. They are split into
    batches of the model's size; samples that do not fill the last one are left out.

    Raises FusecError if a file cannot be read, or an array does not fit its input.
    """
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        for file in _files(path):
            yield from _split(_named(_read(file), inputs, str(file)), inputs, str(file))
        return
    if isinstance(data, np.ndarray | Mapping):
        yield from _split(_named(data, inputs, "calibration data"), inputs, "calibration data")
        return
    for index, item in enumerate(data() if callable(data) else data):
        where = f"calibration batch {index}"
        batch = _named(item, inputs, where)
        for declared in inputs:
            _require_fit(batch[declared.name], declared, where)
        yield batch


def _files(path: Path) -> list[Path]:
    """List the data files at a path. Raises FusecError if there is none."""
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in (".npz", ".npy"))
        if not found:
            raise FusecError(f"{path}: holds no .npz or .npy files")
        return found
    if path.suffix not in (".npz", ".npy"):
        raise FusecError(f"{path}: calibration data is a folder, an .npz file or an .npy file")
    return [path]


def _read(file: Path) -> Item:
    """Read a file without unpickling anything. Raises FusecError if it is not what its name says."""
    try:
        with file.open("rb") as opened:  # numpy leaves a file open if it cannot read it
            loaded = np.load(opened, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except OSError as error:
        raise FusecError(f"{file}: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = "holds Python objects, which are never read" if "pickle" in str(error) else str(error)
        raise FusecError(f"{file}: not a readable {file.suffix} file: {reason}") from error


def _named(item: Any, inputs: Sequence[Declaration], where: str) -> dict[str, HostArray]:
    """Return arrays by input name, in the inputs' dtypes. Raises FusecError if one is missing or of another kind."""
    names = [declared.name for declared in inputs]
    if isinstance(item, Mapping):
        given = dict(item)
    else:
        arrays = [item] if isinstance(item, np.ndarray) or (len(names) == 1 and len(item) != 1) else list(item)
        if len(arrays) != len(names):
            raise FusecError(f"{where}: holds {len(arrays)} arrays, the model has {len(names)} inputs")
        given = dict(zip(names, arrays, strict=True))
    for name in given:
        if name not in names:
            raise FusecError(f"{where}: the model has no input {name!r}; inputs: {', '.join(names)}")
    found: dict[str, HostArray] = {}
    for declared in inputs:
        if declared.name not in given:
            raise FusecError(f"{where}: has no array for input {declared.name!r}")
        array = np.asarray(given[declared.name])
        if declared.dtype is not None and array.dtype != declared.dtype.numpy:
            if not (array.dtype.kind == "f" and declared.dtype.is_float):
                want = declared.dtype.numpy
                raise FusecError(f"{where}: input {declared.name!r} takes {want}, not {array.dtype}")
            array = array.astype(declared.dtype.numpy)
        found[declared.name] = array
    return found


def _require_fit(array: HostArray, declared: Declaration, where: str, rows: bool = True) -> None:
    """Check the shape of an array. `rows`: also its first dim."""
    dims = declared.dims
    if dims is None:
        return
    first = 0 if rows else 1
    fits = array.ndim == len(dims) and all(
        not isinstance(want, int) or want == size for want, size in zip(dims[first:], array.shape[first:], strict=True)
    )
    if not fits:
        want = ", ".join(str(d) if d != "" else "?" for d in dims)
        raise FusecError(f"{where}: input {declared.name!r} has shape [{want}], the array {list(array.shape)}")


def _split(arrays: Mapping[str, HostArray], inputs: Sequence[Declaration], where: str) -> Iterator[Batch]:
    """Split arrays along their first dim into batches of the model's size."""
    for declared in inputs:
        _require_fit(arrays[declared.name], declared, where, rows=False)
    sizes = {declared.dims[0] for declared in inputs if declared.dims}
    given = {array.shape[0] for array in arrays.values() if array.ndim}
    fixed = {size for size in sizes if isinstance(size, int)}
    if len(given) != 1 or len(fixed) > 1 or any(not array.ndim for array in arrays.values()):
        for declared in inputs:  # inputs without a common first dim are one batch
            _require_fit(arrays[declared.name], declared, where)
        yield arrays
        return
    (samples,) = given
    rows = next(iter(fixed)) if fixed else min(ROWS, samples)
    if samples < max(rows, 1):
        raise FusecError(f"{where}: holds {samples} samples, and a batch of the model takes {rows}")
    for start in range(0, samples - rows + 1, max(rows, 1)):
        yield {name: array[start : start + rows] for name, array in arrays.items()}

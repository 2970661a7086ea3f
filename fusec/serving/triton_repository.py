"""Write a `.fusec` file as a model repository for the Python backend of NVIDIA Triton."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusec.errors import FusecError
from fusec.serving.choose_device import SIMULATED
from fusec.serving.predictor import Predictor
from fusec.serving.served_model import ANY, ServedModel, ServedTensor, describe, triton_type
from fusec.serving.server.server_options import models_of
from fusec.serving.triton_model import MODEL_FILE
from fusec.system import atomic_write
from fusec.system.dataclass import dataclass

_MODEL_PY = '''"""Written by fusec export-triton. The Python environment of Triton needs fusec."""

from fusec.serving.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class TritonRepository:
    """A model that was written: its name, and the files."""

    name: str
    files: tuple[Path, ...]


def export(
    model: str | os.PathLike[str], repository: str | os.PathLike[str], name: str = "", delay_s: float = 0.002
) -> TritonRepository:
    """Write `REPOSITORY/NAME/config.pbtxt`, `1/model.py` and a copy of the file. Existing files are replaced.

    name: default: that of the file.
    delay_s: seconds for which Triton holds a request to fill a batch.
    Raises FusecError if the file cannot be served by Triton, or cannot be written.
    """
    given = os.fspath(model)
    ((name, path),) = models_of([f"{name}={given}" if name else given]).items()
    predictor = Predictor(path, device=SIMULATED, warm_up=False)
    found = predictor.sizes.by_rest.values() if predictor.sizes.largest else ()
    served = describe(name, predictor, sorted({size for sizes in found for size in sizes}))
    for tensor in (*served.inputs, *served.outputs):
        if tensor.datatype == "BF16":
            raise FusecError(f"{given}: {tensor.name!r} is BF16, which Triton's Python backend gives no array of")
    folder = Path(repository) / name
    files = (folder / "config.pbtxt", folder / "1" / "model.py", folder / "1" / MODEL_FILE)
    try:
        files[1].parent.mkdir(parents=True, exist_ok=True)
        for file, text in zip(files, (config_text(served, delay_s), _MODEL_PY), strict=False):
            with atomic_write.written(file, durable=True) as opened:
                opened.write(text.encode())
        with atomic_write.written(files[2], durable=True) as opened, Path(path).open("rb") as source:
            shutil.copyfileobj(source, opened, 1 << 20)
    except OSError as error:
        raise FusecError(f"{error.filename or folder}: cannot write: {error.strerror or error}") from error
    return TritonRepository(name, files)


def config_text(model: ServedModel, delay_s: float) -> str:
    """Return `config.pbtxt`: protobuf's text form of Triton's model configuration."""
    lines = [f"name: {_quoted(model.name)}", 'backend: "python"', f"max_batch_size: {model.max_batch}"]
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        lines += [line for tensor in tensors for line in _tensor(kind, tensor, 1 if model.max_batch else 0)]
    if model.max_batch:
        sizes = ", ".join(map(str, model.sizes))
        delay_us = round(delay_s * 1e6)
        lines += ["dynamic_batching {", f"  preferred_batch_size: [ {sizes} ]"]
        lines += [f"  max_queue_delay_microseconds: {delay_us}", "}"]
    lines += ["instance_group [ { kind: KIND_AUTO } ]"]
    return "\n".join(lines) + "\n"


def _tensor(kind: str, tensor: ServedTensor, start: int) -> Sequence[str]:
    dims: Any = (tensor.shape or (ANY,))[start:]
    lines = [f"{kind} [ {{", f"  name: {_quoted(tensor.name)}", f"  data_type: {triton_type(tensor.datatype)}"]
    if dims:
        lines.append(f"  dims: [ {', '.join(map(str, dims))} ]")
    else:  # Triton takes no empty list of dims
        lines += ["  dims: [ 1 ]", "  reshape { shape: [ ] }"]
    return [*lines, "} ]"]


def _quoted(text: str) -> str:
    """Quote a name as a string of protobuf's text form; bytes outside ASCII and control characters as octal."""
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03o}" for byte in text.encode()
    )
    return f'"{escaped}"'

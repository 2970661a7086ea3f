"""Models into graphs: `load` takes a path, bytes, an ONNX ModelProto, fusec's text form, or a Graph."""

from __future__ import annotations

import operator
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusec.errors import ModelError, VerifyError
from fusec.ir import Graph
from fusec.text import parse

if TYPE_CHECKING:
    from onnx import ModelProto

_TEXT_SUFFIXES = frozenset({".txt", ".fusec-ir"})
_TEXT_START = b'graph "'  # no protobuf message starts so
_PROTOBUF_LIMIT = 1 << 31


def load(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph, shapes: Mapping[str, Sequence[int]] | None = None
) -> Graph:
    """The graph of a model; every shape in it is concrete.

    `shapes` maps input names to shapes and is needed for inputs with symbolic dims; a dim bound for one
    input is bound wherever its name occurs. Raises ModelError, whatever is wrong with the model.
    """
    shapes = _sizes(shapes or {})
    if isinstance(model, Graph):
        return _checked(model, shapes, f"graph {model.name!r}")
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        source = _decoded(_bytes(path), str(path), text=path.suffix in _TEXT_SUFFIXES)
        return _imported(source, shapes, str(path), path.parent)
    if isinstance(model, bytes):
        return _imported(_decoded(model, "<bytes>"), shapes, "<bytes>", None)
    return _imported(model, shapes, "<ModelProto>", None)


def _sizes(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The shapes as tuples of Python integers; ModelError for anything that is no size."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        try:
            sizes[name] = tuple(operator.index(d) for d in shape)
        except TypeError as error:
            raise ModelError(f"the shape given for input {name!r} is {shape!r}, not a sequence of sizes") from error
        if any(d < 0 for d in sizes[name]):
            raise ModelError(f"the shape given for input {name!r} has a negative dimension: {list(sizes[name])}")
    return sizes


def _imported(model: ModelProto | Graph, shapes: Mapping[str, Sequence[int]], file: str, folder: Path | None) -> Graph:
    if isinstance(model, Graph):
        return _checked(model, shapes, file)
    # lazily: onnx takes longer to import than all of fusec
    from fusec.frontends.onnx.load import load_onnx

    return load_onnx(model, shapes, file, folder)


def _decoded(data: bytes, file: str, text: bool = False) -> ModelProto | Graph:
    """What the bytes hold. The caller lets go of them before the weights are copied out of the message."""
    if text or data.startswith(_TEXT_START):
        return _text(data, file)
    from fusec.frontends.onnx.load import decoded  # lazily, as above

    return decoded(data, file)


def _bytes(path: Path) -> bytes:
    """The bytes of a regular file of a size protobuf can take; ModelError otherwise."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(f"{path}: is a directory, not a model")
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path}: is not a regular file")
        if status.st_size >= _PROTOBUF_LIMIT:
            raise ModelError(
                f"{path}: {status.st_size} bytes, and protobuf reads less than 2 GiB: "
                "save the weights as external data (onnx.save_model(..., save_as_external_data=True))"
            )
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(f"{path}: {reason}") from error
    if not data:
        raise ModelError(f"{path}: is empty")
    return data


def _text(data: bytes, file: str) -> Graph:
    try:
        return parse(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: is not UTF-8 text ({error})") from error
    except (ModelError, VerifyError) as error:
        raise ModelError(f"{file}: {error}") from error


def _checked(graph: Graph, shapes: Mapping[str, Sequence[int]], file: str) -> Graph:
    """The graph itself, if it is sound and `shapes` says nothing else than it does."""
    known = {v.name: v.type.shape for v in graph.inputs}
    for name, shape in shapes.items():
        if name not in known:
            raise ModelError(f"{file}: there is no input {name!r}; inputs: {', '.join(known) or 'none'}")
        if tuple(shape) != known[name]:
            raise ModelError(f"{file}: input {name!r} has shape {list(known[name])}, not {list(shape)}")
    try:
        graph.verify()
    except VerifyError as error:
        raise ModelError(f"{file}: {error}") from error
    return graph

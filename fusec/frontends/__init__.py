"""Models into graphs: `load` takes a path, bytes, an ONNX ModelProto, fusec's text form, or a Graph."""

from __future__ import annotations

import operator
import os
import stat
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusec.errors import ModelError, VerifyError
from fusec.ir import DType, Graph, Literal
from fusec.system.printable import printable
from fusec.text import parse

if TYPE_CHECKING:
    from onnx import ModelProto

    from fusec.frontends.onnx.load import Sound

_TEXT_SUFFIXES = frozenset({".txt", ".fusec-ir"})
_TEXT_START = b'graph "'  # no protobuf message starts so
_PROTOBUF_LIMIT = 1 << 31


@dataclass(frozen=True)
class Declared:
    """An input or output as the model declares it; `dims` are sizes or names of symbolic dims ("" for one without a
    name), None where it declares none."""

    name: str
    dtype: DType | None
    dims: tuple[int | str, ...] | None


class Source:
    """A model, read once; `load` gives its graph for the shapes it is told, as often as is asked.

    constants: values of some inputs of an ONNX model, by name; they are then no inputs any more. file: its name in
    messages.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | ModelProto | Graph,
        constants: Mapping[str, Literal] | None = None,
        file: str = "",
    ):
        self._folder: Path | None = None
        self._constants = dict(constants or {})
        if isinstance(model, str | os.PathLike):
            path = Path(model)
            self.file, self._folder = printable(str(path)), path.parent
            self._model = _decoded(_bytes(path), self.file, text=path.suffix in _TEXT_SUFFIXES)
        elif isinstance(model, bytes):
            self.file = "<bytes>"
            self._model = _decoded(model, self.file)
        else:
            self.file = f"graph {model.name!r}" if isinstance(model, Graph) else "<ModelProto>"
            self._model = model
        self.file = file or self.file
        self._sound: Sound | None = None
        self._weights: weakref.WeakValueDictionary[str, Literal] = weakref.WeakValueDictionary()  # read, and in use

    def load(self, shapes: Mapping[str, Sequence[int]] | None = None) -> Graph:
        """As `frontends.load`."""
        sizes = _sizes(shapes or {})
        if isinstance(self._model, Graph):
            return _checked(self._model, sizes, self.file)
        # lazily: onnx takes longer to import than all of fusec
        from fusec.frontends.onnx.load import checked, load_onnx

        self._sound = self._sound or checked(self._model, self.file)
        return load_onnx(self._sound, sizes, self.file, self._folder, self._constants, self._weights)

    @cached_property
    def interface(self) -> tuple[tuple[Declared, ...], tuple[Declared, ...]]:
        """Inputs and outputs as declared. Raises ModelError for what is no tensor."""
        if isinstance(self._model, Graph):
            graph = self._model
            outputs = zip(graph.output_names, graph.outputs, strict=True)
            return (
                tuple(Declared(v.name, v.type.dtype, v.type.shape) for v in graph.inputs),
                tuple(Declared(name, v.type.dtype, v.type.shape) for name, v in outputs),
            )
        from fusec.frontends.onnx.load import declared  # lazily, as in `load`

        inputs, outputs = declared(self._model, self.file)
        given = [each for each in inputs if each[0] not in self._constants]
        return tuple(Declared(*each) for each in given), tuple(Declared(*each) for each in outputs)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the model says of itself, as `fusec.session.ModelMeta` has it."""
        model = self._model
        if isinstance(model, Graph):
            return _metadata("fusec", model.name)
        properties = {entry.key: entry.value for entry in model.metadata_props}
        graph = model.graph
        return _metadata(
            model.producer_name,
            graph.name,
            model.domain,
            model.doc_string,
            graph.doc_string,
            model.model_version,
            properties,
        )


def _metadata(
    producer: str,
    graph: str,
    domain: str = "",
    description: str = "",
    graph_description: str = "",
    version: int = 0,
    properties: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "producer_name": producer,
        "graph_name": graph,
        "domain": domain,
        "description": description,
        "graph_description": graph_description,
        "version": version,
        "custom_metadata_map": dict(properties or {}),
    }


def load(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | Source,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Graph:
    """The graph of a model; every shape in it is concrete.

    `shapes` maps input names to shapes and is needed for inputs with symbolic dims; a dim bound for one
    input is bound wherever its name occurs. Raises ModelError, whatever is wrong with the model.
    """
    return (model if isinstance(model, Source) else Source(model)).load(shapes)


def _sizes(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The shapes as tuples of Python integers; ModelError for anything that is no size."""
    sizes: dict[str, tuple[int, ...]] = {}
    if not isinstance(shapes, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise ModelError(f"shapes are a dict of shapes by input name, such as {{'x': (1, 3)}}, not {shapes!r}")
    for name, shape in shapes.items():
        try:
            sizes[name] = tuple(operator.index(d) for d in shape)
        except TypeError as error:
            raise ModelError(f"the shape given for input {name!r} is {shape!r}, not a sequence of sizes") from error
        if any(d < 0 for d in sizes[name]):
            raise ModelError(f"the shape given for input {name!r} has a negative dimension: {list(sizes[name])}")
    return sizes


def _decoded(data: bytes, file: str, text: bool = False) -> ModelProto | Graph:
    """What the bytes hold. The caller lets go of them before the weights are copied out of the message."""
    if text or data.startswith(_TEXT_START):
        return _text(data, file)
    from fusec.frontends.onnx.load import decoded  # lazily, as in `Source.load`

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
            raise ModelError(f"{file}: there is no input {name!r}; inputs: {printable(', '.join(known)) or 'none'}")
        if tuple(shape) != known[name]:
            raise ModelError(f"{file}: input {name!r} has shape {list(known[name])}, not {list(shape)}")
    try:
        graph.verify()
    except VerifyError as error:
        raise ModelError(f"{file}: {error}") from error
    return graph

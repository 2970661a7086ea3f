"""Read models into graphs: from a path, bytes, an ONNX ModelProto, fusec's text form, or a Graph."""

from __future__ import annotations

import operator
import os
import stat
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusec.errors import ModelError, VerifyError
from fusec.frontends.bound_inputs import bound_literal, with_constants
from fusec.frontends.custom_ops import CustomOp, CustomOps, custom_ops_of
from fusec.ir import DType, Graph, Literal
from fusec.system.byte_ranges import ByteRanges, FileRanges, MemoryRanges, Place
from fusec.system.dataclass import dataclass
from fusec.system.printable import printable
from fusec.text import parse

if TYPE_CHECKING:
    from onnx import ModelProto

    from fusec.frontends.onnx.load import CheckedModel
    from fusec.frontends.onnx.model_file.split_model import TensorFiles
    from fusec.frontends.onnx.segmented.segments import Segment

_TEXT_SUFFIXES = frozenset({".txt", ".fusec-ir"})
_TEXT_START = b'graph "'  # no protobuf message starts with these bytes
PROTOBUF_LIMIT = 1 << 31


@dataclass(frozen=True)
class Declaration:
    """An input or output as the model declares it.

    dtype: None if the model declares no element type.
    dims: a size, or the name of a symbolic dim ("" if it has no name), for each dim. None if the model declares none.
    """

    name: str
    dtype: DType | None
    dims: tuple[int | str, ...] | None


class Source:
    """A model that is read once and gives its graph for any input shapes.

    constants: values of some inputs of an ONNX model, by name. These inputs become constants of the graph.
    file: name of the model in messages; by default its path.
    files: where the data is that the tensors of a ModelProto lack.
    custom_ops: Python functions for ops of an ONNX model; see `fusec.compile`.
    data: the bytes of the model's file; None if constants or functions were given with it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | ModelProto | Graph,
        constants: Mapping[str, Literal] | None = None,
        file: str = "",
        files: TensorFiles | None = None,
        custom_ops: Mapping[str, Callable[..., Any] | CustomOp] | CustomOps | None = None,
    ):
        self._files = files
        self.data: FileRanges | None = None
        self.constants = dict(constants or {})
        if isinstance(model, str | os.PathLike):
            path = Path(model)
            self.file = printable(str(path))
            self._model, self._files, data = _read(path, self.file)
            self.data = None if constants or custom_ops else data
        elif isinstance(model, bytes):
            self.file = "<bytes>"
            self._model, self._files = _decoded(MemoryRanges(model), self.file)
        else:
            self.file = f"graph {model.name!r}" if isinstance(model, Graph) else "<ModelProto>"
            self._model = model
        self.file = file or self.file
        self._custom_ops = custom_ops_of(custom_ops)
        if self._custom_ops and isinstance(self._model, Graph):
            raise ModelError(f"{self.file}: custom_ops are for ONNX models, and this is a graph of fusec")
        self._checked: CheckedModel | None = None
        # weak, because weights that no graph uses need no memory
        self._weights: weakref.WeakValueDictionary[str, Literal] = weakref.WeakValueDictionary()

    def with_constants(self, constants: Mapping[str, Any]) -> Source:
        """Return this model with values for some of its inputs, which are no inputs of the graph then.

        constants: an array of the input's type, or Python numbers, by name.
        Raises ModelError for a name that is no input, and for another type or shape.
        """
        if not constants:
            return self
        declared = {each.name: each for each in self.interface[0]}
        known: dict[str, Literal] = {}
        for name, given in constants.items():
            if name not in declared:
                inputs = printable(", ".join(declared)) or "none"
                raise ModelError(f"{self.file}: there is no input {name!r} to make a constant; inputs: {inputs}")
            try:
                known[name] = bound_literal(name, given, declared[name].dtype, declared[name].dims)
            except ModelError as error:
                raise ModelError(f"{self.file}: {error}") from error
        if isinstance(self._model, Graph):
            return Source(with_constants(self._model, known), file=self.file)
        return Source(self._model, {**self.constants, **known}, self.file, self._files, self._custom_ops)

    def load(self, shapes: Mapping[str, Sequence[int]] | None = None) -> Graph:
        """Load the graph for some input shapes, as `frontends.load` does."""
        sizes = self._checked_sizes(shapes)
        if isinstance(self._model, Graph):
            return _checked(self._model, sizes, self.file)
        # imported here, because onnx takes longer to import than all of fusec
        from fusec.frontends.onnx.load import load_onnx

        model = self._check(self._model)
        return load_onnx(model, sizes, self.file, self._files, self.constants, self._weights)

    def _checked_sizes(self, shapes: Mapping[str, Sequence[int]] | None) -> dict[str, tuple[int, ...]]:
        sizes = _sizes(shapes or {})
        if given := [name for name in sizes if name in self.constants]:
            raise ModelError(f"{self.file}: input {given[0]!r} is a constant, so its shape cannot be given")
        return sizes

    def _check(self, model: ModelProto) -> CheckedModel:
        """Check the model once for all shapes."""
        from fusec.frontends.onnx.load import check_model  # imported here as in `load`

        self._checked = self._checked or check_model(model, self.file, self._custom_ops)
        return self._checked

    def segments(self, shapes: Mapping[str, Sequence[int]] | None = None) -> Graph | Segment:
        """Load the graph for some input shapes; its first segment, if later ones need values on the host."""
        if isinstance(self._model, Graph):
            return self.load(shapes)
        from fusec.frontends.onnx.segmented.bounded import joined  # imported here as in `load`
        from fusec.frontends.onnx.segmented.segments import SegmentedModel

        sizes = self._checked_sizes(shapes)
        model = SegmentedModel(self._check(self._model), self.file, self._files, self._weights)
        return joined(model, model.first(sizes, self.constants), sizes, self.constants)

    def standalone(self, opset: int) -> ModelProto:
        """Return a copy as one ONNX message, without functions and external data, in at least this opset.

        Raises ModelError if the model is no ONNX model, is malformed, or cannot be converted.
        """
        if isinstance(self._model, Graph):
            raise ModelError(f"{self.file}: is a graph of fusec, not an ONNX model")
        from fusec.frontends.onnx.standalone import standalone  # imported here as in `load`

        return standalone(self._model, self.file, self._files, opset)

    @property
    def warned(self) -> bool:
        """Tell if an import of this model has warned the user of something."""
        return self._checked is not None and bool(self._checked.noted)

    @property
    def external_files(self) -> Mapping[str, FileRanges]:
        """Return the files with external data that imports of this model have opened, by location in its folder."""
        return {} if self._files is None else self._files.external

    @property
    def weight_places(self) -> frozenset[Place]:
        """Return the places of the weights that are read from `data` when they are used."""
        return frozenset() if self._files is None else self._files.places

    @property
    def onnx(self) -> ModelProto | None:
        """Return the ONNX model, which must not be changed; None for a graph.

        It lacks the data of large weights, which `standalone` has.
        """
        return None if isinstance(self._model, Graph) else self._model

    def edited(self, edit: Callable[[ModelProto], None]) -> Source:
        """Return a source of the same file with a copy of its ONNX model, which `edit` changes.

        Raises ModelError if the model is a graph.
        """
        if isinstance(self._model, Graph):
            raise ModelError(f"{self.file}: is no ONNX model")
        model = type(self._model)()
        model.CopyFrom(self._model)
        edit(model)
        return Source(model, self.constants, self.file, self._files, self._custom_ops)

    @cached_property
    def interface(self) -> tuple[tuple[Declaration, ...], tuple[Declaration, ...]]:
        """Return inputs and outputs as the model declares them.

        Raises ModelError if an input is not a tensor.
        """
        if isinstance(self._model, Graph):
            graph = self._model
            outputs = zip(graph.output_names, graph.outputs, strict=True)
            return (
                tuple(Declaration(v.name, v.type.dtype, v.type.shape) for v in graph.inputs),
                tuple(Declaration(name, v.type.dtype, v.type.shape) for name, v in outputs),
            )
        from fusec.frontends.onnx.load import declared  # imported here as in `load`

        inputs, outputs = declared(self._model, self.file)
        given = [each for each in inputs if each[0] not in self.constants]
        return tuple(Declaration(*each) for each in given), tuple(Declaration(*each) for each in outputs)

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the metadata of the model: the fields of `fusec.session.ModelMeta`."""
        model = self._model
        if isinstance(model, Graph):
            return {
                "producer_name": "fusec",
                "graph_name": model.name,
                **dict.fromkeys(("domain", "description", "graph_description"), ""),
                "version": 0,
                "custom_metadata_map": {},
            }
        return {
            "producer_name": model.producer_name,
            "graph_name": model.graph.name,
            "domain": model.domain,
            "description": model.doc_string,
            "graph_description": model.graph.doc_string,
            "version": model.model_version,
            "custom_metadata_map": {entry.key: entry.value for entry in model.metadata_props},
        }


def bind(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | Source,
    constants: Mapping[str, Any] | None,
    custom_ops: Mapping[str, Callable[..., Any] | CustomOp] | None = None,
) -> str | os.PathLike[str] | bytes | ModelProto | Graph | Source:
    """Return a model with values for some of its inputs and functions for some of its ops. Without both: the model.

    constants: see `Source.with_constants`.
    custom_ops: see `fusec.compile`.
    """
    if custom_ops:
        if isinstance(model, Source):
            raise ModelError(f"{model.file}: a Source takes custom_ops when it is made")
        model = Source(model, custom_ops=custom_ops)
    if not constants:
        return model
    return (model if isinstance(model, Source) else Source(model)).with_constants(constants)


def load(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | Source,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Graph:
    """Load the graph of a model. Every shape in the graph is concrete.

    shapes: shapes by input name. Inputs with symbolic dims need one, unless another input binds these dims: a dim
        has the same size wherever its name occurs.

    Raises ModelError if anything is wrong with the model or with the shapes.
    """
    return (model if isinstance(model, Source) else Source(model)).load(shapes)


def _sizes(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Convert shapes to tuples of Python integers. Raises ModelError if a dim is not a size."""
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


def _read(path: Path, file: str) -> tuple[ModelProto | Graph, TensorFiles | None, FileRanges]:
    """Read a regular file of less than 2 GiB, which is the limit of protobuf. Raises ModelError otherwise."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(f"{path}: is a directory, not a model")
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path}: is not a regular file")
        if path.suffix == ".fusec":
            raise ModelError(
                f"{path}: is a compiled model: load it with fusec.load, or give the model that it was compiled from"
            )
        if status.st_size >= PROTOBUF_LIMIT:
            raise ModelError(
                f"{path}: {status.st_size} bytes, and protobuf reads less than 2 GiB: "
                "save the weights as external data (onnx.save_model(..., save_as_external_data=True))"
            )
        if not status.st_size:
            raise ModelError(f"{path}: is empty")
        data = FileRanges(path)
        return *_decoded(data, file, path), data
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror or error if isinstance(error, OSError) else str(error)
        raise ModelError(f"{path}: {reason}") from error


def _decoded(data: ByteRanges, file: str, path: Path | None = None) -> tuple[ModelProto | Graph, TensorFiles | None]:
    """Decode a model in text or as ONNX. path: that of the bytes; None if they are in memory."""
    text = path is not None and path.suffix in _TEXT_SUFFIXES
    if text or data.read(0, min(len(_TEXT_START), data.size)) == _TEXT_START:
        return _text(data.read(0, data.size), file), None
    from fusec.frontends.onnx.load import decoded  # imported here as in `Source.load`

    return decoded(data, file, None if path is None else path.parent)


def _text(data: bytes, file: str) -> Graph:
    try:
        return parse(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: is not UTF-8 text ({error})") from error
    except (ModelError, VerifyError) as error:
        raise ModelError(f"{file}: {error}") from error


def _checked(graph: Graph, shapes: Mapping[str, Sequence[int]], file: str) -> Graph:
    """Verify the graph and return it. Raises ModelError if `shapes` differ from those of the graph."""
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

"""Edit a model as the options of a session ask: fixed dims, other values of initializers, initializers as inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from fusec.errors import FusecError
from fusec.frontends import Source
from fusec.session.device_memory import to_host
from fusec.session.model_interface import NodeArg
from fusec.session.ort_value import array_of_value
from fusec.session.settings import Settings

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

# The first IR version in which an initializer may be no input. In an older model all are inputs, and none is meant to
# be overridden.
_OVERRIDABLE_SINCE = 4
_Dim = tuple[str, str]  # name and denotation of a symbolic dim, both may be empty


def edited(source: Source, settings: Settings, options: Any) -> Source:
    """Return the model with the dims and initializers that the options give.

    options: the object that `settings` was read from; onnxruntime's is asked for its dims.
    """
    model = source.onnx
    if model is None:
        if settings.sizes_by_name or settings.sizes_by_denotation or settings.initializers:
            raise FusecError(f"{source.file}: has no symbolic dims and no initializers, because it is no ONNX model")
        return source
    sizes = _overrides(model, settings, options)
    known = {t.name for t in model.graph.initializer}
    if unknown := [name for name in settings.initializers if name not in known]:
        raise FusecError(f"{source.file}: there is no initializer {unknown[0]!r}")
    if not sizes and not settings.initializers:
        return source
    by_name = {name: size for (name, _), size in sizes.items() if name}

    def edit(copy: ModelProto) -> None:
        for value in (*copy.graph.input, *copy.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                size = by_name.get(dim.dim_param) or sizes.get((dim.dim_param, dim.denotation))
                if size is not None and not dim.HasField("dim_value"):
                    dim.dim_value = size
        for tensor in copy.graph.initializer:
            if tensor.name in settings.initializers:
                tensor.CopyFrom(_tensor(tensor.name, settings.initializers[tensor.name]))

    return source.edited(edit)


def overridable(source: Source) -> list[NodeArg]:
    """Return the inputs of the model that have initializers as their defaults."""
    model = source.onnx
    if model is None or model.ir_version < _OVERRIDABLE_SINCE:
        return []
    valued = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
    listed = [value for value in model.graph.input if value.name in valued]
    if not listed:
        return []
    from fusec.frontends.onnx.model_file.inputs import tensor_type  # here, because importing onnx takes long

    types = [(value.name, *tensor_type(value)) for value in listed]
    return [NodeArg.of(name, dims, dtype.numpy) for name, dtype, dims in types]


def with_inputs(source: Source, names: Collection[str]) -> Source:
    """Return the model without these initializers, so that they are inputs."""

    def edit(copy: ModelProto) -> None:
        dense = [t for t in copy.graph.initializer if t.name not in names]
        sparse = [t for t in copy.graph.sparse_initializer if t.values.name not in names]
        del copy.graph.initializer[:], copy.graph.sparse_initializer[:]
        copy.graph.initializer.extend(dense)
        copy.graph.sparse_initializer.extend(sparse)

    return source.edited(edit)


def _tensor(name: str, value: Any) -> TensorProto:
    from onnx import numpy_helper  # here, because importing onnx takes long

    return numpy_helper.from_array(to_host(array_of_value(value)), name)


def _overrides(model: ModelProto, settings: Settings, options: Any) -> dict[_Dim, int]:
    """Return the size of each symbolic dim of the inputs for which the options have one."""
    dims = [dim for value in model.graph.input for dim in value.type.tensor_type.shape.dim]
    symbolic = list(dict.fromkeys((d.dim_param, d.denotation) for d in dims if not d.HasField("dim_value")))
    if not hasattr(options, "sizes_by_name"):
        return _overrides_in_onnxruntime(symbolic, options) if symbolic and options is not None else {}
    found = {dim: settings.sizes_by_name.get(dim[0]) or settings.sizes_by_denotation.get(dim[1]) for dim in symbolic}
    return {dim: size for dim, size in found.items() if size is not None}


def _overrides_in_onnxruntime(symbolic: Sequence[_Dim], options: Any) -> dict[_Dim, int]:
    """Return the sizes that onnxruntime's own options hold.

    They can be set and not read, so onnxruntime applies them to a small model with the same dims.
    """
    import onnxruntime  # installed, because the caller made the options with it
    from onnx import TensorProto, helper

    inputs = [
        helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [name or None])
        for i, (name, _) in enumerate(symbolic)
    ]
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(len(symbolic))]
    for value, (_, denotation) in zip(inputs, symbolic, strict=True):
        value.type.tensor_type.shape.dim[0].denotation = denotation
    nodes = [helper.make_node("Identity", [f"x{i}"], [f"y{i}"]) for i in range(len(symbolic))]
    graph = helper.make_graph(nodes, "dims", inputs, outputs)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])
    profiling, path = options.enable_profiling, options.optimized_model_filepath
    options.enable_profiling, options.optimized_model_filepath = (
        False,
        "",
    )  # because the small model shall leave no files
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    finally:
        options.enable_profiling, options.optimized_model_filepath = profiling, path
    sizes = {dim: each.shape[0] for dim, each in zip(symbolic, session.get_inputs(), strict=True)}
    return {dim: size for dim, size in sizes.items() if isinstance(size, int)}

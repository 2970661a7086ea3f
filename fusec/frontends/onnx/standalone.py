"""Rewrite a checked ONNX model so that one message holds all of it, for tools that edit its nodes."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, helper, shape_inference, version_converter

from fusec.errors import ModelError, VerifyError
from fusec.exporters.onnx_element_types import ELEMENT_TYPES
from fusec.frontends.onnx.load import check_model
from fusec.frontends.onnx.model_file.split_model import TensorFiles
from fusec.frontends.onnx.model_file.tensors import Tensors


def standalone(model: ModelProto, file: str, files: TensorFiles | None, opset: int) -> ModelProto:
    """Return a copy of a model without functions and external data, in at least this opset of the default domain.

    Nodes are sorted, those without effect are left out, and each has a name. Tensors and operators keep theirs.
    Initializers are no inputs, so that their values are known.

    Raises ModelError if the model is malformed, has an op that fusec does not import, or cannot be converted.
    """
    known = check_model(model, file)
    made = ModelProto(
        ir_version=max(model.ir_version, 4), producer_name=model.producer_name, doc_string=model.doc_string
    )
    made.metadata_props.extend(model.metadata_props)
    made.graph.CopyFrom(known.graph)
    del made.graph.node[:]
    taken: set[str] = set()
    for index in known.order:
        node = made.graph.node.add()
        node.CopyFrom(known.graph.node[index])
        node.name = fresh_name(known.names[index], taken)
    made.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in known.opsets.items())
    values = {tensor.name for tensor in made.graph.initializer}
    inputs = [value for value in made.graph.input if value.name not in values]
    del made.graph.input[:]
    made.graph.input.extend(inputs)
    _embed(made, file, files)
    version = known.opsets.get("", opset)
    if version < opset:
        made = _converted(made, opset, file)
    elif "" not in known.opsets:
        made.opset_import.append(helper.make_opsetid("", opset))
    made.ir_version = max(made.ir_version, helper.find_min_ir_version_for(made.opset_import, True))
    return made


def fresh_name(hint: str, taken: set[str]) -> str:
    """Return a name that starts with `hint` and is not taken, and take it."""
    name, count = hint, 0
    while name in taken:
        count += 1
        name = f"{hint}_{count}"
    taken.add(name)
    return name


def _embed(model: ModelProto, file: str, files: TensorFiles | None) -> None:
    """Read into the message what its initializers lack.

    Raises ModelError if a file is missing or outside the folder.
    """
    reader = Tensors(files)
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        try:
            literal = reader.literal(tensor)
        except VerifyError as error:
            raise ModelError(f"{file}: initializer {tensor.name!r}: {error}") from error
        tensor.CopyFrom(
            TensorProto(name=tensor.name, data_type=ELEMENT_TYPES[literal.type.dtype], dims=literal.type.shape)
        )
        tensor.raw_data = np.ascontiguousarray(literal.array).tobytes()


def _converted(model: ModelProto, opset: int, file: str) -> ModelProto:
    try:
        return version_converter.convert_version(model, opset)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        version_converter.ConvertError,
        shape_inference.InferenceError,
    ) as error:
        raise ModelError(f"{file}: onnx cannot convert it to opset {opset}: {error}") from error

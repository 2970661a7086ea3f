"""Make a model of the body of a loop that runs on the host: one program, which is run for each trip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import GraphProto, ModelProto, TensorProto, helper

from fusec.exporters.onnx_element_types import ELEMENT_TYPES
from fusec.frontends.custom_ops import CustomOps
from fusec.frontends.onnx.model_file.split_model import TensorFiles
from fusec.ir import DType, Literal, TensorType, Value
from fusec.system.dataclass import dataclass

IR_VERSION = 10


@dataclass(frozen=True, eq=False)
class Surroundings:
    """Hold what a body sees of the model.

    values: by name.
    opsets: version of each domain.
    files: where the data is that tensors lack.
    custom_ops: functions that the user gave for ops.
    """

    values: Mapping[str, Value]
    opsets: Mapping[str, int]
    files: TensorFiles | None
    custom_ops: CustomOps


@dataclass(frozen=True, eq=False)
class LoopBody:
    """The body of a loop.

    model: takes the trip, the condition, the carried values and what it reads of the outer graph; gives the condition,
        the carried values and the scan outputs.
    constants: what it reads of the outer graph and is known.
    files: where the data is that tensors lack.
    operands: number of trips, condition, carried values, and computed values of the outer graph; None for those that
        the host step reads.
    carried: number of carried values.
    custom_ops: functions that the user gave for ops.
    """

    model: ModelProto
    constants: Mapping[str, Literal]
    files: TensorFiles | None
    operands: tuple[Literal | None, ...]
    carried: int
    custom_ops: CustomOps


def loop_body(
    body: GraphProto, first: Sequence[Value], carried: Sequence[Value], around: Surroundings
) -> tuple[LoopBody, list[Value]]:
    """Return a body as a model, and the computed values that the host step reads, in order.

    first: the number of trips and the condition.
    """
    held = {name: value.literal for name, value in around.values.items() if value.literal is not None}
    free = {name: value for name, value in around.values.items() if value.literal is None}
    names = [value.name for value in body.input]
    types = [TensorType((), DType.I64), TensorType((), DType.BOOL), *(value.type for value in carried)]
    inputs = dict(zip(names, types, strict=True)) | {name: value.type for name, value in around.values.items()}
    infos = [
        helper.make_tensor_value_info(name, ELEMENT_TYPES[type.dtype], [None] * type.rank)
        for name, type in inputs.items()
    ]
    flag = helper.make_tensor_value_info(body.output[0].name, TensorProto.BOOL, None)
    graph = helper.make_graph(list(body.node), body.name or "body", infos, [flag, *body.output[1:]])
    graph.initializer.extend(body.initializer)
    graph.sparse_initializer.extend(body.sparse_initializer)
    graph.value_info.extend(body.value_info)
    opsets = [helper.make_opsetid(domain, version) for domain, version in around.opsets.items()]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    operands = (*first, *carried, *free.values())
    literals = tuple(value.literal for value in operands)
    made = LoopBody(model, held, around.files, literals, len(carried), around.custom_ops)
    return made, [value for value in operands if value.literal is None]

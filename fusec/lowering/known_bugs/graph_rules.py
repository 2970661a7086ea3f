"""Rules for graphs that cuDNN accepts and computes wrongly with every plan.

Measured on an H200 with cuDNN 9.19: every plan of random graphs was run and compared (tests/gpu/test_device.py runs
them again). Each rule is a predicate and the reason to give; docs/hazards.md describes the bugs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property

from fusec.ir import DType
from fusec.lowering.cudnn_graph import CONVOLUTIONS, CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.known_bugs.storage import (
    fits_convolution,
    is_broadcast_in_another_order,
    is_channels_last,
    is_packed,
    is_row_major_or_channels_last,
    memory_order,
    row_length,
    two_of_three,
)

_OPERANDS_BEFORE_BIAS = {"sdpa": 3, "sdpa_train": 3, "sdpa_backward": 6}
_MAX_GRID = 65535  # CUDA's limit for the second and third dim of a launch grid
_INTEGERS_AT_ONCE = 8  # bytes of a vector: with other numbers of channels, results were wrong or reads illegal
_CONVERTED_AT_ONCE = 4  # numbers of 8 bits of a matmul's right operand that are converted together
_MAX_TILE_COLUMNS = 128  # of the widest tile measured


class Facts:
    """Facts about one graph that several rules ask for."""

    def __init__(self, graph: CudnnGraph):
        self.graph = graph
        ops = {call.op for call in graph.calls}
        self.convolution = not ops.isdisjoint(CONVOLUTIONS)
        self.matmul = "matmul" in ops
        self.pointwise_only = ops <= {"pointwise"}
        self.computed = {uid for call in graph.calls for uid in call.outputs}

    @cached_property
    def uses(self) -> Counter[int]:
        """Number of calls' operands that each tensor is."""
        return Counter(uid for call in self.graph.calls for uid in call.inputs)

    @cached_property
    def stored_uids(self) -> frozenset[int]:
        """Uids of the graph's outputs."""
        return frozenset(t.uid for t in self.graph.outputs)

    def follows_convolution(self, tensor: CudnnTensor) -> bool:
        """Tell if a tensor is computed from the result of a convolution."""
        found: set[int] = set()
        for call in self.graph.calls:
            if call.op in CONVOLUTIONS or not found.isdisjoint(call.inputs):
                found.update(call.outputs)
        return tensor.uid in found

    def operands(self, call: CudnnCall) -> list[CudnnTensor]:
        """List the tensors that a call reads."""
        return [self.graph.tensor(uid) for uid in call.inputs]

    def result(self, call: CudnnCall) -> CudnnTensor:
        """Return the first tensor that a call writes."""
        return self.graph.tensor(call.outputs[0])


# rules for a whole graph ---------------------------------------------------------------------------------


def _stores_booleans(facts: Facts) -> bool:
    tensors = facts.graph.tensors
    return any(t.dtype is DType.BOOL and not t.virtual and t.value is None for t in tensors)


def _is_true_fp32_matmul(facts: Facts) -> bool:
    return facts.matmul and not facts.graph.tensor_cores


def _writes_result_with_gaps(facts: Facts) -> bool:
    outputs = facts.graph.outputs
    return facts.convolution and len(outputs) > 1 and not all(is_packed(t) for t in outputs)


# rules for one call --------------------------------------------------------------------------------------


def _reduces_by_extremum(facts: Facts, call: CudnnCall) -> bool:
    return call.op == "reduction" and call.mode in ("max", "min")


def _has_one_bias_per_head(facts: Facts, call: CudnnCall) -> bool:
    biases = call.inputs[_OPERANDS_BEFORE_BIAS[call.op] :] if call.op in _OPERANDS_BEFORE_BIAS else ()
    shapes = (facts.graph.tensor(uid).dims for uid in biases)
    return any(dims[0] > 1 and dims[1] > 1 and dims[2:] == (1, 1) for dims in shapes)


def _multiplies_tensor_by_itself(facts: Facts, call: CudnnCall) -> bool:
    return call.op == "matmul" and call.inputs[0] == call.inputs[1]


def _multiplies_tensor_by_its_prologue(facts: Facts, call: CudnnCall) -> bool:
    return call.op == "matmul" and not facts.graph.sources(call.inputs[0]).isdisjoint(
        facts.graph.sources(call.inputs[1])
    )


def _convolves_tensor_with_itself(facts: Facts, call: CudnnCall) -> bool:
    return call.op in CONVOLUTIONS and call.inputs[0] == call.inputs[1]


def _has_filters_in_odd_order(facts: Facts, call: CudnnCall) -> bool:
    return call.op == "conv_fprop" and not is_row_major_or_channels_last(facts.graph.tensor(call.inputs[1]))


def _exceeds_launch_grid(facts: Facts, call: CudnnCall) -> bool:
    dims = facts.result(call).dims
    if not facts.pointwise_only or len(dims) != 3 or call.outputs[0] not in facts.stored_uids:
        return False
    return dims[0] > _MAX_GRID or dims[2] > _MAX_GRID * _MAX_TILE_COLUMNS


def _broadcasts_in_backward_mode(facts: Facts, call: CudnnCall) -> bool:
    dims = facts.result(call).dims
    return call.mode.endswith("_backward") and any(t.dims != dims for t in facts.operands(call))


def _multiplies_odd_number_of_integers(facts: Facts, call: CudnnCall) -> bool:
    """Return True for a product of integers whose channels, or inner dim and columns, are no multiples of 8."""
    if call.compute is not DType.I32:
        return False
    left, right = (tensor.dims for tensor in facts.operands(call))
    counts = right[:2] if call.op in CONVOLUTIONS else (left[-1], right[-1])
    return any(count % _INTEGERS_AT_ONCE for count in counts)


def _converts_odd_rows_of_bytes(facts: Facts, call: CudnnCall) -> bool:
    """Return True for a matmul with a prologue on the left operand, whose right one is converted from odd rows."""
    if call.op != "matmul" or not facts.computed.issuperset(call.inputs):
        return False
    right = map(facts.graph.tensor, facts.graph.sources(call.inputs[1]))
    return any(t.dtype.itemsize == 1 and row_length(t) % _CONVERTED_AT_ONCE for t in right)


def _is_power_next_to_product(facts: Facts, call: CudnnCall) -> bool:
    return call.mode == "pow" and (facts.convolution or facts.matmul)


def _is_tanh_next_to_convolution(facts: Facts, call: CudnnCall) -> bool:
    return facts.convolution and call.mode in ("tanh", "tanh_backward")


def _stores_copy_of_used_value(facts: Facts, call: CudnnCall) -> bool:
    if call.mode != "identity" or not (facts.convolution or facts.matmul) or facts.result(call).virtual:
        return False
    source = call.inputs[0]
    return source in facts.computed and facts.uses[source] > 1


def _adds_number_to_one_filter(facts: Facts, call: CudnnCall) -> bool:
    if call.mode != "add" or not facts.convolution or facts.result(call).dims[1] != 1:
        return False
    return any(t.value is not None for t in facts.operands(call))


# rules for one operand of a pointwise call, and the call's result ------------------------------------------


def _does_not_fit_convolution(facts: Facts, operand: CudnnTensor, result: CudnnTensor) -> bool:
    return facts.convolution and not fits_convolution(operand, result)


def _does_not_fit_matmul(facts: Facts, operand: CudnnTensor, result: CudnnTensor) -> bool:
    return facts.matmul and is_broadcast_in_another_order(operand, result)


def _mixes_memory_orders(facts: Facts, operand: CudnnTensor, result: CudnnTensor) -> bool:
    if facts.convolution or facts.matmul:
        return False
    return memory_order(operand) != memory_order(result, operand)


def _is_broadcast_along_two_dims(facts: Facts, operand: CudnnTensor, result: CudnnTensor) -> bool:
    return not facts.convolution and not facts.matmul and two_of_three(operand.dims, result.dims)


# the tables: a predicate, and the reason. In a reason {mode} is the call's, {operand} and {result} are dims.

GRAPH_RULES: tuple[tuple[Callable[[Facts], bool], str], ...] = (
    (_stores_booleans, "a boolean tensor in memory: cuDNN does not read it as one byte per element"),
    (_is_true_fp32_matmul, "a matmul in true fp32: the only engine that cuDNN offers rounds its operands to tf32"),
    (
        _writes_result_with_gaps,
        "a convolution with two results, one of them within a larger tensor: cuDNN writes it as a packed tensor",
    ),
)

CALL_RULES: tuple[tuple[Callable[[Facts, CudnnCall], bool], str], ...] = (
    (_reduces_by_extremum, "a reduction by {mode}: it starts from the largest finite number, and leaves NaN out"),
    (
        _has_one_bias_per_head,
        "an attention bias with one number for each image and head: cuDNN reads it from a wrong address",
    ),
    (_multiplies_tensor_by_itself, "a matmul of one tensor with itself"),
    (
        _multiplies_tensor_by_its_prologue,
        "a matmul of a tensor with the result of its own prologue: cuDNN runs the prologue on both operands",
    ),
    (_convolves_tensor_with_itself, "a convolution of one tensor with itself"),
    (_has_filters_in_odd_order, "filters stored neither row-major nor channels last"),
    (_exceeds_launch_grid, "a pointwise graph over {result}: more than a launch grid holds"),
    (_broadcasts_in_backward_mode, "{mode} with a broadcast operand"),
    (
        _multiplies_odd_number_of_integers,
        "a product of 8-bit integers whose channels (inner dim and columns of a matmul) are no multiples of 8: wrong "
        "sums, or illegal memory accesses",
    ),
    (
        _converts_odd_rows_of_bytes,
        "a matmul with a prologue on its left operand, whose right one is converted from 8 bits in rows that are no "
        "multiple of 4: illegal memory accesses",
    ),
    (_is_power_next_to_product, "pow next to a product: computed by logarithms, NaN for 0 to the power 0"),
    (
        _is_tanh_next_to_convolution,
        "{mode} next to a convolution: computed as a quotient of exponentials, NaN where they overflow",
    ),
    (
        _stores_copy_of_used_value,
        "a value stored by a copy and used by other ops too: cuDNN does not write the copy",
    ),
    (
        _adds_number_to_one_filter,
        "a number added to the result of a convolution with one filter: engines read it as a bias in memory",
    ),
)


def _is_part_in_fp32(facts: Facts, operand: CudnnTensor, result: CudnnTensor) -> bool:
    """Return True for an fp32 operand within a larger tensor, such as a part of a concat."""
    full = operand.dims == result.dims and facts.follows_convolution(result)
    return full and operand.dtype is DType.F32 and not operand.virtual and not is_packed(operand)


def _is_part_by_pixels(facts: Facts, operand: CudnnTensor, result: CudnnTensor) -> bool:
    """Return True for an operand that is a part of a larger tensor, but not by channels."""
    full = operand.dims == result.dims and facts.follows_convolution(result)
    return full and not operand.virtual and not is_packed(operand) and not is_channels_last(operand)


def _has_pixels_in_another_order(facts: Facts, operand: CudnnTensor, result: CudnnTensor) -> bool:
    """Return True for an operand of a convolution's epilogue whose dims except channels are stored in another order."""
    if not facts.convolution or not facts.follows_convolution(result):
        return False
    orders = ([d for d in memory_order(t, operand) if d != 1] for t in (operand, result))
    return len({tuple(order) for order in orders}) > 1


OPERAND_RULES: tuple[tuple[Callable[[Facts, CudnnTensor, CudnnTensor], bool], str], ...] = (
    (
        _is_part_in_fp32,
        "a convolution's epilogue with an fp32 operand within a larger tensor: it is read by the result's strides",
    ),
    (
        _is_part_by_pixels,
        "a convolution's epilogue with an operand by strides {strides}, part of a larger tensor: it is read by the "
        "result's strides",
    ),
    (
        _does_not_fit_convolution,
        "a convolution's epilogue with an operand {operand} for {result}: cuDNN computes only full, per-channel and "
        "per-pixel operands right",
    ),
    (
        _has_pixels_in_another_order,
        "a convolution's epilogue with an operand by strides {strides}: it is read in the result's order of pixels",
    ),
    (_does_not_fit_matmul, "a matmul's epilogue with an operand {operand} by strides {strides}"),
    (_mixes_memory_orders, "a pointwise graph over operands of two memory orders"),
    (
        _is_broadcast_along_two_dims,
        "an operand {operand} broadcast along two dims of {result}: a pointwise graph of rank 3 computes it wrongly",
    ),
)


def misread(graph: CudnnGraph) -> str | None:
    """Tell why cuDNN would compute this graph wrongly; None if no rule applies."""
    facts = Facts(graph)
    for fires, reason in GRAPH_RULES:
        if fires(facts):
            return reason
    for call in graph.calls:
        for fires, reason in CALL_RULES:
            if fires(facts, call):
                return reason.format(mode=call.mode, result=list(facts.result(call).dims))
        if call.op == "pointwise":
            found = _misread_operand(facts, call)
            if found is not None:
                return found
    return None


def _misread_operand(facts: Facts, call: CudnnCall) -> str | None:
    result = facts.result(call)
    for operand in facts.operands(call):
        if operand.value is not None:
            continue
        for fires, reason in OPERAND_RULES:
            if fires(facts, operand, result):
                return reason.format(
                    operand=list(operand.dims), strides=list(operand.strides), result=list(result.dims)
                )
    return None

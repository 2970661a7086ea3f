"""Rules for plans of cuDNN that compute a graph wrongly, while other plans of the same graph are right.

Measured by running every plan of 3,300 random graphs on an H200 (cuDNN 9.19): see docs/hazards.md. Each rule names
engines, a predicate and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from fusec.ir import DType
from fusec.lowering.cudnn_graph import CONVOLUTIONS, CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.known_bugs.storage import has_innermost_channels, is_packed, wide_dims
from fusec.system.dataclass import dataclass

# The precompiled engines. They write one result: cuDNN offers them for a convolution with two results, and the run
# fails ("vars.get_user_ptrs()[idx] != nullptr").
_ONE_RESULT = (0, 11, 12, 26, 29, 33, 44, 51, 53)
_VARIANT_KNOB = 12  # the knob type in which the variants of engines 7 and 52 differ
_NO_COPY = (29, 30)  # variants without a workspace in which they could copy an operand to channels last


@dataclass(frozen=True)
class PlanFacts:
    """Facts about one plan of a graph that several rules ask for."""

    graph: CudnnGraph
    engine: int
    knobs: Mapping[int, int]

    def call(self, op: str) -> CudnnCall | None:
        """Return the graph's first call of an op; None if there is none."""
        return next((c for c in self.graph.calls if c.op == op), None)

    @cached_property
    def convolution(self) -> tuple[CudnnTensor, CudnnTensor] | None:
        """Image and filters of the graph's convolution; None without one."""
        call = self.call("conv_fprop")
        return None if call is None else (self.graph.tensor(call.inputs[0]), self.graph.tensor(call.inputs[1]))

    @cached_property
    def filter_gradient(self) -> tuple[CudnnTensor, CudnnTensor, CudnnTensor] | None:
        """Image, loss and result of the graph's gradient of filters; None without one."""
        call = self.call("conv_wgrad")
        if call is None:
            return None
        image, loss, filters = (self.graph.tensor(uid) for uid in (*call.inputs, *call.outputs))
        return image, loss, filters

    @cached_property
    def computed_from_product(self) -> set[int]:
        """Uids of the results of convolutions, and of all that is computed from them."""
        found = set[int]()
        for call in self.graph.calls:
            if call.op in CONVOLUTIONS or not found.isdisjoint(call.inputs):
                found.update(call.outputs)
        return found

    @property
    def copies_nothing(self) -> bool:
        return self.knobs.get(_VARIANT_KNOB) in _NO_COPY


# convolutions --------------------------------------------------------------------------------------------


def _is_fp32_convolution(plan: PlanFacts) -> bool:
    """Tell if a convolution reads an fp32 image from memory; for other graphs these numbers name other engines."""
    if plan.convolution is None:
        return False
    image, _ = plan.convolution
    return image.dtype is DType.F32 and not image.virtual


def _is_16_bit_convolution_alone(plan: PlanFacts) -> bool:
    """Tell if the graph is one convolution in 16 bits; with other calls these numbers name other engines."""
    return plan.convolution is not None and plan.convolution[0].dtype.itemsize == 2 and len(plan.graph.calls) == 1


def _has_one_channel_of_several(plan: PlanFacts) -> bool:
    """Tell if an image or a result of one channel lies in memory among other channels, as an operand of a concat does.

    The engines take the stride between such images from their own dims.
    """
    if plan.convolution is None:
        return False
    image, _ = plan.convolution
    read = [plan.graph.tensor(uid) for uid in plan.graph.sources(image.uid)] if image.virtual else [image]
    return any(t.dims[1] == 1 and not is_packed(t) for t in (*read, *plan.graph.outputs))


def _has_other_image_order(plan: PlanFacts) -> bool:
    return plan.convolution is not None and not has_innermost_channels(plan.convolution[0])


def _reads_image_as_is(plan: PlanFacts) -> bool:
    if plan.convolution is None or has_innermost_channels(plan.convolution[0]):
        return False
    image, weight = plan.convolution
    grouped_volume = image.dims[1] != weight.dims[1] and len(image.dims) == 5
    return plan.copies_nothing or grouped_volume


def _is_part_in_other_order(plan: PlanFacts) -> bool:
    """Tell if an image that is not channels last is a part of a larger tensor."""
    return plan.convolution is not None and _has_other_image_order(plan) and not is_packed(plan.convolution[0])


def _stores_integer_sums(plan: PlanFacts) -> bool:
    return plan.convolution is not None and any(t.dtype is DType.I32 for t in plan.graph.outputs)


def _reads_filters_as_is(plan: PlanFacts) -> bool:
    return plan.convolution is not None and plan.copies_nothing and not has_innermost_channels(plan.convolution[1])


def _has_other_image_order_or_two_outputs(plan: PlanFacts) -> bool:
    return plan.convolution is not None and (_has_other_image_order(plan) or len(plan.graph.outputs) > 1)


def _has_two_results(plan: PlanFacts) -> bool:
    if plan.convolution is None or plan.call("genstats") is not None:
        return False
    return len(plan.graph.outputs) > 1


def _stores_bytes_next_to_another_result(plan: PlanFacts) -> bool:
    outputs = plan.graph.outputs
    return plan.convolution is not None and len(outputs) > 1 and any(t.dtype.itemsize == 1 for t in outputs)


def _has_independent_op(plan: PlanFacts) -> bool:
    """Tell if some call neither leads to the convolution nor depends on it."""
    if plan.convolution is None:
        return False
    calls = plan.graph.calls
    product = next(c for c in calls if c.op in CONVOLUTIONS)
    after, before = plan.computed_from_product, set(product.inputs)
    for call in reversed(calls):
        if not before.isdisjoint(call.outputs):
            before.update(call.inputs)
    return any((after | before).isdisjoint(call.outputs) for call in calls)


def _has_gradient_at_product(plan: PlanFacts) -> bool:
    """Tell if an activation's gradient is taken at a value from the convolution, of a loss that is not from it.

    Engine 8 gives NaN or wrong numbers then: relu, sigmoid, gelu, swish and softplus (H200, cuDNN 9.19).
    """
    from_product = plan.computed_from_product
    gradients = (c.inputs for c in plan.graph.calls if c.op == "pointwise" and c.mode.endswith("_backward"))
    return any(loss not in from_product and at in from_product for loss, at in gradients)


def _has_operand_with_other_strides(plan: PlanFacts) -> bool:
    """Tell if an epilogue op reads a tensor of its result's dims, stored with other strides."""
    if plan.convolution is None:
        return False
    for call in (c for c in plan.graph.calls if c.op == "pointwise"):
        result = plan.graph.tensor(call.outputs[0])
        wide = wide_dims(result.dims)
        for operand in (plan.graph.tensor(uid) for uid in call.inputs):
            if operand.dims == result.dims and any(operand.strides[d] != result.strides[d] for d in wide):
                return True
    return False


def _is_transposed_convolution(plan: PlanFacts) -> bool:
    return plan.call("conv_dgrad") is not None


def _converts_bytes(plan: PlanFacts) -> bool:
    """Tell if an operand of the convolution is computed from numbers of 8 bits."""
    if plan.convolution is None:
        return False
    computed = (t.uid for t in plan.convolution if t.virtual)
    sources = (plan.graph.tensor(source) for uid in computed for source in plan.graph.sources(uid))
    return any(t.dtype.itemsize == 1 for t in sources)


# gradients of filters ------------------------------------------------------------------------------------


def _is_grouped_filter_gradient(plan: PlanFacts) -> bool:
    if plan.filter_gradient is None:
        return False
    image, _, filters = plan.filter_gradient
    return image.dims[1] != filters.dims[1]


def _is_16_bit_filter_gradient(plan: PlanFacts) -> bool:
    return plan.filter_gradient is not None and plan.filter_gradient[2].dtype.itemsize == 2


def _is_fp32_filter_gradient(plan: PlanFacts) -> bool:
    return plan.filter_gradient is not None and plan.filter_gradient[0].dtype is DType.F32


def _reads_odd_channels_in_16_bits(plan: PlanFacts) -> bool:
    if plan.filter_gradient is None:
        return False
    image, _, filters = plan.filter_gradient
    return image.dtype.itemsize == 2 and filters.dims[1] % 4 != 0


def _is_filter_gradient_in_other_order(plan: PlanFacts) -> bool:
    return plan.filter_gradient is not None and not all(map(has_innermost_channels, plan.filter_gradient[:2]))


# matmuls -------------------------------------------------------------------------------------------------


def _is_matmul(plan: PlanFacts) -> bool:
    return plan.call("matmul") is not None


def _has_epilogue_on_dot_products(plan: PlanFacts) -> bool:
    """Tell if ops follow dot products: engine 0 reads an address of the host, or computes wrong numbers in a batch."""
    if not _is_matmul(plan) or len(plan.graph.calls) == 1:
        return False
    return any(len(t.dims) == 3 and t.dims[1:] == (1, 1) for t in plan.graph.outputs)


def _has_other_activation_in_cublaslt(plan: PlanFacts) -> bool:
    """Tell if engine 0, which calls cuBLASLt, runs another activation than the graph's.

    It runs relu without its bounds, relu in place of leaky relu, and gelu by tanh.
    """
    return _is_matmul(plan) and _replaced_activation(plan.graph) is not None


def _replaced_activation(graph: CudnnGraph) -> str | None:
    for call in graph.calls:
        bounded_relu = call.mode == "relu" and bool(call.attributes)
        if call.op == "pointwise" and (call.mode in ("leaky_relu", "gelu") or bounded_relu):
            return call.mode
    return None


# norms ---------------------------------------------------------------------------------------------------


def _rounds_norm_to_bytes(plan: PlanFacts) -> bool:
    return plan.call("layernorm") is not None and any(t.dtype.itemsize == 1 for t in plan.graph.outputs)


@dataclass(frozen=True)
class PlanRule:
    """Engines that are wrong where `fires` is true. In `reason`, {engine} and {activation} are filled in."""

    engines: tuple[int, ...]
    fires: Callable[[PlanFacts], bool]
    reason: str


RULES: tuple[PlanRule, ...] = (
    PlanRule((7,), _reads_image_as_is, "engine 7 reads an image that is not stored channels last as if it were"),
    PlanRule(
        (7, 71),
        _is_part_in_other_order,
        "engine {engine} reads a part of a larger image as if it were packed, unless it is stored channels last",
    ),
    PlanRule(
        (7, 52, 71),
        _has_one_channel_of_several,
        "engine {engine} reads or writes one channel of a larger tensor as if it were packed",
    ),
    PlanRule((0, 28), _stores_integer_sums, "engine {engine} adds up products of 8-bit integers wrongly"),
    PlanRule(
        (7, 52), _reads_filters_as_is, "engine {engine} reads filters that are not stored channels last as if they were"
    ),
    PlanRule(
        (3, 12),
        _is_fp32_convolution,
        "engine {engine} convolves by transforms: its error is one of the largest element, not of each",
    ),
    PlanRule(
        (3, 6),
        _is_16_bit_convolution_alone,
        "engine {engine} convolves by transforms: its error is one of the largest element, not of each",
    ),
    PlanRule(
        (4,),
        _has_other_image_order,
        "engine 4 copies an image that is not stored channels last into memory it does not fill",
    ),
    PlanRule((4,), _converts_bytes, "engine 4 converts an image or filters of 8 bits wrongly"),
    PlanRule(
        (52,),
        _has_other_image_order_or_two_outputs,
        "engine 52 with an image that is not stored channels last, or two outputs",
    ),
    PlanRule(_ONE_RESULT, _has_two_results, "engine {engine} with two results: it writes one"),
    PlanRule((8,), _has_independent_op, "engine 8 with an epilogue op that does not depend on the convolution"),
    PlanRule((26, 29), _is_fp32_convolution, "engine {engine} rounds the addends of an fp32 convolution to tf32"),
    PlanRule((8,), _stores_bytes_next_to_another_result, "engine 8 with a result of 8 bits rounds the other one, too"),
    PlanRule(
        (8,), _has_gradient_at_product, "engine 8 with the gradient of an activation at a result of the convolution"
    ),
    PlanRule(
        (8,), _has_operand_with_other_strides, "engine 8 reads an epilogue's operand by the strides of its result"
    ),
    PlanRule((25,), _is_transposed_convolution, "engine 25 sums in the storage type, in no fixed order"),
    PlanRule(
        (1, 20),
        _is_grouped_filter_gradient,
        "engine {engine} with the gradient of a grouped convolution's filters",
    ),
    PlanRule(
        (17, 18),
        _is_fp32_filter_gradient,
        "engine {engine} computes fp32 gradients of filters by transforms: its error is one of the largest element",
    ),
    PlanRule(
        (1,),
        _reads_odd_channels_in_16_bits,
        "engine 1 with the gradient of filters over a 16-bit image whose channels are no multiple of 4",
    ),
    PlanRule(
        (20,),
        _is_16_bit_filter_gradient,
        "engine 20 sums the gradient of filters in the storage type, in no fixed order",
    ),
    PlanRule(
        (70,),
        _is_filter_gradient_in_other_order,
        "engine 70 reads an image or a loss that is not stored channels last as if it were",
    ),
    PlanRule((2,), _is_matmul, "engine 2 computes matmuls wrongly"),
    PlanRule((0,), _has_epilogue_on_dot_products, "engine 0 with an epilogue after dot products"),
    PlanRule((5,), _rounds_norm_to_bytes, "engine 5 accesses other memory when it rounds a layer norm to 8 bits"),
    PlanRule((0,), _has_other_activation_in_cublaslt, "engine 0 computes another function than {activation}"),
)


def wrong_plan(graph: CudnnGraph, engine: int, knobs: Mapping[int, int]) -> str | None:
    """Tell why a plan computes its graph wrongly; None if no rule applies.

    engine: cuDNN's number of the plan's engine
    knobs: the plan's knob values, by cuDNN's number of the knob type
    """
    plan = PlanFacts(graph, engine, knobs)
    for rule in RULES:
        if engine in rule.engines and rule.fires(plan):
            return rule.reason.format(engine=engine, activation=_replaced_activation(graph))
    return None

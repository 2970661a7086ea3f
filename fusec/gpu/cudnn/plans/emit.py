"""Build a cudnn.pygraph from a CudnnGraph, call by call, with explicit uids, dims and strides."""

from __future__ import annotations

from typing import Any

import cudnn

from fusec.errors import LoweringError
from fusec.ir import DType
from fusec.lowering.cudnn_graph import PORTS, CudnnCall, CudnnGraph
from fusec.targets.target import Target

DTYPES: dict[DType, Any] = {
    DType.F64: cudnn.data_type.DOUBLE,
    DType.F32: cudnn.data_type.FLOAT,
    DType.F16: cudnn.data_type.HALF,
    DType.BF16: cudnn.data_type.BFLOAT16,
    DType.I64: cudnn.data_type.INT64,
    DType.I32: cudnn.data_type.INT32,
    DType.I8: cudnn.data_type.INT8,
    DType.U8: cudnn.data_type.UINT8,
    DType.F8E4M3: cudnn.data_type.FP8_E4M3,
    DType.BOOL: cudnn.data_type.BOOLEAN,
}
MODES: Any = cudnn._compiled_module.convolution_mode  # which the package does not export

# The frontend's pointwise methods, with the number of tensors that they take. CudnnCall lists the tensors in the order
# of their parameters: (loss, input) for backward modes, (where true, where false, mask) for binary_select.
POINTWISE: dict[str, int] = {
    **dict.fromkeys(("abs", "ceil", "cos", "elu", "erf", "exp", "floor", "gelu", "gelu_approx_tanh", "gen_index"), 1),
    **dict.fromkeys(("identity", "leaky_relu", "log", "logical_not", "neg", "reciprocal", "relu", "rsqrt"), 1),
    **dict.fromkeys(("sigmoid", "sin", "softplus", "sqrt", "swish", "tan", "tanh"), 1),
    **dict.fromkeys(("add", "add_square", "bias", "div", "max", "min", "mod", "mul", "pow", "scale", "sub"), 2),
    **dict.fromkeys(("cmp_eq", "cmp_ge", "cmp_gt", "cmp_le", "cmp_lt", "cmp_neq", "logical_and", "logical_or"), 2),
    **dict.fromkeys(("elu_backward", "gelu_approx_tanh_backward", "gelu_backward", "leaky_relu_backward"), 2),
    **dict.fromkeys(("relu_backward", "sigmoid_backward", "softplus_backward", "swish_backward", "tanh_backward"), 2),
    "binary_select": 3,
}


def kernel_cache() -> Any:
    """Create the cache of kernels that cuDNN compiles for graphs that differ in their sizes alone."""
    return cudnn.create_kernel_cache()


def emit(graph: CudnnGraph, *, handle: Any = None, target: Target | None = None, kernels: Any = None) -> Any:
    """Build the frontend graph, not validated yet, for the device of `handle`; without one, for `target`.

    kernels: a `kernel_cache`; with it cuDNN offers only engines that allow other sizes

    Scalars by value are inputs by uid; `execute` needs a host address for each.

    Raises LoweringError for an op or type that the frontend lacks.
    """
    for tensor in graph.tensors:
        if tensor.dtype not in DTYPES:
            raise LoweringError(f"cuDNN has no element type {tensor.dtype.value}")
    if handle is None and target is not None:
        properties = cudnn.create_device_properties(target.properties)
        where: dict[str, Any] = {"device_property": properties, "sm_version": target.sm}
    else:
        where = {"handle": handle}
    if kernels is not None:
        where |= {"is_dynamic_shape_enabled": True, "kernel_cache": kernels}
    fp32 = cudnn.data_type.FLOAT
    g = cudnn.pygraph(io_data_type=fp32, intermediate_data_type=fp32, compute_data_type=fp32, **where)
    tensors: dict[int, Any] = {}
    computed = {uid for call in graph.calls for uid in call.outputs}
    for tensor in graph.tensors:
        if tensor.uid not in computed:
            tensors[tensor.uid] = g.tensor(
                dim=list(tensor.dims),
                stride=list(tensor.strides),
                data_type=DTYPES[tensor.dtype],
                is_pass_by_value=tensor.value is not None,
                uid=tensor.uid,
            )
    for call in graph.calls:
        results = _call(g, call, [tensors[uid] for uid in call.inputs])
        for uid, result in zip(call.outputs, results if len(call.outputs) > 1 else [results], strict=True):
            tensor = graph.tensor(uid)
            result.set_uid(uid).set_dim(list(tensor.dims)).set_stride(list(tensor.strides))
            result.set_data_type(DTYPES[tensor.dtype])
            if not tensor.virtual:
                result.set_output(True)
            tensors[uid] = result
    return g


def _keywords(call: CudnnCall) -> dict[str, Any]:
    """Return the attributes of a call as the frontend's methods take them."""
    given = {k: list(v) if isinstance(v, tuple) else v for k, v in call.attributes}
    if given.pop("flipped", False):
        given["convolution_mode"] = MODES.CONVOLUTION
    if "beta" in given:  # only swish has one
        given["swish_beta"] = given.pop("beta")
    return given


def _call(g: Any, call: CudnnCall, inputs: list[Any]) -> Any:
    compute = DTYPES[call.compute]
    attributes = _keywords(call)
    inference = cudnn.norm_forward_phase.INFERENCE
    match call.op:
        case "conv_fprop":
            image, weight = inputs
            return g.conv_fprop(image=image, weight=weight, compute_data_type=compute, **attributes)
        case "conv_dgrad":
            loss, weight = inputs
            return g.conv_dgrad(loss=loss, filter=weight, compute_data_type=compute, **attributes)
        case "conv_wgrad":
            image, loss = inputs
            return g.conv_wgrad(image=image, loss=loss, compute_data_type=compute, **attributes)
        case "matmul":
            return g.matmul(*inputs, compute_data_type=compute)
        case "sdpa" | "sdpa_train":
            trains = call.op == "sdpa_train"
            named = dict(zip(("q", "k", "v", "bias"), inputs, strict=False))
            results = g.sdpa(**named, generate_stats=trains, compute_data_type=compute, **attributes)
            return results if trains else results[0]
        case "sdpa_backward":
            named = dict(zip(PORTS[call.op][0], inputs, strict=False))
            return g.sdpa_backward(**named, compute_data_type=compute, **attributes)
        case "pointwise":
            if POINTWISE.get(call.mode) != len(inputs):
                raise LoweringError(f"cuDNN has no pointwise mode {call.mode!r} of {len(inputs)} operands")
            return getattr(g, call.mode)(*inputs, compute_data_type=compute, **attributes)
        case "genstats":
            return g.genstats(*inputs, compute_data_type=compute)
        case "reduction":
            mode = getattr(cudnn.reduction_mode, call.mode.upper())
            return g.reduction(*inputs, mode=mode, compute_data_type=compute)
        case "layernorm" | "instancenorm":
            x, scale, bias, epsilon = inputs
            norm = g.layernorm if call.op == "layernorm" else g.instancenorm
            parameters = {"scale": scale, "bias": bias, "epsilon": epsilon}
            return norm(norm_forward_phase=inference, input=x, compute_data_type=compute, **parameters)[0]
        case "rmsnorm":
            x, scale, *bias, epsilon = inputs
            parameters = {"scale": scale, "epsilon": epsilon, **({"bias": bias[0]} if bias else {})}
            return g.rmsnorm(norm_forward_phase=inference, input=x, compute_data_type=compute, **parameters)[0]
        case "batchnorm" | "batchnorm_backward":
            names = ({"x": "input", "dy": "grad"}.get(port, port) for port in PORTS[call.op][0])
            return getattr(g, call.op)(**dict(zip(names, inputs, strict=True)), compute_data_type=compute)
        case _:
            raise LoweringError(f"the cuDNN frontend has no operation {call.op!r}")

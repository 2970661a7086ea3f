"""Write a Lowered as a Python script that needs only cudnn and cupy, with each call of gpu/cudnn/plans/emit.py.

A test checks that the script builds the same graph as `emit`, by the JSON of cuDNN's frontend.

A model's names are untrusted text. They appear only in string literals, as `ascii` writes them. No comment holds one,
because Python obeys `coding:` in a comment on the first two lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fusec.errors import LoweringError
from fusec.ir import DType
from fusec.lower_cudnn import Lowered
from fusec.lowering.cudnn_graph import PORTS, CudnnCall, CudnnGraph, CudnnTensor

# Names of a type in the script, in cudnn.data_type, and in numpy (where numpy lacks the type, that of its bits).
NAMES: dict[DType, tuple[str, str, str]] = {
    DType.F64: ("f64", "DOUBLE", "float64"),
    DType.F32: ("f32", "FLOAT", "float32"),
    DType.F16: ("f16", "HALF", "float16"),
    DType.BF16: ("bf16", "BFLOAT16", "uint16"),
    DType.I64: ("i64", "INT64", "int64"),
    DType.I32: ("i32", "INT32", "int32"),
    DType.I8: ("i8", "INT8", "int8"),
    DType.U8: ("u8", "UINT8", "uint8"),
    DType.BOOL: ("boolean", "BOOLEAN", "bool"),
    DType.F8E4M3: ("fp8", "FP8_E4M3", "uint8"),
}
AS_BITS = (DType.BF16, DType.F8E4M3)  # types that numpy lacks

_F32 = NAMES[DType.F32][:2]
_LINE = 120  # longest line of the script

_HEAD = """\
# A cuDNN graph, call by call; see README.txt
import sys
from pathlib import Path

import cudnn
import cupy
import numpy as np

TITLE = {title}
"""

_PLANS = """\
g.validate()
g.build_operation_graph()
g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
"""
_TRUE_FP32 = "g.deselect_numeric_notes([cudnn.numerical_note.TENSOR_CORE])  # nothing rounded to tf32\n"

_RUN = """\

driver, gpu = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
print(f"cuDNN {{cudnn.backend_version_string()}}, frontend {{cudnn.__version__}}, driver for CUDA {{driver}}, {{gpu}}")
before, expected = (dict(np.load(Path(__file__).with_name(name))) for name in ("inputs.npz", "expected.npz"))
passed = []
for plan in [int(index) for index in sys.argv[1:]] or range(g.get_execution_plan_count()):
    print(f"plan {{plan}}, {{g.get_plan_name_at_index(plan)}}", end=": ", flush=True)
    try:
        g.build_plan_at_index(plan)
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
        print(f"not built: {{error}}")
        continue
    memory = {{int(uid): cupy.asarray(array) for uid, array in before.items()}}  # outputs too, filled with NaN
    pointers = {{uid: array.data.ptr for uid, array in memory.items()}}{scalars}
    workspace = cupy.empty(g.get_workspace_size_plan_at_index(plan), cupy.uint8)
    g.execute_plan_at_index(pointers, workspace.data.ptr, plan, handle)
    for uid, allowed in {allowed}.items():
        got, want = {got}, {want}
        differ = (got != want) & ~(np.isnan(got) & np.isnan(want))
        error = np.linalg.norm(got[differ] - want[differ]) / (np.linalg.norm(want[np.isfinite(want)]) or 1.0)
        passed.append(error <= allowed)  # False for NaN
        print(f"relative L2 error of output {{uid}}: {{error:.1e}}, allowed {{allowed:.1e}}", flush=True)
sys.exit(0 if passed and all(passed) else 1)
"""

_WIDE = """\


def wide(array, kind):  # a type that NumPy lacks is stored as its bits
    if kind == "bf16":  # the upper half of a float
        return (array.astype(np.uint32) << 16).view(np.float32).astype(float)
    if kind == "fp8":  # a sign, 4 bits of exponent, 3 of fraction, and no infinity
        exponent, fraction = (array >> 3 & 15).astype(int), array & 7
        size = np.where(exponent > 0, (8.0 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
        return np.where(array & 127 == 127, np.nan, np.where(array > 127, -size, size))
    return array.astype(float)

"""


def script(lowered: Lowered, allowed: Mapping[int, float], title: str = "a cuDNN graph") -> str:
    """Return the source of a script that builds the graph and runs its plans on `inputs.npz`.

    The script runs all plans, or those given as arguments, and reads its files from its own folder. It exits with 1
    unless a plan builds and the outputs of all plans that build are close to `expected.npz`.

    allowed: largest relative L2 error, by uid of an output.

    Raises LoweringError if cuDNN's frontend lacks a type or an operation.
    """
    graph = lowered.graph
    names = dict(lowered.inputs) | {c.uid: c.literal.label for c in lowered.constants} | dict(lowered.outputs)
    made = {uid for call in graph.calls for uid in call.outputs}
    used = sorted({_names(t)[:2] for t in graph.tensors} | {NAMES[c.compute][:2] for c in graph.calls} | {_F32})
    types = ", ".join(name for name, _ in used), ", ".join(f"cudnn.data_type.{known}" for _, known in used)
    lines = [f"{types[0]} = {types[1]}", "handle = cudnn.create_handle()"]
    lines.append(
        "g = cudnn.pygraph(io_data_type=f32, intermediate_data_type=f32, compute_data_type=f32, handle=handle)"
    )
    lines += [_given(tensor) for tensor in graph.tensors if tensor.uid not in made]
    for call in graph.calls:
        lines += _made(graph, call)
    by_value = [t for t in graph.tensors if t.value is not None]
    lines += [f"s{t.uid} = np.array([{_scalar(t)}], np.{_names(t)[2]})" for t in by_value]
    addresses = ", ".join(f"{t.uid}: s{t.uid}.ctypes.data" for t in by_value)
    kinds = {t.uid: NAMES[t.dtype][0] for t in graph.outputs if t.dtype in AS_BITS}
    body = "\n".join(lines) + "\n" + _PLANS + ("" if graph.tensor_cores else _TRUE_FP32)
    run = _RUN.format(
        scalars=f" | {{{addresses}}}" if by_value else "",
        allowed="{" + ", ".join(f"{t.uid}: {allowed[t.uid]:.2e}" for t in graph.outputs) + "}",
        got=_wide("memory[uid].get()", kinds),
        want=_wide("expected[str(uid)]", kinds),
    )
    return _HEAD.format(title=ascii(title)) + _named(names) + body + (_WIDE if kinds else "") + run


def _wide(array: str, kinds: Mapping[int, str]) -> str:
    """Return the expression of an output as float64. kinds: names of the types that are stored as bits, by uid."""
    return f"wide({array}, {kinds}.get(uid))" if kinds else f"{array}.astype(float)"


def _names(tensor: CudnnTensor) -> tuple[str, str, str]:
    if tensor.dtype not in NAMES:
        raise LoweringError(f"a script has no element type {tensor.dtype.value}, because NumPy and CuPy lack it")
    return NAMES[tensor.dtype]


def _named(names: Mapping[int, str]) -> str:
    """Return a dictionary of the model's names by uid, wrapped to lines of _LINE characters."""
    lines = ["   "]
    for uid, name in sorted(names.items()):
        item = f" {uid}: {name!a},"
        if len(lines[-1]) + len(item) > _LINE:
            lines.append("   ")
        lines[-1] += item
    return "\n".join(["NAMES = {", *lines, "}"]) + "\n\n"


def _given(tensor: CudnnTensor) -> str:
    by_value = ", is_pass_by_value=True" if tensor.value is not None else ""
    place = f"dim={list(tensor.dims)}, stride={list(tensor.strides)}, data_type={_names(tensor)[0]}"
    return f"t{tensor.uid} = g.tensor({place}{by_value}, uid={tensor.uid})"


def _made(graph: CudnnGraph, call: CudnnCall) -> list[str]:
    """Return the lines of a call, and of the calls that set attributes of its results."""
    call_line = f"{', '.join(f't{uid}' for uid in call.outputs)} = {_call(call)}"
    setters = [_setters(graph, uid) for uid in call.outputs]
    if len(setters) == 1 and len(call_line + setters[0]) <= _LINE:
        return [call_line + setters[0]]
    return [call_line, *(f"t{uid}{each}" for uid, each in zip(call.outputs, setters, strict=True))]


def _setters(graph: CudnnGraph, uid: int) -> str:
    """Return the calls that set attributes of a result."""
    tensor = graph.tensor(uid)
    setters = f".set_uid({tensor.uid}).set_dim({list(tensor.dims)}).set_stride({list(tensor.strides)})"
    setters += f".set_data_type({_names(tensor)[0]})"
    return setters if tensor.virtual else f"{setters}.set_output(True)"


def _call(call: CudnnCall) -> str:
    """Return the call of a method of the frontend, as `emit` makes it. fp32 is the graph's compute type."""
    operands = [f"t{uid}" for uid in call.inputs]
    compute = {} if call.compute is DType.F32 else {"compute_data_type": NAMES[call.compute][0]}
    attributes = {k: _literal(v) for k, v in call.attributes}
    match call.op:
        case "conv_fprop" | "conv_dgrad" | "conv_wgrad":
            if attributes.pop("flipped", None):
                attributes["convolution_mode"] = "cudnn._compiled_module.convolution_mode.CONVOLUTION"
            return _text(call.op, [], dict(zip(PORTS[call.op][0], operands, strict=True)) | attributes | compute)
        case "matmul" | "genstats":
            return _text(call.op, operands, compute)
        case "sdpa":
            named = dict(zip(PORTS[call.op][0], operands, strict=False)) | attributes | {"generate_stats": "False"}
            return _text(call.op, [], named | compute) + "[0]"
        case "sdpa_train":
            named = dict(zip(PORTS[call.op][0], operands, strict=False)) | attributes | {"generate_stats": "True"}
            return _text("sdpa", [], named | compute)
        case "sdpa_backward":
            return _text(call.op, [], dict(zip(PORTS[call.op][0], operands, strict=False)) | attributes | compute)
        case "pointwise":
            named = {"swish_beta" if k == "beta" else k: v for k, v in attributes.items()}
            return _text(call.mode, operands, named | compute)
        case "reduction":
            return _text(call.op, operands, {"mode": f"cudnn.reduction_mode.{call.mode.upper()}"} | compute)
        case "layernorm" | "rmsnorm" | "instancenorm":
            x, scale, *bias, epsilon = operands
            named = {"norm_forward_phase": "cudnn.norm_forward_phase.INFERENCE", "input": x, "scale": scale}
            named |= {"bias": bias[0]} if bias else {}
            return _text(call.op, [], named | {"epsilon": epsilon} | compute) + "[0]"
        case "batchnorm" | "batchnorm_backward":
            names = ({"x": "input", "dy": "grad"}.get(port, port) for port in PORTS[call.op][0])
            return _text(call.op, [], dict(zip(names, operands, strict=True)) | compute)
        case _:
            raise LoweringError(f"the cuDNN frontend has no operation {call.op!r}")


def _text(method: str, operands: list[str], named: Mapping[str, str]) -> str:
    return f"g.{method}({', '.join([*operands, *(f'{k}={v}' for k, v in named.items())])})"


def _scalar(tensor: CudnnTensor) -> str:
    if tensor.dtype in AS_BITS:
        return str(np.array(tensor.value, tensor.dtype.numpy).view(NAMES[tensor.dtype][2]))
    return _literal(tensor.value)


def _literal(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(list(value) if isinstance(value, tuple) else value)

"""Read a torch ExportedProgram as a Source.

torch's own exporter writes the ONNX model. The parameters are not copied: the Source reads them from torch's memory.
Only this module, `torch_fast_paths` and `fusec.torch_backend` import torch; the rest imports them on demand.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked

from fusec.errors import ModelError
from fusec.frontends import Source
from fusec.frontends.torch_fast_paths import without_fast_paths
from fusec.ir import DType, Literal, TensorType

DTYPES: Mapping[Any, DType] = {
    torch.float64: DType.F64,
    torch.float32: DType.F32,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.int64: DType.I64,
    torch.int32: DType.I32,
    torch.int16: DType.I16,
    torch.int8: DType.I8,
    torch.uint64: DType.U64,
    torch.uint32: DType.U32,
    torch.uint16: DType.U16,
    torch.uint8: DType.U8,
    torch.bool: DType.BOOL,
    torch.float8_e4m3fn: DType.F8E4M3,
    torch.float8_e4m3fnuz: DType.F8E4M3FNUZ,
    torch.float8_e5m2: DType.F8E5M2,
    torch.float8_e5m2fnuz: DType.F8E5M2FNUZ,
}
# NumPy and DLPack lack some of torch's types; tensors of these types are passed as integers of the same size
CARRIERS: Mapping[Any, Any] = {
    torch.bfloat16: torch.int16,
    torch.bool: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}
# several types, because torch's exporter has no common base class for its errors
EXPORT_ERRORS = (
    torch.onnx.OnnxExporterError,
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
)
_log = logging.getLogger("torch.onnx._internal.exporter._registration")


def source(program: Any) -> Source:
    """Make a Source of a `torch.export.ExportedProgram` for inference.

    `fusec.compile` and `compile_dynamic` accept the result. Symbolic dims stay symbolic.

    Raises ModelError if the program changes its inputs or buffers, or when torch cannot write it as ONNX.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise ModelError(
            f"an ExportedProgram is wanted (torch.export.export(model.eval(), inputs)), not {type(program).__name__}"
        )
    model, proto = _onnx(program)
    constants = {
        name: Literal(TensorType(tuple(t.shape), dtype_of(t)), lambda t=t: to_numpy(t), name)
        for name, t in model.items()
    }
    return Source(proto, constants, "ExportedProgram")


def _onnx(program: Any) -> tuple[dict[str, Any], Any]:
    """Return the parameters of a program by name, and its ONNX model, in which they are inputs."""
    level = _log.level
    _log.setLevel(logging.ERROR)  # because it warns when torchvision is not installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # because torch's exporter calls deprecated functions of torch
            written = torch.onnx.export(without_fast_paths(program), dynamo=True, optimize=False, verbose=False)
            _require_pure(written.exported_program.graph_signature)
            graph = written.model.graph
            tensors: dict[str, Any] = {}
            for name, value in list(graph.initializers.items()):
                tensor: Any = getattr(value.const_value, "raw", None)
                if isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES:
                    tensors[name] = tensor
                    value.const_value = None
                    del graph.initializers[name]
                    graph.inputs.append(value)
            return tensors, written.model_proto
    except EXPORT_ERRORS as error:
        raise ModelError(f"torch cannot write the model as ONNX: {reason(error)}") from error
    finally:
        _log.setLevel(level)


def _require_pure(signature: Any) -> None:
    """Check that a program changes neither inputs nor buffers, since its ONNX model would not show it.

    Raises ModelError if it does.
    """
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if changed:
        raise ModelError(f"the model changes {', '.join(changed)}: only inference is compiled, call model.eval() first")


def reason(error: BaseException) -> str:
    """Return the first line of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def dtype_of(tensor: Any) -> DType:
    """Return the DType of a tensor. Raises ModelError if fusec lacks its element type."""
    if tensor.dtype not in DTYPES:
        raise ModelError(f"element type {tensor.dtype} is not supported")
    return DTYPES[tensor.dtype]


def to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """Convert a tensor to an array. The array shares the memory of a tensor on the host."""
    host = tensor.detach().cpu()
    carrier = CARRIERS.get(host.dtype)
    return host.numpy() if carrier is None else host.view(carrier).numpy().view(DTYPES[tensor.dtype].numpy)


def from_numpy(array: np.ndarray[Any, Any]) -> Any:
    """Wrap an array as a tensor that shares its memory."""
    dtype = next(t for t, known in DTYPES.items() if known.numpy == array.dtype)
    carrier = CARRIERS.get(dtype)
    if carrier is None:
        return torch.from_numpy(array)
    plain = np.dtype(str(carrier).removeprefix("torch."))
    return torch.from_numpy(array.view(plain)).view(dtype)

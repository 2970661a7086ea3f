"""Pass tensors to an executable and back without a copy, and tell their memory formats."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked

from fusec.dynamic_shapes.executable import DynamicExecutable
from fusec.errors import ExecutionError
from fusec.frontends import Source
from fusec.frontends.torch_export import CARRIERS, DTYPES, from_numpy, to_numpy
from fusec.ir import channels_last


def is_tensor(x: Any) -> bool:
    """Tell if a value is a tensor."""
    return isinstance(x, torch.Tensor)


def named(model: Source, given: Sequence[Any], made: Sequence[Any]) -> list[str]:
    """Return the names of the inputs and outputs that are channels last, from their tensors in order."""
    inputs, outputs = model.interface
    pairs = (*zip(inputs, given, strict=False), *zip(outputs, made, strict=False))
    return [declared.name for declared, tensor in pairs if is_channels_last(tensor)]


def is_channels_last(tensor: Any) -> bool:
    """Tell if a tensor, or the example of one, is packed channels last and not row-major as well."""
    if not is_tensor(tensor) or tensor.ndim not in (4, 5) or tensor.layout is not torch.strided:
        return False
    shape, strides = ([_hint(size) for size in sizes] for sizes in (tensor.shape, tensor.stride()))
    wide = [dim for dim in channels_last(tensor.ndim) if shape[dim] != 1]
    step = 1
    for dim in reversed(wide):
        if strides[dim] != step:
            return False
        step *= shape[dim]
    return wide != sorted(wide)


def _hint(size: Any) -> int:
    """Return a size; of a symbolic one the example value, because any other query would make the size fixed."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else -1


def run(executable: DynamicExecutable, tensors: Sequence[Any]) -> list[Any]:
    """Return the outputs for tensors in the order of the inputs.

    Memory on the device is shared, and work is queued on the caller's stream.
    """
    on_gpu = next((t.device for t in tensors if t.is_cuda), None)
    with _stream(on_gpu):
        feeds = {spec.name: lent(t, executable) for spec, t in zip(executable.inputs, tensors, strict=True)}
        results = executable.run(None, feeds)
        declared = (spec.dtype for spec in executable.outputs)
        return [_tensor(a, a.dtype if t is None else t) for a, t in zip(results, declared, strict=True)]


def lent(tensor: Any, executable: DynamicExecutable) -> Any:
    """Return an array that shares the memory of a tensor."""
    if not tensor.is_cuda:
        return to_numpy(tensor)
    if tensor.device.index != 0:
        raise ExecutionError(f"a tensor is on {tensor.device}, fusec runs on cuda:0")
    if executable.device == "simulated":
        raise ExecutionError("the model runs in simulation here: its inputs must be on the CPU")
    from fusec.gpu.launch.cupy_arrays import borrowed  # needs cupy, which only a GPU machine must have

    held, carrier = tensor.detach(), CARRIERS.get(tensor.dtype)
    return borrowed(held if carrier is None else held.view(carrier), DTYPES[tensor.dtype].numpy)


def _tensor(array: Any, element_type: Any) -> Any:
    """Return a tensor that shares the memory of a result. element_type: NumPy's; the GPU has bytes for narrow types."""
    if not hasattr(array, "__cuda_array_interface__"):
        return from_numpy(array)
    dtype = next(t for t, known in DTYPES.items() if known.numpy == element_type)
    carrier = CARRIERS.get(dtype)
    if carrier is None:
        return torch.from_dlpack(array)
    return torch.from_dlpack(array.view(str(carrier).removeprefix("torch."))).view(dtype)


def _stream(device: Any) -> AbstractContextManager[Any]:
    """Make torch's current stream the stream of CuPy."""
    if device is None:
        return nullcontext()
    from fusec.gpu.launch.cupy_arrays import on_stream  # as above

    return on_stream(torch.cuda.current_stream(device).cuda_stream)

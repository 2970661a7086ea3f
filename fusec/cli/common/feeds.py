"""Prepare and summarise a run for `fusec run`: inputs, a summary of the outputs, and a comparison with onnxruntime."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fusec.convert import LIMIT
from fusec.diagnostics.verify import random_array, relative_l2
from fusec.driver import AnyExecutable
from fusec.errors import FusecError, LoweringError
from fusec.ir import BYTES, DType, TensorType
from fusec.lowering.packing import in_order
from fusec.ops import Cast
from fusec.runtime import Executable
from fusec.system.printable import printable

TEXT_SUFFIXES = (".txt", ".fusec-ir")
_FP8 = (DType.F8E4M3, DType.F8E5M2)


def feeds(executable: AnyExecutable, arrays: Mapping[str, tuple[Path, Any]], seed: int) -> dict[str, Any]:
    """Return the given arrays, checked, and random ones for the other inputs."""
    known = {spec.name: TensorType(spec.shape, DType.of_host(spec.dtype), spec.order) for spec in executable.inputs}
    for name, (path, _) in arrays.items():
        if name not in known:
            raise FusecError(
                f"{path}: the model has no input {name!r}; inputs: {printable(', '.join(known)) or 'none'}"
            )
    rng = np.random.default_rng(seed)
    feeds: dict[str, Any] = {}
    for name, type in known.items():
        if name not in arrays:
            feeds[name] = in_order(random_array(rng, type), type)
            continue
        path, mapped = arrays[name]
        want = type.dtype.numpy
        # a .npy file cannot name bfloat16: numpy writes it as two bytes without a type
        array = mapped.view(want) if want.name == "bfloat16" and mapped.dtype.str[1:] == "V2" else mapped
        if DType.of_host(array.dtype) is not type.dtype:
            wanted = "strings" if type.dtype is DType.STRING else want
            raise FusecError(f"{path}: input {name!r} takes {wanted}, not {array.dtype}")
        if array.shape != type.shape:
            raise FusecError(f"{path}: input {name!r} has shape {list(type.shape)}, not {list(array.shape)}")
        feeds[name] = in_order(array, type)
    return feeds


def statistics(name: str, array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return figures that show a difference between two results at a glance; strings have none."""
    if array.dtype == object:
        return {"name": name, "dtype": "string", "shape": list(array.shape), "mean": None, "std": None}
    wide = array.astype(np.float64)
    mean, std = (float(wide.mean()), float(wide.std())) if wide.size else (0.0, 0.0)
    return {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "mean": mean, "std": std}


def need_onnxruntime(compare: str) -> None:
    """Check --compare before the model is compiled. Raises FusecError if onnxruntime is not installed."""
    if compare != "onnxruntime":
        raise FusecError(f"--compare takes onnxruntime, not {compare!r}")
    if importlib.util.find_spec("onnxruntime") is None:
        raise FusecError("--compare needs onnxruntime: pip install 'fusec[demo]'")


def onnx_of(model: str, executable: AnyExecutable) -> str | bytes:
    """Return what onnxruntime reads: an ONNX file itself, else the graph that was imported, written as ONNX.

    A `.fusec` file carries that graph. Raises FusecError if ONNX cannot express it, or it is too large for one file.
    """
    if not model.endswith((".fusec", *TEXT_SUFFIXES)) or not isinstance(executable, Executable):
        return model
    from fusec.exporters.onnx import to_onnx  # here, because importing onnx takes long

    try:
        exported = to_onnx(executable.compiled.source)
    except LoweringError as error:
        raise FusecError(f"{model}: --compare needs its graph as ONNX, which cannot express it: {error}") from error
    if exported.ByteSize() > LIMIT:
        raise FusecError(f"{model}: --compare needs its graph as ONNX, and it takes more than {LIMIT} bytes")
    return exported.SerializeToString()


def has_fp8(executable: AnyExecutable) -> bool:
    """Tell if the imported model has 8-bit floats. False for a model with host steps."""
    if not isinstance(executable, Executable):
        return False
    return any(value.type.dtype in _FP8 for value in executable.compiled.source.values())


def rounds_less(executable: AnyExecutable) -> bool:
    """Tell if roundings of a quantised model may be left out, so that a result differs from onnxruntime's by a step."""
    programs = [executable] if isinstance(executable, Executable) else executable.programs
    return any(
        isinstance(node.op, Cast) and node.op.to in BYTES
        for each in programs
        if not each.compiled.options.as_source
        for node in each.compiled.source.nodes
    )


def distances(
    model: str | bytes, name: str, feeds: Mapping[str, Any], got: Mapping[str, Any], optimised: bool
) -> dict[str, float]:
    """Return the relative L2 distance of each output from onnxruntime's on the CPU.

    name: name of the model in errors.
    optimised: use onnxruntime's optimisations.
    """
    import onnxruntime  # here, because only the extra `demo` installs it

    # onnxruntime's errors have no common base class, and their extension module has no types
    kinds = vars(importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")).values()
    errors = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))
    try:
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3  # errors only, because it warns of every initializer that nothing uses
        if not optimised:
            settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        # By default it rounds the other operand to 8 bits where weights have 4. Level 1 computes in fp32.
        settings.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
        taken = {i.name for i in session.get_inputs()}
        want = session.run(list(got), {name: array for name, array in feeds.items() if name in taken})
    except (*errors, RuntimeError, ValueError) as error:
        raise FusecError(f"{name}: onnxruntime cannot run it: {error}") from error
    return {out: _distance(array, np.asarray(w)) for (out, array), w in zip(got.items(), want, strict=True)}


def _distance(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    """Return the relative L2 distance of numbers, or the share of strings that differ."""
    return float(np.mean(got != want)) if got.dtype == object and got.size else relative_l2(got, want)

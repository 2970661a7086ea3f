"""Compile an exported model to fused cuDNN plans. Public names are imported at their first use."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusec.artifacts.fusec_file import save
    from fusec.builder import Builder, Tensor
    from fusec.driver import compile, compile_dynamic, load
    from fusec.dynamic_shapes.executable import DynamicExecutable
    from fusec.errors import (
        CheckError,
        ExecutionError,
        FusecError,
        LoweringError,
        ModelError,
        TargetError,
        VerifyError,
    )
    from fusec.frontends.custom_ops import CustomOp
    from fusec.generation.generator import Generator
    from fusec.gradients import backward, grad
    from fusec.ir import DType, Graph, TensorType
    from fusec.quantization.quantize import QuantizedModel, quantize
    from fusec.runtime import Executable
    from fusec.scale.device_pool.pool import DevicePool, pool
    from fusec.scale.training.data_parallel import DataParallel, data_parallel
    from fusec.scale.training.worker_group import run_workers
    from fusec.serving.predictor import Predictor
    from fusec.session import InferenceSession
    from fusec.text import parse
    from fusec.torch_backend import from_torch

__version__ = "0.1.0"

logging.getLogger("fusec").addHandler(logging.NullHandler())  # a program that uses fusec decides what it shows

_HOMES = {
    "compile": "driver",
    "load": "driver",
    "compile_dynamic": "driver",
    "DynamicExecutable": "dynamic_shapes.executable",
    "CustomOp": "frontends.custom_ops",
    "InferenceSession": "session",
    "Generator": "generation.generator",
    "Predictor": "serving.predictor",
    "from_torch": "torch_backend",
    **dict.fromkeys(("quantize", "QuantizedModel"), "quantization.quantize"),
    "save": "artifacts.fusec_file",
    "Executable": "runtime",
    **dict.fromkeys(("pool", "DevicePool"), "scale.device_pool.pool"),
    **dict.fromkeys(("data_parallel", "DataParallel"), "scale.training.data_parallel"),
    "run_workers": "scale.training.worker_group",
    "parse": "text",
    "Builder": "builder",
    "Tensor": "builder",
    "backward": "gradients",
    "grad": "gradients",
    **dict.fromkeys(("DType", "Graph", "TensorType"), "ir"),
    **dict.fromkeys(
        ("CheckError", "ExecutionError", "FusecError", "LoweringError", "ModelError", "TargetError", "VerifyError"),
        "errors",
    ),
}

__all__ = [
    "Builder",
    "CheckError",
    "CustomOp",
    "DType",
    "DataParallel",
    "DevicePool",
    "DynamicExecutable",
    "Executable",
    "ExecutionError",
    "FusecError",
    "Generator",
    "Graph",
    "InferenceSession",
    "LoweringError",
    "ModelError",
    "Predictor",
    "QuantizedModel",
    "TargetError",
    "Tensor",
    "TensorType",
    "VerifyError",
    "__version__",
    "backward",
    "compile",
    "compile_dynamic",
    "data_parallel",
    "from_torch",
    "grad",
    "load",
    "parse",
    "pool",
    "quantize",
    "run_workers",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fusec' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fusec.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

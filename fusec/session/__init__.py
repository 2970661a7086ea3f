"""Run models through the calls of onnxruntime: `import fusec.session as onnxruntime`."""

from __future__ import annotations

from typing import NoReturn

from fusec.session.inference_session import InferenceSession
from fusec.session.io_binding import IOBinding
from fusec.session.missing_names import MODULE
from fusec.session.model_interface import ModelMeta, NodeArg
from fusec.session.module_calls import (
    INTERFACE,
    disable_telemetry_events,
    enable_telemetry_events,
    get_build_info,
    get_version_string,
    preload_dlls,
    set_default_logger_verbosity,
    set_global_thread_pool_sizes,
)
from fusec.session.ort_value import OrtValue
from fusec.session.providers import CPU, GPU, get_all_providers, get_available_providers, get_device
from fusec.session.session_options import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
)
from fusec.session.settings import set_default_logger_severity

ModelMetadata = ModelMeta  # onnxruntime's name
__version__ = INTERFACE  # because programs compare it with releases of onnxruntime


def __getattr__(name: str) -> NoReturn:
    """Say why a name of onnxruntime's module is missing."""
    reason = MODULE.get(name)
    raise AttributeError(f"module 'fusec.session' has no attribute {name!r}{f': {reason}' if reason else ''}")


__all__ = [
    "CPU",
    "GPU",
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "ModelMeta",
    "ModelMetadata",
    "NodeArg",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_version_string",
    "preload_dlls",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_global_thread_pool_sizes",
]

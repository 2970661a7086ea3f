"""Run models through the calls of onnxruntime: `import fusec.session as onnxruntime`."""

from fusec.session.inference_session import InferenceSession
from fusec.session.io_binding import IOBinding
from fusec.session.model_interface import ModelMeta, NodeArg
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
    "get_all_providers",
    "get_available_providers",
    "get_device",
    "set_default_logger_severity",
]

"""Run models through the calls of onnxruntime."""

from fusec.session.inference_session import CPU, GPU, InferenceSession, ModelMeta, NodeArg
from fusec.session.io_binding import IOBinding
from fusec.session.ort_value import OrtValue

__all__ = ["CPU", "GPU", "IOBinding", "InferenceSession", "ModelMeta", "NodeArg", "OrtValue"]

"""Exported models without their weights: large random tensors are left out and drawn again when a model is read."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper

ARCHIVE = Path(__file__).with_name("models.zip")
LARGE = 128  # elements; what is smaller, or has one dim (statistics must stay positive), stays as it is


def pack(models: dict[str, ModelProto], path: Path = ARCHIVE) -> None:
    """Write models into one archive, each weight as its shape and spread."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, model in sorted(models.items()):
            for node in model.graph.node:
                node.ClearField("doc_string")
                node.ClearField("metadata_props")
            for function in model.functions:
                for node in function.node:
                    node.ClearField("doc_string")
                    node.ClearField("metadata_props")
            for holder in (model, model.graph):
                holder.ClearField("metadata_props")
                holder.ClearField("doc_string")
            model.graph.ClearField("value_info")
            for tensor in model.graph.initializer:
                tensor.ClearField("metadata_props")
                if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1 and np.prod(tensor.dims) >= LARGE:
                    spread = float(numpy_helper.to_array(tensor).std())
                    tensor.ClearField("raw_data")
                    tensor.ClearField("float_data")
                    tensor.doc_string = f"normal {spread:.6g}"
            member = zipfile.ZipInfo(f"{name}.onnx")  # without a time: equal models are equal archives
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, model.SerializeToString(deterministic=True))


def names(path: Path = ARCHIVE) -> list[str]:
    """The models there are."""
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".onnx") for name in archive.namelist()]


def read(name: str, path: Path = ARCHIVE) -> ModelProto:
    """A model with weights drawn anew: normal, as wide as they were, the same each time."""
    with zipfile.ZipFile(path) as archive:
        model = onnx.load_from_string(archive.read(f"{name}.onnx"))
    for tensor in model.graph.initializer:
        kind, _, spread = tensor.doc_string.partition(" ")
        if kind == "normal":
            seed = int.from_bytes(hashlib.sha256(f"{name} {tensor.name}".encode()).digest()[:8], "big")
            weights = np.random.default_rng(seed).standard_normal(tuple(tensor.dims)) * float(spread)
            tensor.CopyFrom(numpy_helper.from_array(weights.astype(np.float32), tensor.name))
    return model

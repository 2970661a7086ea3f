"""Compiled files that the tests of serving share, and what they compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from frontends.onnx.models import info, model
from onnx import TensorProto, helper

import fusec

node = helper.make_node


def weights(seed: int, *shape: int) -> np.ndarray:
    return (0.3 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def classifier() -> onnx.ModelProto:
    """Bytes of images, normalised on the device, a convolution, a pool and a classifier."""
    nodes = [
        node("Cast", ["image"], ["f"], to=TensorProto.FLOAT),
        node("Mul", ["f", "scale"], ["n"]),
        node("Conv", ["n", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("GlobalAveragePool", ["r"], ["g"]),
        node("Flatten", ["g"], ["v"]),
        node("MatMul", ["v", "fc"], ["logits"]),
        node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0),
    ]
    held = {"scale": np.array(1 / 128, np.float32), "w": weights(1, 8, 3, 3, 3), "fc": weights(2, 8, 5)}
    outputs = [info("logits", ["N", 5]), info("label", ["N"], TensorProto.INT64)]
    return model(nodes, [info("image", ["N", 3, 8, 8], TensorProto.UINT8)], outputs, held)


def saved(folder: Path, sizes: list[int]) -> Path:
    """Write the classifier for batch sizes."""
    path = folder / "classifier.fusec"
    given = {"N": sizes[0]} if len(sizes) == 1 else {"N": (sizes[0], sizes[-1])}
    buckets = None if len(sizes) == 1 else {"N": sizes}
    fusec.compile(classifier(), target="h200", shapes=given, buckets=buckets, simulate=True).save(path)
    return path


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 8, 8)).astype(np.uint8)


def slow(folder: Path) -> Path:
    """Write a model that takes long in simulation: convolutions of many channels, for one image."""
    nodes = [node("Conv", ["x", "w0"], ["c0"], pads=[1, 1, 1, 1])]
    nodes += [node("Conv", [f"c{i}", "w"], [f"c{i + 1}"], pads=[1, 1, 1, 1]) for i in range(6)]
    nodes += [node("GlobalAveragePool", ["c6"], ["y"])]
    held = {"w0": weights(0, 64, 3, 3, 3), "w": weights(1, 64, 64, 3, 3) * np.float32(0.1)}
    proto = model(nodes, [info("x", [1, 3, 64, 64])], [info("y", [1, 64, 1, 1])], held)
    path = folder / "slow.fusec"
    exe = fusec.compile(proto, target="h200", simulate=True)
    assert isinstance(exe, fusec.Executable)
    exe.save(path)
    return path

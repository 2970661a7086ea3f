"""Make the models that a server is measured with: ResNet-50, a small network, and one that takes no time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import fusec
from benchmarks.serving import stub_device
from examples.models import light, randomised


@dataclass(frozen=True)
class Case:
    """A model and how it is served and asked."""

    model: str
    side: int
    batches: tuple[int, ...]
    precision: str


CASES = {
    "resnet50": Case("resnet50", 224, (1, 8, 16, 32, 48, 64), "fp16"),
    "small": Case("small", 64, (1, 2, 4, 8), "fp32"),
    "stub": Case("stub", 224, (1, 8, 16, 32, 48, 64), "fp16"),
}


def with_preprocessing(model: onnx.ModelProto, side: int) -> onnx.ModelProto:
    """Let a network for one float image take any number of images as bytes, and normalise them itself."""
    graph = model.graph
    taken = {tensor.name for tensor in graph.initializer}
    (image,) = (value for value in graph.input if value.name not in taken)
    name = image.name
    graph.input.remove(image)
    graph.input.insert(0, helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", 3, side, side]))
    mean = np.array([123.675, 116.28, 103.53], np.float32).reshape(1, 3, 1, 1)  # of ImageNet, as torchvision has it
    scale = (1 / np.array([58.395, 57.12, 57.375], np.float32)).reshape(1, 3, 1, 1)
    graph.initializer.extend([numpy_helper.from_array(mean, "mean"), numpy_helper.from_array(scale, "scale")])
    if model.ir_version < 4:
        graph.input.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3, 1, 1]) for n in ("mean", "scale"))
    first = [
        helper.make_node("Cast", ["image"], ["as_float"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["as_float", "mean"], ["centred"]),
        helper.make_node("Mul", ["centred", "scale"], [name]),
    ]
    nodes = [*first, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    shapes = {node.input[1] for node in nodes if node.op_type == "Reshape"}
    for tensor in graph.initializer:
        if tensor.name in shapes:
            sizes = numpy_helper.to_array(tensor).copy()
            sizes[0] = -1
            tensor.CopyFrom(numpy_helper.from_array(sizes, tensor.name))
    for value in graph.output:
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    return model


def network(case: Case) -> onnx.ModelProto:
    """Return the network of a case."""
    if case.model == "resnet50":
        return with_preprocessing(randomised(onnx.load(light("resnet50")), 0), case.side)
    rng = np.random.default_rng(0)
    weights = {"w0": (32, 3, 3, 3), **{f"w{i}": (32, 32, 3, 3) for i in range(1, 5)}, "fc": (32, 10)}
    drawn = {n: (rng.standard_normal(s) * np.sqrt(2 / np.prod(s[1:]))).astype(np.float32) for n, s in weights.items()}
    nodes = [
        helper.make_node("Conv", ["x" if i == 0 else f"r{i - 1}", f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1])
        for i in range(5)
    ]
    nodes += [helper.make_node("Relu", [f"c{i}"], [f"r{i}"]) for i in range(5)]
    nodes.sort(key=lambda node: (int(node.output[0][1:]), node.op_type != "Conv"))
    nodes += [
        helper.make_node("GlobalAveragePool", ["r4"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "fc"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, case.side, case.side])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])],
        [numpy_helper.from_array(array, name) for name, array in drawn.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return with_preprocessing(model, case.side)


def compiled(case: Case, folder: Path, tune: str, budget: float) -> Path:
    """Compile and tune a case for all its batches, and return the file."""
    path = folder / f"{case.model}.fusec"
    if case.model == "stub":
        return stub_device.compiled(case.side, case.batches, path)
    sizes = {"N": (case.batches[0], case.batches[-1])}
    made = fusec.compile(
        network(case), precision=case.precision, shapes=sizes, buckets={"N": case.batches}, tune=tune, budget=budget
    )
    made.save(path)
    return path


def images(case: Case, count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, 3, case.side, case.side)).astype(np.uint8)

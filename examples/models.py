"""Load exported networks for examples, tests and benchmarks: the nine light models that the onnx package ships.

Each weight tensor in the files repeats one number, which would hide a wrong layout or channel order. `randomised` draws
seeded weights that keep the scale of activations through the whole network.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

_DATA = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
LIGHT = (
    "light_bvlc_alexnet",
    "light_densenet121",
    "light_inception_v1",
    "light_inception_v2",
    "light_resnet50",
    "light_shufflenet",
    "light_squeezenet",
    "light_vgg19",
    "light_zfnet512",
)

# Ops between a weight and its use that only reshape it.
_RESHAPING = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}
# Ops whose results are their operands' values, unchanged or averaged.
_MOVING = _RESHAPING | {"AveragePool", "Concat", "Dropout", "GlobalAveragePool", "LRN", "MaxPool", "Transpose"}
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16}
_FLOAT_NAMES = {"float16", "float32", "float64", "bfloat16"}


def light(name: str) -> Path:
    """Return the file of a light model: 'light_resnet50', or 'resnet50' for short."""
    full = name if name.startswith("light_") else f"light_{name}"
    if full not in LIGHT:
        raise ValueError(f"no light model {name!r}; there are {', '.join(LIGHT)}")
    return _DATA / f"{full}.onnx"


def reference_inputs(name: str) -> dict[str, np.ndarray]:
    """Return the inputs of `reference_outputs`: ramps from 0 to 1, as in onnx's own backend test."""
    return {
        name: (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)).astype(np.float32)
        for name, shape in input_shapes(onnx.load(light(name))).items()
    }


def reference_outputs(name: str) -> dict[str, np.ndarray]:
    """Return the outputs that onnx ships with a light model, for `reference_inputs`."""
    path = light(name)
    outputs: dict[str, np.ndarray] = {}
    for index, output in enumerate(onnx.load(path).graph.output):
        tensor = TensorProto.FromString(path.with_name(f"{path.stem}_output_{index}.pb").read_bytes())
        outputs[output.name] = numpy_helper.to_array(tensor)
    return outputs


def input_shapes(model: ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs that are no initializers, by name; a symbolic dim counts as 1."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name: tuple(dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim)
        for value in model.graph.input
        if value.name not in weights
    }


def random_inputs(model: ModelProto, seed: int) -> dict[str, np.ndarray]:
    """Draw float32 inputs from a normal distribution with mean 0; images get coarse patches, as a picture has.

    Global pooling averages plain noise to almost nothing, so every input would give the same output.
    """
    rng = np.random.default_rng(seed)
    inputs: dict[str, np.ndarray] = {}
    for name, shape in input_shapes(model).items():
        x = rng.standard_normal(shape)
        if len(shape) == 4:
            patch = [-(-side // 4) for side in shape[2:]]
            coarse = rng.standard_normal((*shape[:2], 4, 4)).repeat(patch[0], 2).repeat(patch[1], 3)
            x = 0.6 * x + 0.8 * coarse[:, :, : shape[2], : shape[3]]
        inputs[name] = x.astype(np.float32)
    return inputs


def randomised(model: ModelProto, seed: int) -> ModelProto:
    """Copy a model with newly drawn floating weights, as initializers. The use of a weight decides its scale."""
    rng = np.random.default_rng(seed)
    copy = ModelProto.FromString(model.SerializeToString())
    graph = copy.graph
    weights = _weights(copy)
    uses = _uses(copy)
    gains, rectified = _gains(copy), _rectified(copy)
    drawn: dict[str, np.ndarray] = {}
    for name, old in weights.items():
        node, slot = uses.get(name, (None, 0))
        drawn[name] = _draw(rng, old.shape, node, slot, gains, rectified).astype(old.dtype, copy=False)

    nodes = [n for n in graph.node if not (n.op_type in ("ConstantOfShape", "Constant") and n.output[0] in drawn)]
    del graph.node[:]
    graph.node.extend(nodes)
    needed = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    others = [t for t in graph.initializer if t.name not in drawn and t.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(others)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in drawn.items() if name in needed)
    # IR version 3 requires each initializer to be an input, too
    listed = {t.name for t in graph.initializer}
    before = {t.name for t in model.graph.initializer}
    inputs = [v for v in graph.input if v.name not in before or v.name in listed]
    if copy.ir_version < 4:
        known = {v.name for v in inputs}
        inputs += [
            helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
            for t in graph.initializer
            if t.name not in known
        ]
    del graph.input[:]
    graph.input.extend(inputs)
    return copy


def _weights(model: ModelProto) -> dict[str, np.ndarray]:
    """Return the floating initializers, and the floating constants of more than one element, by name."""
    found: dict[str, np.ndarray] = {}
    integers: dict[str, np.ndarray] = {}
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        (found if tensor.data_type in _FLOATS else integers)[tensor.name] = array
    for node in model.graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "ConstantOfShape" and node.input[0] in integers:
            value = numpy_helper.to_array(attributes["value"]) if "value" in attributes else np.zeros(1, np.float32)
            if value.dtype.name in _FLOAT_NAMES:
                found[node.output[0]] = np.broadcast_to(value[0], tuple(integers[node.input[0]]))
        elif node.op_type == "Constant" and isinstance(attributes.get("value"), TensorProto):
            value = numpy_helper.to_array(attributes["value"])
            if value.dtype.name in _FLOAT_NAMES and value.size > 1:
                found[node.output[0]] = value
    return found


def _uses(model: ModelProto) -> dict[str, tuple[NodeProto, int]]:
    """Map each value's name to the first node that computes with it and the operand's index, across reshapes."""
    uses: dict[str, tuple[NodeProto, int]] = {}
    for node in reversed(model.graph.node):
        for slot, name in enumerate(node.input):
            if node.op_type in _RESHAPING and slot == 0 and node.output[0] in uses:
                uses[name] = uses[node.output[0]]
            elif node.op_type not in _RESHAPING:
                uses[name] = (node, slot)
    return uses


def _gains(model: ModelProto) -> dict[str, float]:
    """Return factors for results that need a smaller scale, by name.

    Without them, residual sums would grow from block to block, and softmax would give one-hot results. Pooling,
    reshapes and ReLU pass the factor on to the layer with weights before them.
    """
    computed = set(input_shapes(model))
    for node in model.graph.node:
        if not computed.isdisjoint(node.input):
            computed.update(node.output)
    gains: dict[str, float] = {}
    for node in reversed(model.graph.node):
        operands = [name for name in node.input if name in computed]
        result = node.output[0]
        if node.op_type == "Softmax" or (node.op_type in ("Sum", "Add") and len(operands) > 1):
            gains.update(dict.fromkeys(operands, 0.5))
        elif (
            node.op_type in (*_RESHAPING, "AveragePool", "Dropout", "GlobalAveragePool", "Relu")
            and result in gains
            and operands
        ):
            gains.setdefault(operands[0], gains[result])
    return gains


def _rectified(model: ModelProto) -> set[str]:
    """Return the names of values that are never negative: results of ReLU, also moved, pooled or concatenated."""
    found: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "Relu" or (node.op_type in _MOVING and not found.isdisjoint(node.input)):
            found.update(node.output)
    return found


def _draw(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    node: NodeProto | None,
    slot: int,
    gains: dict[str, float],
    rectified: set[str],
) -> np.ndarray:
    """Draw a weight for operand `slot` of `node`, with a scale that keeps the scale of activations."""
    op = node.op_type if node is not None else ""
    gain = gains.get(node.output[0], 1.0) if node is not None else 1.0
    if op == "BatchNormalization":
        # scale 0.95, because the spreads of scale and variance raise the mean square to 1
        centre, spread = {1: (0.95 * gain, 0.2 * gain), 2: (0.0, 0.1), 3: (0.0, 0.1), 4: (1.0, 0.5)}[slot]
        return centre + spread * rng.uniform(-1.0, 1.0, shape)
    if op in ("Conv", "ConvTranspose", "Gemm", "MatMul") and slot == 1 and node is not None:
        # because a ReLU halves the mean square, the next layer's weights restore it
        restore = 2.0 if node.input[0] in rectified else 1.0
        scale = np.float32(gain * np.sqrt(restore / _fan_in(shape, node)))
        return rng.standard_normal(shape, np.float32) * scale
    if op == "Mul":
        return 1.0 + 0.2 * rng.uniform(-1.0, 1.0, shape)
    return 0.1 * rng.standard_normal(shape)


def _fan_in(shape: tuple[int, ...], node: NodeProto) -> int:
    """Count the products that each output element sums."""
    if node.op_type == "Conv":
        return int(np.prod(shape[1:]))
    if node.op_type == "ConvTranspose":
        return int(shape[0] * np.prod(shape[2:]))
    transposed = any(a.name == "transB" and a.i for a in node.attribute)
    return shape[-1] if transposed else shape[-2]

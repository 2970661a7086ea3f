"""Run a network for any batch size through onnxruntime's interface, and export it as ONNX with what fused.

Without a GPU it runs in simulation. If torch is installed (extra `torch`), the example runs torch.compile, too.
"""

from __future__ import annotations

import collections
import importlib.util
import warnings

import numpy as np
import onnx
from onnx import ModelProto

import fusec
from examples.models import light, randomised
from fusec import convert


def any_batch() -> ModelProto:
    """Make SqueezeNet with a symbolic batch size."""
    model = randomised(onnx.load(light("squeezenet")), seed=0)
    del model.graph.value_info[:]
    held = {tensor.name for tensor in model.graph.initializer}
    for value in (*model.graph.input, *model.graph.output):
        if value.name not in held:
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


def main() -> None:
    model = any_batch()
    session = fusec.InferenceSession(model.SerializeToString(), precision="fp16", buckets={"batch": [4]})
    (image,) = session.get_inputs()
    print(f"{image.name}: {image.type} {image.shape}, run by {session.executable.device}")
    for batch in (1, 3):
        x = np.random.default_rng(batch).standard_normal((batch, *image.shape[1:])).astype(np.float32)
        (y,) = session.run(None, {image.name: x})
        print(f"a batch of {batch} gives {y.shape}, run as {session.executable.shapes[-1][image.name][0]}")

    compiled = session.executable.at(session.executable.shapes[-1]).compiled
    nodes = convert.to_onnx(compiled).graph.node
    fused = collections.Counter(p.value for n in nodes for p in n.metadata_props if p.key == "fusec.partition")
    print("nodes of the optimised graph by what they fused into:", dict(fused.most_common(4)))

    if importlib.util.find_spec("torch") and importlib.util.find_spec("onnxscript"):
        with_torch()


def with_torch() -> None:
    """Compile a torch module. Where fusec is installed, `backend="fusec"` finds the backend, too."""
    import torch

    from fusec.torch_backend import backend

    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10))
    x = torch.randn(2, 3, 8, 8)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        distance = (torch.compile(net.eval(), backend=backend)(x) - net(x)).norm() / net(x).norm()
    print(f"torch.compile: relative distance {distance:.1e} from torch itself")


if __name__ == "__main__":
    main()

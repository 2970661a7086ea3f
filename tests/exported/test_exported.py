"""Test architectures as both exporters of torch write them: the answers are onnxruntime's, and every step is verified.

Made by benchmarks/checks/export_models.py from small configurations with random weights.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from exported.packing import names, read
from helpers import quick

from fusec import driver
from fusec.diagnostics.verify import relative_l2, verify
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.runtime import Executable, SimulatorBackend

pytestmark = pytest.mark.cudnn


def feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    arrays: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            arrays[value.name] = rng.integers(0, 90, shape)
        else:
            arrays[value.name] = rng.standard_normal(shape).astype(np.float32)
    return arrays


COSTLY = "efficientnet-dynamo"  # to compile


@pytest.mark.parametrize(
    "name", quick(names(), [name for name in names() if name.endswith("-dynamo") and name != COSTLY])
)
def test_an_exported_model_gives_onnxruntimes_answers(name: str, asked_once: Oracle) -> None:
    model = read(name)
    data = model.SerializeToString()
    inputs = feeds(model)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    want = session.run(None, inputs)
    compiled = driver.build(data, target="h200", oracle=asked_once)
    got = Executable(compiled, SimulatorBackend()).run(None, inputs)
    for array, right in zip(got, want, strict=True):
        assert isinstance(right, np.ndarray)
        assert np.asarray(array).shape == right.shape
        assert relative_l2(np.asarray(array), right) < 1e-4
    report = verify(compiled)
    assert report.ok, str(report)


def test_there_are_fifteen_architectures_from_both_exporters() -> None:
    found = {name.rpartition("-")[0] for name in names()}
    both = {name for name in found if {f"{name}-script", f"{name}-dynamo"} <= set(names())}
    assert len(found) >= 20 and len(both) >= 15

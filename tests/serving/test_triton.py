"""Test a model repository for Triton, run with a stub of the module that Triton gives its Python backend."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.command import fusec as command
from frontends.onnx.models import run
from helpers import assert_close
from serving.files import classifier, images, saved

from fusec.serving.served_model import ServedModel, ServedTensor
from fusec.serving.triton_repository import config_text

pytestmark = [pytest.mark.cudnn, pytest.mark.usefixtures("no_gpu")]

CONFIG = """\
name: "shapes"
backend: "python"
max_batch_size: 8
input [ {
  name: "image"
  data_type: TYPE_UINT8
  dims: [ 3, 8, 8 ]
} ]
output [ {
  name: "logits"
  data_type: TYPE_FP32
  dims: [ 5 ]
} ]
output [ {
  name: "label"
  data_type: TYPE_INT64
  dims: [ 1 ]
  reshape { shape: [ ] }
} ]
dynamic_batching {
  preferred_batch_size: [ 1, 8 ]
  max_queue_delay_microseconds: 500
}
instance_group [ { kind: KIND_AUTO } ]
"""


class Tensor:
    def __init__(self, name: str, array: np.ndarray):
        self.name, self.array = name, array

    def as_numpy(self) -> np.ndarray:
        return self.array


class Request:
    def __init__(self, tensors: list[Tensor], outputs: list[str]):
        self.tensors, self.outputs = tensors, outputs

    def requested_output_names(self) -> list[str]:
        return self.outputs


class Response:
    def __init__(self, output_tensors: list[Tensor], error: Exception | None = None):
        self.output_tensors, self.error = output_tensors, error


class TritonError(Exception):
    pass


def stub() -> types.ModuleType:
    module = types.ModuleType("triton_python_backend_utils")
    found: dict[str, Any] = {"Tensor": Tensor, "InferenceResponse": Response, "TritonError": TritonError}
    found["get_input_tensor_by_name"] = lambda request, name: next(
        (tensor for tensor in request.tensors if tensor.name == name), None
    )
    vars(module).update(found)
    return module


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load `model.py` as Triton does."""
    repository = tmp_path / "repository"
    result = command(
        "export-triton", saved(tmp_path, [1, 8]), repository, "--name", "shapes", "--delay-ms", 0.5, "--json"
    )
    assert result.exit_code == 0, result.stderr
    folder = repository / "shapes"
    assert json.loads(result.stdout) == {
        "model": "shapes",
        "files": [str(folder / name) for name in ("config.pbtxt", "1/model.py", "1/model.fusec")],
    }
    assert (folder / "config.pbtxt").read_text() == CONFIG
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub())
    spec = importlib.util.spec_from_file_location("model", folder / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.TritonPythonModel()
    made.initialize(
        {
            "model_repository": str(folder),
            "model_version": "1",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )
    return made


def test_requests_of_a_batch_run_together(model: Any) -> None:
    given = [images(rows, seed=rows) for rows in (1, 3, 2)]
    wanted = [["logits", "label"], ["label"], ["logits"]]
    requests = [Request([Tensor("image", x)], outputs) for x, outputs in zip(given, wanted, strict=True)]
    calls: list[int] = []
    executable = model._predictor.executable
    unchanged = executable.run
    executable.run = lambda names, feeds: calls.append(len(feeds["image"])) or unchanged(names, feeds)
    responses = model.execute(requests)
    assert calls == [8]
    for x, outputs, response in zip(given, wanted, responses, strict=True):
        want = dict(zip(("logits", "label"), run(classifier(), {"image": x}), strict=True))
        assert [tensor.name for tensor in response.output_tensors] == outputs
        for tensor in response.output_tensors:
            assert_close(tensor.array.astype(np.float64), want[tensor.name].astype(np.float64), 1e-5)


def test_a_bad_request_fails_alone(model: Any) -> None:
    x = images(2)
    requests = [
        Request([Tensor("image", x)], ["label"]),
        Request([Tensor("image", x.astype(np.float32))], ["label"]),
        Request([], ["label"]),
    ]
    good, bad, empty = model.execute(requests)
    np.testing.assert_array_equal(good.output_tensors[0].array, run(classifier(), {"image": x})[1])
    assert "takes uint8, not float32" in str(bad.error)
    assert "input %image is missing" in str(empty.error)


def test_errors_of_the_command(tmp_path: Path) -> None:
    file = saved(tmp_path, [2])
    assert "is no .fusec file" in command("export-triton", "m.onnx", tmp_path).stderr
    (tmp_path / "taken").write_text("")
    assert "cannot write" in command("export-triton", file, tmp_path / "taken").stderr


def test_names_are_quoted() -> None:
    odd = ServedModel("m", (ServedTensor('a"\n\\é', "FP32", (2,)),), (ServedTensor("y", "BOOL", None),), 0, ())
    text = config_text(odd, 0.0)
    assert r'name: "a\042\012\134\303\251"' in text
    assert "data_type: TYPE_BOOL\n  dims: [ -1 ]" in text
    assert "dynamic_batching" not in text

"""Run programs written for onnxruntime, as its API documentation shows them, with only the import changed.

Each program sets `results`. They are compared with those of onnxruntime itself, which runs the unchanged text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model
from helpers import assert_close
from onnx import helper

pytestmark = pytest.mark.cudnn

IMPORT, OURS = "import onnxruntime as ort\n", "import fusec.session as ort\n"
START = """
import numpy as np
x = np.random.default_rng(3).standard_normal((2, 4)).astype(np.float32)
"""

PROGRAMS = {
    "load and run": """
session = ort.InferenceSession("model.onnx", providers=ort.get_available_providers()[-1:])
results = session.run(["y"], {"x": x})
""",
    "names of inputs and outputs": """
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
first = session.get_inputs()[0]
label = session.get_outputs()[0].name
results = [first.name, first.shape, first.type, label, *session.run([label], {first.name: x})]
""",
    "bytes and all outputs": """
with open("model.onnx", "rb") as file:
    session = ort.InferenceSession(file.read(), providers=[("CPUExecutionProvider", {})])
results = session.run(None, {"x": x})
""",
    "session options": """
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
options.intra_op_num_threads = 1
options.inter_op_num_threads = 1
options.log_severity_level = 3
options.enable_mem_pattern = False
options.add_session_config_entry("session.intra_op.allow_spinning", "0")
session = ort.InferenceSession("model.onnx", sess_options=options, providers=["CPUExecutionProvider"])
told = session.get_session_options()
results = [told.graph_optimization_level.name, told.intra_op_num_threads, *session.run(None, {"x": x})]
results.append(options.get_session_config_entry("session.intra_op.allow_spinning"))
""",
    "free dimensions": """
options = ort.SessionOptions()
options.add_free_dimension_override_by_name("N", 2)
session = ort.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
results = [session.get_inputs()[0].shape, session.get_outputs()[0].shape, *session.run(None, {"x": x})]
""",
    "free dimensions by denotation": """
options = ort.SessionOptions()
options.add_free_dimension_override_by_denotation("DATA_BATCH", 2)
session = ort.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
results = [session.get_inputs()[0].shape, session.get_outputs()[0].shape, *session.run(None, {"x": x})]
""",
    "an OrtValue": """
value = ort.OrtValue.ortvalue_from_numpy(x)
about = [value.device_name(), list(value.shape()), value.data_type(), value.element_type(), value.is_tensor()]
about += [value.has_value(), value.is_sparse_tensor(), value.is_tensor_sequence(), value.tensor_size_in_bytes()]
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
results = [*about, value.numpy().copy(), np.array(value), *session.run(["y"], {"x": value})]
""",
    "an OrtValue updated in place": """
value = ort.OrtValue.ortvalue_from_shape_and_type([2, 4], np.float32)
address = value.data_ptr()
value.update_inplace(x)
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
outputs = session.run_with_ort_values(["y"], {"x": value})
value.update_inplace(x + 1)
more = session.run_with_ort_values(["y", "z"], {"x": value})
results = [value.data_ptr() == address, *(v.numpy() for v in (*outputs, *more)), more[0].data_type()]
""",
    "a type that NumPy lacks": """
value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.arange(4, dtype=np.uint16), 16)
empty = ort.OrtValue.ortvalue_from_shape_and_type([2, 3], 16)
results = [value.data_type(), value.element_type(), list(empty.shape()), empty.data_type()]
""",
    "DLPack": """
value = ort.OrtValue.from_dlpack(x)
results = [np.from_dlpack(value), list(value.__dlpack_device__()), value.data_ptr() == x.ctypes.data]
""",
    "a binding to host memory": """
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
binding = session.io_binding()
binding.bind_cpu_input("x", x)
binding.bind_output("y")
session.run_with_iobinding(binding)
results = [*binding.copy_outputs_to_cpu(), *(v.numpy() for v in binding.get_outputs())]
""",
    "a binding to OrtValues": """
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
given = ort.OrtValue.ortvalue_from_numpy(x)
place = ort.OrtValue.ortvalue_from_shape_and_type([2, 6], np.float32)
binding = session.io_binding()
binding.bind_ortvalue_input("x", given)
binding.bind_ortvalue_output("y", place)
binding.bind_output("z", "cpu")
binding.synchronize_inputs()
session.run_with_iobinding(binding)
binding.synchronize_outputs()
results = [place.numpy(), *binding.copy_outputs_to_cpu()]
binding.clear_binding_inputs()
binding.clear_binding_outputs()
""",
    "a binding to addresses": """
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
value = ort.OrtValue.ortvalue_from_numpy(x)
place = ort.OrtValue.ortvalue_from_shape_and_type([2, 6], np.float32)
binding = session.io_binding()
binding.bind_input(name="x", device_type=value.device_name(), device_id=0, element_type=np.float32,
                   shape=value.shape(), buffer_ptr=value.data_ptr())
binding.bind_output(name="y", device_type=place.device_name(), device_id=0, element_type=1,
                    shape=place.shape(), buffer_ptr=place.data_ptr())
session.run_with_iobinding(binding)
results = [place.numpy()]
""",
    "a run on another thread": """
import threading
class Data:
    def __init__(self):
        self.event = threading.Event()
        self.results = self.error = None
def callback(results, data, error):
    data.results, data.error = results, error
    data.event.set()
options = ort.SessionOptions()
options.intra_op_num_threads = 2
session = ort.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
data = Data()
session.run_async(["y"], {"x": x}, callback, data)
assert data.event.wait(60)
results = [*data.results, data.error]
""",
    "an initializer that is overridden": """
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
(arg,) = session.get_overridable_initializers()
other = np.arange(6, dtype=np.float32)
results = [arg.name, arg.shape, arg.type, *session.run(None, {"x": x}), *session.run(None, {"x": x, "b": other})]
results += [*session.run(None, {"x": x, "b": other + 1}), *session.run(None, {"x": x})]
""",
    "metadata": """
meta = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"]).get_modelmeta()
results = [meta.producer_name, meta.graph_name, meta.domain, meta.description, meta.graph_description, meta.version,
           meta.custom_metadata_map]
""",
    "providers": """
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"], provider_options=[{"a": 1}])
options = session.get_provider_options()["CPUExecutionProvider"]
session.set_providers(["CPUExecutionProvider"])
session.disable_fallback()
session.enable_fallback()
results = [session.get_providers(), "CPUExecutionProvider" in ort.get_available_providers(), ort.get_device(),
           *session.run(None, {"x": x})]
""",
    "a terminated run": """
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
options = ort.RunOptions()
options.log_severity_level = 3
options.only_execute_path_to_fetches = True
results = session.run(["y"], {"x": x}, options)
options.terminate = True
try:
    session.run(["y"], {"x": x}, run_options=options)
    results.append("it ran")
except Exception as error:
    results.append("terminate" in str(error))
""",
    "a shared initializer": """
weight = ort.OrtValue.ortvalue_from_numpy(np.full((4, 6), 0.5, np.float32))
options = ort.SessionOptions()
options.add_initializer("w", weight)
session = ort.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
results = session.run(None, {"x": x})
""",
}


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fusec.gpu import device

    monkeypatch.setenv("FUSEC_DEVICE", "none")
    device._first_gpu.cache_clear()
    monkeypatch.chdir(tmp_path)
    onnx.save(net(), tmp_path / "model.onnx")


def net() -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["a"]),
        helper.make_node("Relu", ["a"], ["y"]),
        helper.make_node("Tanh", ["a"], ["z"]),
    ]
    held = {"w": rng.standard_normal((4, 6)).astype(np.float32), "b": rng.standard_normal(6).astype(np.float32)}
    inputs = [info("x", ["N", 4]), info("b", [6])]
    inputs[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    proto = model(nodes, inputs, [info("y", ["N", 6]), info("z", ["N", 6])], held, producer_name="tests")
    proto.domain, proto.model_version, proto.doc_string = "ai.tests", 3, "a net"
    helper.set_model_props(proto, {"task": "none"})
    return proto


def results_of(text: str) -> list[Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "program", "exec"), names)  # a text of this file
    return names["results"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_same_with_only_the_import_changed(name: str) -> None:
    want, got = (results_of(start + START + PROGRAMS[name]) for start in (IMPORT, OURS))
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        if isinstance(theirs, np.ndarray):
            assert_close(ours, theirs, 1e-6)
        else:
            assert ours == theirs


PROFILE = """
options = ort.SessionOptions()
options.enable_profiling = True
options.profile_file_prefix = "trace"
session = ort.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
session.run(None, {"x": x})
session.run(None, {"x": x})
started = session.get_profiling_start_time_ns()
results = [session.end_profiling(), started]
"""


def test_a_profile_has_the_events_of_onnxruntime() -> None:
    found: list[set[tuple[str, str]]] = []
    for start in (IMPORT, OURS):
        name, started = results_of(start + START + PROFILE)
        events = json.loads(Path(name).read_text())
        assert name.startswith("trace_")
        assert started > 0
        assert all(event["ph"] == "X" and event["dur"] >= 0 and event["ts"] >= 0 for event in events)
        assert sum(event["name"] == "model_run" for event in events) == 2
        found.append(
            {event["cat"] for event in events} | {event["name"] for event in events if event["cat"] == "Session"}
        )
        steps = [event for event in events if event["cat"] == "Node"]
        assert all(event["name"].endswith("_kernel_time") for event in steps)
        assert {event["args"]["provider"] for event in steps} == {"CPUExecutionProvider"}
    assert {"Session", "Node", "session_initialization", "model_run"} <= found[0] & found[1]

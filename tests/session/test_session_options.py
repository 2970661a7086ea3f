"""Test what the options of a session and of its providers do."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from frontends.onnx.models import info, model
from helpers import assert_close, one_program
from onnx import TensorProto, helper

import fusec
from fusec import session as ort
from fusec.errors import ExecutionError, FusecError, ModelError
from fusec.session import CPU, GPU, providers
from fusec.session.settings import disabled

pytestmark = [pytest.mark.cudnn, pytest.mark.usefixtures("no_gpu")]


def net(batch: int | str | None = "N") -> onnx.ModelProto:
    """A convolution with BatchNorm, two inputs that share a dim, and a default value of one input."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", "s", "b", "m", "v"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Mul", ["d", "scale"], ["y"]),
    ]
    held = {name: rng.random(8) + 0.5 for name in ("s", "b", "m", "v")}
    held |= {"w": rng.standard_normal((8, 3, 3, 3)), "scale": np.full(1, 2.0)}
    inputs = [info("x", [batch, 3, 8, 8]), info("scale", [1])]
    return model(nodes, inputs, [info("y", [batch, 8, 8, 8])], {k: v.astype(np.float32) for k, v in held.items()})


def image(batch: int = 2) -> np.ndarray[Any, Any]:
    return np.random.default_rng(batch).standard_normal((batch, 3, 8, 8)).astype(np.float32)


def peer(proto: onnx.ModelProto, **feeds: Any) -> Any:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=[CPU])
    return session.run(None, feeds)[0]


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("kind", [ort.SessionOptions, onnxruntime.SessionOptions])
def test_each_level_leaves_out_its_passes(kind: Any) -> None:
    found: list[frozenset[str]] = []
    for level in ort.GraphOptimizationLevel:
        own = onnxruntime.GraphOptimizationLevel if kind is onnxruntime.SessionOptions else ort.GraphOptimizationLevel
        made = options(kind, graph_optimization_level=getattr(own, level.name))
        session = ort.InferenceSession(net(2), made)
        program = one_program(session.executable.at(session.executable.shapes[0]))
        assert set(program.compiled.options.disabled_names) == disabled(level)
        assert_close(session.run(None, {"x": image()})[0], peer(net(2), x=image()), 1e-5)
        found.append(disabled(level))
    assert found[0] > found[1] > found[2] > found[3] == found[4] == frozenset()
    assert "fold_batchnorm" in found[1]
    assert "precision" not in found[0]


def test_all_levels_keep_the_precision() -> None:
    made = options(ort.SessionOptions, graph_optimization_level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    session = ort.InferenceSession(net(2), made, precision="fp16")
    assert_close(session.run(None, {"x": image()})[0], peer(net(2), x=image()), 3e-3)
    assert one_program(session.executable.at(session.executable.shapes[0])).compiled.options.precision == "fp16"


@pytest.mark.parametrize("kind", [ort.SessionOptions, onnxruntime.SessionOptions])
def test_deterministic_compute(kind: Any) -> None:
    session = ort.InferenceSession(net(2), options(kind, use_deterministic_compute=True))
    assert one_program(session.executable.at(session.executable.shapes[0])).compiled.options.deterministic


@pytest.mark.parametrize("kind", [ort.SessionOptions, onnxruntime.SessionOptions])
def test_free_dims_of_either_object(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    proto = net()
    proto.graph.input[0].type.tensor_type.shape.dim[1].ClearField("dim_value")
    proto.graph.input[0].type.tensor_type.shape.dim[1].denotation = "DATA_CHANNEL"
    made = options(kind, enable_profiling=True)
    made.add_free_dimension_override_by_name("N", 3)
    made.add_free_dimension_override_by_name("no such dim", 7)
    made.add_free_dimension_override_by_denotation("DATA_CHANNEL", 3)
    session = ort.InferenceSession(proto.SerializeToString(), made)
    assert session.get_inputs()[0].shape == [3, 3, 8, 8]
    assert session.get_outputs()[0].shape == [3, 8, 8, 8]
    assert made.enable_profiling
    assert not list(tmp_path.iterdir())  # asking onnxruntime for the dims leaves no trace
    assert_close(session.run(None, {"x": image(3)})[0], peer(net(), x=image(3)), 1e-5)
    with pytest.raises(ExecutionError, match=r"input %x has shape \[3, 3, 8, 8\], the array \[2, 3, 8, 8\]"):
        session.run(None, {"x": image(2)})
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"  # the caller's model is unchanged


def test_only_named_dims_get_a_size() -> None:
    made = ort.SessionOptions()
    made.add_free_dimension_override_by_name("M", 5)
    assert ort.InferenceSession(net(), made).get_inputs()[0].shape == ["N", 3, 8, 8]
    with pytest.raises(FusecError, match="the size of dim 'N' is 0"):
        made.add_free_dimension_override_by_name("N", 0)


def test_stages_are_printed_and_warnings_hidden(capfd: pytest.CaptureFixture[str]) -> None:
    proto = net(2)
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 9  # a fault that fusec warns of
    with pytest.warns(UserWarning, match="declare"):
        ort.InferenceSession(proto)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ort.InferenceSession(proto, options(ort.SessionOptions, log_severity_level=3))
        ort.set_default_logger_severity(3)
        try:
            ort.InferenceSession(proto)
        finally:
            ort.set_default_logger_severity(2)
    assert capfd.readouterr().err == ""
    ort.InferenceSession(net(2), options(ort.SessionOptions, log_severity_level=1, logid="mine"))
    assert "[I:fusec:mine] import\n" in capfd.readouterr().err
    with pytest.raises(FusecError, match="a severity is 0 to 4, not 7"):
        ort.set_default_logger_severity(7)


@pytest.mark.parametrize("batch", [2, "N"])
def test_the_optimised_model_is_written_once(batch: int | str, tmp_path: Path) -> None:
    path = tmp_path / "optimised.onnx"
    session = ort.InferenceSession(net(batch), options(onnxruntime.SessionOptions, optimized_model_filepath=str(path)))
    assert path.exists() is (batch == 2)
    session.run(None, {"x": image()})
    written = onnx.load(path)
    assert not [node for node in written.graph.node if node.op_type == "BatchNormalization"]
    assert_close(peer(written, x=image()), peer(net(), x=image()), 1e-5)
    path.unlink()
    session.run(None, {"x": image()})
    assert not path.exists()
    wrong = options(ort.SessionOptions, optimized_model_filepath=str(tmp_path / "none" / "a.onnx"))
    with pytest.raises(FusecError, match="cannot write"):
        ort.InferenceSession(net(2), wrong)


def test_profile_of_steps(tmp_path: Path) -> None:
    made = options(ort.SessionOptions, enable_profiling=True, profile_file_prefix=str(tmp_path / "t"))
    session = ort.InferenceSession(net(), made)
    want = [session.run(None, {"x": image(n)})[0].copy() for n in (1, 2)]
    for n in (1, 2):  # timing steps after a run does not disturb the next one
        assert_close(session.run(None, {"x": image(n)})[0], want[n - 1], 0)
    path = session.end_profiling()
    events = json.loads(Path(path).read_text())
    steps = [event for event in events if event["cat"] == "Node"]
    program = one_program(session.executable.at({"x": (1, 3, 8, 8)}))
    assert [e["args"]["op_name"] for e in steps[: program.compiled.program.launches]] == [
        step.signature for step in program.compiled.program.steps if step.kind.value != "view"
    ]
    assert {e["args"]["output_type_shape"][0]["float32"][0] for e in steps} == {1, 2}
    assert session.end_profiling() == ""
    assert session.get_profiling_start_time_ns() == 0
    wrong = ort.InferenceSession(
        net(), options(ort.SessionOptions, enable_profiling=True, profile_file_prefix="/none/a")
    )
    with pytest.raises(FusecError, match="cannot write"):
        wrong.end_profiling()


def test_initializers_of_the_options(tmp_path: Path) -> None:
    proto, rng = net(2), np.random.default_rng(9)
    weights = {"w": rng.standard_normal((8, 3, 3, 3)).astype(np.float32), "s": rng.random(8).astype(np.float32)}
    made = ort.SessionOptions()
    made.add_initializer("w", onnxruntime.OrtValue.ortvalue_from_numpy(weights["w"]))
    made.add_external_initializers(["s"], [ort.OrtValue.ortvalue_from_numpy(weights["s"])])
    changed = net(2)
    for tensor in changed.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights[tensor.name], tensor.name))
    assert_close(ort.InferenceSession(proto, made).run(None, {"x": image()})[0], peer(changed, x=image()), 1e-5)
    # external data need not be there
    onnx.save(proto, tmp_path / "net.onnx", save_as_external_data=True, location="data", size_threshold=800)
    (tmp_path / "data").unlink()
    assert_close(
        ort.InferenceSession(tmp_path / "net.onnx", made).run(None, {"x": image()})[0], peer(changed, x=image()), 1e-5
    )
    made.add_initializer("nothing", weights["s"])
    with pytest.raises(FusecError, match="there is no initializer 'nothing'"):
        ort.InferenceSession(proto, made)
    with pytest.raises(FusecError, match="2 names of initializers, but 1 values"):
        made.add_external_initializers(["a", "b"], [weights["s"]])


def test_an_overridden_initializer_is_an_input() -> None:
    session = ort.InferenceSession(net())
    other = np.full(1, -3.0, np.float32)
    for n in (1, 2):
        assert_close(session.run(None, {"x": image(n), "scale": other})[0], peer(net(), x=image(n), scale=other), 1e-5)
        assert_close(session.run(None, {"x": image(n)})[0], peer(net(), x=image(n)), 1e-5)
    binding = session.io_binding()
    binding.bind_cpu_input("x", image())
    binding.bind_cpu_input("scale", other)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    assert_close(binding.copy_outputs_to_cpu()[0], peer(net(), x=image(), scale=other), 1e-5)
    with pytest.raises(ExecutionError, match="no input %w"):
        session.run(None, {"x": image(), "w": other})
    old = net()
    old.ir_version = 3  # in which no initializer can be overridden, though all are inputs
    assert ort.InferenceSession(old).get_overridable_initializers() == []


def test_what_no_session_takes() -> None:
    with pytest.raises(FusecError, match="sess_options is a SessionOptions of fusec or onnxruntime, not dict"):
        ort.InferenceSession(net(), {"enable_profiling": True})
    made = ort.SessionOptions()
    made.add_session_config_entry("session.load_model_format", "ORT")
    with pytest.raises(FusecError, match=r"session\.load_model_format is ORT: fusec reads ONNX"):
        ort.InferenceSession(net(), made)
    with pytest.raises(FusecError, match="SessionOptions has no configuration entry 'x'"):
        made.get_session_config_entry("x")
    with pytest.raises(FusecError, match="a library of onnxruntime's custom operators"):
        made.register_custom_ops_library("ops.so")
    with pytest.raises(TypeError, match="InferenceSession has no parameter 'precison'"):
        ort.InferenceSession(net(), precison="fp16")
    ort.InferenceSession(net(), enable_fallback=0)
    with pytest.raises(FusecError, match="run_options is a RunOptions of fusec or onnxruntime, not dict"):
        ort.InferenceSession(net()).run(None, {"x": image()}, {"terminate": True})
    text = fusec.parse('graph "g" (%x : f32[2]) {\n  %y = relu(%x) : f32[2]\n  return %y\n}')
    made = ort.SessionOptions()
    made.add_free_dimension_override_by_name("N", 2)
    with pytest.raises(FusecError, match="is no ONNX model"):
        ort.InferenceSession(text, made)  # pyright: ignore[reportArgumentType]  # graphs are taken, too


def test_a_failed_run_on_another_thread_tells_the_callback() -> None:
    import threading

    done, told = threading.Event(), list[Any]()

    def callback(results: Any, data: Any, error: str) -> None:
        told.extend([results, data, error])
        done.set()

    ort.InferenceSession(net()).run_async(None, {"x": image()[:, :2]}, callback, 7)
    assert done.wait(60)
    assert told[:2] == [[], 7]
    assert "input %x has shape" in told[2]


def test_providers_choose_the_device_and_the_precision() -> None:
    added = ort.SessionOptions()
    assert not added.has_providers()
    added.add_provider(CPU, {"a": "b"})
    session = ort.InferenceSession(net(2), added)
    assert added.has_providers()
    assert session.get_provider_options() == {CPU: {"a": "b"}}
    with pytest.warns(UserWarning, match="DmlExecutionProvider is for other hardware, so fusec uses CPUExec"):
        session.set_providers(["DmlExecutionProvider", CPU])
    assert session.get_provider_options() == {CPU: {}}
    for asked, want in (({"use_tf32": 1}, "tf32"), ({"trt_fp16_enable": True}, "fp16"), ({"use_tf32": "0"}, "fp32")):
        with pytest.warns(UserWarning, match="this machine has no such GPU"):
            session.set_providers([(GPU, asked)])
        assert one_program(session.executable.at(session.executable.shapes[0])).compiled.options.precision == want
        assert_close(session.run(None, {"x": image()})[0], peer(net(), x=image()), 2e-3)
    with pytest.raises(FusecError, match="device 0, not on device 1"):
        ort.InferenceSession(net(), providers=[GPU], provider_options=[{"device_id": 1}])
    with pytest.raises(FusecError, match="1 providers, but options of 2"):
        ort.InferenceSession(net(), providers=[CPU], provider_options=[{}, {}])
    with pytest.raises(FusecError, match="providers are a list of names"):
        ort.InferenceSession(net(), providers=CPU)
    assert ort.get_available_providers() == [CPU]
    assert ort.get_device() == "CPU"
    assert ort.get_all_providers()[-1] == CPU
    assert providers.DeviceChoice(options={GPU: {"user_compute_stream": "64"}}).stream == 64


def test_ranges_of_a_session_and_profiles_of_tensorrt() -> None:
    session = ort.InferenceSession(net(), shapes={"N": "1..2..4"})
    assert session.executable.shapes == [{"x": (2, 3, 8, 8)}]
    assert session.get_inputs()[0].shape == ["N", 3, 8, 8]
    profile = {f"trt_profile_{k}_shapes": f"x:{n}x3x8x8" for k, n in (("min", 1), ("opt", 2), ("max", 4))}
    with pytest.warns(UserWarning, match="this machine has no such GPU"):
        other = ort.InferenceSession(net(), providers=[("TensorrtExecutionProvider", profile)])
    for each in (session, other):
        for batch in (2, 3):
            assert_close(each.run(None, {"x": image(batch)})[0], peer(net(), x=image(batch)), 1e-5)
        assert each.executable.shapes == [{"x": (2, 3, 8, 8)}, {"x": (3, 3, 8, 8)}]
        with pytest.raises(ExecutionError, match="dim 'N' is 5 in input %x, but this executable takes 1 to 4"):
            each.run(None, {"x": image(5)})
    for change, why in (
        ({"trt_profile_opt_shapes": ""}, "trt_profile_opt_shapes is '', but is written like x:1x3x224x224"),
        ({"trt_profile_max_shapes": "y:1x3"}, "do not have the same inputs"),
        ({"trt_profile_max_shapes": "x:1x3"}, "the profiles of input 'x' have different numbers of dims"),
    ):
        with pytest.raises(FusecError, match=why):
            _ = providers.DeviceChoice(options={GPU: profile | change}).shapes


def test_values_of_onnxruntime_share_their_memory() -> None:
    array = image()
    theirs = onnxruntime.OrtValue.ortvalue_from_numpy(array)
    session = ort.InferenceSession(net())
    binding = session.io_binding()
    place = onnxruntime.OrtValue.ortvalue_from_shape_and_type([2, 8, 8, 8], np.float32)
    binding.bind_ortvalue("x", theirs)
    binding.bind_ortvalue_output("y", place)
    for shift in (0, 1):
        array += shift
        session.run_with_iobinding(binding)
        assert_close(place.numpy(), peer(net(), x=array), 1e-5)
    for dtype in (TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.BOOL, TensorProto.INT64):
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type([3], dtype)
        ours = ort.OrtValue(value)
        assert (ours.data_type(), ours.element_type()) == (value.data_type(), dtype)
        assert ours.data_ptr() == value.data_ptr()
    packed = onnxruntime.OrtValue.ortvalue_from_shape_and_type([2], TensorProto.INT4)
    with pytest.raises(FusecError, match="int4 cannot be bound"):
        session.run(None, {"x": packed})


def test_what_an_ortvalue_refuses() -> None:
    value = ort.OrtValue.ortvalue_from_numpy(np.zeros(3, np.float32))
    with pytest.raises(FusecError, match=r"an OrtValue of float32 \[3\] cannot take float64 \[3\]"):
        value.update_inplace(np.zeros(3))
    with pytest.raises(FusecError, match="elements of float32 cannot be read as bfloat16"):
        ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(3, np.float32), TensorProto.BFLOAT16)
    with pytest.raises(FusecError, match="an OrtValue of strings is made from an array"):
        ort.OrtValue.ortvalue_from_shape_and_type([3], TensorProto.STRING)
    with pytest.raises(FusecError, match="memory_info names an allocator of onnxruntime"):
        ort.OrtValue.ortvalue_from_shape_and_type([3], np.float32, memory_info=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="is no ONNX model"):
        fusec.frontends.Source(fusec.parse('graph "g" (%x : f32[2]) {\n  return %x\n}')).edited(lambda model: None)

"""Test models with host steps, on a stand-in and on a GPU: only what the host reads leaves the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frontends.onnx.models import info, model, run
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import Array, Machine, on_device
from helpers import assert_close
from lowering.lowers_judge import LowersJudge
from onnx import TensorProto, helper
from segments.models import CASES
from segments.test_detector import detector, images
from segments.test_image_decoder import FILES, bytes_of, convolved, network, pictured

import fusec
from fusec.segments import programs
from fusec.segments.executable import SegmentedExecutable

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


@pytest.fixture
def machine(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    from fusec.compiler import choose_judge
    from fusec.execution.shape_family import ShapeFamily
    from fusec.gpu import device

    monkeypatch.setattr(choose_judge, "CudnnJudge", lambda *_: LowersJudge())
    monkeypatch.setattr(ShapeFamily, "oracle", lambda *_: None)
    monkeypatch.setattr(device, "_first_gpu", lambda: ("NVIDIA H200", 90))
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    return machine


@pytest.mark.cudnn
@needs_compiler
@pytest.mark.parametrize("small", [1 << 20, -1])
@pytest.mark.parametrize("name", ["non_zero", "slice_end", "expand", "loop_until"])
def test_arrays_stay_on_the_device(name: str, small: int, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SMALL_ELEMENTS", small)
    case = CASES[name]()
    executable = fusec.compile(case.proto, target="h200", tune="none")
    assert isinstance(executable, SegmentedExecutable)
    assert executable.device == "NVIDIA H200"
    for feeds in (*case.feeds[:2], *case.feeds[:2]):
        wants = run(case.proto, dict(feeds))
        for on_host in (True, False):
            given = feeds if on_host else {key: on_device(array) for key, array in feeds.items()}
            for got, want in zip(executable.run(None, given), wants, strict=True):
                assert isinstance(got, Array) is not on_host
                assert_close(got.get() if isinstance(got, Array) else got, want, 1e-5)
        into = on_device(np.zeros_like(wants[0]))
        executable.run(["y"], feeds, {"y": into})
        assert_close(into.get(), wants[0], 1e-5)


@pytest.mark.cudnn
@needs_compiler
@pytest.mark.parametrize("counted", [False, True])
def test_the_number_of_boxes_alone_comes_to_the_host(counted: bool, machine: Machine) -> None:
    """Of a detector that is one program, and of one whose last results NumPy computes."""
    executable = fusec.compile(detector(counted=counted), target="h200", tune="none")
    assert isinstance(executable, SegmentedExecutable)
    for image in images():
        wants = run(detector(counted=counted), {"image": image})
        for given in (image, on_device(image)):
            for got, want in zip(executable.run(None, {"image": given}), wants, strict=True):
                assert isinstance(got, Array) is (given is not image)
                assert got.shape == want.shape
                assert_close(got.get() if isinstance(got, Array) else got, want, 1e-5)
        (step,) = executable.explain().segments[0].steps
        assert (step.read_bytes, step.written_bytes) == (8, 0)
    assert len(executable.programs) == 1


@pytest.mark.cudnn
@needs_compiler
def test_pixels_come_to_the_device(machine: Machine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SMALL_ELEMENTS", -1)
    data, pixels, filters, mean = pictured(rng, "PNG")
    executable = fusec.compile(network(len(data), filters, mean), target="h200", tune="none")
    for x in (bytes_of(data), on_device(bytes_of(data))):
        got = executable(x)
        assert isinstance(got, Array) is isinstance(x, Array)
        assert_close(got.get() if isinstance(got, Array) else got, convolved(pixels, filters, mean), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("small", [1 << 20, -1])
@pytest.mark.parametrize("name", CASES)
def test_every_case_agrees_on_a_gpu(name: str, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(programs, "SMALL_ELEMENTS", small)
    case = CASES[name]()
    executable = fusec.compile(case.proto, tune="none")
    assert isinstance(executable, SegmentedExecutable)
    for feeds in case.feeds:
        wants = run(case.proto, dict(feeds))
        device: dict[str, Any] = {key: cupy.asarray(array) for key, array in feeds.items()}
        for given in (feeds, device):
            for got, want in zip(executable.run(None, given), wants, strict=True):
                assert isinstance(got, np.ndarray) is (given is feeds)
                host = got if isinstance(got, np.ndarray) else got.get()
                assert host.shape == want.shape
                assert_close(host, want, 1e-4)


@pytest.mark.gpu
def test_a_detector_on_a_gpu() -> None:
    executable = fusec.compile(detector())
    assert isinstance(executable, SegmentedExecutable)
    for image in images():
        wants = run(detector(), {"image": image})
        for got, want in zip(executable.run(None, {"image": image}), wants, strict=True):
            assert got.shape == want.shape
            assert_close(got, want, 1e-3)
    assert executable.verify().ok


def labelled() -> Any:
    """Make a model with strings as input and output: the GPU computes the class of a row, the host its name."""
    common: dict[str, Any] = {"domain": "ai.onnx.ml"}
    nodes = [
        helper.make_node("OneHotEncoder", ["colour"], ["hot"], cats_strings=["red", "green"], **common),
        helper.make_node("Concat", ["x", "hot"], ["features"], axis=1),
        helper.make_node(
            "LinearClassifier", ["features"], ["label", "scores"], coefficients=[0.5, -1, 2, 0, -0.5, 1, 0, 2],
            intercepts=[0.1, 0.2], classlabels_strings=["cat", "dog"], **common,
        ),
    ]  # fmt: skip
    inputs = [info("x", ["n", 2]), info("colour", ["n"], TensorProto.STRING)]
    proto = model(nodes, inputs, ["label", "scores"], opset=17)
    proto.opset_import.add(domain="ai.onnx.ml", version=3)
    return proto


def check_labels(rng: np.random.Generator, arrays: Any) -> None:
    """Run the model on host arrays and on those of the device. arrays: makes an array of the device."""
    count = 6
    x = rng.standard_normal((count, 2)).astype(np.float32)
    colour = np.array(["red", "blue", "green", "green", "red", "red"], object)
    want = run(labelled(), {"x": x, "colour": colour})
    executable = fusec.compile(labelled(), shapes={"x": x.shape, "colour": colour.shape}, tune="none")
    for given in (x, arrays(x)):
        label, scores = executable.run(None, {"x": given, "colour": colour})
        assert isinstance(label, np.ndarray)
        assert label.tolist() == want[0].tolist()
        assert hasattr(scores, "get") is (given is not x)
        assert_close(scores.get() if hasattr(scores, "get") else scores, want[1], 1e-4)


@pytest.mark.cudnn
@needs_compiler
def test_strings_stay_on_the_host(machine: Machine, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr(programs, "SMALL_ELEMENTS", -1)
    check_labels(rng, on_device)


@pytest.mark.gpu
@pytest.mark.parametrize("small", [1 << 20, -1])
def test_strings_stay_on_the_host_of_a_gpu(
    small: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    import cupy

    monkeypatch.setattr(programs, "SMALL_ELEMENTS", small)
    check_labels(rng, cupy.asarray)


@pytest.mark.gpu
def test_images_are_decoded_for_a_gpu(rng: np.random.Generator) -> None:
    """The bytes come from the device or the host. Pillow decodes them on the host."""
    import cupy

    for name in FILES:
        data, pixels, filters, mean = pictured(rng, name)
        executable = fusec.compile(network(len(data), filters, mean), tune="none")
        want = convolved(pixels, filters, mean)
        for x in (bytes_of(data), cupy.asarray(bytes_of(data))):
            got = executable(x)
            assert isinstance(got, np.ndarray) is isinstance(x, np.ndarray)
            assert_close(got if isinstance(got, np.ndarray) else got.get(), want, 1e-4)

"""Test a small detector: a convolution, boxes that are decoded, NonMaxSuppression, and the boxes that stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli.command import fusec as command
from frontends.onnx.models import info, model, run
from helpers import assert_close
from segments.models import FLOAT, INT, floats, ints, n

import fusec
from fusec.errors import CheckError
from fusec.segments.executable import SegmentedExecutable

CLASSES, ANCHORS, CELLS = 3, 2, 6


def detector(batch: int | str = 1, counted: bool = True) -> onnx.ModelProto:
    """Make the model. counted: an output is the number of boxes, which another number of rows changes."""
    rng = np.random.default_rng(1)
    outputs = ANCHORS * (4 + CLASSES)
    cells = np.stack(np.meshgrid(np.arange(CELLS), np.arange(CELLS), indexing="ij"), -1).reshape(-1, 2) * 4.0
    held = {
        "w": (rng.standard_normal((outputs, 3, 3, 3)) * 0.4).astype(np.float32),
        "b": (rng.standard_normal(outputs) * 0.1).astype(np.float32),
        "flat": ints(0, -1, 4 + CLASSES),
        "split": ints(2, 2, CLASSES),
        "anchors": np.repeat(cells, ANCHORS, 0)[None].astype(np.float32),
        "half": np.array(0.5, np.float32),
        "most": ints(20),
        "iou": np.array([0.5], np.float32),
        "least": np.array([0.9], np.float32),
        "box": ints(2),
        "first": ints(0),
    }
    nodes = [
        n("Conv image w b -> maps", strides=[4, 4], pads=[1, 1, 1, 1]),
        n("Transpose maps -> last", perm=[0, 2, 3, 1]),
        n("Reshape last flat -> rows"),
        n("Split rows split -> xy wh logits", axis=2),
        n("Add xy anchors -> centres"),
        n("Exp wh -> scale"),
        n("Mul scale half -> halves"),
        n("Sub centres halves -> low"),
        n("Add centres halves -> high"),
        n("Concat low high -> boxes", axis=2),
        n("Sigmoid logits -> probabilities"),
        n("Transpose probabilities -> scores", perm=[0, 2, 1]),
        n("NonMaxSuppression boxes scores most iou least -> chosen"),
        n("Gather chosen box -> places", axis=1),
        n("Gather boxes first -> image_boxes", axis=0),
        n("Squeeze image_boxes first -> plain"),
        n("Squeeze places one -> place"),
        n("Gather plain place -> found", axis=0),
        n("Shape found -> shape"),
        n("Gather shape zero -> count", axis=0),
    ]
    held |= {"one": ints(1), "zero": np.array(0)}
    outputs_of = [info("found", None), info("chosen", None, INT), info("count", None, INT), info("boxes", None, FLOAT)]
    if not counted:
        del outputs_of[2], nodes[-2:]
    return model(nodes, [info("image", [batch, 3, 24, 24])], outputs_of, held)


def images() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [(rng.standard_normal((1, 3, 24, 24)) * scale).astype(np.float32) for scale in (1.0, 2.0, 0.0, 0.5, 0.7)]


def agrees(executable: Any, image: np.ndarray, counted: bool = True) -> None:
    want_all = run(detector(counted=counted), {"image": image})
    for got, want in zip(executable.run(None, {"image": image}), want_all, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert_close(got, want, 1e-5)


@pytest.mark.cudnn
def test_a_detector_runs_in_simulation() -> None:
    executable = fusec.compile(detector(), target="h200", simulate=True)
    assert isinstance(executable, SegmentedExecutable)
    counts = {len(run(detector(), {"image": image})[0]) for image in images()}
    assert len(counts) > 2, "the images shall give several numbers of boxes"
    for image in images():
        agrees(executable, image)
    explanation = executable.explain()
    assert [each.runs_as for each in explanation.segments] == ["program", "numpy"]
    assert [step.op for step in explanation.segments[0].steps] == ["NonMaxSuppression"]
    (step,) = explanation.segments[0].steps
    assert (step.most, step.read_bytes, step.written_bytes) == (20 * CLASSES, 8, 0)
    assert len(executable.programs) == 1, "no number of boxes was compiled for"
    assert executable.verify().ok
    executable.assert_fused("conv*")
    with pytest.raises(CheckError):
        executable.assert_fused("conv*+softmax")


@pytest.mark.cudnn
def test_a_detector_whose_boxes_are_separate_is_one_program() -> None:
    """All rows that there can be are computed, and the results are cropped; no result is from another call."""
    executable = fusec.compile(detector(counted=False), target="h200", simulate=True)
    assert isinstance(executable, SegmentedExecutable)
    (program,) = executable.programs
    assert {node.op.name for node in program.compiled.graph.nodes} >= {"conv", "non_max_suppression", "gather"}
    for image in images():
        agrees(executable, image, counted=False)
    assert [each.runs_as for each in executable.explain().segments] == ["program", "nothing"]
    (step,) = executable.explain().segments[0].steps
    assert (step.op, step.read_bytes, step.written_bytes) == ("NonMaxSuppression", 8, 0)
    assert len(executable.programs) == 1
    assert executable.verify().ok
    first = executable.run(["found"], {"image": images()[0]})[0]
    held = first.copy()
    executable.run(None, {"image": images()[1]})
    np.testing.assert_array_equal(first, held)
    into = np.zeros_like(held)
    assert executable.run(["found"], {"image": images()[0]}, out={"found": into})[0] is into
    np.testing.assert_array_equal(into, held)


@pytest.mark.cudnn
def test_two_results_of_one_tensor_share_no_memory() -> None:
    twice = detector(counted=False)
    twice.graph.node.append(n("Identity found -> again"))
    twice.graph.output.append(info("again", None, FLOAT))
    executable = fusec.compile(twice, target="h200", simulate=True)
    results = executable.run(None, {"image": images()[0]})
    found, again = results[0], results[-1]
    assert found.size
    np.testing.assert_array_equal(found, again)
    assert not np.shares_memory(found, again)


def summed(rows: str, result: str) -> onnx.ModelProto:
    """Sum the rows that are found, so that each counts in the result."""
    model_of = detector(counted=False)
    del model_of.graph.output[:]
    model_of.graph.node.append(n(f"ReduceSum {rows} -> {result}", keepdims=0))
    model_of.graph.output.append(info(result, None, INT if rows == "chosen" else FLOAT))
    return model_of


@pytest.mark.cudnn
@pytest.mark.parametrize("rows", ["found", "chosen"])
def test_rows_that_are_summed_stay_two_segments(rows: str) -> None:
    executable = fusec.compile(summed(rows, "sum"), target="h200", simulate=True)
    assert isinstance(executable, SegmentedExecutable)
    for image in images():
        (got,) = executable.run(None, {"image": image})
        assert_close(got, run(summed(rows, "sum"), {"image": image})[0], 1e-5)
    assert [each.runs_as for each in executable.explain().segments] == ["program", "numpy"]


@pytest.mark.cudnn
def test_a_limit_that_is_computed_keeps_the_host_step() -> None:
    model_of = detector(counted=False)
    model_of.graph.node.insert(0, n("ReduceMax image -> largest", keepdims=0))
    model_of.graph.node.insert(1, n("Clip largest zero_of most_of -> threshold"))
    model_of.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(number, np.float32), name)
        for name, number in (("zero_of", 0), ("most_of", 0.7))
    )
    suppression = next(node for node in model_of.graph.node if node.op_type == "NonMaxSuppression")
    suppression.input[3] = "threshold"
    executable = fusec.compile(model_of, target="h200", simulate=True)
    assert isinstance(executable, SegmentedExecutable)
    for image in images():
        for got, want in zip(executable.run(None, {"image": image}), run(model_of, {"image": image}), strict=True):
            assert_close(got, want, 1e-5)
    (step,) = executable.explain().segments[0].steps
    assert step.most is None


@pytest.mark.cudnn
def test_a_detector_in_fp16_finds_about_the_same() -> None:
    executable = fusec.compile(detector(), target="h200", precision="fp16", simulate=True)
    image = images()[0]
    boxes = executable.run(["boxes"], {"image": image})[0]
    assert_close(boxes, run(detector(), {"image": image})[3], 3e-2)


@pytest.mark.slow
@pytest.mark.cudnn
def test_all_batches_of_a_detector() -> None:
    executable = fusec.compile_dynamic(detector("n"), target="h200", simulate=True)
    for image in images()[:2]:
        agrees(executable, image)
    assert len(executable.run(None, {"image": floats(2, 3, 24, 24)})) == 4


@pytest.mark.cudnn
def test_a_session_runs_a_detector() -> None:
    session = fusec.InferenceSession(detector().SerializeToString(), providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_outputs()] == ["found", "chosen", "count", "boxes"]
    agrees(session, images()[0])


@pytest.mark.cudnn
def test_commands_take_a_detector(tmp_path: Path) -> None:
    path = tmp_path / "detector.onnx"
    onnx.save(detector(), path)
    assert command("run", path, "--compare", "onnxruntime").exit_code == 0
    assert command("verify", path).exit_code == 0
    explained = command("explain", path)
    assert explained.exit_code == 0
    assert "Host step 'NonMaxSuppression_12' (NonMaxSuppression): the device computes it" in explained.stdout
    assert "which is at most 60" in " ".join(explained.stdout.split())
    assert "1 value, 8 B to the host, 0 back" in explained.stdout
    assert "ops in NumPy on the host" in explained.stdout
    compiled = command("compile", path, "--json")
    assert '"host_steps": 1' in compiled.stdout
    for refused in (("compile", path, "-o", tmp_path / "d.fusec"), ("bench", path), ("convert", path, "-o", path)):
        result = command(*refused)
        assert result.exit_code == 2
        assert "is split at node 'NonMaxSuppression_12'" in result.stderr

"""Test ranges of sizes of a model with host steps: reports work, and what needs one program says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, run
from onnx import TensorProto, helper

import fusec
from fusec.errors import FusecError
from fusec.segments.executable import SegmentedExecutable
from fusec.session import SessionOptions

pytestmark = [pytest.mark.cudnn, pytest.mark.usefixtures("no_gpu")]


def net() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("NonZero", ["r"], ["y"]),
    ]
    held = {"w": np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)}
    return model(nodes, [info("x", ["N", 4])], [info("y", [2, None], TensorProto.INT64)], held)


def fresh(batch: int) -> np.ndarray:
    return np.random.default_rng(batch).standard_normal((batch, 4)).astype(np.float32)


def test_programs_of_a_range_have_host_steps(tmp_path: Path) -> None:
    exe: Any = fusec.compile(net(), shapes={"N": "1..2..4"})
    assert isinstance(exe, fusec.DynamicExecutable)
    assert isinstance(exe.program(), SegmentedExecutable)
    for batch in (2, 3):
        x = fresh(batch)
        np.testing.assert_array_equal(exe(x), run(net(), {"x": x})[0])
    assert exe.verify().ok
    assert "NonZero" in str(exe.explain({"N": 3}))
    exe.assert_fused("matmul+relu")
    for refused in (exe.bench, lambda: exe.save(tmp_path / "net.fusec")):
        with pytest.raises(FusecError, match="is more than one program, and this model is split at node"):
            refused()
    assert not list(tmp_path.iterdir())


def test_a_session_profiles_the_programs_between_host_steps(tmp_path: Path) -> None:
    options = SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "trace")
    session = fusec.InferenceSession(net(), options, shapes={"N": (1, 4)})
    x = fresh(3)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], run(net(), {"x": x})[0])
    events = json.loads(Path(session.end_profiling()).read_text())
    assert "matmul+relu" in {event["args"].get("op_name") for event in events}
    options = SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "net.onnx")
    with pytest.raises(FusecError, match=r"cannot be written to .* as one optimised model, and this model is split at"):
        fusec.InferenceSession(net(), options, shapes={"N": (1, 4)})

"""Test `fusec quantize`: writes standard ONNX, reports, and fails with one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli.command import fusec
from onnx import TensorProto, helper, numpy_helper
from quantization.models import images, residual_net


@pytest.fixture
def net(tmp_path: Path) -> Path:
    onnx.save(residual_net(), tmp_path / "net.onnx")
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "a.npz", x=images())
    return tmp_path / "net.onnx"


def test_a_file_is_written_and_runs(net: Path) -> None:
    out = net.with_name("int8.onnx")
    result = fusec("quantize", net, "--data", net.parent / "data", "-o", out)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "4 layers in int8, entropy calibration on 16 samples; nodes left in float: 1; weights" in result.stdout
    run = fusec("run", out, "--shape", "x=2,3,8,8", "--target", "cpu", "--compare", "onnxruntime", "--tolerance", 0.02)
    assert run.exit_code == 0


def test_a_difference_of_a_quantised_model_names_the_option_that_rounds_as_the_model_does(net: Path) -> None:
    out = net.with_name("int8.onnx")
    assert fusec("quantize", net, "--data", net.parent / "data", "-o", out).exit_code == 0

    def differs(model: Path, *more: str) -> str:
        exact = ("--shape", "x=2,3,8,8", "--target", "cpu", "--compare", "onnxruntime", "--tolerance", "1e-12")
        result = fusec("run", model, *exact, *more)
        assert result.exit_code == 1 and "differs from onnxruntime by more than 1e-12: y" in result.stderr
        return result.stderr

    assert "may leave out roundings of a quantised model: compare with --rounding source" in differs(out)
    assert "--rounding source" not in differs(out, "--rounding", "source")
    assert "--rounding source" not in differs(net)


def test_weights_of_4_bits_agree_with_onnxruntime(tmp_path: Path) -> None:
    """By default onnxruntime rounds the other operand to 8 bits, and differs by 4e-3."""
    rng = np.random.default_rng(0)
    weights = numpy_helper.from_array(0.05 * rng.standard_normal((256, 512)).astype(np.float32), "w")
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, size]) for name, size in (("x", 256), ("y", 512))
    )
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weights])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, tmp_path / "m.onnx")
    assert fusec("quantize", tmp_path / "m.onnx", "--format", "weights-int4", "-o", tmp_path / "q.onnx").exit_code == 0
    result = fusec("run", tmp_path / "q.onnx", "--precision", "fp16", "--target", "cpu", "--compare", "onnxruntime")
    assert result.exit_code == 0, result.stderr


def test_an_fp8_model_agrees_with_onnxruntime(net: Path) -> None:
    """With its optimisations, onnxruntime computes other numbers."""
    out = net.with_name("fp8.onnx")
    assert fusec("quantize", net, "--data", net.parent / "data", "--format", "fp8", "-o", out).exit_code == 0
    result = fusec("run", out, "--shape", "x=2,3,8,8", "--target", "cpu", "--compare", "onnxruntime")
    assert result.exit_code == 0, result.stderr


def test_the_report_names_edges_layers_and_reasons(net: Path) -> None:
    """No file is written without -o."""
    result = fusec("quantize", net, "--data", net.parent / "data", "--report")
    assert result.exit_code == 0
    for part in ("output y: ", "conv2", "SQNR", "r0 ", "stem (Conv): 3 input channels: Tensor Cores need 16"):
        assert part in result.stdout
    assert {path.name for path in net.parent.iterdir()} == {"net.onnx", "data"}


def test_json(net: Path) -> None:
    out = net.with_name("fp8.onnx")
    options = ("--format", "fp8", "--calibration", "percentile", "--percentile", 99, "--keep-float", 1, "--json")
    result = fusec("quantize", net, "--data", net.parent / "data" / "a.npz", "-o", out, *options)
    told = json.loads(result.stdout)
    assert (told["format"], told["calibration"], told["samples"], told["output"]) == ("fp8", "percentile", 16, str(out))
    assert {"name", "op", "weight", "output"} == set(told["layers"][0])
    assert {"tensor", "largest", "threshold", "scale", "sqnr"} == set(told["edges"][0])
    assert {"name", "op", "reason"} == set(told["floats"][0])
    assert told["weight_bytes"][0] > 2 * told["weight_bytes"][1]
    assert told["outputs"]["y"] > 20


def test_weights_alone_need_no_data(net: Path) -> None:
    out = net.with_name("int4.onnx")
    result = fusec("quantize", net, "--format", "weights-int4", "--block-size", 16, "--exclude", "lin*", "-o", out)
    assert result.exit_code == 0
    written = onnx.load(out)
    blocks = [a.i for node in written.graph.node for a in node.attribute if a.name == "block_size"]
    assert blocks == [16, 16, 16]


def test_a_bound_that_cannot_hold_fails_with_1(net: Path) -> None:
    out = net.with_name("int8.onnx")
    result = fusec("quantize", net, "--data", net.parent / "data", "--min-sqnr", 300, "-o", out)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "fusec: the bound holds only with all 4 layers in float\n"
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "quantize: give -o FILE.onnx, or --report to write no file"),
        (("-o", "out.onnx"), "net.onnx: calibration data is needed: give data"),
        (("--report", "--data", "nosuch.npz"), "nosuch.npz: No such file or directory"),
        (("--report", "--format", "int2"), "format is one of int8, fp8, weights-int8, weights-int4, not 'int2'"),
    ],
)
def test_bad_options(net: Path, options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(net.parent)
    result = fusec("quantize", "net.onnx", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"fusec: error: {message}\n"

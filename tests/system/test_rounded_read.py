"""Test that numbers are rounded while they are read: each once, from any place, by one thread or several."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fusec import frontends
from fusec.errors import ModelError
from fusec.ir import Constant, Literal
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.system import rounded_read
from fusec.system.byte_ranges import FileRanges, MemoryRanges
from fusec.system.rounded_read import read_rounded


@pytest.mark.parametrize("parallel_bytes", [0, 1 << 30])
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float64)])
def test_each_number_is_rounded_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, parallel_bytes: int, dtype: np.dtype
) -> None:
    monkeypatch.setattr(rounded_read, "PARALLEL_BYTES", parallel_bytes)
    monkeypatch.setattr(rounded_read, "PART_BYTES", 1 << 10)
    for count in (1, 255, 256, 257, 12_345):
        numbers = rng.standard_normal(count).astype(np.float32)
        data = MemoryRanges(b"abc" + numbers.tobytes() + b"rest")
        made = read_rounded(data, 3, count, numbers.dtype, dtype)
        assert made.dtype == dtype
        np.testing.assert_array_equal(made, numbers.astype(dtype))


def model(weight: np.ndarray) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["w"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, weight.shape[0]])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, weight.shape[1]])
    graph = helper.make_graph(nodes, "net", [x], [y], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def narrow_weight(path: Path) -> Literal:
    """Return the weight of a model in fp16, which is not read yet."""
    graph = run(PIPELINE, frontends.load(path, None), Options("fp16"))
    (found,) = [n.op.literal for n in graph.nodes if isinstance(n.op, Constant) and n.op.literal.type.size > 1000]
    return found


def test_a_weight_of_a_file_is_rounded_without_a_copy_in_its_own_type(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, path = rng.standard_normal((256, 300)).astype(np.float32), tmp_path / "net.onnx"
    path.write_bytes(model(weight).SerializeToString())
    monkeypatch.setattr(
        "fusec.frontends.onnx.model_file.stored_data.StoredData._read", lambda self: pytest.fail("read as a whole")
    )
    np.testing.assert_array_equal(np.sort(narrow_weight(path).array, None), np.sort(weight.astype(np.float16), None))


def test_a_number_out_of_range_becomes_the_largest_with_a_warning(rng: np.random.Generator, tmp_path: Path) -> None:
    weight, path = rng.standard_normal((256, 300)).astype(np.float32), tmp_path / "net.onnx"
    weight[17, 5] = -1e6
    path.write_bytes(model(weight).SerializeToString())
    with pytest.warns(UserWarning, match=r"1 of 76800 elements are out of f16's range"):
        assert narrow_weight(path).array.min() == np.finfo(np.float16).min


def test_a_file_that_changes_while_it_is_read_is_an_error(rng: np.random.Generator, tmp_path: Path) -> None:
    weight, path = rng.standard_normal((256, 300)).astype(np.float32), tmp_path / "net.onnx"
    path.write_bytes(model(weight).SerializeToString())
    late = narrow_weight(path)
    ranges = FileRanges(path)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelError, match=r"net.onnx: a weight cannot be read: was changed"):
        _ = late.array
    with pytest.raises(OSError, match="was changed"):
        read_rounded(ranges, 0, 10, np.dtype(np.float32), np.dtype(np.float16))


@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.int4])
def test_the_digest_of_a_weight_of_a_file_is_that_of_its_array(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: type
) -> None:
    """A large weight is read in parts, so that it takes little memory."""
    monkeypatch.setattr("fusec.frontends.onnx.model_file.stored_data.PART_BYTES", 1000)
    weight, path = rng.integers(-8, 8, (256, 300)).astype(dtype), tmp_path / "net.onnx"
    path.write_bytes(model(weight).SerializeToString())
    graph = frontends.load(path, None)
    (late,) = (v.literal for v in graph.values() if v.literal is not None)
    if dtype is not ml_dtypes.int4:
        monkeypatch.setattr(
            "fusec.frontends.onnx.model_file.stored_data.StoredData._read", lambda self: pytest.fail("read as a whole")
        )
    assert late.digest == Literal.of(weight).digest

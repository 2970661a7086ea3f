"""Test weights whose data is missing, does not fit, or lies where it must not: nothing outside the folder is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model
from onnx import TensorProto, helper, numpy_helper

from fusec.errors import ModelError
from fusec.frontends import load

W = np.arange(6, dtype=np.float32)


def _model(tensor: TensorProto) -> onnx.ModelProto:
    proto = model([helper.make_node("Add", ["x", "w"], ["y"])], [info("x", [6])], ["y"])
    tensor.name = "w"
    proto.graph.initializer.append(tensor)
    return proto


def _external(**entries: str) -> TensorProto:
    tensor = TensorProto(dims=[6], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def fails(model: Any, *parts: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(model)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def _saved(folder: Path, tensor: TensorProto) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "w.bin").write_bytes(W.tobytes())
    (folder / "m.onnx").write_bytes(_model(tensor).SerializeToString())
    return folder / "m.onnx"


def test_absolute_location(tmp_path: Path) -> None:
    path = _saved(tmp_path, _external(location=str(tmp_path / "w.bin")))
    fails(path, "m.onnx: initializer 'w': external data", "is outside the model's folder")


@pytest.mark.parametrize("location", ["../w.bin", "sub/../../w.bin", "../model/w.bin"])
def test_location_with_dots(tmp_path: Path, location: str) -> None:
    (tmp_path / "w.bin").write_bytes(W.tobytes())
    path = _saved(tmp_path / "model", _external(location=location))
    fails(path, f"initializer 'w': external data {location!r} is outside the model's folder")


def test_symlink_out_of_the_folder(tmp_path: Path) -> None:
    path = _saved(tmp_path / "model", _external(location="link.bin"))
    (tmp_path / "secret").write_bytes(W.tobytes())
    (tmp_path / "model" / "link.bin").symlink_to(tmp_path / "secret")
    fails(path, "'link.bin' is outside the model's folder (through a symbolic link)")


def test_folder_that_is_a_symlink_out(tmp_path: Path) -> None:
    path = _saved(tmp_path / "model", _external(location="sub/secret"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_bytes(W.tobytes())
    (tmp_path / "model" / "sub").symlink_to(tmp_path / "out")
    fails(path, "(through a symbolic link)")


def test_hard_link_out_of_the_folder(tmp_path: Path) -> None:
    path = _saved(tmp_path / "model", _external(location="link.bin"))
    (tmp_path / "secret").write_bytes(W.tobytes())
    (tmp_path / "model" / "link.bin").hardlink_to(tmp_path / "secret")
    fails(path, "'link.bin' has several hard links, so it may be a file of another folder: copy it")


def test_symlink_loop(tmp_path: Path) -> None:
    path = _saved(tmp_path, _external(location="loop"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    fails(path, "'loop'", "no such file")


def test_missing_external_file(tmp_path: Path) -> None:
    fails(_saved(tmp_path, _external(location="none.bin")), "'none.bin': no such file in the model's folder")


def test_external_data_that_is_a_folder(tmp_path: Path) -> None:
    path = _saved(tmp_path, _external(location="sub"))
    (tmp_path / "sub").mkdir()
    fails(path, "'sub' is not a regular file")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"offset": "4"}, "external data at bytes 4 to 28 of 'w.bin', which has 24"),
        ({"offset": "99999999999999999"}, "which has 24"),
        ({"offset": "-4"}, "with the offset '-4'"),
        ({"offset": "x"}, "with the offset 'x'"),
        ({"length": "12"}, "f32[6] takes 24 bytes, its external data in 'w.bin' has 12"),
        ({"length": "-1"}, "with the length '-1'"),
        ({"location": ""}, "external data at the location ''"),
        ({"location": "a\0b"}, "external data at the location"),
    ],
)
def test_external_entries(tmp_path: Path, entries: dict[str, str], said: str) -> None:
    fails(_saved(tmp_path, _external(**{"location": "w.bin", **entries})), "initializer 'w': ", said)


def test_external_data_without_location(tmp_path: Path) -> None:
    fails(_saved(tmp_path, _external(offset="0")), "external data without a location")


def test_external_data_of_a_model_without_a_folder(tmp_path: Path) -> None:
    path = _saved(tmp_path, _external(location="w.bin"))
    fails(path.read_bytes(), "external data in 'w.bin', but the model was not given as a path")


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (TensorProto(dims=[6], data_type=1, raw_data=b"\0" * 20), "f32[6] takes 24 bytes, its data has 20"),
        (TensorProto(dims=[6], data_type=1, float_data=[1.0]), "f32[6] takes 6 elements, its data has 1"),
        (TensorProto(dims=[6], data_type=1), "f32[6] takes 6 elements, its data has 0"),
        (
            TensorProto(dims=[1 << 60], data_type=1),
            "a tensor f32[1152921504606846976] takes 4.295e+09 GiB",
        ),
        (TensorProto(dims=[1 << 32], data_type=1), "takes 4294967296 elements, its data has 0"),
        (TensorProto(dims=[-6], data_type=1), "negative dimension in shape [-6]"),
        (TensorProto(dims=[6], data_type=0), "element type undefined is not supported"),
        (TensorProto(dims=[6], data_type=99), "element type number 99 is not supported"),
        (TensorProto(dims=[6], data_type=14, float_data=[1.0] * 12), "element type complex64 is not supported"),
        (TensorProto(dims=[6], data_type=17, raw_data=b"\0" * 5), "f8e4m3[6] takes 6 bytes, its data has 5"),
        (TensorProto(dims=[5], data_type=22, raw_data=b"\0" * 5), "i4[5] takes 3 bytes, its data has 5"),
        (TensorProto(dims=[1], data_type=1, raw_data=b"\0" * 4, float_data=[1.0]), "twice, in float_data and raw_data"),
        (TensorProto(dims=[2], data_type=22, raw_data=b"\0", int32_data=[1]), "twice, in int32_data and raw_data"),
        (TensorProto(dims=[1], data_type=1, float_data=[1.0], int64_data=[1]), "twice, in float_data and int64_data"),
        (TensorProto(dims=[6], data_type=1, segment=TensorProto.Segment(begin=0)), "segmented tensors"),
    ],
)
def test_inline_data_that_does_not_fit(tensor: TensorProto, said: str) -> None:
    fails(_model(tensor), "initializer 'w': ", said)


@pytest.mark.parametrize(
    ("indices", "shape", "said"),
    [
        ([0, 9], [6], "is outside its 6 elements"),
        ([0, -1], [6], "is outside its 6 elements"),
        ([0, 1, 2], [6], "sparse tensor of 2 values, indices [3]"),
        ([0, 1], [1 << 40], "the limit is 64 GiB"),
        ([0, 1], [1 << 30], "the limit is 2 GiB"),
    ],
)
def test_sparse_initializers(indices: list[int], shape: list[int], said: str) -> None:
    proto = model([helper.make_node("Add", ["x", "w"], ["y"])], [info("x", [6])], ["y"])
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.ones(2, np.float32), "w"), numpy_helper.from_array(np.array(indices), "i"), shape
    )
    proto.graph.sparse_initializer.append(sparse)
    fails(proto, "initializer 'w': ", said)

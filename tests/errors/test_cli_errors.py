"""Test bad input at the command line: exit status 2, one clear message on stderr, no output, no file touched."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli.command import SHAPE, fusec, tiny
from onnx import TensorProto, helper

COMMANDS = ("compile", "run", "explain", "verify")
NPY_MAGIC = b"\x93NUMPY\x01\x00"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny(tmp_path)


def check_refused(*args: object, says: tuple[object, ...]) -> None:
    result = fusec(*args)
    assert result.exit_code == 2, result
    assert result.stdout == ""
    assert result.stderr.startswith("fusec: error: "), result.stderr
    for text in says:
        assert str(text) in result.stderr, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_file(command: str, tmp_path: Path) -> None:
    check_refused(command, tmp_path / "none.onnx", says=(tmp_path / "none.onnx", "No such file"))


@pytest.mark.parametrize("command", COMMANDS)
def test_folder_for_a_model(command: str, tmp_path: Path) -> None:
    says = "has no file that ends in .onnx" if command == "run" else "is a directory"  # run takes folders of models
    check_refused(command, tmp_path, says=(tmp_path, says))


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(random.Random(seed).randbytes(2000))
    check_refused("explain", path, says=(path,))


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_truncated_model(part: float, model: Path) -> None:
    data = model.read_bytes()
    model.write_bytes(data[: int(part * len(data))])
    check_refused("compile", model, *SHAPE, says=(model,))


def test_external_data_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "../secret.bin"), ("length", "16")):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    types = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", types[:1], types[1:], [weight])
    path = folder / "m.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    check_refused("run", path, says=(path, "secret.bin", "folder"))


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_target(command: str, model: Path) -> None:
    check_refused(command, model, *SHAPE, "--target", "gtx", says=("gtx", "t4, a100, l4, h100, h200, b200"))


def test_one_unknown_target_among_others(model: Path) -> None:
    check_refused("explain", model, *SHAPE, "--target", "t4,gtx", says=("'gtx'",))
    check_refused("explain", model, *SHAPE, "--target", "t4,", says=("''",))


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_precision(command: str, model: Path) -> None:
    check_refused(command, model, *SHAPE, "--precision", "int4", says=("fp32, tf32, fp16, bf16", "int4"))


def test_unknown_pass(model: Path) -> None:
    check_refused("compile", model, *SHAPE, "--disable", "nonsense", says=("nonsense",))


@pytest.mark.parametrize("text", ["x", "=1,2", "x=1,a", "x=1;8;8;8", "x=1.5,8,8,8", "x=1,,8,8"])
def test_shape_that_is_none(text: str, model: Path) -> None:
    check_refused("compile", model, "--shape", text, says=(text,))


def test_shape_given_twice(model: Path) -> None:
    check_refused("compile", model, *SHAPE, *SHAPE, says=("twice", "x"))


@pytest.mark.parametrize(
    ("text", "says"),
    [("q=1,2", "'q'"), ("x=1,2", "x"), ("x=-1,8,8,8", "negative"), ("x=1,9,8,8", "x"), (f"x={10**30},8,8,8", "x")],
)
def test_shape_that_does_not_fit(text: str, says: str, model: Path) -> None:
    check_refused("compile", model, "--shape", text, says=(says,))


def test_symbolic_dims_without_a_shape(model: Path) -> None:
    check_refused("verify", model, says=(model, "'x'", "--shape"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("frobnicate",), "frobnicate"),
        (("--frob",), "--frob"),
        (("compile",), "MODEL"),
        (("compile", "m.onnx", "--frob"), "--frob"),
        (("run", "m.onnx", "--compare", "torch"), "torch"),
        (("run", "m.onnx", "--tolerance", "-1"), "--tolerance"),
        (("verify", "m.onnx", "--seed", "-1"), "--seed"),
        (("verify", "m.onnx", "--seed", "one"), "--seed"),
    ],
)
def test_bad_options(args: tuple[str, ...], says: str) -> None:
    check_refused(*args, says=(says,))


def test_unknown_tuning(model: Path) -> None:
    check_refused("run", model, *SHAPE, "--tune", "max", says=("max", "none, quick"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_under_the_output() -> None:
    with Path("/dev/full").open("w") as full:
        program = [sys.executable, "-m", "fusec", "targets"]
        result = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "fusec: error: No space left on device\n")


# arrays ---------------------------------------------------------------------------------------------


def check_refused_input(model: Path, path: object, *says: object) -> None:
    check_refused("run", model, *SHAPE, "--input", f"x={path}", says=says)


def test_input_that_is_no_pair(model: Path, tmp_path: Path) -> None:
    check_refused("run", model, *SHAPE, "--input", tmp_path / "x.npy", says=("--input", "NAME="))


def test_input_file_missing(model: Path, tmp_path: Path) -> None:
    check_refused_input(model, tmp_path / "none.npy", tmp_path / "none.npy", "No such file")


def test_input_folder(model: Path, tmp_path: Path) -> None:
    check_refused_input(model, tmp_path, tmp_path)


@pytest.mark.parametrize("data", [b"", b"hello", NPY_MAGIC, NPY_MAGIC + b"\x76\x00" + b"(" * 118, b"\x93NUMPY\x09\x00"])
def test_input_that_is_no_npy(data: bytes, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(data)
    check_refused_input(model, path, path, ".npy")


def test_pickled_npy_is_never_read(model: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    np.save(tmp_path / "x.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    check_refused_input(model, tmp_path / "x.npy", tmp_path / "x.npy", "bject")
    assert not (tmp_path / "exploded").exists()


def test_header_larger_than_the_file_costs_no_memory(model: Path, tmp_path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 64), }".ljust(117) + b"\n"
    path = tmp_path / "x.npy"
    path.write_bytes(NPY_MAGIC + struct.pack("<H", len(header)) + header + bytes(64))
    check_refused_input(model, path, path)


def test_npz_for_an_npy(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones(3))
    check_refused_input(model, tmp_path / "x.npz", tmp_path / "x.npz", ".npy")


@pytest.mark.cudnn
def test_input_of_another_shape(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 8, 8, 9), np.float32))
    check_refused_input(model, tmp_path / "x.npy", "'x'", "[1, 8, 8, 8]", "[1, 8, 8, 9]")


@pytest.mark.cudnn
def test_input_of_another_dtype(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 8, 8, 8), np.float64))
    check_refused_input(model, tmp_path / "x.npy", "'x'", "float32", "float64")


@pytest.mark.cudnn
def test_input_of_no_name(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 8, 8, 8), np.float32))
    check_refused("run", model, *SHAPE, "--input", f"q={tmp_path / 'x.npy'}", says=("'q'", "x"))


# files written --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "name"), [("compile", "o.json"), ("run", "o.npz")])
class TestOutput:
    def test_folder_missing(self, command: str, name: str, model: Path, tmp_path: Path) -> None:
        check_refused(command, model, *SHAPE, "--output", tmp_path / "none" / name, says=(tmp_path / "none" / name,))

    def test_folder_is_a_file(self, command: str, name: str, model: Path) -> None:
        check_refused(command, model, *SHAPE, "--output", model / name, says=(model / name,))

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_folder_not_writable(self, command: str, name: str, model: Path, tmp_path: Path) -> None:
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o500)
        check_refused(command, model, *SHAPE, "--output", folder / name, says=(folder / name, "cannot be written"))

    def test_existing_file_survives_a_failure(self, command: str, name: str, model: Path, tmp_path: Path) -> None:
        path = tmp_path / name
        path.write_bytes(b"precious")
        model.write_bytes(b"broken")
        check_refused(command, model, "--output", path, says=(model,))
        assert path.read_bytes() == b"precious"

    @pytest.mark.cudnn
    def test_existing_file_survives_a_full_disk(
        self, command: str, name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        path = tmp_path / name
        path.write_bytes(b"precious")
        monkeypatch.setattr(os, "fsync", full)
        check_refused(command, model, *SHAPE, "--output", path, says=(path, "No space left on device"))
        assert path.read_bytes() == b"precious"
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "tiny.onnx"])


def test_a_device_is_not_replaced(model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "o.json")
    check_refused("compile", model, *SHAPE, "--output", tmp_path / "o.json", says=(tmp_path / "o.json", "regular file"))
    assert (tmp_path / "o.json").is_fifo()


def test_the_models_are_what_they_claim(model: Path) -> None:
    onnx.checker.check_model(onnx.load(model))

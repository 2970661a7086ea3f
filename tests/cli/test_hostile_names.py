"""Test names that try to rule the terminal: no command prints a control or bidi character of them, JSON keeps them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli.command import Result, fusec
from gpu.cudnn import recorded_answers
from onnx import TensorProto, helper, numpy_helper

from fusec.cli import commands

EVIL = "\x1b]0;owned\x07\x1b[2J\r\nFORGED line\u202e\u2066\x9b\x7f\u2028\x85\t\x08"


def name(word: str) -> str:
    return f"{word}{EVIL}"


def save(folder: Path) -> Path:
    """A small model in which every name is hostile, in a file whose name is."""
    w = numpy_helper.from_array(np.full((4, 3, 3, 3), 0.1, np.float32), name("w"))
    nodes = [
        helper.make_node("Conv", [name("x"), name("w")], [name("c")], name("conv"), pads=[1, 1, 1, 1]),
        helper.make_node("Relu", [name("c")], [name("r")], name("act")),
        helper.make_node("Sign", [name("r")], [name("s")], name("sign")),
        helper.make_node("Add", [name("r"), name("s")], [name("y")], name("sum")),
    ]
    x = helper.make_tensor_value_info(name("x"), TensorProto.FLOAT, [name("N"), 3, 8, 8])
    y = helper.make_tensor_value_info(name("y"), TensorProto.FLOAT, [name("N"), 4, 8, 8])
    graph = helper.make_graph(nodes, name("graph"), [x], [y], [w])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    file = folder / f"{name('net').replace('/', '')}.onnx"
    file.write_bytes(model.SerializeToString())
    return file


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("evil"))


def check_quiet(result: Result, status: int = 0) -> Result:
    """The result, of which a terminal obeys nothing and whose lines are all fusec's own."""
    for text in (result.stdout, result.stderr):
        bad = {c for line in text.split("\n") for c in line if not c.isprintable()}
        assert not bad, text
        assert not [line for line in text.split("\n") if line.startswith("FORGED")], text
    assert result.exit_code == status, result.stderr
    return result


SHAPE = ("--shape", f"{name('x')}=1,3,8,8")


@pytest.mark.cudnn
@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("compile",), 0),
        (("compile", "--target", "a100"), 0),
        (("run",), 0),
        (("run", "--compare", "onnxruntime"), 0),
        (("run", "--compare", "onnxruntime", "--tolerance", "0"), 1),
        (("explain",), 0),
        (("explain", "--precision", "fp16"), 0),
        (("explain", "--target", "h200,t4"), 0),
        (("explain", "--must-fuse", "conv+relu+sign"), 1),
        (("verify",), 0),
        (("bench", "--runs", 1), 0),
    ],
)
def test_what_a_command_prints(command: tuple[object, ...], status: int, evil: Path) -> None:
    first, *more = command
    result = fusec(first, evil, *SHAPE, *more)
    assert "FORGED" in check_quiet(result, status).stdout
    told = fusec(first, evil, *SHAPE, *more, "--json")
    document = json.loads(check_quiet(told, status).stdout)
    assert document["model"] == str(evil)
    for kind in ("inputs", "outputs"):
        names = [spec["name"] for spec in document.get(kind, ())]
        assert all(found in (name("x"), name("y")) for found in names)


@pytest.mark.cudnn
def test_commands_that_write(evil: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / f"cache{EVIL}"))
    recorded_answers.seed(tmp_path / f"cache{EVIL}")
    monkeypatch.chdir(tmp_path)
    out: Callable[[str], Path] = lambda end: tmp_path / f"{name('out')}{end}"  # noqa: E731
    check_quiet(fusec("compile", evil, *SHAPE, "-o", out(".fusec")))
    check_quiet(fusec("compile", evil, *SHAPE, "-o", out(".json")))
    for command in (("compile",), ("run",), ("verify",), ("explain",), ("lock", "write", "-o", out(".lock"))):
        check_quiet(fusec(*command, out(".fusec")))
    check_quiet(fusec("compile", out(".fusec"), *SHAPE), 2)
    check_quiet(fusec("lock", "diff", out(".lock"), evil, *SHAPE))
    check_quiet(fusec("convert", evil, *SHAPE, "-o", out(".onnx")))
    check_quiet(fusec("quantize", evil, "--format", "weights-int8", "--report", "-o", out(".onnx")))
    check_quiet(fusec("quantize", evil, "--exclude", name("z"), "-o", out(".onnx")), 2)
    check_quiet(fusec("run", evil, *SHAPE, "-o", out(".npz")))
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 8, 8), np.float32))
    check_quiet(fusec("run", evil, *SHAPE, "--input", f"{name('x')}={tmp_path / 'x.npy'}"))
    check_quiet(fusec("run", evil, *SHAPE, "--input", f"{name('z')}={tmp_path / 'x.npy'}"), 2)
    check_quiet(fusec("repro", evil, *SHAPE, "--partition", 0))
    check_quiet(fusec("repro", evil, *SHAPE, "--partition", 0), 2)  # the folder is in use
    check_quiet(fusec("repro", evil, *SHAPE, "--partition", 99, "-o", out("")), 2)
    check_quiet(fusec("cache", "info"))
    check_quiet(fusec("cache", "export", out(".zip")))
    check_quiet(fusec("cache", "import", out(".zip")))
    check_quiet(fusec("cache", "import", evil), 2)
    check_quiet(fusec("cache", "trust", out(".fusec")))
    check_quiet(fusec("cache", "trust", evil), 2)
    check_quiet(fusec("cache", "clear"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("compile", name("nowhere") + ".onnx"),
        ("run", name("nowhere") + ".fusec"),
        ("run", "x.onnx", "-o", name("nowhere") + "/y.npz"),
        ("compile", "x.onnx", "--target", EVIL),
        ("compile", "x.onnx", "--precision", EVIL),
        ("compile", "x.onnx", "--shape", f"{EVIL}=a"),
        ("compile", "x.onnx", "--disable", EVIL),
        ("lock", "diff", name("a") + ".lock", name("b") + ".lock"),
        ("cache", "import", EVIL),
        ("cache", "trust", EVIL),
        ("fuzz", "replay", EVIL),
        (EVIL,),
        ("compile", "x.onnx", f"--{EVIL}"),
    ],
)
def test_arguments_in_errors(arguments: tuple[str, ...]) -> None:
    check_quiet(fusec(*arguments), 2)


def change(edit: Callable[[onnx.ModelProto], object]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        model = onnx.load(file)
        edit(model)
        file.write_bytes(model.SerializeToString())

    return apply


def external(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=name("data"))


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: setattr(m.graph.node[2], "op_type", name("Op")),
        lambda m: setattr(m.graph.node[2], "domain", name("domain")),
        lambda m: [setattr(node, "op_type", name("Op")) for node in m.graph.node],
        lambda m: m.graph.node[2].input.append(name("r")),
        lambda m: m.graph.node[1].input.__setitem__(0, name("missing")),
        lambda m: m.graph.node[0].attribute.append(helper.make_attribute(name("attribute"), 1)),
        lambda m: m.graph.node[0].attribute[0].ints.append(3),
        lambda m: m.graph.node.append(m.graph.node[3]),
        lambda m: m.graph.input[0].type.tensor_type.shape.dim[1].__setattr__("dim_value", 5),
        lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", TensorProto.STRING),
        lambda m: m.graph.initializer[0].dims.__setitem__(0, 7),
        lambda m: m.graph.output[0].__setattr__("name", name("other")),
        lambda m: m.opset_import.extend([helper.make_opsetid(name("d"), 1), helper.make_opsetid(name("d"), 2)]),
        external,
    ],
)  # fmt: skip
def test_models_that_are_refused(edit: Callable[[onnx.ModelProto], object], tmp_path: Path) -> None:
    file = save(tmp_path)
    change(edit)(file)
    result = check_quiet(fusec("compile", file, *SHAPE), 2)
    assert "FORGED" in result.stderr


def test_a_shape_that_is_missing(tmp_path: Path) -> None:
    check_quiet(fusec("compile", save(tmp_path)), 2)
    check_quiet(fusec("compile", save(tmp_path), "--shape", f"{name('z')}=1"), 2)


def test_text_that_does_not_parse(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(
        'graph "g" (%x: f32[2]) {\n  %y = ' + "\x1b[2J\u202e\x07" + "(%x)\n  return %y\n}", encoding="utf-8"
    )
    result = check_quiet(fusec("compile", file), 2)
    assert "line 2" in result.stderr


@pytest.mark.cudnn
def test_warnings(evil: Path, tmp_path: Path) -> None:
    cache = tmp_path / f"cache{EVIL}"
    cache.mkdir()
    (cache / "answers.sqlite").write_bytes(b"no database" * 100)
    done = subprocess.run(
        [sys.executable, "-m", "fusec", "compile", str(evil), *SHAPE],
        env={**os.environ, "FUSEC_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "is damaged" in check_quiet(Result(done.returncode, done.stdout, done.stderr)).stderr


@pytest.mark.cudnn
def test_errors_of_the_library(evil: Path) -> None:
    from fusec import driver
    from fusec.errors import FusecError

    executable = driver.compile(str(evil), target="h200", shapes={name("x"): (1, 3, 8, 8)})
    for feeds in ({}, {name("z"): 1}, {name("x"): np.zeros((2, 2), np.float32)}):
        with pytest.raises(FusecError) as caught:
            executable.run(None, feeds)
        assert all(line.isprintable() and not line.startswith("FORGED") for line in str(caught.value).split("\n"))


def test_commands_print_by_say_alone() -> None:
    for file in sorted(Path(commands.__file__).parent.glob("*.py")):
        printed = re.findall(r"(?<![\w.])print\(|typer\.echo\(|sys\.std\w+\.write\(", file.read_text())
        assert len(printed) == (file.name == "output.py"), file

"""Test sizes and ranges for symbolic dims: how they are written, what they fix, and what a call outside them says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dynamic_shapes.test_executable import fresh, image_net
from frontends.onnx.models import info, model, run
from helpers import assert_close, one_program
from onnx import helper

import fusec
from fusec import frontends
from fusec.dynamic_shapes.size_ranges import read_sizes, sizing_of
from fusec.dynamic_shapes.sizing import SizeRange
from fusec.errors import CheckError, ExecutionError, FusecError, ModelError

pytestmark = [pytest.mark.cudnn, pytest.mark.usefixtures("no_gpu")]


def pair(first: list[Any], second: list[Any]) -> frontends.Source:
    """A sum of two inputs."""
    nodes = [helper.make_node("Add", ["a", "b"], ["c"])]
    return frontends.Source(model(nodes, [info("a", first), info("b", second)], [info("c", first)]))


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (4, (4, 4, 4)),
        (np.int64(4), (4, 4, 4)),
        ("4", (4, 4, 4)),
        ("1..32", (1, 32, 32)),
        ("1..8..32", (1, 8, 32)),
        ((1, 32), (1, 32, 32)),
        ([1, 8, 32], (1, 8, 32)),
        (("1..8..32",), (1, 8, 32)),
        (0, (0, 0, 0)),
    ],
)
def test_a_range_can_be_written_in_these_ways(given: Any, want: tuple[int, int, int]) -> None:
    assert SizeRange.of("dim", given) == SizeRange(*want)


@pytest.mark.parametrize("given", ["", "a", "1..", "1..2..3..4", "1-3", (), (1, 2, 3, 4), 1.5, None, ("1", "2")])
def test_what_is_no_range_is_refused(given: Any) -> None:
    with pytest.raises(FusecError, match=r"dim 'N' is .*, but must be a size, or a range such as"):
        SizeRange.of("dim 'N'", given)


@pytest.mark.parametrize("given", [(5, 1), "1..9..8", -1, "3..2"])
def test_sizes_that_fall_are_refused(given: Any) -> None:
    with pytest.raises(FusecError, match="must be 0 or more and must not fall"):
        SizeRange.of("dim 'N'", given)


def test_one_shape_for_each_input_is_read_by_the_importer() -> None:
    source = pair(["N", 3], ["N", 3])
    assert read_sizes(source, {"a": (2, 3)}) is None
    assert read_sizes(source, {"q": (2, 3)}) is None  # the importer reports it
    assert read_sizes(source, None) is None
    assert read_sizes(source, {"N": (2, 3)}) is not None


def test_names_of_dims_and_of_inputs() -> None:
    known = sizing_of(pair(["N", "S"], ["N", None]), {"S": 5, "b": ("1..8", "2..6")})
    assert [spec.dims for spec in known.inputs] == [("N", 5), ("N", "b[1]")]
    assert known.outputs[0].dims == ("N", 5)
    assert known.ranges == {"N": SizeRange(1, 8, 8), "b[1]": SizeRange(2, 6, 6)}
    assert known.likely == {"a": (8, 5), "b": (8, 6)}


def test_contradictions_and_unknown_names_are_refused() -> None:
    source = pair(["N", 3], ["N", 3])
    for given, why in (
        ({"q": 1}, "there is no input or symbolic dim 'q'; inputs: a, b; dims: N"),
        ({"N": (1, 8), "b": (4, 3)}, "dim 'N' is 1 to 8 and 4 in the shapes given"),
        ({"a": (1, "2..3")}, "dim 1 of input 'a' is 3 in the model, and 2 to 3 as given"),
        ({"a": ("1..2",)}, "input 'a' has 2 dims, the shape given has 1"),
        ({"a": 5}, "the shape given for input 'a' is 5, not a sequence of sizes"),
    ):
        with pytest.raises(ModelError, match=why):
            sizing_of(source, given)


def test_an_input_and_a_dim_of_one_name() -> None:
    source = pair(["a", 3], ["a", 3])
    assert sizing_of(source, {"a": (2, 3)}).likely == {"a": (2, 3), "b": (2, 3)}
    assert sizing_of(source, {"a": "2..3"}).likely == {"a": (3, 3), "b": (3, 3)}


def test_an_input_without_a_shape_gets_one() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    exe = fusec.compile(model(nodes, [info("x", None)], ["y"]), shapes={"x": ("1..4", 3)})
    assert exe.inputs[0].shape == ("x[0]", 3)
    x = fresh(2, 3)
    assert_close(exe(x), np.maximum(x, 0), 0)


def test_sizes_by_name_make_one_program() -> None:
    exe = fusec.compile(image_net(), shapes={"N": 2, "H": 16})
    assert isinstance(exe, fusec.Executable)
    assert exe.inputs[0].shape == (2, 3, 16, 16)
    with pytest.raises(ModelError, match=r"input 'x' has symbolic dims \[N, 3, H, H\]"):
        fusec.compile(image_net(), shapes={"N": 2})


@pytest.mark.parametrize(
    "shapes", [{"N": "1..4..8", "H": 16}, {"N": (1, 4, 8), "H": "16"}, {"x": ("1..4..8", 3, 16, 16)}]
)
def test_a_range_compiles_its_likely_size_first(shapes: Any) -> None:
    exe: Any = fusec.compile(image_net(), shapes=shapes)
    assert isinstance(exe, fusec.DynamicExecutable)
    assert exe.inputs[0].shape == ("N", 3, 16, 16)
    assert exe.shapes == [{"x": (4, 3, 16, 16)}]
    x = fresh(3, 3, 16, 16)
    assert_close(exe(x), run(image_net(), {"x": x})[0], 1e-5)
    assert exe.shapes[-1] == {"x": (3, 3, 16, 16)}
    with pytest.raises(ExecutionError, match="dim 'N' is 9 in input %x, but this executable takes 1 to 8"):
        exe(fresh(9, 3, 16, 16))
    with pytest.raises(ExecutionError, match="dim 'N' is 9"):
        exe.at({"N": 9})
    assert not exe.fits({"x": (9, 3, 16, 16)})
    with pytest.raises(ExecutionError, match=r"input %x has shape \[N, 3, 16, 16\], the array \[2, 3, 8, 8\]"):
        exe(fresh(2, 3, 8, 8))


def test_a_dim_without_a_range_is_free() -> None:
    exe: Any = fusec.compile(image_net(), shapes={"N": "1..4"})
    assert exe.shapes == []
    with pytest.raises(ExecutionError, match="there is no program yet: call it, give shapes"):
        exe.explain()
    for size in (8, 16):
        exe(fresh(2, 3, size, size))
    assert exe.program().inputs[0].shape == (2, 3, 16, 16)  # the one used last
    with pytest.raises(ExecutionError, match="sizes are given of N, so other dims of the inputs have no size"):
        exe.at({"N": 2})
    with pytest.raises(ExecutionError, match="there is no symbolic dim 'x'; those of the inputs: N, H"):
        exe.at({"N": 2, "x": 3})


def test_buckets_within_a_range() -> None:
    exe: Any = fusec.compile(image_net(), shapes={"N": (1, 5, 9), "H": 8}, buckets={"N": [2, 8]})
    assert exe.shapes == [{"x": (8, 3, 8, 8)}]  # the bucket of the likely size
    for n in (1, 2, 5, 9):
        x = fresh(n, 3, 8, 8)
        assert_close(exe(x), run(image_net(), {"x": x})[0], 1e-5)
    assert [s["x"][0] for s in exe.shapes] == [2, 8, 9]
    with pytest.raises(FusecError, match=r"buckets of 'N' are \[16\], but its sizes are 1 to 9"):
        fusec.compile(image_net(), shapes={"N": (1, 9)}, buckets={"N": [16]})
    free: Any = fusec.compile(image_net(), buckets={"N": [4]})  # without ranges, as compile_dynamic
    free(fresh(3, 3, 8, 8))
    assert free.shapes == [{"x": (4, 3, 8, 8)}]


def test_one_program_only_takes_state_or_a_lock() -> None:
    nodes = [helper.make_node("Add", ["x", "s"], ["t"])]
    proto = model(nodes, [info("x", ["N"]), info("s", ["N"])], [info("t", ["N"])])
    with pytest.raises(FusecError, match="state needs one size for each dim"):
        fusec.compile(proto, shapes={"N": "1..4"}, state={"s": "t"})
    exe = one_program(fusec.compile(proto, shapes={"N": 4}, state={"s": "t"}))
    exe.bind(s=np.ones(4, np.float32))
    with pytest.raises(ExecutionError, match="a program with state cannot be timed on random inputs"):
        exe.bench()
    with pytest.raises(FusecError, match="lock needs one size for each dim"):
        fusec.compile(proto, shapes={"N": "1..4"}, lock="fusec.lock")


def test_reports_are_about_one_program() -> None:
    exe: Any = fusec.compile(image_net(), shapes={"N": (1, 4), "H": 8})
    for shapes, batch in ((None, 4), ({"N": 2}, 2), ({"x": (3, 3, 8, 8)}, 3)):
        program = exe.at({"N": batch})
        assert str(exe.explain(shapes)) == str(program.explain())
        assert exe.verify(shapes=shapes).ok
        timed = exe.bench(runs=2, shapes=shapes)
        assert timed.memory_bytes == program.memory.nbytes
        assert timed.call.runs == 2
    exe.assert_fused("conv+relu")
    with pytest.raises(CheckError):
        exe.assert_fused("conv+exp")


def test_executables_are_timed_on_random_inputs() -> None:
    exe = one_program(fusec.compile(image_net(), shapes={"N": 2, "H": 8}))
    timed = exe.bench(runs=3, seed=1)
    assert timed.device == "simulated"
    assert [step.signature for step in timed.steps] == [
        step.signature for step in exe.compiled.program.steps if step.kind.value != "view"
    ]


def test_compile_dynamic_takes_ranges_too() -> None:
    exe = fusec.compile_dynamic(image_net(), shapes={"N": (1, 4), "H": 8})
    assert exe.shapes == []
    assert exe.inputs[0].shape == ("N", 3, 8, 8)
    assert exe.outputs[0].shape == ("N", 5)
    with pytest.raises(ExecutionError, match="takes 1 to 4"):
        exe(fresh(5, 3, 8, 8))

"""Compare models that are split at host steps with onnxruntime, in simulation and op by op."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, run
from helpers import assert_close
from segments.models import BOOL, CASES, FLOAT, INT, floats, given_axis, ints, n, non_zero

import fusec
from fusec.errors import ExecutionError, FusecError, ModelError
from fusec.segments import programs
from fusec.segments.executable import SegmentedExecutable


def compiled(proto: Any, **options: Any) -> SegmentedExecutable:
    executable = fusec.compile(proto, **options)
    assert isinstance(executable, SegmentedExecutable)
    return executable


def check_agrees(executable: Any, proto: Any, feeds: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = run(proto, dict(feeds))
    got = executable.run(None, dict(feeds))
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_every_case_agrees_with_onnxruntime(name: str) -> None:
    case = CASES[name]()
    executable = compiled(case.proto, target="cpu")
    for feeds in (*case.feeds, case.feeds[0]):
        check_agrees(executable, case.proto, feeds)
        steps = tuple(step.op for segment in executable.explain().segments for step in segment.steps)
        assert not case.steps or steps == case.steps


@pytest.mark.parametrize("name", CASES)
def test_every_case_agrees_if_all_segments_are_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SMALL_ELEMENTS", -1)
    case = CASES[name]()
    executable = compiled(case.proto, target="cpu")
    for feeds in case.feeds:
        check_agrees(executable, case.proto, feeds)
    assert "numpy" not in [segment.runs_as for segment in executable.explain().segments]
    count = len(executable.programs)
    for feeds in case.feeds:
        check_agrees(executable, case.proto, feeds)
    assert len(executable.programs) == count, "a segment was compiled again"


@pytest.mark.cudnn
@pytest.mark.parametrize("name", ["non_zero", "compress_rows", "slice_end", "if"])
def test_cases_agree_in_simulation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SMALL_ELEMENTS", -1)
    case = CASES[name]()
    executable = compiled(case.proto, target="h200", simulate=True)
    for feeds in case.feeds:
        check_agrees(executable, case.proto, feeds)
    assert executable.device == "simulated"
    assert executable.verify().ok


@pytest.mark.cudnn
def test_hints_are_those_of_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product before the host step and one after it: both programs give the same hint, which is shown once."""
    monkeypatch.setattr(programs, "SMALL_ELEMENTS", -1)
    nodes = [
        n("MatMul x x -> s"),
        n("Reshape s flat -> r"),
        n("NonZero r -> w"),
        n("Shape w -> c"),
        n("Cast c -> f", to=FLOAT),
    ]
    nodes += [n("ReduceSum f -> g", keepdims=0), n("Add s g -> t"), n("MatMul t t -> y")]
    proto = model(nodes, [info("x", [2, 8, 8])], [info("y", None)], {"flat": ints(-1)})
    executable = compiled(proto, target="h200", simulate=True)
    executable(floats(2, 8, 8))
    hints = [program.hints for program in executable.programs]
    assert [[hint.kind for hint in each] for each in hints if each] == [["precision"]] * 2
    assert set(executable.hints) == {hint for each in hints for hint in each}
    assert len(set(executable.hints)) == len(executable.hints)


def test_the_segments_used_last_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SMALL_ELEMENTS", -1)
    monkeypatch.setattr(programs, "MAX_SEGMENTS", 2)
    case = non_zero()
    executable = compiled(case.proto, target="cpu")
    for feeds in (*case.feeds, *case.feeds):
        check_agrees(executable, case.proto, feeds)
        assert len(executable.programs) <= 3


def test_a_result_shares_no_memory_with_the_callers_arrays() -> None:
    """The outputs are an input, a constant, and the same bits as an input."""
    nodes = [n("Identity x -> y"), n("BitCast x -> z", to=INT), n("Constant -> k", value_ints=[1, 2])]
    proto = model(nodes, [info("x", [3], 11)], [info("y", None, 11), info("z", None, INT), info("k", None, INT)],
                  opset=26)  # fmt: skip
    x = np.array([1.0, 2.0, 3.0])
    got = compiled(proto, target="cpu")(x)
    x[...] = 0
    assert got[0].tolist() == [1, 2, 3]
    assert got[1].view(np.float64).tolist() == [1, 2, 3]
    got[2][...] = 0  # a result can be written


def test_values_of_a_call_are_those_at_the_call() -> None:
    """A value that became a constant must not change with the array that it came in."""
    case = given_axis()
    executable = compiled(case.proto, target="cpu")
    x, axis = floats(4, 5), np.array(0)
    first = executable(x, axis)
    axis[...] = 1
    second = executable(x, axis)
    assert_close(first, np.maximum(x.cumsum(0), 0), 1e-6)
    assert_close(second, np.maximum(x.cumsum(1), 0), 1e-6)


def test_outputs_by_name_and_into_arrays() -> None:
    case = non_zero()
    executable = compiled(case.proto, target="cpu")
    feeds = case.feeds[3]
    (places,) = executable.run(["nz"], feeds)
    into = np.zeros_like(places)
    (same,) = executable.run(["nz"], feeds, {"nz": into})
    assert same is into
    assert (into == places).all()
    assert places.any()
    with pytest.raises(ExecutionError, match=r"out %nz is int64\[1\], the result int64\[2, 20\]"):
        executable.run(["nz"], feeds, {"nz": np.zeros(1, np.int64)})
    with pytest.raises(ExecutionError, match="no output %q; outputs are %y, %s, %nz"):
        executable.run(["q"], feeds)
    with pytest.raises(ExecutionError, match="input %x is missing"):
        executable.run(None, {})
    with pytest.raises(ExecutionError, match="input %x takes float32, not float64"):
        executable(np.zeros((4, 5)))


def test_the_explanation_times_host_steps_after_a_call() -> None:
    case = non_zero()
    executable = compiled(case.proto, target="cpu")
    before = executable.explain()
    assert before.segments[0].steps[0].seconds is None
    assert "nodes wait for the first call" in str(before)
    executable.run(None, case.feeds[3])
    after = executable.explain()
    step = after.segments[0].steps[0]
    assert (step.node, step.values, step.read_bytes, step.written_bytes) == ("NonZero_2", 1, 20, 320)
    assert step.seconds is not None and step.seconds > 0
    assert json.loads(json.dumps(after.to_json()))["totals"]["host_steps"] == 1
    assert "20 B to the host, 320 B back" in str(after)


def test_the_body_of_a_loop_is_compiled_once() -> None:
    case = CASES["loop_until"]()
    executable = compiled(case.proto, target="cpu")
    trips = set[int | None]()
    for feeds in case.feeds:
        check_agrees(executable, case.proto, feeds)
        trips.add(executable.explain().segments[0].steps[0].trips)
    assert len(trips) > 1
    assert len(executable.programs) == 2, "one for what is in front of the loop, one for its body"
    assert f"ran {executable.explain().segments[0].steps[0].trips} times" in str(executable.explain())
    report = executable.verify()
    assert report.ok
    assert any("loop body" in check.what for check in report.checks)


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_a_loop_that_makes_no_trip_has_empty_scan_outputs(target: str) -> None:
    """As where a detector finds nothing to loop over. A dim that the body computes is 0."""
    case = CASES["loop"]()
    executable = compiled(case.proto, target="cpu")
    check_agrees(executable, case.proto, {"x": np.full((4, 5), -9, np.float32)})
    body = onnx.helper.make_graph(
        [n("Identity go -> on"), n("Neg v -> row"), n("NonZero v -> places"), n("Shape places -> count")], "body",
        [info("i", [], INT), info("go", [], BOOL), info("v", [2, 3])],
        [info("on", [], BOOL), info("v", [2, 3]), info("row", [2, 3]), info("places", [2, "n"], INT),
         info("count", [2], INT)])  # fmt: skip
    proto = model([n("Loop trips _ x -> last rows places counts", body=body)],
                  [info("x", [2, 3]), info("trips", [], INT)],
                  [*(info(name, None) for name in ("last", "rows")),
                   *(info(name, None, INT) for name in ("places", "counts"))])  # fmt: skip
    executable = compiled(proto, target=target)
    for trips in (0, 3, 0):
        check_agrees(executable, proto, {"x": floats(2, 3), "trips": np.array(trips)})
    assert executable(floats(2, 3), np.array(0))[2].shape == (0, 2, 0)


def test_what_a_model_with_host_steps_lacks(tmp_path: Path) -> None:
    case = non_zero()
    executable = compiled(case.proto, target="cpu")
    cut = r"is split at node 'NonZero_2' \(NonZero\), which needs the operand of NonZero on the host"
    for call in (lambda: executable.save(tmp_path / "x.fusec"), executable.lock, executable.bind):
        with pytest.raises(FusecError, match=f"^<ModelProto>: .*{cut}"):
            call()
    one_program_alone: tuple[dict[str, Any], ...] = ({"state": {"x": ""}}, {"lock": tmp_path / "fusec.lock"})
    for options in one_program_alone:
        with pytest.raises(ModelError, match=f"needs one program, and the model {cut}"):
            fusec.compile(case.proto, target="cpu", **options)
    assert not list(tmp_path.iterdir())


def test_a_constant_makes_one_program() -> None:
    assert isinstance(fusec.compile(given_axis().proto, target="cpu", constants={"axis": 1}), fusec.Executable)


def test_a_host_step_that_fails_names_its_node() -> None:
    nodes = [n("Compress x c -> z", axis=0), n("Relu z -> y")]
    proto = model(nodes, [info("x", [2, 3]), info("c", [4], BOOL)], [info("y", None)])
    executable = compiled(proto, target="cpu")
    assert executable(floats(2, 3), np.array([False, True, False, False])).shape == (1, 3)
    with pytest.raises(ExecutionError, match=r"node 'Compress_0' \(Compress\): the condition is longer than dim 0"):
        executable(floats(2, 3), np.array([False, True, False, True]))


def test_a_value_that_fits_no_shape_names_its_node() -> None:
    nodes = [n("Reshape x s -> z"), n("Relu z -> y")]
    executable = compiled(model(nodes, [info("x", [2, 3]), info("s", [2], INT)], [info("y", None)]), target="cpu")
    assert executable(floats(2, 3), ints(3, -1)).shape == (3, 2)
    with pytest.raises(ModelError, match=r"node 'Reshape_0' \(Reshape\): \[2, 3\] has 6 elements, no \[4, -1\] fits"):
        executable(floats(2, 3), ints(4, -1))


def test_channels_last_names_stay_with_their_segment() -> None:
    nodes = [n("Relu image -> r"), n("NonZero r -> nz"), n("Neg r -> y")]
    proto = model(nodes, [info("image", [1, 3, 4, 4], FLOAT)], [info("y", None), info("nz", None, INT)])
    executable = compiled(proto, target="cpu", channels_last={"image", "y"})
    image = floats(1, 3, 4, 4)
    assert_close(executable(image)[0], -np.maximum(image, 0), 0)


@pytest.mark.parametrize("seed", range(8))
def test_suppression_among_many_boxes(seed: int) -> None:
    """Boxes are compared in blocks: the limit may end within one, and a block may lose all of its boxes."""
    rng = np.random.default_rng(seed)
    nodes = [n("NonMaxSuppression boxes scores most iou least -> rows"), n("Cast rows -> y", to=FLOAT)]
    held = {
        "most": ints(int(rng.integers(0, 250))),
        "iou": rng.uniform(0, 0.9, 1).astype(np.float32),
        "least": rng.uniform(-0.5, 0.9, 1).astype(np.float32),
    }
    proto = model(nodes, [info("boxes", [1, 300, 4]), info("scores", [1, 4, 300])], [info("y", None)], held)
    low = rng.uniform(0, 60, (1, 300, 2))
    boxes = np.concatenate([low, low + rng.uniform(1, 30, (1, 300, 2))], -1).astype(np.float32)
    scores = rng.uniform(0, 1, (1, 4, 300)).astype(np.float32)
    check_agrees(compiled(proto, target="cpu"), proto, {"boxes": boxes, "scores": scores})

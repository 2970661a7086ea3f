"""Test the folder of a finding: it restores the finding, replays it, and is complete or absent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import SkipTest

import ml_dtypes
import numpy as np
import pytest
from helpers import HEALTH_CHECKS
from hypothesis import given, settings
from hypothesis.errors import UnsatisfiedAssumption

from fusec.errors import FusecError
from fusec.ir import Constant, DType, Graph, Literal, TensorType, print_graph
from fusec.ops import pw
from fusec.testing import example_codec, finding_folder
from fusec.testing.case import Case, MismatchError, Property, Trust
from fusec.testing.failure import SkippedError, attempt
from fusec.testing.finding_folder import Finding, folders, load, save
from fusec.testing.findings import replay
from fusec.testing.runner.shrink import digest
from fusec.testing.runner.worker_process import check_apart
from fusec.testing.strategies import cases, graphs

PLANTED = Path(__file__).with_name("planted.py")


def graph_of_types() -> Graph:
    """Build a graph with inputs of types that .npz cannot store, and two large constants with one label."""
    graph = Graph("g")
    x = graph.add_input("layer/x", TensorType((2, 3), DType.BF16))
    graph.add_input("half", TensorType((), DType.F16))
    graph.add_input("mask", TensorType((2, 0), DType.BOOL))
    graph.add_input("count", TensorType((4,), DType.U8))
    rng = np.random.default_rng(0)
    a, b = (
        graph.add(Constant(Literal.of(rng.standard_normal((5, 2, 3)).astype(ml_dtypes.bfloat16), "w"))) for _ in "ab"
    )
    graph.set_outputs([graph.add(pw("relu"), graph.add(pw("mul"), graph.add(pw("add"), x, a), b))], ["y"])
    return graph


def failing(graph: Graph, name: str = "no_relu_and_mul", case: Case | None = None) -> Finding:
    """Make a finding as a run does."""
    x = np.array([1.5, np.nan], ml_dtypes.bfloat16)

    def check(graph: Graph, case: Case) -> None:
        raise MismatchError("output %y is off", {"y": x}, {"y": np.add(x, 1)})

    failure = attempt(Property("p", check), graph, case or Case())
    assert failure is not None
    return Finding(f"{PLANTED}:{name}", graph, case or Case(seed=3, style="special"), failure, {"seed": 1})


def test_loaded_finding_equals_the_saved_one(tmp_path: Path) -> None:
    finding = failing(graph_of_types())
    folder = save(finding, tmp_path)
    again = load(folder)
    assert digest(again.graph) == digest(packed(finding.graph))
    assert again.property == finding.property
    assert again.signature == finding.signature
    assert again.failure == finding.failure
    assert again.versions["numpy"] == np.__version__
    assert again.origin == {"seed": 1}
    drawn = finding.case.inputs(finding.graph)
    kept = again.case.inputs(again.graph)
    assert list(kept) == ["layer/x", "half", "mask", "count"]
    for name, array in drawn.items():
        assert kept[name].dtype == array.dtype
        assert kept[name].tobytes() == array.tobytes()
    for one, other in ((again.failure.got, finding.failure.got), (again.failure.want, finding.failure.want)):
        assert one["y"].dtype == ml_dtypes.bfloat16
        assert one["y"].tobytes() == other["y"].tobytes()
    files = {path.name for path in folder.iterdir()}
    assert {"graph.txt", "weights.npz", "inputs.npz", "expected.npz", "got.npz", "replay.py", "finding.json"} <= files
    data = json.loads((folder / "finding.json").read_text())
    assert data["no_onnx"] or "graph.onnx" in files
    assert data["ops"] == {"add": 1, "mul": 1, "relu": 1}


def packed(graph: Graph) -> Graph:
    """Relabel the constants as text and arrays restore them."""
    copy = graph.clone()
    for node in copy.nodes:
        if isinstance(node.op, Constant):
            copy.set_op(node, Constant(Literal.of(node.op.literal.array, node.result.name)))
    return copy


@settings(max_examples=30, deadline=None, suppress_health_check=HEALTH_CHECKS, derandomize=True)
@given(graphs(), cases())
def test_any_example_can_be_encoded_and_decoded(graph: Graph, case: Case) -> None:
    data = json.loads(json.dumps(example_codec.encode(graph, case)))
    again, other = example_codec.decode(data)
    assert other.to_json() == case.to_json()
    assert print_graph(again) == example_codec.text_of(graph)[0]
    assert example_codec.encode(again, other) == data


def test_feeds_can_be_encoded_and_decoded(tmp_path: Path) -> None:
    graph = graph_of_types()
    case = Case(feeds=Case(seed=9).inputs(graph))
    _, other = example_codec.decode(json.loads(json.dumps(example_codec.encode(graph, case))))
    assert case.feeds is not None and other.feeds is not None
    assert all(other.feeds[name].tobytes() == array.tobytes() for name, array in case.feeds.items())
    assert [a.shape for a in other.feeds.values()] == [a.shape for a in case.feeds.values()]


def test_replay_script_runs_the_finding_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(failing(graph_of_types()), tmp_path)
    script = [sys.executable, folder / "replay.py"]
    result = subprocess.run(script, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 1
    assert "still fails: output %v4 is off by 5" in result.stdout
    assert "MismatchError" in result.stderr
    assert "in no_relu_and_mul" in result.stderr, "no traceback to debug by"
    (tmp_path / "fixed").touch()
    monkeypatch.setenv("FUSEC_FIXED", str(tmp_path / "fixed"))
    assert replay(folder) == 0
    assert replay(folder / "replay.py") == 0


def test_crash_is_replayed_in_its_own_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((2,), DType.F32))
    graph.set_outputs([graph.add(pw("tanh"), graph.add(pw("add"), x, x))])
    failure = check_apart(failing(graph, "dies"))
    assert failure is not None
    assert (failure.how, failure.error) == ("died", "SIGSEGV")
    saved = save(Finding(f"{PLANTED}:dies", graph, Case(), failure), tmp_path)
    assert replay(saved) == 1
    assert "SIGSEGV" in capsys.readouterr().out
    assert check_apart(failing(graph, "holds")) is None


def test_similar_failures_have_one_kind() -> None:
    def failure(error: Exception) -> tuple[str, bool]:
        def check(graph: Graph, case: Case) -> None:
            raise error

        found = attempt(Property("p", check), Graph("g"), Case())
        assert found is not None
        return found.kind, found.doubt

    one = failure(MismatchError("output %a.1 [2, 3]: error 1.5e-3, allowed nan"))
    assert one == failure(MismatchError("output %b [4]: error 7, allowed inf\nmore"))
    assert one != failure(MismatchError("input %a.1 [2, 3]: error 1.5e-3, allowed nan"))
    assert failure(KeyError("x"))[0] != failure(ValueError("x"))[0]
    assert failure(MismatchError("m", oracle=Trust.ONNXRUNTIME))[1]
    assert not failure(MismatchError("m"))[1]
    assert not failure(KeyError("x"))[1]


def test_property_can_skip_an_example() -> None:
    def check(graph: Graph, case: Case) -> None:
        raise UnsatisfiedAssumption  # what `assume` does

    def skip(graph: Graph, case: Case) -> None:
        raise SkipTest("not here")

    for each in (check, skip):
        with pytest.raises(SkippedError):
            attempt(Property("p", each), Graph("g"), Case())


def test_errors_name_folders_that_are_no_findings(tmp_path: Path) -> None:
    with pytest.raises(FusecError, match="no such folder"):
        folders(tmp_path / "none")
    with pytest.raises(FusecError, match="holds no finding"):
        folders(tmp_path)
    folder = save(failing(graph_of_types()), tmp_path)
    assert folders(tmp_path) == folders(folder) == [folder]
    (folder / "weights.npz").unlink()
    with pytest.raises(FusecError, match=f"{folder.name}: line .*no weight"):
        load(folder)
    (folder / "finding.json").write_text("{}")
    with pytest.raises(FusecError, match="no finding that can be read"):
        load(folder)


def test_finding_is_written_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = failing(graph_of_types())
    folder = save(finding, tmp_path / "kept")
    (folder / "extra").touch()
    assert save(finding, tmp_path / "kept") == folder
    assert not (folder / "extra").exists(), "the old one was mixed with the new"

    def fail(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(finding_folder, "_write_onnx", fail)
    with pytest.raises(KeyboardInterrupt):
        save(finding, tmp_path / "cut")
    assert list((tmp_path / "cut").iterdir()) == []


def test_finding_is_saved_without_onnx_if_export_fails(tmp_path: Path) -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((2, 2), DType.F32))
    graph.set_outputs([graph.add(pw("tanh"), x)])

    class Odd:
        """No op at all."""

        name = "odd"

    assert finding_folder._write_onnx(Odd(), tmp_path / "graph.onnx")  # type: ignore[arg-type]
    assert not (tmp_path / "graph.onnx").exists()


def test_the_message_of_an_error_names_its_type() -> None:
    def check(graph: Graph, case: Case) -> None:
        raise KeyError("pads")

    failure = attempt(Property("p", check), Graph("g"), Case())
    assert failure is not None
    assert failure.message == "KeyError: 'pads'"

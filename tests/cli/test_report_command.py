"""Test that `fusec report` writes one page without a network, and that `fusec report diff` compares two models."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from cli.command import SHAPE, fusec
from cli.test_hostile_names import SHAPE as EVIL_SHAPE
from cli.test_hostile_names import check_quiet, save
from onnx import TensorProto, helper
from report.page_structure import checked

from fusec.errors import FusecError
from fusec.report.plan_choices import FIRST
from fusec.runtime import SimulatorBackend
from fusec.targets import target

pytestmark = pytest.mark.cudnn


def page(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def test_a_page_holds_what_explain_says(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    result = fusec("report", model, *SHAPE, "-o", file)
    assert (result.exit_code, result.stderr) == (0, "")
    size = f"{file.stat().st_size / 1024:.1f} KiB"
    assert result.stdout == f"4 steps (4 launches) for h200 in fp32, simulated\nwrote {file}, {size}\n"
    assert fusec("report", "-q", model, *SHAPE, "-o", file).stdout.count("\n") == 1
    read = checked(page(file))
    (explained,) = json.loads(fusec("explain", model, *SHAPE, "--json").stdout)["targets"]
    for step in explained["steps"]:
        assert f"Step {step['index']}: {step['ops']}" in read.texts[f"step-{step['index']}"]
        assert step["engine_class"] in read.texts[f"step-{step['index']}"]
    assert any(step["engine_class"] for step in explained["steps"])
    for number, decline in enumerate((*explained["left_out"], *explained["declined"])):
        assert decline["ours"] in read.texts[f"refusal-{number}"]
    assert "tiny.onnx" in read.text and str(model.parent) not in read.text  # the reader need not know the folder


def test_the_default_file_and_json(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = json.loads(fusec("report", model, *SHAPE, "--target", "t4", "--no-cores", "--json").stdout)
    assert (data["model"], data["output"]) == (str(model), "report.html")
    assert data["bytes"] == Path("report.html").stat().st_size
    (program,) = data["programs"]
    assert (program["target"], program["simulated"], program["time_us"]) == ("t4", True, None)
    (explained,) = json.loads(fusec("explain", model, *SHAPE, "--target", "t4", "--no-cores", "--json").stdout)[
        "targets"
    ]
    assert program["totals"] == explained["totals"]


def test_a_fleet_is_compiled_on_request(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert target.names() == ["t4", "a100", "l4", "h100", "h200", "b200"]
    monkeypatch.setattr(target, "names", lambda: ["t4", "h200"])  # fewer to ask about
    file = tmp_path / "page.html"
    data = json.loads(fusec("report", model, *SHAPE, "--fleet", "--no-cores", "-o", file, "--json").stdout)
    assert [each["target"] for each in data["fleet"]] == ["t4", "h200"]
    text = checked(page(file)).texts["fleet"]
    assert all(each["target"] in text for each in data["fleet"])


def test_pages_are_not_compared(model: Path, tmp_path: Path) -> None:
    """The message says what to give in place of a page."""
    result = fusec("report", "diff", tmp_path / "old.html", model, *SHAPE)
    assert result.exit_code == 2
    assert "old.html: is a page; `fusec report diff` compares models or .fusec files: give these" in result.stderr


def test_a_compiled_model_is_reported_with_its_plans(model: Path, tmp_path: Path) -> None:
    compiled, file = tmp_path / "tiny.fusec", tmp_path / "page.html"
    assert fusec("compile", model, *SHAPE, "--target", "h200", "-o", compiled).exit_code == 0
    data = json.loads(fusec("report", compiled, "--fleet", "--no-cores", "-o", file, "--json").stdout)
    assert [each["target"] for each in data["fleet"]] == ["h200"]
    text = checked(page(file)).text
    assert "as its lock says; no plan was timed" in text
    differ = tmp_path / "diff.html"
    result = fusec("report", "diff", model, compiled, *SHAPE, "-o", differ)
    assert (result.exit_code, "comes too late" in result.stderr) == (2, True)


def test_one_model_is_compared_on_two_gpus(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "diff.html"
    result = fusec("report", "diff", model, model, *SHAPE, "--target", "h200,t4", "--no-cores", "-o", file)
    assert result.exit_code == 0 and "of 4 groups of steps run differently" in result.stdout
    assert "tiny.onnx on h200 and tiny.onnx on t4" in checked(page(file)).text


def test_a_lock_decides_the_plans(model: Path, tmp_path: Path) -> None:
    lock, file = tmp_path / "fusec.lock", tmp_path / "page.html"
    assert fusec("lock", model, *SHAPE, "-o", lock).exit_code == 0
    assert fusec("report", model, *SHAPE, "--locked", lock, "--no-cores", "-o", file).exit_code == 0
    text = checked(page(file)).text
    assert "as its lock says; no plan was timed" in text and FIRST not in text
    lock.write_text(lock.read_text().split("[[partition]]")[0])
    result = fusec("report", model, *SHAPE, "--locked", lock, "--no-cores", "-o", tmp_path / "other.html")
    assert result.exit_code == 1 and "has no entry" in result.stderr and not (tmp_path / "other.html").exists()


def test_two_versions_are_compared(model: Path, tmp_path: Path) -> None:
    changed = onnx.load(model)
    changed.graph.node[2].op_type = "Exp"
    new, file = tmp_path / "new.onnx", tmp_path / "diff.html"
    onnx.save(changed, new)
    data = json.loads(fusec("report", "diff", model, new, *SHAPE, "--no-cores", "-o", file, "--json").stdout)
    assert data["different"] == 1 < data["groups"]
    text = checked(page(file)).text
    assert "sign" in text and "exp" in text and "tiny.onnx" in text and "new.onnx" in text


def test_a_model_with_host_steps_has_a_part_for_each_program(tmp_path: Path) -> None:
    """The number of elements that NonZero finds decides the shapes after it."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], "first"),
        helper.make_node("NonZero", ["r"], ["found"], "cut"),
        helper.make_node("Cast", ["found"], ["f"], "cast", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["f", "f2"], ["y"], "last"),
        helper.make_node("Transpose", ["f"], ["f2"], "turn", perm=[1, 0]),
    ]
    nodes[3], nodes[4] = nodes[4], nodes[3]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 64])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 2])
    graph = helper.make_graph(nodes, "cut", [x], [y])
    model, file = tmp_path / "cut.onnx", tmp_path / "page.html"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), model)
    result = fusec("report", model, "--no-cores", "-o", file)
    assert result.exit_code == 0, result.stderr
    read = checked(page(file))
    assert "segment-0-step-0" in read.ids
    assert "NonZero" in read.texts["segment-0-summary"] and "on the host" in read.texts["segment-0-summary"]


def test_on_a_gpu_everything_is_timed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator takes the place of the GPU, under its name."""
    file = tmp_path / "page.html"
    monkeypatch.setattr("fusec.cli.report._is_present", lambda request, target: True)
    monkeypatch.setattr("fusec.compiler.compile_model.SimulatorBackend", lambda: SimulatorBackend("NVIDIA H200"))
    data = json.loads(fusec("report", model, *SHAPE, "--runs", 2, "--no-cores", "-o", file, "--json").stdout)
    (program,) = data["programs"]
    assert (program["device"], program["simulated"]) == ("NVIDIA H200", False) and program["time_us"] > 0
    text = checked(page(file)).texts
    assert "Measured on NVIDIA H200" in text["summary"] and "medians of 2 runs" in text["summary"]
    assert "measured alone" in text["step-0"] and "compiled in" in text["summary"]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    evil, file = save(tmp_path), tmp_path / "page.html"
    check_quiet(fusec("report", evil, *EVIL_SHAPE, "-o", file))
    source = page(file)
    assert "FORGED" in checked(source).text
    assert not {c for c in source if not c.isprintable() and c != "\n"}
    check_quiet(fusec("report", "diff", evil, evil, *EVIL_SHAPE, "--no-cores", "-o", file))
    assert not {c for c in page(file) if not c.isprintable() and c != "\n"}


def test_errors_come_before_the_work(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = tmp_path / "none" / "page.html"
    result = fusec("report", model, *SHAPE, "-o", nowhere)
    assert result.exit_code == 2 and "there is no folder" in result.stderr
    result = fusec("report", "diff", model, model, *SHAPE, "--target", "t4,h200,b200")
    assert result.exit_code == 2 and "names more than two GPUs" in result.stderr

    def missing() -> None:
        raise FusecError("a report needs Jinja2: pip install 'fusec[report]'")

    monkeypatch.setattr("fusec.report.need_jinja", missing)
    result = fusec("report", model, *SHAPE, "-o", tmp_path / "page.html")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "fusec: error: a report needs Jinja2: pip install 'fusec[report]'\n"

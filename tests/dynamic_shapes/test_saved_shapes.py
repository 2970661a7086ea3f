"""Test `.fusec` files with programs for several sets of input shapes: what they hold, share and refuse."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from dynamic_shapes.test_executable import attention, fresh, image_net, node, weights
from frontends.onnx.models import info, model, run
from helpers import assert_close

import fusec
from fusec.artifacts import fusec_file
from fusec.artifacts.shape_table import ShapeTable
from fusec.dynamic_shapes import save_shapes
from fusec.dynamic_shapes.save_shapes import save
from fusec.errors import FusecError, ModelError
from fusec.plans.plan_record import Choice, Entry

pytestmark = [pytest.mark.cudnn, pytest.mark.usefixtures("no_gpu")]


def check(exe: Any, *shape: int) -> None:
    x = fresh(*shape)
    assert_close(exe(x), run(image_net(), {"x": x})[0], 1e-5)


def rewritten(path: Path, change: Any) -> Path:
    """Write the file again with another manifest."""
    other = path.with_name("other.fusec")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "manifest.json":
                manifest = json.loads(data)
                change(manifest)
                data = json.dumps(manifest).encode()
            new.writestr(name, data)
    return other


def test_a_file_holds_the_sizes_of_a_range(tmp_path: Path) -> None:
    path = tmp_path / "net.fusec"
    exe: Any = fusec.compile(image_net(), shapes={"N": "1..2..6", "H": 8})
    check(exe, 5, 3, 8, 8)
    exe.save(path)
    loaded: Any = fusec.load(path)
    assert isinstance(loaded, fusec.DynamicExecutable)
    assert loaded.inputs == exe.inputs
    assert loaded.outputs == exe.outputs
    assert loaded.program().inputs[0].shape == (2, 3, 8, 8)
    for batch in (1, 6, 2, 5):  # the ends and the likely size, and what was used before
        check(loaded, batch, 3, 8, 8)
    with pytest.raises(
        ModelError, match=r"has no program for .*3, 3, 8, 8.*, only for x \[2, 3, 8, 8\]; x \[1, 3, 8, 8\]"
    ):
        loaded(fresh(3, 3, 8, 8))
    assert loaded.explain().summary == exe.explain().summary
    assert loaded.verify().ok


def test_programs_of_a_file_share_the_weights(tmp_path: Path) -> None:
    one, many = tmp_path / "one.fusec", tmp_path / "many.fusec"
    fusec.compile(image_net(), shapes={"N": 4, "H": 8}).save(one)
    exe: Any = fusec.compile(image_net(), shapes={"N": (1, 4), "H": 8})
    exe.save(many)

    def weights(path: Path) -> int:
        with zipfile.ZipFile(path) as file:
            return file.getinfo("weights.safetensors").file_size

    assert weights(one) == weights(many)
    loaded: Any = fusec.load(many)
    programs = [loaded.at({"N": n}) for n in (1, 4)]
    literals = [
        {id(c.literal) for each in p.compiled.lowered if each is not None for c in each.constants} for p in programs
    ]
    assert literals[0] == literals[1]


def test_padding_is_proved_when_the_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "net.fusec"
    exe: Any = fusec.compile(image_net(), shapes={"N": (2, 8), "H": 8}, buckets={"N": [4, 8]})
    exe.save(path)
    loaded: Any = fusec.load(path)
    for batch in range(2, 9):
        check(loaded, batch, 3, 8, 8)
    assert [s["x"][0] for s in loaded.shapes] == [4, 8]
    table = fusec_file.table(path)
    assert table is not None
    assert sorted(key[0][0] for key, _ in table.padded) == [2, 3, 5, 6, 7]
    wrong: Any = fusec.compile(attention(), shapes={"B": 1, "S": (1, 4)}, buckets={"S": [4]})
    with pytest.raises(ModelError, match="dim 'S' cannot be padded from 1 to 4"):
        wrong.save(path)
    assert isinstance(fusec.load(path), fusec.DynamicExecutable)  # the old file is still there


def test_a_file_for_two_targets(tmp_path: Path) -> None:
    path = tmp_path / "net.fusec"
    made: list[Any] = [
        fusec.compile_dynamic(image_net(), target=t, shapes={"N": (1, 4), "H": 8}) for t in ("h200", "l4")
    ]
    programs = [exe.at({"N": n}).contents() for n in (4, 1) for exe in made]
    save(path, programs, made[0].sizing, made[0].padding)
    for target in ("l4", "h200"):
        loaded: Any = fusec.load(path, target=target)
        assert loaded.program().compiled.target.name == target
        check(loaded, 1, 3, 8, 8)
    with pytest.raises(FusecError, match="not all input shapes were compiled for all targets"):
        save(path, programs[:3], made[0].sizing, made[0].padding)


def test_a_session_loads_such_a_file(tmp_path: Path) -> None:
    path = tmp_path / "net.fusec"
    exe: Any = fusec.compile(image_net(), shapes={"N": (1, 4), "H": 8})
    exe.save(path)
    session = fusec.InferenceSession(path)
    assert session.get_inputs()[0].shape == ["N", 3, 8, 8]
    x = fresh(1, 3, 8, 8)
    assert_close(session.run(None, {"x": x})[0], run(image_net(), {"x": x})[0], 1e-5)


def test_too_many_programs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exe = fusec.compile_dynamic(image_net(), shapes={"N": (1, 100), "H": 8}, buckets={"N": list(range(1, 101))})
    with pytest.raises(FusecError, match="a file holds at most 64 programs"):
        exe.save(tmp_path / "net.fusec")
    monkeypatch.setattr(save_shapes, "MAX_PADDED", 2)
    wide = fusec.compile_dynamic(image_net(), shapes={"N": (1, 4), "H": 8}, buckets={"N": [4]})
    with pytest.raises(FusecError, match="more than 2 sets of input shapes are padded"):
        wide.save(tmp_path / "net.fusec")


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "net.fusec"
    exe: Any = fusec.compile(image_net(), shapes={"N": (1, 4), "H": 8})
    exe.save(path)

    def without_ranges(manifest: dict[str, Any]) -> None:
        del manifest["shapes"]["ranges"]

    with pytest.raises(ModelError, match="its table of shapes has another form than fusec writes"):
        fusec.load(rewritten(path, without_ranges))

    for programs in ("2", 0, -1):

        def of_programs(manifest: dict[str, Any], programs: Any = programs) -> None:
            manifest["programs"] = programs

        with pytest.raises(ModelError, match=r"manifest\.json: has other fields than fusec writes"):
            fusec.load(rewritten(path, of_programs))

    def of_many(manifest: dict[str, Any]) -> None:
        manifest["programs"] = 10**9

    with pytest.raises(ModelError, match=r"shapes/2/h200/graph\.txt"):
        fusec.load(rewritten(path, of_many))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("inputs", [["q", "f32", ["N", 3, 8, 8]]]),
        ("inputs", [["x", "f32", ["N", 3, 9, 9]]]),
        ("outputs", []),
        ("ranges", {"N": [1, 2, 2]}),
        ("buckets", {"Q": [4]}),
        ("padded", [[[[3, 3, 8, 8]], [[[7, 1, 4, 3]]]]]),
        ("padded", [[[[3, 3, 8, 8]], [[[0, 1, 4, 9]]]]]),
        ("padded", [[[[3, 3, 8, 8]], [[[0, 3, 4, 3]]]]]),
        ("padded", [[[[3, 3, 8, 8]], []]]),
        ("padded", [[[[3, 3, 8]], [[[0, 1, 4, 3]]]]]),
        ("padded", [[[[1, 3, 8, 8]], [[[0, 1, 2, 1]]]]]),
    ],
)
def test_a_table_that_does_not_fit_the_programs_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "net.fusec"
    exe: Any = fusec.compile(image_net(), shapes={"N": (3, 4), "H": 8}, buckets={"N": [4]})
    exe.save(path)

    def changed(manifest: dict[str, Any]) -> None:
        manifest["shapes"][key] = value

    check(fusec.load(path), 3, 3, 8, 8)
    with pytest.raises(ModelError, match=r"its table of shapes does not fit its programs|there is no symbolic dim 'Q'"):
        fusec.load(rewritten(path, changed))


def test_the_table_survives_a_file() -> None:
    exe: Any = fusec.compile_dynamic(image_net(), shapes={"N": (1, 4)}, buckets={"N": [4]})
    padded = ((((3, 3, 8, 8),), (((0, 1, 4, 3),),)),)
    table = ShapeTable(exe.sizing.inputs, exe.sizing.outputs, {"N": (1, 2, 4)}, {"N": (4,)}, padded)
    assert ShapeTable.from_json(json.loads(json.dumps(table.to_json())), "f") == table


def test_a_plan_that_two_programs_need_is_stored_once(tmp_path: Path) -> None:
    """A part of the model has no dim with a range, so its cuDNN graph is the same in all programs."""
    nodes = [
        node("Conv", ["a", "w"], ["c"]),
        node("Relu", ["c"], ["y"]),
        node("Conv", ["x", "w"], ["d"]),
        node("Relu", ["d"], ["z"]),
    ]
    proto = model(nodes, [info("a", [2, 3, 8, 8]), info("x", ["N", 3, 8, 8])], ["y", "z"], weights(w=[8, 3, 3, 3]))
    exe: Any = fusec.compile(proto, shapes={"N": (3, 4)}, precision="fp16")
    programs = [exe.at({"N": n}).compiled for n in (4, 3)]
    keys = [{each.graph.key for each in c.lowered if each is not None} for c in programs]
    assert keys[0] & keys[1]
    plans = {("h200", key): [Entry(Choice(1, ()), b"plan")] for key in keys[0] | keys[1]}
    path = tmp_path / "net.fusec"
    save(path, [(c, plans) for c in programs], exe.sizing, exe.padding)
    with zipfile.ZipFile(path) as file:
        assert len(set(file.namelist())) == len(file.namelist())
    assert fusec_file.trust(path) == len(keys[0] | keys[1])
    assert [len(each.plans) for each in fusec_file.load_all(path, "h200")] == [len(each) for each in keys]


def test_all_plans_of_a_file_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of later sets of shapes are trusted as those of the first."""
    exe: Any = fusec.compile(image_net(), shapes={"N": (1, 4), "H": 8}, precision="fp16")
    programs = [exe.at({"N": n}).compiled for n in (4, 1)]
    keys = dict.fromkeys(each.graph.key for c in programs for each in c.lowered if each is not None)
    choice = Choice(engine=1, knobs=(), workspace_bytes=0)
    plans = {("h200", key): [Entry(choice, f"plan {key}".encode())] for key in keys}
    path = tmp_path / "net.fusec"
    save(path, [(c, plans) for c in programs], exe.sizing, exe.padding)
    assert fusec_file.trust(path) == len(keys)
    assert len(fusec_file.load_all(path, "h200")) == 2
    assert len(keys) > 1

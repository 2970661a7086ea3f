"""Test `.fusec` files: a loaded model computes the same, members are checked, and nothing is executed."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from lowering.lowers_judge import LowersJudge
from safetensors.numpy import load as read_safetensors

import fusec
from examples.models import light, randomised
from fusec import frontends
from fusec.artifacts import container, fusec_file, read_file
from fusec.diagnostics.explain import explain
from fusec.errors import FusecError, ModelError
from fusec.execution.compilation import Compiled
from fusec.ir import Graph, print_graph
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry
from fusec.plans.verdict import Plan
from fusec.runtime import Executable, SimulatorBackend
from fusec.targets.target import load as load_target
from fusec.text import parse

MODEL = """
graph "net" (%x: f32[2,3,8,8], %k: f32[1,4,1,1]) {
  %w = constant weight("w") : f32[4,3,3,3] loc("conv 1")
  %b = constant [0.5, -0.5, 0.25, nan] : f32[4,1,1]
  %c = conv(%x, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1]} : f32[2,4,8,8] loc("conv 1", "b\\"ü")
  %d = add(%c, %b)
  %e = relu(%d)
  %f = mul(%e, %k)
  %p = max_pool(%f) {window=[2,2], strides=[2,2], pads=[0,0,0,0], dilations=[1,1]}
  %u = sub(%p, %p)
  %r = reshape(%u) {shape=[2,64]}
  return %r as "flat", %e as "map"
}"""


PLANS = (Plan(1, ((2, 3),), True, 64, True), Plan(4, (), False))  # by the first a zero bias is wanted, too


def compiled(
    target: str = "h200", precision: str = "fp16", text: str = MODEL, shape: tuple[int, ...] = (4, 3, 3, 3)
) -> Compiled:
    weights = {"w": np.random.default_rng(3).standard_normal(shape).astype(np.float32)}
    source, options, judge = parse(text, weights), Options(precision), LowersJudge(PLANS)
    graph = run(PIPELINE, source.clone(), options)
    return Compiled(source, partition(graph, judge, load_target(target)), load_target(target), options, judge)


def keys(c: Compiled) -> list[str]:
    return list(dict.fromkeys(lowered.graph.key for lowered in c.lowered if lowered is not None))


def plans(c: Compiled) -> dict[tuple[str, str], list[Entry]]:
    return {
        (c.target.name, key): [
            Entry(Choice(1, ((2, 3),), 64, 1.5, 1e-4), b"plan one of " + key.encode()),
            Entry(Choice(4, ())),
        ]
        for key in keys(c)
    }


def outputs(c: Compiled) -> list[bytes]:
    rng = np.random.default_rng(5)
    executable = Executable(c, SimulatorBackend())
    feeds = {spec.name: rng.standard_normal(spec.shape).astype(spec.dtype) for spec in executable.inputs}
    return [array.tobytes() for array in executable.run(None, feeds)]


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "store")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.fusec"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_what_is_saved_comes_back_and_computes_the_same_bits(path: Path, store: PlanStore, precision: str) -> None:
    before = compiled(precision=precision)
    fusec_file.save(path, [before], plans(before))
    after = fusec_file.load(path, "h200", store).compiled
    assert print_graph(after.graph, locations=True) == print_graph(before.graph, locations=True)
    assert print_graph(after.source, locations=True) == print_graph(before.source, locations=True)
    assert str(after.program) == str(before.program)
    assert (after.options, after.target) == (before.options, before.target)
    for a, b in zip(after.program.steps, before.program.steps, strict=True):
        assert (a.kind, a.spelling, a.verdict, str(a.body)) == (b.kind, b.spelling, b.verdict, str(b.body))
    for a, b in zip(after.program.refusals, before.program.refusals, strict=True):
        assert (str(a.body), a.reason) == (str(b.body), b.reason)
    assert [x and x.graph for x in after.lowered] == [x and x.graph for x in before.lowered]
    assert outputs(after) == outputs(before)
    # no constant is lost, not even the bits of a NaN
    pairs = zip(after.source.nodes, before.source.nodes, strict=True)
    literals = [(a.result.literal, b.result.literal) for a, b in pairs if b.result.literal is not None]
    assert literals
    assert all(a is not None and b is not None and a.digest == b.digest and a.label == b.label for a, b in literals)


def test_spelled_steps_come_back_spelled(path: Path) -> None:
    text = MODEL.partition("%d = add")[0] + '%e = relu(%c)\n  return %e, %k as "same" }'  # asks for a zero bias
    before = compiled(precision="tf32", text=text)
    assert any(step.spelling for step in before.program.steps)
    fusec_file.save(path, [before])
    after = fusec_file.load(path, "h200").compiled
    assert str(after.program) == str(before.program)
    assert outputs(after) == outputs(before)


def test_several_targets_share_one_file_and_its_weights(path: Path, tmp_path: Path, store: PlanStore) -> None:
    both = [compiled("h200"), compiled("l4")]
    fusec_file.save(path, both, {**plans(both[0]), **plans(both[1])})
    assert fusec_file.targets(path) == ("h200", "l4")
    assert fusec_file.load(path, "l4", store).compiled.target.name == "l4"
    fusec_file.save(tmp_path / "one.fusec", both[:1])
    with zipfile.ZipFile(path) as two, zipfile.ZipFile(tmp_path / "one.fusec") as one:
        assert two.getinfo(fusec_file.WEIGHTS).file_size == one.getinfo(fusec_file.WEIGHTS).file_size
    with pytest.raises(ModelError, match="compiled for h200, l4, not for t4"):
        fusec_file.load(path, "t4", store)


def test_what_does_not_belong_together_is_not_saved(path: Path) -> None:
    other = MODEL.replace("relu", "sigmoid")
    for second in (compiled("l4", "fp32"), compiled("l4", text=other), compiled("h200")):
        with pytest.raises(FusecError, match=r"net\.fusec"):
            fusec_file.save(path, [compiled("h200"), second])
        assert not path.exists()
    assert list(path.parent.iterdir()) == []


def test_weights_are_aligned_and_in_the_wellknown_format(path: Path) -> None:
    before = compiled()
    fusec_file.save(path, [before])
    after = fusec_file.load(path, "h200").compiled
    for node in after.graph.nodes:
        literal = node.results[0].literal
        if literal is not None:
            assert not literal.array.flags.owndata
            assert not literal.array.flags.writeable
            assert literal.array.ctypes.data % literal.type.dtype.itemsize == 0
    with zipfile.ZipFile(path) as archive:
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        assert archive.testzip() is None
        held = read_safetensors(archive.read(fusec_file.WEIGHTS))
    for node in before.graph.nodes:
        literal = node.results[0].literal
        if literal is not None:
            assert np.array_equal(held[literal.digest], literal.array, equal_nan=True)
    reader = container.Reader(path)
    for name in reader.manifest["members"]:
        view = np.frombuffer(reader.check(name), np.uint8)
        assert view.ctypes.data % container.ALIGNMENT == reader._places[name][0] % container.ALIGNMENT == 0, name


def test_equal_models_make_equal_files(path: Path, tmp_path: Path) -> None:
    fusec_file.save(path, [compiled()])
    fusec_file.save(tmp_path / "again.fusec", [compiled()])
    assert path.read_bytes() == (tmp_path / "again.fusec").read_bytes()


def test_blobs_are_handed_on_only_if_trusted(path: Path, store: PlanStore) -> None:
    before = compiled()
    given = plans(before)
    fusec_file.save(path, [before], given)
    strange = fusec_file.load(path, "h200", store)
    assert {key: [e.choice for e in entries] for key, entries in strange.plans.items()} == {
        key: [e.choice for e in entries] for (_, key), entries in given.items()
    }
    assert all(entry.blob is None for entries in strange.plans.values() for entry in entries)
    assert any("not built here" in note for note in strange.notes)
    assert fusec_file.trust(path, store) == len(given)
    known = fusec_file.load(path, "h200", store)
    assert {("h200", key): list(entries) for key, entries in known.plans.items()} == given
    assert known.notes == ()


def test_plans_of_another_version_are_built_anew_and_it_is_said(
    path: Path, store: PlanStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compiled()
    monkeypatch.setattr(fusec_file, "versions", lambda: {"cudnn": "9.19", "frontend": "1.28"})
    monkeypatch.setattr(read_file, "versions", lambda: {"cudnn": "9.19", "frontend": "1.28"})
    fusec_file.save(path, [before], plans(before))
    fusec_file.trust(path, store)
    assert fusec_file.load(path, "h200", store).notes == ()
    monkeypatch.setattr(read_file, "versions", lambda: {"cudnn": "9.28", "frontend": "1.28"})
    loaded = fusec_file.load(path, "h200", store)
    assert [note.partition(": ")[2] for note in loaded.notes] == [
        "made with cudnn 9.19, here 9.28: its plans are built anew"
    ]
    assert all(entry.blob is None for entries in loaded.plans.values() for entry in entries)
    monkeypatch.setattr(read_file, "versions", lambda: {"cudnn": "", "frontend": ""})  # nothing to run them with
    assert fusec_file.load(path, "h200", store).notes == ()


def members(path: Path) -> dict[str, tuple[int, int]]:
    reader = container.Reader(path)
    return {name: reader._places[name] for name in reader.manifest["members"]}


def read_all(path: Path, store: PlanStore) -> None:
    """Load a file, and read the weights of the imported model, too, which are checked at first use."""
    for node in fusec_file.load(path, "h200", store).compiled.source.nodes:
        if node.results[0].literal is not None:
            _ = node.results[0].literal.array


def test_a_changed_byte_in_any_member_is_named(path: Path, store: PlanStore) -> None:
    before = compiled()
    fusec_file.save(path, [before], plans(before))
    fusec_file.trust(path, store)
    whole, draw = path.read_bytes(), random.Random(0)
    for name, (start, end) in members(path).items():
        for _ in range(4):
            place = draw.randrange(start, end)
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
            with pytest.raises(ModelError, match=name.replace(".", r"\.")):
                read_all(path, store)


def test_a_large_member_is_hashed_in_order_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "_CHUNK_BYTES", 20)
    before = compiled()
    fusec_file.save(path, [before], plans(before))
    start, end = members(path)["weights.safetensors"]
    assert end - start > 500
    whole = path.read_bytes()
    for _ in range(20):
        assert container.Reader(path).check("weights.safetensors") == whole[start:end]
    path.write_bytes(whole[: end - 1] + bytes([whole[end - 1] ^ 1]) + whole[end:])
    with pytest.raises(ModelError, match=r"weights\.safetensors: its checksum does not fit"):
        container.Reader(path).check("weights.safetensors")


def test_damage_anywhere_is_an_error_or_does_nothing(path: Path, store: PlanStore) -> None:
    before = compiled()
    fusec_file.save(path, [before], plans(before))
    want = outputs(before)
    whole, draw = path.read_bytes(), random.Random(1)
    ends = [end for _, end in members(path).values()]
    places = [*range(min(ends), min(ends) + 60), *range(len(whole) - 300, len(whole), 3)]
    for place in [*places, *(draw.randrange(len(whole)) for _ in range(40))]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        loaded, said = None, ""
        try:
            loaded = fusec_file.load(path, "h200", store)
        except ModelError as error:
            said = str(error)
        if loaded is None:
            assert "net.fusec" in said
        else:
            assert outputs(loaded.compiled) == want  # padding, times: parts that mean nothing
    for size in [0, 1, 21, 22, *range(100, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"net\.fusec"):
            fusec_file.load(path, "h200", store)


def rewritten(path: Path, name: str, data: bytes) -> None:
    """Write the file with another member and a fitting manifest, as an attacker would."""
    reader = container.Reader(path)
    contents = {n: bytes(reader.check(n)) for n in reader.manifest["members"]}
    contents[name] = data
    manifest = {k: v for k, v in reader.manifest.items() if k != "members"}
    with container.written(path) as file:
        for member, held in contents.items():
            file.add(member, held)
        file.finish(manifest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["steps"].pop(), "is in no step"),
        (lambda d: d["steps"][0].update(nodes=[-1]), "nodes"),
        (lambda d: d["steps"][0].update(nodes=[10**9]), "index"),
        (lambda d: d["steps"][0].update(nodes=3), "program"),
        (lambda d: d["steps"][0].update(kind="shell"), "shell"),
        (lambda d: d["steps"].reverse(), "before it is made"),
        (lambda d: d["steps"][0].pop("verdict"), "verdict"),
        (lambda d: d.update(plans={"k": [{"choice": {}, "blob": None}]}), "knobs is missing"),
        (lambda d: d.update(plans={"k": [{"choice": {}, "blob": "../../etc/passwd"}]}), "missing"),
        (lambda d: d.update(steps=None), "program"),
    ],
)  # fmt: skip
def test_a_program_made_up_is_refused(path: Path, store: PlanStore, change: object, words: str) -> None:
    fusec_file.save(path, [compiled()])
    data = container.Reader(path).json("h200/program.json")
    change(data)  # type: ignore[operator]
    rewritten(path, "h200/program.json", json.dumps(data).encode())
    with pytest.raises(ModelError, match=words):
        fusec_file.load(path, "h200", store)


def test_the_imported_model_is_parsed_once_at_its_first_use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiled()
    fusec_file.save(path, [before])
    parsed: list[str] = []

    def counted(text: str, *given: Any) -> Graph:
        parsed.append(text)
        return parse(text, *given)

    monkeypatch.setattr(read_file, "parse", counted)
    after = fusec_file.load(path, "h200").compiled
    assert outputs(after) == outputs(before)
    assert parsed == [container.Reader(path).text("h200/graph.txt")]
    copied = replace(after, tuned=None)
    assert str(after.source) == str(before.source)
    assert copied.source is after.source
    assert parsed[1:] == [container.Reader(path).text("source.txt")]


def test_remarks_on_the_imported_model_come_back(path: Path) -> None:
    before = compiled()
    fusec_file.save(path, [before])
    assert "remarks.json" not in container.Reader(path)
    assert fusec_file.load(path, "h200").compiled.source.remarks == {}
    before.source.remarks["a loop"] = "is unrolled"
    fusec_file.save(path, [before])
    assert fusec_file.load(path, "h200").compiled.source.remarks == {"a loop": "is unrolled"}
    for made_up in (b"[]", b'{"a loop": 1}', b"{"):
        rewritten(path, "remarks.json", made_up)
        with pytest.raises(ModelError, match=r"net\.fusec: remarks\.json"):
            fusec_file.load(path, "h200")


def test_an_imported_model_made_up_is_refused_at_its_first_use(path: Path) -> None:
    before = compiled()
    fusec_file.save(path, [before])
    rewritten(path, "source.txt", b'graph "net" (%x: f32[2,3]) {\n  %y = unknown(%x)\n  return %y }')
    after = fusec_file.load(path, "h200").compiled
    assert outputs(after) == outputs(before)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"net\.fusec: source\.txt: line 2, column 8: unknown op 'unknown'"):
            _ = after.source


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each part of JSON data; of lists the first two items."""
    yield path
    if isinstance(data, dict):
        for key in data:
            yield from places(data[key], (*path, key))
    elif isinstance(data, list):
        for index in range(min(len(data), 2)):
            yield from places(data[index], (*path, index))


@pytest.mark.slow
def test_whatever_is_altered_in_a_program_is_refused_or_explained(path: Path, store: PlanStore) -> None:
    c = compiled()
    fusec_file.save(path, [c], plans(c))
    whole = container.Reader(path).json("h200/program.json")
    assert whole["refusals"]
    refused, alterations = 0, (None, True, -1, 10**20, "x", [], [0], [[]], {}, {"a": 1})
    for place in list(places(whole)):
        of_lists = [part for part in place if isinstance(part, int)]  # what one item is not given, its neighbour is
        for bad in alterations[sum(of_lists) % 2 :: 2] if of_lists else alterations:
            data = copy.deepcopy({"whole": whole})
            inside: Any = data
            for part in ("whole", *place)[:-1]:
                inside = inside[part]
            inside[("whole", *place)[-1]] = bad
            rewritten(path, "h200/program.json", json.dumps(data["whole"]).encode())
            try:
                fusec_file.trust(path, store)
                found = fusec_file.load(path, "h200", store).compiled
                assert str(explain(found.program, found.target, cores=False))
            except FusecError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{", b"[]", b"3", b'{"a": 3}', b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}',
    ],
)  # fmt: skip
def test_weights_made_up_are_refused(path: Path, store: PlanStore, header: bytes) -> None:
    fusec_file.save(path, [compiled()])
    for data in (header, len(header).to_bytes(8, "little") + header + b"1234", b"\xff" * 8 + header):
        rewritten(path, fusec_file.WEIGHTS, data)
        with pytest.raises(ModelError, match=r"weights\.safetensors|no weight"):
            fusec_file.load(path, "h200", store)


def test_another_format_is_refused_in_words(path: Path) -> None:
    fusec_file.save(path, [compiled()])
    reader = container.Reader(path)
    contents = {n: bytes(reader.check(n)) for n in reader.manifest["members"]}
    with container.written(path) as file:
        for member, held in contents.items():
            file.add(member, held)
        file.finish({**{k: v for k, v in reader.manifest.items() if k != "members"}, "format": 99})
    with pytest.raises(ModelError, match="is of format 99, this fusec"):
        fusec_file.load(path, "h200")
    with pytest.raises(ModelError, match="No such file"):
        fusec_file.load(path.with_name("none.fusec"), "h200")
    os.mkfifo(path.with_name("pipe.fusec"))
    for other in (path.with_name("pipe.fusec"), path.parent):
        with pytest.raises(ModelError, match="is not a regular file"):
            fusec_file.load(other, "h200")
    for name, reason in (
        (path, "File is not a zip file"),
        (path.with_name("m.onnx"), "fusec.compile reads ONNX models"),
    ):
        name.write_text("graph")
        with pytest.raises(ModelError, match=rf"not a readable \.fusec file, or truncated: {reason}"):
            fusec_file.load(name, "h200")


def test_a_failed_save_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fusec_file.save(path, [compiled()])
    whole = path.read_bytes()

    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fusec_file, "write", fail)
    with pytest.raises(FusecError, match="No space left"):
        fusec_file.save(path, [compiled("l4")])
    assert path.read_bytes() == whole
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_cut_short_or_changed_after_it_was_loaded_changes_nothing(path: Path) -> None:
    """Runs in a separate process, because SIGBUS would end it if the file were mapped."""
    before = compiled()
    fusec_file.save(path, [before])
    program = (
        "import sys; from pathlib import Path; from fusec.artifacts import fusec_file as artifact; "
        "from fusec.errors import ModelError\n"
        "path = Path(sys.argv[1])\n"
        "def weights(graph):\n"
        "    return [x.array.tobytes() for n in graph.nodes if (x := n.results[0].literal) is not None]\n"
        "want = weights(artifact.load(path, 'h200').compiled.graph)\n"
        "loaded, late = artifact.load(path, 'h200').compiled, artifact.load(path, 'h200').compiled\n"
        "source = weights(loaded.source)\n"
        "with path.open('r+b') as file: file.write(bytes(path.stat().st_size))\n"
        "for cut in (False, True):\n"
        "    if cut: path.open('r+b').truncate(0)\n"
        "    assert want == weights(loaded.graph)\n"
        "    assert source == weights(loaded.source)\n"
        "    try: weights(late.source)\n"
        "    except ModelError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={"FUSEC_DEVICE": "none", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    changed, cut = done.stdout.splitlines()
    assert "source.safetensors: its checksum does not fit" in changed
    assert "source.safetensors: was truncated after the file was opened" in cut


def test_public_names_and_lean_imports(path: Path) -> None:
    before = compiled()
    fusec.save(path, [before])
    program = (
        f"import sys, fusec; exe = fusec.load({str(path)!r}); print(exe.device, exe.compiled.target.name);"
        "print([m for m in ('onnx', 'hypothesis', 'cudnn', 'cupy', 'scipy') if m in sys.modules]);"
        "print([m for m in ('explain', 'hints', 'notebook', 'verify') if f'fusec.diagnostics.{m}' in sys.modules]);"
        "print(exe.explain().summary)"
    )
    # with the run's cache, and the compiler of the stand-in for a driver, which the judge of hints may start
    given = {name: os.environ[name] for name in ("FUSEC_CACHE", "PATH")}
    environment = {"FUSEC_DEVICE": "none", **given, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == ["simulated h200", "[]", "[]", explain(before.program, before.target).summary]


@pytest.mark.slow
def test_resnet50_is_ready_in_far_less_than_the_second_and_a_half_it_may_take(path: Path) -> None:
    model = randomised(onnx.load(light("resnet50")), 0)
    source, options, judge = frontends.load(model), Options("fp16"), LowersJudge(PLANS)
    goal = load_target("h200")
    graph = run(PIPELINE, source.clone(), options)
    fusec_file.save(path, [Compiled(source, partition(graph, judge, goal), goal, options, judge)])
    program = (
        "import time; start = time.perf_counter(); import fusec;"
        f"fusec.load({str(path)!r}, target='h200'); print(time.perf_counter() - start)"
    )
    environment = {"FUSEC_DEVICE": "none", "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert float(done.stdout) < 1.5


def test_weights_that_a_spelling_reorders_are_in_the_file_once(tmp_path: Path) -> None:
    """A linear layer becomes a 1x1 convolution, whose filters are the transposed weight."""
    text = """
graph "linear" (%x: f32[8,256]) {
  %w = constant weight("w") : f32[256,512]
  %y = matmul(%x, %w)
  %z = relu(%y)
  return %z
}"""
    net = compiled(precision="fp32", text=text, shape=(256, 512))
    assert any("as_convolution" in step.spelling for step in net.program.steps)
    path = tmp_path / "linear.fusec"
    fusec_file.save(path, [net])
    assert path.stat().st_size < 1.2 * 256 * 512 * 4
    loaded = fusec_file.load(path, "h200").compiled
    assert [str(s.body) for s in loaded.program.steps] == [str(s.body) for s in net.program.steps]
    x = np.random.default_rng(2).standard_normal((8, 256)).astype(np.float32)
    here, there = (np.asarray(Executable(each, SimulatorBackend())(x)) for each in (net, loaded))
    assert np.array_equal(here, there)


def test_a_simulated_program_derives_its_weights_at_the_first_call() -> None:
    """A compilation then holds the model's weights alone."""
    text = """
graph "linear" (%x: f32[8,256]) {
  %w = constant weight("w") : f32[256,512]
  %y = matmul(%x, %w)
  return %y
}"""
    net = compiled(precision="fp32", text=text, shape=(256, 512))
    (binding,) = (b for lowered in net.lowered if lowered is not None for b in lowered.constants)
    executable = Executable(net, SimulatorBackend())
    assert binding.literal._array is None
    executable(np.ones((8, 256), np.float32))
    assert binding.literal._array is not None

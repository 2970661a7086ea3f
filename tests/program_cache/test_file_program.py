"""Test when the program of a model's file comes from the cache, and that it is the same program."""

from __future__ import annotations

import json
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exported.packing import read as exported
from helpers import assert_close
from onnx import helper, numpy_helper
from program_cache.files import TARGET, Builder, compile_file, drawn, workers, write_mlp

from fusec import frontends
from fusec.artifacts import read_program, write_program
from fusec.artifacts.write_program import literals_of
from fusec.compiler import file_program
from fusec.compiler.file_program import FileProgram
from fusec.errors import ModelError
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import CompileOptions
from fusec.frontends.onnx.model_file import split_model
from fusec.gpu import device
from fusec.gpu.cudnn.legality.judges import CudnnJudge
from fusec.ir import print_graph
from fusec.passes.cleanup import fold_constants
from fusec.passes.partition import canonical_key
from fusec.passes.partition.strict_rounding import StrictRounding
from fusec.passes.rewriting import derived_constants
from fusec.plans.verdict import Refused
from fusec.program_cache import constants, key
from fusec.program_cache.store import ProgramStore
from fusec.runtime import Executable, SimulatorBackend


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the machine seem to have a GPU, an empty cache, and code that nobody edits meanwhile."""
    monkeypatch.setattr(key, "LOADED_NS", 2**63)
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "cuda_driver", lambda: object())
    monkeypatch.setattr(device, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(file_program, "choose_judge", lambda target, options, oracle, family: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_mlp(tmp_path / "model.onnx", drawn())


def results(compiled: Compiled, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return Executable(compiled, SimulatorBackend()).run(None, {"x": x})[0]


def entries() -> list[Path]:
    return sorted(each for each in ProgramStore().folder.glob("*") if not each.name.startswith("."))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_second_process_takes_the_program_from_the_cache(path: Path, precision: str) -> None:
    built, cached = compile_file(path, precision=precision)
    assert not cached
    read, cached = compile_file(str(path), precision=precision)
    assert cached
    assert print_graph(read.graph, locations=True) == print_graph(built.graph, locations=True)
    assert [step.signature for step in read.program.steps] == [step.signature for step in built.program.steps]
    assert read.options == built.options
    assert read.target == TARGET
    x = np.random.default_rng(1).standard_normal((8, 160)).astype(np.float32)
    np.testing.assert_array_equal(results(read, x), results(built, x))
    assert print_graph(read.source) == print_graph(built.source), "the model is read when a report needs it"


@pytest.fixture
def no_small_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let constants of 1,000 bytes count as large, because the models of this test are small."""
    for module in (constants, derived_constants, read_program, write_program, fold_constants):
        monkeypatch.setattr(module, "EAGER_BYTES", 1000)
    monkeypatch.setattr(split_model, "LARGE_BYTES", 1000)
    monkeypatch.setattr(constants, "STORED_BYTES", 1 << 15)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["bert", "convnext", "mobilenetv2", "segformer", "vit", "wav2vec2", "whisper"])
@pytest.mark.usefixtures("no_small_constants")
def test_programs_of_exported_models_are_the_same(name: str, precision: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(exported(f"{name}-dynamo"), path)
    built, _ = compile_file(path, precision=precision)
    read, cached = compile_file(path, precision=precision)
    assert cached
    assert print_graph(read.graph) == print_graph(built.graph)
    for ours, theirs in zip(literals_of(read.graph), literals_of(built.graph), strict=True):
        np.testing.assert_array_equal(ours.operand(), theirs.operand())
    for ours, theirs in zip(read.program.steps, built.program.steps, strict=True):
        assert (ours.kind, ours.spelling, ours.verdict) == (theirs.kind, theirs.spelling, theirs.verdict)
        assert [node.result.name for node in ours.nodes] == [node.result.name for node in theirs.nodes]
        assert canonical_key(ours.body) == canonical_key(theirs.body)
    assert [each.reason for each in read.program.refusals] == [each.reason for each in built.program.refusals]


def test_an_entry_holds_no_large_weight_and_another_checkpoint_has_the_same_entry(path: Path) -> None:
    compile_file(path)
    (entry,) = entries()
    assert entry.stat().st_size < drawn().nbytes / 4
    write_mlp(path, drawn(1))
    read, cached = compile_file(path)
    assert cached
    x = np.random.default_rng(1).standard_normal((8, 160)).astype(np.float32)
    want = np.maximum(x.astype(np.float64) @ drawn(1) + 0.5, 0)
    np.testing.assert_allclose(results(read, x), want, rtol=1e-4, atol=1e-4)


def test_a_small_weight_is_part_of_the_key(path: Path) -> None:
    compile_file(path)
    write_mlp(path, drawn(), bias=0.25)
    assert not compile_file(path)[1]


def test_a_large_weight_is_part_of_the_key_if_a_pass_looked_at_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder.__call__

    def looks(self: Builder, graph: Any, target: Any = TARGET) -> Compiled:
        (weight,) = (v.literal for v in graph.values() if v.literal is not None and v.literal.type.rank == 2)
        assert weight.array.any()
        return build(self, graph, target)

    monkeypatch.setattr(Builder, "__call__", looks)
    assert not compile_file(path)[1]
    assert compile_file(path)[1], "the same weight"
    write_mlp(path, drawn(1))
    assert not compile_file(path)[1], "another weight"


def test_a_small_constant_that_is_computed_from_a_large_weight_depends_on_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"

    def write(weight: np.ndarray[Any, Any]) -> None:
        model = onnx.load(write_mlp(path, weight))
        sums = helper.make_node("ReduceSum", ["w", "rows"], ["sums"], keepdims=0)
        model.graph.node.insert(0, sums)
        model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "rows"))
        next(node for node in model.graph.node if node.op_type == "Add").input[1] = "sums"
        onnx.save(model, path)

    write(drawn())
    assert not compile_file(path)[1]
    assert compile_file(path)[1]
    (entry,) = entries()
    assert len(json.loads(zipfile.ZipFile(entry).read("manifest.json"))["weights_read"]) == 1
    write(drawn(1))
    read, cached = compile_file(path)
    assert not cached
    x = np.random.default_rng(1).standard_normal((8, 160)).astype(np.float32)
    want = np.maximum(x.astype(np.float64) @ drawn(1) + drawn(1).sum(axis=0, dtype=np.float64), 0)
    np.testing.assert_allclose(results(read, x), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "other",
    [
        {"precision": "bf16"},
        {"disable": ["fold_scales"]},
        {"deterministic": True},
        {"tune": "full"},
        {"channels_last": True},
        {"heuristics": "B"},
        {"rounding": "source"},
    ],
)
def test_other_options_have_another_entry(path: Path, other: dict[str, Any]) -> None:
    compile_file(path)
    assert not compile_file(path, **other)[1]
    assert compile_file(path, **other)[1]
    assert compile_file(path)[1]


def test_shapes_are_part_of_the_key(path: Path) -> None:
    compile_file(path)
    assert not compile_file(path, {"x": (8, 160)})[1]
    assert compile_file(path, {"x": [8, 160]})[1]


def test_other_code_has_another_entry(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "pass.py").write_text("one")
    monkeypatch.setattr(key.fusec, "__file__", str(package / "__init__.py"))
    key._code.cache_clear()
    compile_file(path)
    assert compile_file(path)[1]
    (package / "pass.py").write_text("other")
    key._code.cache_clear()
    assert not compile_file(path)[1]
    monkeypatch.undo()
    key._code.cache_clear()


def test_another_gpu_replaces_the_entry(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_file(path)
    monkeypatch.setattr(device, "device_name", lambda: "NVIDIA H100")
    assert not compile_file(path)[1]
    assert len(entries()) == 1
    assert compile_file(path)[1]


def with_external_data(path: Path, weight: np.ndarray[Any, Any], bias: float = 0.5) -> None:
    """Write the model with all weights in another file, the large one first."""
    model = onnx.load(write_mlp(path, weight, bias))
    path.with_name("weights").unlink(missing_ok=True)
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)


def test_external_data_is_read_where_it_is(path: Path) -> None:
    with_external_data(path, drawn())
    built, cached = compile_file(path, precision="fp16")
    assert not cached
    x = np.random.default_rng(1).standard_normal((8, 160)).astype(np.float32)
    read, cached = compile_file(path, precision="fp16")
    assert cached
    np.testing.assert_array_equal(results(read, x), results(built, x))
    with_external_data(path, drawn(1))
    read, cached = compile_file(path, precision="fp16")
    assert cached, "another checkpoint"
    want = np.maximum(x.astype(np.float64) @ drawn(1) + 0.5, 0)
    assert_close(results(read, x), want, 1e-2)


def test_small_external_data_is_part_of_what_a_program_depends_on(path: Path) -> None:
    with_external_data(path, drawn())
    compile_file(path)
    with_external_data(path, drawn(), bias=0.25)
    read, cached = compile_file(path)
    assert not cached
    x = np.zeros((8, 160), np.float32)
    np.testing.assert_array_equal(results(read, x), np.full((8, 256), 0.25, np.float32))


@pytest.mark.parametrize("change", ["missing", "shorter", "longer"])
def test_external_data_of_another_size_is_not_read(path: Path, change: str) -> None:
    with_external_data(path, drawn())
    compile_file(path)
    weights = path.with_name("weights")
    if change == "missing":
        weights.unlink()
    else:
        os.truncate(weights, weights.stat().st_size + (4096 if change == "longer" else -4096))
    if change == "longer":
        assert not compile_file(path)[1]
    else:
        with pytest.raises(ModelError, match="external data"):
            compile_file(path)
    assert len(entries()) == 1, "what is in the cache is not damaged"


def test_external_data_that_was_changed_after_it_was_compiled_is_not_read(path: Path, tmp_path: Path) -> None:
    with_external_data(path, drawn())
    compile_file(path)
    compiled, _ = compile_file(path)
    weights = path.with_name("weights")
    (tmp_path / "other").write_bytes(bytes(weights.stat().st_size))
    (tmp_path / "other").replace(weights)
    with pytest.raises(ModelError, match="was changed after it was compiled"):
        _ = compiled.source


def test_a_model_whose_import_warned_is_not_cached(path: Path) -> None:
    model = onnx.load(path)
    model.graph.node.add(op_type="Gelu", domain="com.microsoft", input=["out"], output=["more"])
    model.graph.output[0].name = "more"
    onnx.save(model, path)
    for _ in range(2):
        with pytest.warns(UserWarning, match="does not import domain"):
            assert not compile_file(path)[1]
    assert not entries()


def test_a_program_is_not_cached_if_an_answer_of_cudnn_may_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, judge = Builder.__call__, CudnnJudge(workers(), True)
    judge.within(9.0).passing.append(Refused("plan", "CUDNN_STATUS_ALLOC_FAILED", "no memory is left"))
    for wrapped in (judge, StrictRounding(judge)):
        monkeypatch.setattr(Builder, "__call__", lambda *given, j=wrapped: replace(build(*given), judge=j))
        compile_file(path)
        assert not entries()


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_a_model_that_was_changed_after_it_was_compiled_is_not_read(path: Path, tmp_path: Path, change: str) -> None:
    compile_file(path)
    compiled, cached = compile_file(path)
    assert cached
    if change == "in place":
        write_mlp(path, drawn(1))
    else:
        write_mlp(tmp_path / "other", drawn(1)).replace(path)
    with pytest.raises(ModelError, match=re.escape(f"{path}: was changed after it was compiled")):
        _ = compiled.source


def test_a_model_that_is_changed_while_it_is_compiled_is_not_cached(path: Path) -> None:
    options = CompileOptions()
    file = FileProgram.of(path, options, None)
    assert file is not None
    write_mlp(path, drawn(1))
    read = file.read()
    assert isinstance(read, FileProgram)
    read.compiled(TARGET, workers(), Builder(options))
    assert not entries()


def test_without_a_gpu_of_the_target_nothing_is_cached(path: Path) -> None:
    options = CompileOptions()
    file = FileProgram.of(path, options, None)
    assert file is not None
    read = file.read()
    assert isinstance(read, FileProgram)
    assert read.compiled(TARGET, None, Builder(options)).program.steps
    assert not entries()


def test_a_source_of_a_file_shares_the_entry_of_its_path(path: Path) -> None:
    compile_file(frontends.Source(path))
    assert compile_file(path)[1]
    assert compile_file(frontends.Source(path))[1]


def test_a_source_that_has_warned_for_other_shapes_still_gives_its_model(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = frontends.Source(path)
    compile_file(source)
    compiled, cached = compile_file(source)
    assert cached
    monkeypatch.setattr(frontends.Source, "warned", True)
    assert compiled.source.outputs


def test_what_is_no_file_alone_is_not_cached(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = frontends.Source(path)
    bound = source.with_constants({"x": np.zeros((8, 160), np.float32)})
    given: list[Any] = [path.read_bytes(), source.load(), bound, path.parent, path.with_name("missing"), os.devnull]
    for each in (*given, frontends.Source(path, custom_ops={"my::Op": lambda x: x})):
        assert FileProgram.of(each, CompileOptions(), None) is None
    for options in (CompileOptions(lock="a.lock"), CompileOptions(budget_s=5.0), CompileOptions(rounding="fastest")):
        assert FileProgram.of(path, options, None) is None
    monkeypatch.setenv("FUSEC_DUMP", "states")
    assert FileProgram.of(path, CompileOptions(), None) is None
    monkeypatch.delenv("FUSEC_DUMP")
    assert FileProgram.of(path, CompileOptions(), None) is not None
    with monkeypatch.context() as patch:
        patch.setattr(key, "LOADED_NS", 0)
        assert FileProgram.of(path, CompileOptions(), None) is None, "a file of fusec was changed meanwhile"
    monkeypatch.setattr(device, "cuda_driver", lambda: None)
    assert FileProgram.of(path, CompileOptions(), None) is None


def test_a_damaged_entry_is_dropped(path: Path) -> None:
    compile_file(path)
    (entry,) = entries()
    whole = entry.read_bytes()
    for damaged in (whole[:-9], whole.replace(b"matmul", b"matmal"), b"", whole.replace(b'"key"', b'"kay"')):
        entry.write_bytes(damaged)
        with pytest.warns(UserWarning, match="dropped the cached program .* it is built anew"):
            assert not compile_file(path)[1]
        assert compile_file(path)[1]

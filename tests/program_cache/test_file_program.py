"""Test when the program of a model's file comes from the cache, and that it is the same program."""

from __future__ import annotations

import json
import os
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exported.packing import read as exported
from helpers import assert_close
from onnx import TensorProto, helper, numpy_helper
from program_cache import files
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
from fusec.frontends.onnx.model_file.stored_data import StoredData
from fusec.gpu import device
from fusec.gpu.cudnn.legality.judges import CudnnJudge
from fusec.ir import Graph, noted_reads, print_graph
from fusec.passes.cleanup import fold_constants
from fusec.passes.partition import canonical_key, partition
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


def test_weights_that_a_thread_loads_early_are_not_taken_for_constants(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constant still tells how it is computed after another thread has computed it."""

    def write(weight: np.ndarray[Any, Any]) -> None:
        model = onnx.load(write_mlp(path, weight))
        scale = numpy_helper.from_array(np.full((160, 1), 0.125, np.float32), "scale")
        model.graph.initializer.append(scale)
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(weight.T), "w"))
        for made in (
            helper.make_node("Mul", ["turned", "scale"], ["scaled"]),
            helper.make_node("Transpose", ["w"], ["turned"], perm=[1, 0]),
        ):
            model.graph.node.insert(0, made)
        next(node for node in model.graph.node if node.op_type == "MatMul").input[1] = "scaled"
        onnx.save(model, path)

    def loaded_early(graph: Graph, judge: Any, target: Any) -> Any:
        work = [load for x in literals_of(graph) if (load := x.early()) is not None]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda load: load(), work))
        assert work
        return partition(graph, judge, target)

    monkeypatch.setattr(files, "partition", loaded_early)
    x = np.random.default_rng(1).standard_normal((8, 160)).astype(np.float32)
    for seed in range(2):
        write(drawn(seed))
        compiled, cached = compile_file(path, precision="fp16")
        assert cached is bool(seed), "another checkpoint"
        want = np.maximum(x.astype(np.float64) @ (drawn(seed) * 0.125) + 0.5, 0)
        assert_close(results(compiled, x), want, 1e-2)
    (entry,) = entries()
    assert entry.stat().st_size < drawn().nbytes / 4


def test_numbers_beyond_the_range_are_warned_of_again(path: Path) -> None:
    write_mlp(path, drawn(), bias=1e6)

    def is_cached() -> bool:
        compiled, cached = compile_file(path, precision="fp16")
        results(compiled, np.zeros((8, 160), np.float32))
        return cached

    for expected in (False, True):
        with pytest.warns(UserWarning, match="are out of f16's range"):
            assert is_cached() is expected


def test_a_dense_form_that_an_earlier_import_made_is_noted_again(tmp_path: Path) -> None:
    values = numpy_helper.from_array(np.ones(1 << 15, np.float32), "s")
    places = numpy_helper.from_array(np.arange(1 << 15), "places")
    sparse = helper.make_sparse_tensor(values, places, [1 << 16])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1 << 16]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "s"], ["y"])], "sparse", [x], [y])
    graph.sparse_initializer.append(sparse)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    (held,) = model.graph.sparse_initializer
    for number, tensor in enumerate((held.values, held.indices)):
        (tmp_path / str(number)).write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=str(number))
    onnx.save(model, tmp_path / "model.onnx")
    source = frontends.Source(tmp_path / "model.onnx")
    imported = source.load()
    with noted_reads() as read:
        (literal,) = (v.literal for v in source.load().values() if v.literal is not None)
        assert literal.array.any()
    assert imported.outputs
    assert {each.load.location for each in read if isinstance(each.load, StoredData)} == {"0", "1"}


def test_a_source_keeps_the_files_that_it_has_opened(path: Path, tmp_path: Path) -> None:
    with_external_data(path, drawn())
    source = frontends.Source(path)
    compile_file(source)
    other = tmp_path / "other"
    other.mkdir()
    with_external_data(write_mlp(other / "model.onnx", drawn(1)), drawn(1))
    (other / "weights").replace(path.with_name("weights"))
    x = np.random.default_rng(1).standard_normal((8, 160)).astype(np.float32)
    compiled, cached = compile_file(source)
    assert not cached
    assert_close(results(compiled, x), np.maximum(x.astype(np.float64) @ drawn() + 0.5, 0), 1e-5)
    compiled, cached = compile_file(path)
    assert cached
    assert_close(results(compiled, x), np.maximum(x.astype(np.float64) @ drawn(1) + 0.5, 0), 1e-5)


def test_a_report_finds_the_model_from_another_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    compile_file(path.name)
    compiled, cached = compile_file(path.name)
    assert cached
    monkeypatch.chdir("/")
    assert compiled.source.outputs


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


def test_a_package_whose_files_cannot_be_listed_has_no_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "dangling.py").symlink_to("nowhere")
    monkeypatch.setattr(key.fusec, "__file__", str(tmp_path / "__init__.py"))
    key._code.cache_clear()
    assert FileProgram.of(path, CompileOptions(), None) is None
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
    assert FileProgram.of(path, CompileOptions(), {"x": (8.0, 160)}) is None, "reading the model refuses that"  # type: ignore[dict-item]
    path.rename(path.with_suffix(".fusec"))
    assert FileProgram.of(path.with_suffix(".fusec"), CompileOptions(), None) is None
    path.with_suffix(".fusec").rename(path)
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

"""Test repro folders: the script builds what emit builds and judges what it runs; errors are clear."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli.command import SHAPE, fusec, tiny
from diagnostics.test_verify import compiled as compiled_net
from gpu.cudnn.plans.test_emit import mode_graph
from gpu.cudnn_graphs import WINDOW, batch_norm, batch_norm_backward, conv, conv_with_sums, image, norm
from helpers import assert_close
from lowering.bodies import BODIES, NHWC, load
from lowering.lowers_judge import LowersJudge
from repro.repro_stand_ins import build, run

from fusec import repro
from fusec.diagnostics.verify import random_array
from fusec.errors import ExecutionError, FusecError, LoweringError
from fusec.execution.compilation import Compiled
from fusec.gpu import device
from fusec.gpu.cudnn.without_driver.deviceless import bring_up
from fusec.ir import DType, Graph
from fusec.lower_cudnn import Lowered, lower
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.known_bugs import wrong_plan
from fusec.lowering.packing import pack, unpack
from fusec.lowering.simulator import simulate
from fusec.passes.base import Options
from fusec.passes.partition import partition
from fusec.reference import evaluate
from fusec.repro import data, source
from fusec.schedule.program import Kind
from fusec.targets import target as targets
from fusec.text import parse

EXPORTER = importlib.util.find_spec("fusec.exporters") is not None
H200 = targets.load("h200")
RESIDUAL = f"""
graph "net" (%x: f16[2,8,9,7]{NHWC}, %z: f16[2,16,9,7]{NHWC}) {{
  %w = constant weight("w") : f16[16,8,3,3]{NHWC}
  %b = constant weight("b") : f16[1,16,1,1]
  %c = conv(%x, %w) {{strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}} : f16[2,16,9,7]{NHWC}
  %d = add(%c, %b) : f16[2,16,9,7]{NHWC}
  %e = add(%d, %z) : f16[2,16,9,7]{NHWC}
  %y = relu(%e) : f16[2,16,9,7]{NHWC}
  return %y
}}"""
SCALED = 'graph "s" (%x: {0}[3,40]) {{\n  %k = constant [0.5] : {0}[]\n  %y = mul(%x, %k)\n  return %y\n}}'
TO_FP8 = """graph "q" (%x: f8e4m3[3,8,64]) {
  %w = constant weight("w") : f8e4m3[64,32]{1,0}
  %s = constant [0.5] : f32[]
  %m = matmul(%x, %w)
  %k = mul(%m, %s)
  %c = clip(%k) {min=-448.0, max=448.0}
  %y = cast(%c) {to=f8e4m3}
  return %y
}"""
LOGARITHM = 'graph "l" (%x: f32[3,40]) {\n  %y = log(%x)\n  return %y\n}'
TRANSPOSED = BODIES["batched matmul with a transposed operand and a scale"]
FILES = {
    *("repro.py", "test_repro.py", "inputs.npz", "expected.npz", "graph.txt", "graph.json", "partition.onnx"),
    *("versions.json", "README.txt"),
}


@pytest.fixture(autouse=True)
def exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide an exporter that writes the text form, for lack of one for ONNX."""
    if not EXPORTER:
        stand_in = ModuleType("fusec.exporters.onnx")
        vars(stand_in)["to_onnx"] = lambda graph: SimpleNamespace(SerializeToString=lambda: str(graph).encode())
        monkeypatch.setitem(sys.modules, "fusec.exporters", ModuleType("fusec.exporters"))
        monkeypatch.setitem(sys.modules, "fusec.exporters.onnx", stand_in)


def ones(graph: CudnnGraph) -> dict[int, float]:
    return {t.uid: 1.0 for t in graph.outputs}


def bare(graph: CudnnGraph) -> Lowered:
    return Lowered(graph, (), (), ())


def write(folder: Path, body: Graph, **more: Any) -> Lowered:
    lowered = lower(body)
    assert repro.write_body(body, lowered, folder, H200, "a test", **more) == folder
    return lowered


def arrays(path: Path) -> dict[int, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {int(uid): archive[uid] for uid in archive.files}


# the script --------------------------------------------------------------------------------------------------------


def test_the_script_of_a_residual_block_is_short_and_knows_no_fusec() -> None:
    lowered = lower(load(RESIDUAL))
    text = repro.script(lowered, ones(lowered.graph), "step 3 of net: conv+bias+add+relu")
    compile(text, "repro.py", "exec")
    assert len(text.splitlines()) <= 51
    assert max(map(len, text.splitlines())) <= 120
    assert "fusec" not in text
    imports = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
    assert imports == ["sys", "pathlib", "cudnn", "cupy", "numpy"]


def check_same_as_emitted(lowered: Lowered, plans: bool = True) -> None:
    variables = build(source.script(lowered, ones(lowered.graph)), plans)
    from fusec.gpu.cudnn.plans.emit import emit  # imports cudnn, which wants the driver library loaded

    emitted = emit(lowered.graph, target=H200)
    emitted.validate()
    built, wanted = (json.loads(repr(g._lowered_graph)) for g in (variables["g"], emitted))
    for each in (built, wanted):
        each.pop("gid")  # a number that counts graphs
    assert built == wanted
    filters = [note.name for _, note, _ in variables["g"]._note_filters]
    assert filters == ([] if lowered.graph.tensor_cores else ["TENSOR_CORE"])
    values = {t.uid: t.value for t in lowered.graph.tensors if t.value is not None}
    assert {uid: variables[f"s{uid}"][0] for uid in values} == {u: np.float32(v) for u, v in values.items()}


@pytest.mark.cudnn
@pytest.mark.parametrize("title", BODIES)
@pytest.mark.parametrize("tensor_cores", [True, False])
def test_the_script_builds_the_graph_that_emit_makes(title: str, tensor_cores: bool) -> None:
    lowered = lower(load(BODIES[title]))
    # the frontend rewrites its attention node when it plans; emit's graph is only validated here
    plans = not any(call.op.startswith("sdpa") for call in lowered.graph.calls)
    check_same_as_emitted(replace(lowered, graph=replace(lowered.graph, tensor_cores=tensor_cores)), plans)


def more_graphs() -> Iterator[CudnnGraph]:
    """Return graphs with what the bodies lack: operations, attributes, infinite ones, other types."""
    yield norm("layernorm", (64, 16, 1, 1), (1, 16, 1, 1))
    yield norm("rmsnorm", (64, 16, 1, 1), (1, 16, 1, 1))
    yield batch_norm((8, 16, 4, 4), (1, 16, 1, 1))
    yield batch_norm_backward((8, 16, 4, 4), (1, 16, 1, 1))
    tensors = (image(1, (8, 64, 28, 28)), image(2, (64, 32, 3, 3)), image(3, (8, 32, 28, 28)))
    yield CudnnGraph(tensors, (CudnnCall("conv_dgrad", (1, 2), (3,), attributes=WINDOW),))
    yield conv("bias", "relu", dtype=DType.BF16)
    yield conv_with_sums()
    pair = (image(1, (8, 64, 2, 2)), image(2, (8, 64, 2, 2)))
    for mode, attributes in (
        ("relu", (("lower_clip", float("-inf")), ("upper_clip", 6.0))),
        ("swish", (("beta", 2.0),)),
        ("leaky_relu", (("negative_slope", 0.5),)),
        ("gen_index", (("axis", 1),)),
    ):
        yield CudnnGraph(pair, (CudnnCall("pointwise", (1,), (2,), mode, attributes),))


@pytest.mark.cudnn
@pytest.mark.parametrize("graph", list(more_graphs()), ids=lambda g: f"{g.calls[0].op}-{g.calls[0].mode}")
def test_further_operations_are_built_as_emit_does(graph: CudnnGraph) -> None:
    check_same_as_emitted(bare(graph))


@pytest.mark.cudnn
def test_every_pointwise_mode_is_built_as_emit_does() -> None:
    bring_up(90)
    from fusec.gpu.cudnn.plans.emit import DTYPES, POINTWISE

    for mode, count in POINTWISE.items():
        check_same_as_emitted(bare(mode_graph(mode, count)), plans=False)  # no engine takes each mode in these types
    reduction = CudnnCall("reduction", (1,), (2,), "max", compute=DType.F16)
    tensors = (image(1, (64, 128, 1, 1)), image(2, (64, 1, 1, 1)))
    check_same_as_emitted(bare(CudnnGraph(tensors, (reduction,))), plans=False)
    assert {dtype: names[1] for dtype, names in source.NAMES.items()} == {d: known.name for d, known in DTYPES.items()}


def test_scalars_are_exact_in_each_type() -> None:
    for dtype, value, line in (
        (DType.F32, 0.1, "s2 = np.array([0.1], np.float32)"),
        (DType.F16, float("inf"), 's2 = np.array([float("inf")], np.float16)'),
        (DType.BF16, 1.0, f"s2 = np.array([{0x3F80}], np.uint16)"),
    ):
        tensors = (
            image(1, (1, 8, 2, 2)),
            CudnnTensor(2, (1,) * 4, (1,) * 4, dtype, value=value),
            image(3, (1, 8, 2, 2)),
        )
        graph = CudnnGraph(tensors, (CudnnCall("pointwise", (1, 2), (3,), "mul"),))
        assert line in source.script(bare(graph), ones(graph)).splitlines()


@pytest.mark.parametrize("dtype", source.AS_BITS)
def test_a_script_reads_the_bits_of_every_number(dtype: DType) -> None:
    bits = np.dtype(source.NAMES[dtype][2])
    codes = np.arange(1 << 8 * bits.itemsize).astype(bits)
    call = CudnnCall("pointwise", (1,), (2,), "identity")
    graph = CudnnGraph((image(1, (1, 8, 2, 2)), image(2, (1, 8, 2, 2), dtype)), (call,))
    text = source.script(bare(graph), ones(graph))
    variables: dict[str, Any] = {"np": np}
    exec(text[text.index("def wide(") : text.index("\ndriver, gpu")], variables)
    with np.errstate(all="ignore"):
        want = codes.view(dtype.numpy).astype(np.float64)
        np.testing.assert_array_equal(variables["wide"](codes, source.NAMES[dtype][0]), want)


def test_types_and_operations_that_the_frontend_lacks_are_refused() -> None:
    pair = (image(1, (1, 8, 2, 2)), image(2, (1, 8, 2, 2)))
    with pytest.raises(LoweringError, match="no operation 'resample'"):
        source.script(bare(CudnnGraph(pair, (CudnnCall("resample", (1,), (2,)),))), {2: 1.0})
    odd = (image(1, (1, 8, 2, 2), DType.I16), pair[1])
    with pytest.raises(LoweringError, match="element type i16"):
        source.script(bare(CudnnGraph(odd, (CudnnCall("pointwise", (1,), (2,), "relu"),))), {2: 1.0})


def test_odd_names_stay_in_their_comments() -> None:
    body = load('graph "g" (%"a\\x0ab": f32[3,40]) {\n  %"é\\x0aexit()" = exp(%"a\\x0ab")\n  return %"é\\x0aexit()"\n}')
    lowered = lower(body)
    text = repro.script(lowered, ones(lowered.graph), 'net\nexit() """')
    compile(text, "repro.py", "exec")
    assert "\nexit()" not in text
    assert text.isascii()


# computes 16 of 32 channels from 16 of 48
WITHIN = """graph "g" (%x: f32[2,16,4,4]{0,2,3,1} of [2,48,4,4]) {
  %w = constant weight("w") : f32[16,16,1,1]{0,2,3,1}
  %y = conv(%x, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1]} : f32[2,16,4,4]{0,2,3,1} of [2,32,4,4]
  return %y
}"""


# a whole run, on stand-ins -----------------------------------------------------------------------------------------


@pytest.mark.cudnn
@pytest.mark.parametrize(
    "text",
    [
        RESIDUAL,
        SCALED.format("f32"),
        SCALED.format("bf16"),
        LOGARITHM,
        BODIES["a value needed outside is a second output"],
        WITHIN,
        TO_FP8,
    ],
    ids=["residual", "scalar", "bf16", "nan is right", "two outputs", "parts of larger tensors", "fp8"],
)
def test_a_right_plan_passes(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lowered = write(tmp_path / "r", load(text))
    assert run(tmp_path / "r", lowered.graph) == 0
    out = capsys.readouterr().out
    assert re.search(r"^cuDNN 9\S+, frontend 1\S+, driver for CUDA 13000, stand-in$", out, re.MULTILINE)
    assert "plan 0, engine0: not built: no such engine today" in out
    assert out.count("error of output") == len(lowered.outputs)
    assert out.count("0.0e+00, allowed") == len(lowered.outputs)


def wrong_everywhere(graph: CudnnGraph, buffers: Mapping[int, np.ndarray]) -> None:
    simulate(graph, buffers)
    for tensor in graph.outputs:
        buffers[tensor.uid][...] = buffers[tensor.uid].astype(np.float64) * (
            1.2 if tensor.dtype is DType.F8E4M3 else 1.01
        )


def codes_next_to_ties(graph: CudnnGraph, buffers: Mapping[int, np.ndarray]) -> None:
    """A sum in another order rounds one of a hundred numbers to the next code."""
    simulate(graph, buffers)
    codes = buffers[graph.outputs[0].uid].view(np.uint8)
    codes[::100] = np.where(codes[::100] & 127 < 126, codes[::100] + 1, codes[::100])


@pytest.mark.cudnn
def test_some_codes_of_fp8_may_differ_by_one(tmp_path: Path) -> None:
    lowered = write(tmp_path / "r", load(TO_FP8))
    inputs, expected = (arrays(tmp_path / "r" / f"{name}.npz") for name in ("inputs", "expected"))
    drawn = [array for uid, array in inputs.items() if array.size > 1 and uid not in expected]
    assert len(drawn) == 2 and all(np.unique(array).size > 50 for array in (*drawn, *expected.values()))
    assert run(tmp_path / "r", lowered.graph, execute=codes_next_to_ties) == 0


def one_nan(graph: CudnnGraph, buffers: Mapping[int, np.ndarray]) -> None:
    simulate(graph, buffers)
    buffers[graph.outputs[-1].uid][5] = np.nan


def nothing_written(graph: CudnnGraph, buffers: Mapping[int, np.ndarray]) -> None:
    pass


def last_not_written(graph: CudnnGraph, buffers: Mapping[int, np.ndarray]) -> None:
    before = {t.uid: buffers[t.uid][-1] for t in graph.outputs}
    simulate(graph, buffers)
    for uid, value in before.items():
        buffers[uid][-1] = value


@pytest.mark.cudnn
@pytest.mark.parametrize("execute", [wrong_everywhere, one_nan, nothing_written, last_not_written])
@pytest.mark.parametrize("text", [RESIDUAL, SCALED.format("bf16"), WITHIN, TO_FP8], ids=["f16", "bf16", "parts", "fp8"])
def test_a_wrong_plan_fails(execute: Any, text: str, tmp_path: Path) -> None:
    lowered = write(tmp_path / "r", load(text))
    assert run(tmp_path / "r", lowered.graph, execute=execute) == 1


@pytest.mark.cudnn
def test_an_unwritten_output_is_wrong_where_nan_is_right(tmp_path: Path) -> None:
    lowered = write(tmp_path / "r", load(LOGARITHM))
    (want,) = arrays(tmp_path / "r" / "expected.npz").values()
    assert 0 < np.isnan(want).sum() < want.size

    def numbers_only(graph: CudnnGraph, buffers: Mapping[int, np.ndarray]) -> None:
        buffers[graph.outputs[0].uid][~np.isnan(want)] = want[~np.isnan(want)]

    assert run(tmp_path / "r", lowered.graph, execute=numbers_only) == 1


@pytest.mark.cudnn
def test_plans_are_chosen_by_argument_and_one_must_be_built(tmp_path: Path) -> None:
    lowered = write(tmp_path / "r", load(RESIDUAL))
    assert run(tmp_path / "r", lowered.graph, ["1"]) == 0
    assert run(tmp_path / "r", lowered.graph, ["0"]) == 1


def save(path: Path, arrays: Mapping[int, np.ndarray]) -> None:
    named: dict[str, Any] = {str(uid): array for uid, array in arrays.items()}
    np.savez(path, **named)


@pytest.mark.cudnn
def test_tampered_files_fail(tmp_path: Path) -> None:
    lowered = write(tmp_path / "r", load(RESIDUAL))
    path = tmp_path / "r" / "expected.npz"
    for change in (lambda a: a + np.float16(0.01), lambda a: np.where(np.arange(a.size) == 3, np.float16(np.nan), a)):
        kept = arrays(path)
        save(path, {uid: change(array) for uid, array in kept.items()})
        assert run(tmp_path / "r", lowered.graph) == 1
        save(path, kept)
    assert run(tmp_path / "r", lowered.graph) == 0


# the folder --------------------------------------------------------------------------------------------------------


def test_the_folder_has_all_files(tmp_path: Path) -> None:
    body = load(RESIDUAL)
    lowered = write(tmp_path / "r", body, seed=5)
    folder = tmp_path / "r"
    assert {path.name for path in folder.iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert CudnnGraph.from_json(json.loads((folder / "graph.json").read_text())) == lowered.graph
    weights = {node.result.literal.label: node.result.literal.array for node in body.nodes if node.result.literal}
    assert str(parse((folder / "graph.txt").read_text(), weights)) == str(body)
    compile((folder / "test_repro.py").read_text(), "test_repro.py", "exec")
    versions = json.loads((folder / "versions.json").read_text())
    assert list(versions) == ["fusec", "cudnn", "cudnn_frontend", "cupy", "numpy", "python", "target", "gpu"]
    assert (versions["target"], versions["numpy"]) == ("h200", np.__version__)
    text = (folder / "README.txt").read_text()
    assert all(name in text for name in FILES - {"README.txt"})
    assert "random inputs of seed 5" in text
    if EXPORTER:
        import onnx

        onnx.checker.check_model(onnx.load(folder / "partition.onnx"))


@pytest.mark.parametrize(
    "text", [RESIDUAL, SCALED.format("bf16"), BODIES["batched matmul with a transposed operand and a scale"]]
)
def test_inputs_depend_on_the_seed_and_expected_outputs_are_simulated(text: str, tmp_path: Path) -> None:
    body = load(text)
    lowered = write(tmp_path / "r", body, seed=7)
    before, expected = arrays(tmp_path / "r" / "inputs.npz"), arrays(tmp_path / "r" / "expected.npz")
    rng, feeds = np.random.default_rng(7), {}
    names = {name: uid for uid, name in lowered.inputs}
    for value in body.inputs:
        feeds[value.name] = random_array(rng, value.type)
        drawn = pack(np, feeds[value.name], value.type)
        assert drawn.tobytes() == before[names[value.name]].tobytes()
    graph = lowered.graph
    buffers = {t.uid: before[t.uid].view(t.dtype.numpy) for t in (*graph.inputs, *graph.outputs)}
    assert set(before) == set(buffers)
    assert all(np.isnan(buffers[t.uid]).all() for t in graph.outputs)
    simulate(graph, buffers)
    assert set(expected) == {t.uid for t in graph.outputs}
    for uid, array in expected.items():
        assert array.tobytes() == buffers[uid].tobytes()
    means = evaluate(body, feeds, precision=DType.F64)  # says nothing of memory, so constants lie as they should
    for uid, name in lowered.outputs:
        type = dict(zip(body.output_names, body.outputs, strict=True))[name].type
        assert_close(unpack(expected[uid].view(type.dtype.numpy), type), means[name], 2 * type.dtype.epsilon + 1e-6)


def test_given_inputs_are_used_or_refused(tmp_path: Path) -> None:
    body = load(SCALED.format("f32"))
    x = np.arange(120, dtype=np.float32).reshape(3, 40)
    lowered = write(tmp_path / "r", body, feeds={"x": x})
    assert (arrays(tmp_path / "r" / "expected.npz")[lowered.outputs[0][0]] == x.reshape(-1) / 2).all()
    assert "given inputs" in (tmp_path / "r" / "README.txt").read_text()
    for feeds, words in (
        ({}, "no array for input 'x'"),
        ({"x": x[:1]}, "does not take float32"),
        ({"x": x > 1}, "bool"),
    ):
        with pytest.raises(ExecutionError, match=words):
            write(tmp_path / "other", body, feeds=feeds)
    assert not (tmp_path / "other").exists()


def test_poison_differs_everywhere() -> None:
    for right in (
        np.array([1.0, np.nan, np.inf, 77.0], np.float16),
        np.array([77, 78, 0], np.int8),
        np.array([True, False]),
    ):
        poison = data._poison(right).astype(right.dtype)
        assert not ((poison == right) | ((poison != poison) & (right != right))).any()


def test_a_used_folder_is_refused_and_an_empty_one_is_used(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    write(taken, load(LOGARITHM))
    (taken / "repro.py").write_text("mine")
    with pytest.raises(FusecError, match="taken: exists and is not empty"):
        write(taken, load(LOGARITHM))
    assert (taken / "repro.py").read_text() == "mine"
    with pytest.raises(FusecError, match="exists and is not a folder"):
        write(taken / "repro.py", load(LOGARITHM))
    with pytest.raises(FusecError, match="there is no folder"):
        write(tmp_path / "no" / "r", load(LOGARITHM))
    with pytest.raises(FusecError, match="null"):
        write(tmp_path / "a\0b", load(LOGARITHM))


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, buffers: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data, "save", full)
    with pytest.raises(FusecError, match="r: cannot write: No space left on device"):
        write(tmp_path / "r", load(LOGARITHM))
    assert not list(tmp_path.iterdir())


def test_the_readme_names_the_reason_for_a_missing_onnx_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Graph) -> None:
        raise LoweringError("ONNX has no such op")

    monkeypatch.setattr(importlib.import_module("fusec.exporters.onnx"), "to_onnx", refuse)
    write(tmp_path / "r", load(LOGARITHM))
    assert not (tmp_path / "r" / "partition.onnx").exists()
    assert "is missing: ONNX has no such op" in (tmp_path / "r" / "README.txt").read_text()


def test_as_a_pytest_file_it_is_skipped_without_a_gpu(tmp_path: Path) -> None:
    write(tmp_path / "r", load(LOGARITHM))
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-c", os.devnull, "test_repro.py"]
    blocked = tmp_path / "cupy.py"  # also on a machine that has one
    blocked.write_text("raise ImportError('blocked')")
    done = subprocess.run(
        command,
        cwd=tmp_path / "r",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no usable GPU: blocked" in done.stdout


# steps of a compilation ----------------------------------------------------------------------------------------------


def test_steps_are_written_by_number(tmp_path: Path) -> None:
    net = compiled_net()
    kinds = [step.kind for step in net.program.steps]
    index = kinds.index(Kind.CUDNN)
    assert repro.write(net, index, tmp_path / "r", seed=2) == tmp_path / "r"
    assert (tmp_path / "r" / "graph.txt").read_text() == f"{net.program.steps[index].body}\n"
    lines = (tmp_path / "r" / "repro.py").read_text().splitlines()
    head = next(line for line in lines if line.startswith("TITLE"))
    assert head.startswith(f"TITLE = 'step {index} of net: {net.program.steps[index].signature}")
    assert "NVIDIA H200 in fp32" in head


def test_other_steps_are_refused_with_the_possible_numbers(tmp_path: Path) -> None:
    net = compiled_net()
    kinds = [step.kind for step in net.program.steps]
    able = ", ".join(str(i) for i, kind in enumerate(kinds) if kind is Kind.CUDNN)
    kernel = kinds.index(Kind.KERNEL)
    with pytest.raises(FusecError, match=rf"step {kernel} \(\S+\) runs as a kernel.*cuDNN steps are {able}$"):
        repro.write(net, kernel, tmp_path / "r")
    for index in (-1, len(kinds)):
        with pytest.raises(
            FusecError, match=f"no step {index}: steps are 0 to {len(kinds) - 1}; cuDNN steps are {able}$"
        ):
            repro.write(net, index, tmp_path / "r")
    assert not list(tmp_path.iterdir())


def test_a_program_without_cudnn_steps_says_so(tmp_path: Path) -> None:
    graph = parse('graph "g" (%x: f32[3,4]) {\n  %y = sign(%x)\n  return %y\n}')
    judge = LowersJudge()
    net = Compiled(graph, partition(graph, judge, H200), H200, Options("fp32"), judge)
    with pytest.raises(FusecError, match=r"step 0 \(sign\) runs as a kernel.*this program has no cuDNN step"):
        repro.write(net, 0, tmp_path / "r")


# the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A described GPU, also on a machine that has one."""
    monkeypatch.setenv("FUSEC_DEVICE", "none")
    device._first_gpu.cache_clear()
    yield
    device._first_gpu.cache_clear()


@pytest.mark.cudnn
@pytest.mark.usefixtures("described")
def test_the_command_writes_the_default_or_the_given_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    first = fusec("repro", model, *SHAPE, "--partition", 0, "--precision", "tf32", "--target", "a100")
    assert first.exit_code == 0, first.stderr
    assert first.stdout.startswith("repro-tiny-0: step 0 (conv+bias+relu)")
    assert {path.name for path in (tmp_path / "repro-tiny-0").iterdir()} == FILES
    script = (tmp_path / "repro-tiny-0" / "repro.py").read_text()
    assert "\nTITLE = 'step 0 of tiny: conv+bias+relu" in script
    assert "for NVIDIA A100-SXM4-80GB in tf32" in script
    assert "deselect" not in script
    second = fusec("repro", model, *SHAPE, "--partition", 2, "-o", tmp_path / "there", "--seed", 3, "--json")
    document = json.loads(second.stdout)
    assert (document["step"], document["signature"], document["target"]) == (2, "add", "h200")
    assert document["folder"] == str(tmp_path / "there")
    assert set(document["files"]) == FILES


@pytest.mark.cudnn
@pytest.mark.usefixtures("described")
def test_the_errors_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        (("--partition", "1"), "step 1 (sign) runs as a kernel, not by cuDNN; cuDNN steps are 0, 2"),
        (("--partition", "9"), "there is no step 9: steps are 0 to 3; cuDNN steps are 0, 2"),
        (("--partition", "0", "-o", "."), ".: exists and is not empty"),
        (("--partition", "0", "-o", "no/where"), "no/where: there is no folder"),
        ((), "--partition"),
    ):
        result = fusec("repro", model, *SHAPE, *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.onnx"]


def test_the_manual_names_every_option() -> None:
    docs = Path(repro.__file__).parent.parent.parent / "docs"
    manual = (docs / "cli.md").read_text()
    assert "## `fusec repro" in manual
    for option in re.findall(r"(?<![\w`])--?[a-z][a-z-]*", fusec("repro", "--help").stdout.partition("Options:")[2]):
        assert f"`{option}" in manual or f"{option}`" in manual, option
    assert all(f"`{name}`" in (docs / "repro.md").read_text() for name in FILES)


# on a GPU ------------------------------------------------------------------------------------------------------------


def on_gpu(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "repro.py"], cwd=folder, capture_output=True, text=True, check=False)


def wrong_plans(printed: str) -> Iterator[tuple[int, dict[int, int]]]:
    """Engine and knobs of what is farther off than allowed."""
    pattern = r"plan \d+, eng(\d+)((?:_k\d+=\d+)*): .*: (\S+), allowed (\S+)"
    for engine, knobs, error, allowed in re.findall(pattern, printed):
        if not float(error) <= float(allowed):
            yield int(engine), {int(k): int(v) for k, v in re.findall(r"k(\d+)=(\d+)", knobs)}


def test_wrong_plans_are_read_from_what_a_script_prints() -> None:
    printed = """cuDNN 9.19.0
plan 0, eng0: relative L2 error of output 8: 0.0e+00, allowed 1.0e-03
plan 8, eng34_k0=1_k2=0_k14=4: relative L2 error of output 3: 3.2e-01, allowed 2.0e-03
plan 9, eng1: not built: no
plan 10, eng20: relative L2 error of output 3: nan, allowed 2.0e-03
"""
    assert list(wrong_plans(printed)) == [(34, {0: 1, 2: 0, 14: 4}), (20, {})]


@pytest.mark.gpu
@pytest.mark.parametrize("title", BODIES)
def test_scripts_pass_on_a_gpu_and_fail_on_tampered_expectations(title: str, tmp_path: Path) -> None:
    body = load(BODIES[title])
    lowered = lower(body)
    folder = repro.write_body(body, lowered, tmp_path / "r", H200, title)
    done = on_gpu(folder)
    wrong = list(wrong_plans(done.stdout))
    assert done.returncode == int(bool(wrong)), done.stdout + done.stderr
    for engine, knobs in wrong:  # the script runs all there are; these are never taken
        assert wrong_plan(lowered.graph, engine, knobs) is not None, done.stdout
    expected = {uid: 1.5 * a.astype(np.float32) + 1 for uid, a in arrays(folder / "expected.npz").items()}
    save(folder / "expected.npz", expected)
    assert on_gpu(folder).returncode == 1


@pytest.mark.gpu
def test_the_pytest_file_passes_on_a_gpu(tmp_path: Path) -> None:
    write(tmp_path / "r", load(RESIDUAL))
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "test_repro.py"]
    done = subprocess.run(command, cwd=tmp_path / "r", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout

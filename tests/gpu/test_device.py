"""Test on a GPU that cuDNN computes what the simulator says, models are right, and hazards are real."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.autotune.dense_block import dense_block
from helpers import assert_close, one_program
from lowering.bodies import BODIES, load

import fusec
from fusec import driver, lockfile
from fusec.builder import Tensor
from fusec.diagnostics.verify import allowed_error, verify
from fusec.errors import LoweringError
from fusec.ir import DType, Graph, TensorType, Value
from fusec.lower_cudnn import LOWER, lower
from fusec.ops import CLASSES, Concat, Conv, Reduce, pw
from fusec.reference import evaluate
from fusec.text import parse

pytestmark = pytest.mark.gpu

# cuDNN's fp32 approximations of these are coarser than rounding, measured at up to 1.1e-5
APPROXIMATED = {"tanh", "tanh_backward", "mish", "gelu_tanh", "gelu_tanh_backward"}


@pytest.fixture(scope="module")
def backend() -> Any:
    from fusec.gpu.backend import CudnnBackend

    return CudnnBackend("none")


@pytest.mark.parametrize("title", BODIES)
@pytest.mark.parametrize("tensor_cores", [True, False])
def test_a_lowered_graph_runs_as_simulated(
    backend: Any, title: str, tensor_cores: bool, rng: np.random.Generator
) -> None:
    from gpu.plan_check import compare

    body = load(BODIES[title])
    floats = "matmul" in BODIES[title] and "i8" not in BODIES[title]
    if not tensor_cores and "f32" in BODIES[title] and floats:
        with pytest.raises(LoweringError, match="true fp32"):  # partitions spell it as a convolution
            lower(body, tensor_cores)
        return
    graph = lower(body, tensor_cores).graph
    checked = compare(backend, graph, rng)
    assert checked.untouched == 0
    assert checked.error <= allowed_error(body, body.outputs[0].type.dtype, graph)


POINTWISE = [n for n, c in CLASSES.items() if n in LOWER and c.row.rule in ("float", "number") and n != "round"]


@pytest.mark.parametrize("name", POINTWISE)  # cuDNN rounds only where it stores integers, which `BODIES` show
def test_every_pointwise_mode_computes_its_meaning(backend: Any, name: str, rng: np.random.Generator) -> None:
    op, graph = CLASSES[name](), Graph(name)
    operands = [graph.add_input(f"x{i}", TensorType((6, 40), DType.F32)) for i in range(op.row.arity)]
    graph.set_outputs([graph.add(op, *operands, name="y")])
    if name == "thresholded_relu":
        pytest.skip("cuDNN does not compile a select with a scalar")
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs}
    if name in ("log", "sqrt", "rsqrt", "pow"):
        feeds["x0"] = np.abs(feeds["x0"]) + np.float32(0.1)
    lowered = lower(graph)
    buffers = {uid: feeds[value].reshape(-1).copy() for uid, value in lowered.inputs}
    buffers[lowered.outputs[0][0]] = np.full(240, np.nan, np.float32)
    backend.run_on_host(lowered.graph, buffers)
    (want,) = evaluate(graph, feeds, precision=DType.F64).values()
    rtol = 1e-3 if name == "tan" else 3e-5 if name in APPROXIMATED else 2e-6  # tan: near its poles
    assert_close(buffers[lowered.outputs[0][0]].reshape(6, 40), want, rtol)


NET = """
graph "net" (%x: f32[2,8,16,16]) {
  %w = constant weight("w") : f32[16,8,3,3]
  %b = constant weight("b") : f32[16,1,1]
  %c = conv(%x, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}
  %d = add(%c, %b)
  %e = relu(%d)
  %p = max_pool(%e) {window=[3,3], strides=[2,2], pads=[1,1,1,1], dilations=[1,1]}
  %g = reduce(%p) {kind="mean", axes=[2,3]}
  %s = sigmoid(%g)
  %m = mul(%p, %s)
  %v = constant weight("v") : f32[16,16,1,1]
  %n = conv(%m, %v) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1]}
  %o = add(%n, %p)
  %q = gelu(%o)
  %a = avg_pool(%q) {window=[2,2], strides=[2,2], pads=[0,0,0,0], dilations=[1,1]}
  %r = reshape(%a) {shape=[2,256]}
  %f = constant weight("f") : f32[256,10]
  %y = matmul(%r, %f)
  %z = softmax(%y)
  return %z
}"""


def net() -> Graph:
    rng = np.random.default_rng(5)
    shapes = {"w": (16, 8, 3, 3), "b": (16, 1, 1), "v": (16, 16, 1, 1), "f": (256, 10)}
    return parse(NET, {k: (0.2 * rng.standard_normal(s)).astype(np.float32) for k, s in shapes.items()})


@pytest.mark.parametrize(
    ("precision", "tune", "rtol"),
    [
        ("fp32", "none", 1e-5),
        ("fp32", "quick", 1e-5),
        ("tf32", "none", 4e-3),
        ("fp16", "none", 5e-3),
        ("fp16", "quick", 5e-3),
        ("bf16", "none", 4e-2),
    ],
)
def test_a_whole_net(precision: str, tune: str, rtol: float, rng: np.random.Generator) -> None:
    executable = fusec.compile(net(), precision=precision, tune=tune)
    assert executable.device != "simulated"
    x = rng.standard_normal((2, 8, 16, 16)).astype(np.float32)
    (want,) = evaluate(net(), {"x": x}, precision=DType.F64).values()
    got = executable(x)
    assert isinstance(got, np.ndarray)
    assert_close(got, want, rtol)


def reversing(kind: str, dtype: str, rank: int, groups: int) -> Graph:
    """A convolution whose filters each call gives, with a residual and an activation."""
    b = fusec.Builder()
    x = b.input("x", (2, 32, *(13, 12, 9)[:rank]), dtype)
    w = b.input("w", (16, 32 // groups, *(3, 2, 3)[:rank]), dtype)
    y = b.conv(x, w, stride=(2, 1, 1)[:rank], padding=1, groups=groups, flipped=True)
    b.output(y=b.pointwise(kind, y + b.input("z", y.shape, dtype)))
    return b.graph()


@pytest.mark.parametrize("tune", ["none", "full"])  # full: every plan that is offered is compared with the simulator
@pytest.mark.parametrize(
    ("dtype", "precision", "rtol"),
    [
        ("f32", "fp32", 1e-5),
        ("f32", "tf32", 2e-3),
        ("f32", "fp16", 3e-3),
        ("f16", "fp32", 3e-3),
        ("bf16", "fp32", 2e-2),
        ("f64", "fp32", 1e-12),
    ],
)
@pytest.mark.parametrize(
    ("rank", "groups", "kind"), [(1, 1, "relu"), (2, 1, "relu"), (2, 1, "gelu"), (2, 4, "relu"), (3, 1, "relu")]
)
def test_filters_of_a_call_are_reversed(
    rank: int, groups: int, kind: str, dtype: str, precision: str, rtol: float, tune: str, rng: np.random.Generator
) -> None:
    graph = reversing(kind, dtype, rank, groups)
    executable = fusec.compile(graph, precision=precision, tune=tune)
    assert executable.device != "simulated"
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(v.type.dtype.numpy) for v in graph.inputs}
    (want,) = evaluate(graph, feeds, precision=DType.F64).values()
    assert np.linalg.norm(want) > 1.0
    assert_close(np.asarray(executable(**feeds), np.float64), want, rtol)


def test_eight_bit_filters_of_a_call_are_reversed(rng: np.random.Generator) -> None:
    b = fusec.Builder()
    x, w = b.input("x", (2, 32, 9, 8), "i8"), b.input("w", (16, 32, 3, 2), "i8")
    b.output(y=b.conv(x, w, padding=1, flipped=True))
    executable = fusec.compile(b.graph(), tune="none")
    feeds = {v.name: rng.integers(-128, 128, v.type.shape).astype(np.int8) for v in b.graph().inputs}
    (want,) = evaluate(b.graph(), feeds).values()
    np.testing.assert_array_equal(np.asarray(executable(**feeds)), want)


def test_arrays_on_the_device_stay_there(rng: np.random.Generator) -> None:
    import cupy

    executable = fusec.compile(net(), tune="none")
    x = rng.standard_normal((2, 8, 16, 16)).astype(np.float32)
    want = executable(x)
    got = executable(cupy.asarray(x))
    assert isinstance(got, cupy.ndarray)
    assert_close(got.get(), want, 0.0)
    torch = pytest.importorskip("torch")
    from_torch = executable(torch.from_numpy(x).cuda())
    assert_close(torch.from_dlpack(from_torch).cpu().numpy(), want, 0.0)


def test_held_inputs_are_unchanged_after_replays(rng: np.random.Generator) -> None:
    import cupy

    executable = one_program(fusec.compile(net(), tune="none"))
    executable.hold_inputs()
    x = cupy.asarray(rng.standard_normal((2, 8, 16, 16)).astype(np.float32))
    want = executable(x)
    executable(x)
    executable.replay()
    executable.replay()
    read = executable.input_buffers["x"]
    assert_close(read.get(), x.get(), 0.0)
    assert_close(executable(read).get(), want.get(), 0.0)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("tune", ["none", "quick"])
def test_a_dense_block_without_copies(rng: np.random.Generator, precision: str, tune: str) -> None:
    source = dense_block(seed=int(rng.integers(1 << 30)))
    executable = one_program(fusec.compile(source, precision=precision, tune=tune))
    steps = [s for s in executable.compiled.program.steps if s.nodes[-1].op.name == "concat"]
    ways = {"none": {"view"}, "quick": {"view", "kernel"}}[tune]  # timed, whichever is faster
    assert len(steps) == 3 and {step.kind.value for step in steps} <= ways
    tolerance = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 5e-3, "bf16": 4e-2}[precision]
    for _ in range(3):
        x = rng.standard_normal((2, 64, 32, 32)).astype(np.float32)
        assert_close(executable(x), evaluate(source, {"x": x})["y"], tolerance)


def test_steps_side_by_side(rng: np.random.Generator, tmp_path: Path) -> None:
    """Four towers over one image, joined: whichever way they are recorded, the answer is the same each time, and a lock
    says which way it is."""
    graph = Graph("towers")
    x = graph.add_input("x", TensorType((1, 32, 14, 14), DType.F32))

    def convolved(v: Value, filters: int, side: int) -> Value:
        shape = (filters, v.type.shape[1], side, side)
        w = graph.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32))
        return graph.add(pw("relu"), graph.add(Conv((1, 1), (side // 2,) * 4, (1, 1)), v, w))

    stem = convolved(x, 64, 3)
    towers = [convolved(convolved(stem, 64, 1), 64, side) for side in (1, 3, 3, 5)]
    graph.set_outputs([convolved(graph.add(Concat(1), *towers), 32, 1)], ["y"])
    executable = one_program(fusec.compile(graph, precision="fp16", tune="quick"))
    arrays = rng.standard_normal((20, 1, 32, 14, 14)).astype(np.float32)
    for array in arrays:
        assert_close(executable(array), evaluate(graph, {"x": array})["y"], 5e-3)
    lanes, other_us, declined, _ = executable.recorded
    assert not declined
    assert other_us is not None, "both ways were timed"
    assert lanes in (1, 2, 3, 4)
    lockfile.write(tmp_path / "fusec.lock", executable.lock())
    locked = one_program(fusec.compile(graph, precision="fp16", lock=tmp_path / "fusec.lock"))
    for array in arrays[:3]:
        assert_close(locked(array), evaluate(graph, {"x": array})["y"], 5e-3)
    assert (locked.recorded[0], locked.recorded[1]) == (lanes, None)


def test_calls_from_several_streams_and_threads(rng: np.random.Generator) -> None:
    import cupy

    executable = one_program(fusec.compile(net(), tune="none"))
    x = rng.standard_normal((2, 8, 16, 16)).astype(np.float32)
    want = {sign: executable(sign * x) for sign in (1, -1)}
    device = {sign: cupy.asarray(sign * x) for sign in (1, -1)}
    for _ in range(3):
        executable(device[1])
    streams = {sign: cupy.cuda.Stream(non_blocking=True) for sign in (1, -1)}
    cupy.cuda.get_current_stream().synchronize()
    got: dict[int, list[Any]] = {1: [], -1: []}

    def work(sign: int) -> None:
        with streams[sign]:
            got[sign] = [executable(device[sign]) for _ in range(50)]
            streams[sign].synchronize()

    threads = [threading.Thread(target=work, args=(sign,)) for sign in (1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sign, results in got.items():
        assert len(results) == 50
        for result in results:
            assert_close(result.get(), want[sign], 0.0)
    buffer = executable.input_buffers["x"]
    buffer[...] = device[-1]
    assert_close(executable(buffer).get(), want[-1], 0.0)


def test_verification_on_the_device(backend: Any) -> None:
    for precision in ("fp32", "fp16"):
        report = verify(driver.build(net(), precision=precision), run=backend.run_on_host)
        assert report.ok, str(report)


@pytest.mark.parametrize("tune", ["none", "quick"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_steps_are_verified_as_they_run(precision: str, tune: str) -> None:
    report = driver.compile(net(), precision=precision, tune=tune).verify()
    assert report.ok, str(report)
    assert "executed" in {check.level for check in report.checks}


HAZARDS = [
    ("conv", "2,32,8,12", "2,32,1,1"),
    ("conv", "2,32,8,12", "1,1,8,12"),
    ("conv", "2,32,8,12", "2,1,1,1"),
    ("pointwise", "2,20,32", "1,1,32"),
    ("pointwise", "2,20,32", "1,20,1"),
    ("pointwise", "2,20,32", "2,1,1"),
]
SAFE = [
    ("conv", "2,32,8,12", "1,32,1,1"),
    ("conv", "2,32,8,12", "2,1,8,12"),
    ("pointwise", "2,20,32", "2,1,32"),
    ("pointwise", "2,20,32", "1,20,32"),
    ("pointwise", "1,40,32", "1,1,32"),
]


def probe(case: tuple[str, str, str]) -> float:
    """The error of one unguarded graph; infinity if it faulted."""
    script = Path(__file__).with_name("known_bug_probe.py")
    done = subprocess.run(
        [sys.executable, str(script), *case], capture_output=True, text=True, check=False, timeout=100
    )
    return float(done.stdout.split()[-1]) if done.returncode == 0 else float("inf")


@pytest.mark.parametrize("case", HAZARDS)
def test_hazards_are_real(case: tuple[str, str, str]) -> None:
    """Each is computed wrongly or faults; one that passes here no longer needs its guard."""
    assert not probe(case) < 0.05


@pytest.mark.parametrize("case", SAFE)
def test_their_neighbours_are_safe(case: tuple[str, str, str]) -> None:
    assert probe(case) < 2e-3


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("tune", ["none", "quick"])
def test_inverted_bottlenecks_with_a_gate(rng: np.random.Generator, precision: str, tune: str) -> None:
    """Thin products, a depthwise convolution with its mean, and the gate before the projection."""
    b = fusec.Builder("f32")
    x = b.input("x", (4, 16, 24, 24))

    def conv(x: Tensor, filters: int, side: int = 1, groups: int = 1) -> Tensor:
        shape = (filters, x.shape[1] // groups, side, side)
        w = b.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32))
        bias = b.constant(rng.standard_normal((1, filters, 1, 1)).astype(np.float32))
        return b.conv(x, w, padding=side // 2, groups=groups) + bias

    y = b.pointwise("swish", conv(x, 96), beta=1.0)
    y = b.pointwise("swish", conv(y, 96, 5, 96), beta=1.0)
    gate = b.pointwise("swish", conv(b.apply(Reduce("mean", (2, 3)), y), 8), beta=1.0)
    y = y * b.pointwise("sigmoid", conv(gate, 96))
    b.output(y=conv(y, 16) + x)
    source = b.graph()
    executable = fusec.compile(source, precision=precision, tune=tune)
    for _ in range(3):
        array = rng.standard_normal((4, 16, 24, 24)).astype(np.float32)
        want = evaluate(source, {"x": array})["y"]
        assert_close(executable(array), want, {"fp16": 5e-3, "bf16": 4e-2}[precision])

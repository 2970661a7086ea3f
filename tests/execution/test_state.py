"""Test the state of an executable: inputs that stay on the device, and updates, in place or by a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES
from helpers import assert_close, one_program
from lowering.lowers_judge import LowersJudge

import fusec
from fusec import training
from fusec.builder import Builder
from fusec.errors import ExecutionError, FusecError
from fusec.execution.compilation import Compiled
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.ops import Rotary, Scatter
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.runtime import Executable, SimulatorBackend
from fusec.schedule.memory_plan import plan_memory
from fusec.targets.target import load

Array = np.ndarray[Any, Any]


def accumulator() -> Builder:
    """total = total * 0.5 + x; gives twice what it is then."""
    b = Builder()
    x, total = b.input("x", (4, 3)), b.parameter("total", np.ones((4, 3), np.float32))
    new = total * 0.5 + x
    b.update(total, new)
    b.output(y=new * 2.0)
    return b


@pytest.fixture(params=["cpu", "simulated"])
def compiled(request: pytest.FixtureRequest) -> Any:
    """Compiles a builder for NumPy alone, or with every pointwise op in a simulated cuDNN step."""
    if request.param == "simulated":
        return lambda b: _simulated(b)
    return lambda b: fusec.compile(b, target="cpu")


def _simulated(b: Builder) -> Executable:
    graph, target, judge = b.graph(), load("h200"), LowersJudge()
    options = Options("tf32", state=tuple((n, b.updates.get(n, "")) for n in b.parameters))
    program = partition(run(PIPELINE, graph.clone(), options), judge, target)
    exe = Executable(Compiled(graph, program, target, options, judge), SimulatorBackend())
    exe.bind(**{n: a for n, a in b.parameters.items() if a is not None})
    return exe


def test_a_step_replaces_the_state(compiled: Any, rng: np.random.Generator) -> None:
    exe, total = compiled(accumulator()), np.ones((4, 3))
    assert exe.in_place == 1
    for _ in range(4):
        x = rng.standard_normal((4, 3)).astype(np.float32)
        total = total * 0.5 + x
        assert_close(exe.step(x), 2 * total, 1e-5)
        assert_close(exe.value("total"), total, 1e-5)


def test_bind_gives_new_values(compiled: Any) -> None:
    exe = compiled(accumulator())
    exe.step(x=np.zeros((4, 3), np.float32))
    exe.bind(total=np.full((4, 3), 8.0, np.float32))
    assert (exe.step(x=np.zeros((4, 3), np.float32)) == 8.0).all()


def test_what_is_read_later_is_copied_after_the_last_step(compiled: Any, rng: np.random.Generator) -> None:
    """An output still reads the old value, so the update may not overwrite it."""
    b = Builder()
    x, w = b.input("x", (4, 3)), b.parameter("w", np.ones((4, 3), np.float32))
    b.update(w, w + x)
    b.output(before=w, product=w.T @ x)
    exe = compiled(b)
    assert exe.in_place == 0
    x1 = rng.standard_normal((4, 3)).astype(np.float32)
    exe.step(x1)
    before, product = exe.step(x1)
    assert_close(before, 1 + x1, 1e-6)
    assert_close(product, (1 + x1).T @ x1, 1e-5)


def test_a_view_of_the_old_value_counts_as_reading_it(compiled: Any, rng: np.random.Generator) -> None:
    b = Builder()
    x, w = b.input("x", (4, 3)), b.parameter("w", np.ones((4, 3), np.float32))
    b.update(w, w + x)
    b.output(y=(w.reshape(2, 6) @ w.reshape(6, 2) + x.sum()))
    exe = compiled(b)
    x1 = rng.standard_normal((4, 3)).astype(np.float32)
    exe.step(x1)
    w1 = 1 + x1
    assert_close(exe.step(x1), w1.reshape(2, 6) @ w1.reshape(6, 2) + x1.sum(), 1e-5)


def test_two_updates_by_each_other(compiled: Any) -> None:
    """Fibonacci: each new value is made of both old ones."""
    b = Builder()
    p, q = (b.parameter(n, np.full((3,), v, np.float32)) for n, v in (("p", 0.0), ("q", 1.0)))
    b.update(p, q * 1.0)
    b.update(q, p + q)
    b.output(y=p * 1.0)
    exe = compiled(b)
    assert [float(exe.step()[0]) for _ in range(9)] == [0, 1, 1, 2, 3, 5, 8, 13, 21]


def test_two_values_change_places(compiled: Any) -> None:
    b = Builder()
    p, q = (b.parameter(n, np.full((3,), v, np.float32)) for n, v in (("p", 0.0), ("q", 1.0)))
    b.update(p, q)
    b.update(q, p)
    b.output(y=p + q * 2.0)
    exe = compiled(b)
    assert [float(exe.step()[0]) for _ in range(4)] == [2, 1, 2, 1]


def test_rows_are_written_into_state(compiled: Any, rng: np.random.Generator) -> None:
    """As a decoder writes new keys into its cache: nothing else of the state is copied."""
    b = Builder()
    cache, at = b.parameter("cache", np.zeros((2, 5, 3), np.float32)), b.input("at", (2,), "i64")
    rows = b.input("rows", (2, 3))
    written = b.apply(Scatter("none"), cache.reshape(10, 3), at, rows).reshape(2, 5, 3)
    b.update(cache, written)
    b.output(y=written.sum(1))
    exe, expected = compiled(b), np.zeros((2, 5, 3), np.float32)
    assert exe.in_place == 1
    for places in ([0, 5], [1, 9], [1, 6]):
        new = rng.standard_normal((2, 3)).astype(np.float32)
        expected.reshape(10, 3)[places] = new
        assert_close(exe.step(at=np.array(places), rows=new), expected.sum(1), 1e-6)
        assert (exe.value("cache") == expected).all()
    (scatter,) = [step for step in exe.explain().steps if step.ops == "scatter"]
    assert (scatter.read_bytes, scatter.written_bytes) == (2 * 8 + 2 * 3 * 4, 2 * 3 * 4)
    exe.step(at=np.array([0, 1]), rows=new)  # recorded by now
    with pytest.raises(ExecutionError, match=r"scatter.* index outside 0\.\.9"):
        exe.step(at=np.array([0, 10]), rows=new)


def test_rows_that_one_step_computes_are_written_into_two_states(compiled: Any, rng: np.random.Generator) -> None:
    """As a decoder writes keys, which go through a rotary embedding, and values."""
    b = Builder()
    keys, values = (b.parameter(name, np.zeros((5, 4), np.float32)) for name in ("keys", "values"))
    at, k, v, angles = b.input("at", (2,), "i64"), b.input("k", (3, 4)), b.input("v", (2, 4)), b.input("angles", (4,))
    rotated = b.apply(Rotary(), k, angles, angles)
    b.update(keys, b.apply(Scatter("none"), keys, at, rotated[1:]))
    b.update(values, b.apply(Scatter("none"), values, at, v))
    b.output(y=rotated * 2.0)
    exe, want = compiled(b), np.zeros((2, 5, 4), np.float32)
    assert exe.in_place == 2
    for places in ([0, 4], [1, 0]):
        new = {
            n: rng.standard_normal(s).astype(np.float32) for n, s in (("k", (3, 4)), ("v", (2, 4)), ("angles", (4,)))
        }
        (embedded,) = Rotary().reference(np, new["k"], new["angles"], new["angles"])
        want[:, places] = embedded[1:], new["v"]
        assert_close(exe.step(at=np.array(places), **new), 2 * embedded, 1e-6)
        assert_close(exe.value("keys"), want[0], 1e-6)
        assert (exe.value("values") == want[1]).all()
    if exe.compiled.target.name == "cpu":  # which has a step for each op
        return
    (step,) = [step for step in exe.explain().steps if step.ops == "rotary+slice+scatter+scatter"]
    rows_bytes, embedded_bytes = 2 * 4 * 4, 3 * 4 * 4
    assert step.read_bytes == 2 * 8 + rows_bytes + embedded_bytes + 4 * 4
    assert step.written_bytes == 2 * rows_bytes + embedded_bytes


def test_rows_of_the_old_state_are_read_before_they_are_written(compiled: Any) -> None:
    b = Builder()
    state = b.parameter("state", np.arange(6, dtype=np.float32).reshape(3, 2))
    b.update(state, b.apply(Scatter("none"), state, b.constant(np.array([1, 2])), state[:2]))
    b.output(y=b.input("x", (2,)) * 2.0)
    exe = compiled(b)
    assert exe.in_place == 0
    exe.step(np.ones(2, np.float32))
    assert exe.value("state").tolist() == [[0, 1], [0, 1], [2, 3]]


def test_state_is_stored_outside_the_arena() -> None:
    exe = one_program(fusec.compile(accumulator(), target="cpu"))
    assert not any(v.name == "total" for v in exe.memory.offsets)
    assert exe.memory.nbytes < plan_memory(exe.compiled.program).nbytes


def test_executables_share_state(compiled: Any, rng: np.random.Generator) -> None:
    exe, reader = compiled(accumulator()), Builder()
    total = reader.parameter("total", shape=(4, 3))
    reader.output(y=total * 2.0)
    second = compiled(reader)
    with pytest.raises(ExecutionError, match="input %total is missing: it is state, bind it"):
        second.step()
    second.share(exe)
    for _ in range(3):
        exe.step(rng.standard_normal((4, 3)).astype(np.float32))
        assert_close(second.step(), 2 * exe.value("total"), 1e-6)


def test_state_given_to_a_call_is_bound(compiled: Any) -> None:
    exe = compiled(accumulator())
    x, total = np.zeros((4, 3), np.float32), np.full((4, 3), 4.0, np.float32)
    outputs = dict(zip([s.name for s in exe.outputs], exe.run(None, {"x": x, "total": total}), strict=True))
    assert_close(outputs["y"], total, 0.0)
    assert_close(outputs["total.next"], total / 2, 0.0)
    assert_close(exe.value("total"), total / 2, 0.0)


def test_filters_are_stored_in_the_layout_of_convolutions(rng: np.random.Generator) -> None:
    """And so is what replaces them: no copy from one order to the other in any step."""
    b = Builder()
    x = b.input("x", (2, 4, 6, 6))
    w = b.parameter("w", rng.standard_normal((8, 4, 3, 3)).astype(np.float32))
    loss = b.conv(x, w, padding=1).relu().sum()
    (g,) = fusec.backward(loss, [w])
    b.update(w, w - g * 0.1)
    b.output(loss=loss)
    exe = _simulated(b)
    old, new = exe.compiled.graph.inputs[1], exe.compiled.graph.outputs[0]
    assert old.type.order == new.type.order == (0, 2, 3, 1)
    reference = one_program(fusec.compile(b, target="cpu"))
    for _ in range(2):
        image = rng.standard_normal((2, 4, 6, 6)).astype(np.float32)
        assert_close(exe.step(image), reference.step(image), 1e-5)
    assert_close(exe.value("w"), reference.value("w"), 1e-5)


def test_saved_state_is_state_again(tmp_path: Path) -> None:
    path = tmp_path / "step.fusec"
    _simulated(accumulator()).save(path)
    exe = fusec.load(path)
    assert exe.state == {"total": "total.next"}
    exe.bind(total=np.zeros((4, 3), np.float32))
    assert (exe.step(np.ones((4, 3), np.float32)) == 2.0).all()


def test_models_of_other_kinds_name_their_state() -> None:
    text = 'graph "g" (%x: f32[2], %s: f32[2]) {\n %t = add(%s, %x)\n return %t\n}'
    exe = one_program(fusec.compile(fusec.parse(text), target="cpu", state={"s": "t"}))
    exe.bind(s=np.zeros(2, np.float32))
    assert exe.step(np.ones(2, np.float32)) == ()
    assert exe.value("s").tolist() == [1.0, 1.0]
    for state, message in (
        ({"z": ""}, "state %z is no input of the model"),
        ({"s": "u"}, "%u, the update of state %s, is no output of the model"),
    ):
        with pytest.raises(FusecError, match=message):
            fusec.compile(fusec.parse(text), target="cpu", state=state)
    wider = fusec.parse(text.replace("%x: f32[2],", "%x: f32[2], %n: f32[1],"))
    with pytest.raises(FusecError, match=r"%t is f32\[2\], and cannot replace %n"):
        fusec.compile(wider, target="cpu", state={"n": "t"})


def test_what_is_no_state_is_refused() -> None:
    exe = one_program(fusec.compile(accumulator(), target="cpu"))
    with pytest.raises(ExecutionError, match="%x is no state; that is %total"):
        exe.bind(x=np.zeros((4, 3), np.float32))
    with pytest.raises(ExecutionError, match=r"state %total has shape \[4, 3\], the array \[3\]"):
        exe.bind(total=np.zeros(3, np.float32))
    with pytest.raises(ExecutionError, match="2 arrays for 1 inputs"):
        exe.step(1, 2)
    b = Builder()
    b.output(y=b.parameter("p", shape=(2,)) * 2.0)
    with pytest.raises(ExecutionError, match="%x is no state; that is %total"):
        exe.value("x")
    with pytest.raises(ExecutionError, match="state %p has no value: bind it"):
        one_program(fusec.compile(b, target="cpu")).value("p")


def test_the_cpu_runs_op_by_op() -> None:
    exe = one_program(fusec.compile(accumulator(), target="cpu"))
    assert exe.device == "cpu"
    assert {step.kind.value for step in exe.compiled.program.steps} == {"kernel"}
    assert "compiled for NumPy alone" in str(exe.explain())


def test_a_scale_is_updated_where_its_norm_reads_it(rng: np.random.Generator) -> None:
    """A batch norm's own step, with the update in it, reads each channel's numbers before it writes them."""
    b = Builder()
    x, scale = b.input("x", (4, 3, 2, 2)), b.parameter("scale", np.ones(3, np.float32))
    held = b.parameter("held", np.zeros(3, np.float32))
    bias = b.constant(np.zeros(3, np.float32))
    y, mean, _ = b.batch_norm_train(x, scale, bias)
    b.update(held, held * 0.5 + mean)
    b.update(scale, scale - mean * 0.1)
    b.output(y=y)
    graph, target, judge = b.graph(), load("h200"), LowersJudge(without=["batch_norm_train"])
    options = Options("tf32", state=tuple((n, b.updates.get(n, "")) for n in b.parameters))
    program = fuse_steps(partition(run(PIPELINE, graph.clone(), options), judge, target), FIGURES)
    exe = Executable(Compiled(graph, program, target, options, judge), SimulatorBackend())
    assert exe.in_place == 2 and len(program.steps) == 1
    exe.bind(**{n: a for n, a in b.parameters.items() if a is not None})
    other = one_program(fusec.compile(b, target="cpu"))
    for _ in range(3):
        array = rng.standard_normal((4, 3, 2, 2)).astype(np.float32) + 1.0
        assert_close(exe.step(array), other.step(array), 1e-5)
    assert_close(exe.value("scale"), other.value("scale"), 1e-5)


def trained(copied: bool, w: Array) -> Builder:
    """A linear layer in 16 bits with fp32 weights, and momentum; weights are cast in each call, or a copy is stored."""
    b = Builder("f16")
    x, held = b.input("x", (6, 4)), b.parameter("w", w)
    narrow = b.copy(held, "f16") if copied else held.astype("f16")
    loss = ((x @ narrow).tanh().astype("f32") ** 2).mean()
    training.sgd(b, [held], fusec.backward(loss, [held]), 0.5, momentum=0.9)
    b.output(loss=loss)
    return b


def test_a_copy_is_what_would_have_been_cast(compiled: Any, rng: np.random.Generator) -> None:
    w = rng.standard_normal((4, 5)).astype(np.float32)
    casts, copies = compiled(trained(False, w)), compiled(trained(True, w))
    assert copies.in_place >= casts.in_place
    for _ in range(4):
        x = rng.standard_normal((6, 4)).astype(np.float16)
        assert copies.step(x) == casts.step(x)
    np.testing.assert_array_equal(copies.value("w"), casts.value("w"))
    np.testing.assert_array_equal(copies.value("w as f16"), copies.value("w").astype(np.float16))


def test_a_copy_follows_what_is_bound(compiled: Any, rng: np.random.Generator) -> None:
    w, other = (rng.standard_normal((4, 5)).astype(np.float32) for _ in range(2))
    exe, x = compiled(trained(True, w)), rng.standard_normal((6, 4)).astype(np.float16)
    before = exe.step(x)
    exe.bind(w=other)
    np.testing.assert_array_equal(exe.value("w as f16"), other.astype(np.float16))
    assert exe.step(x) == compiled(trained(True, other)).step(x) != before
    exe.bind(**{"w as f16": np.zeros((4, 5), np.float16), "w": w})
    assert not exe.value("w as f16").any(), "what is given is taken"


def test_a_gradient_by_a_parameter_that_is_read_both_ways() -> None:
    b = Builder()
    w = b.parameter("w", np.array([1.0, 2.0], np.float32))
    half = b.copy(w, "f16")
    assert b.copy(w, "f16") is half and b.copy(w, "f32") is w
    (gradient,) = fusec.backward((w * 3.0 + half.astype("f32") * 4.0).sum(), [w])
    b.output(gradient=gradient)
    assert (one_program(fusec.compile(b, target="cpu")).step() == 7.0).all()


def test_copies_of_what_is_none() -> None:
    b = Builder()
    w, count = b.parameter("w", np.ones(2, np.float32)), b.parameter("n", np.ones(2, np.int64))
    with pytest.raises(FusecError, match=r"a copy of .*n.* in f16"):
        b.copy(count, "f16")
    with pytest.raises(FusecError, match="is no parameter of this graph"):
        b.copy(w * 2.0, "f16")
    b.update(w, w * 2.0)
    with pytest.raises(FusecError, match="is already updated"):
        b.copy(w, "f16")

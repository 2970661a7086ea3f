"""Test `Builder.scan`: the function of a step becomes the body of one op, and reads values outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import assert_close

import fusec
from fusec.builder import Builder, Tensor
from fusec.errors import ModelError
from fusec.ops import Scan
from fusec.reference import evaluate
from fusec.text import parse

Array = np.ndarray[Any, Any]
Rows = tuple[list[Tensor], list[Tensor]]


def wrong(value: Any) -> Any:
    """Return a value whose type is not taken, without its type."""
    return value


def floats(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, Array]:
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_a_step_reads_values_outside_of_it(rng: np.random.Generator) -> None:
    feeds = floats(rng, h=(2, 3), x=(9, 2, 4), w=(3, 3), u=(4, 3))
    b = Builder()
    first, sequence, w, u = (b.input(name, array.shape) for name, array in feeds.items())

    def step(states: list[Tensor], rows: list[Tensor]) -> Rows:
        (h,), (x,) = states, rows
        after = (x @ (2.0 * u) + h @ (w + 1.0) * 0.5).tanh()
        return [after], [after * h, x]

    (last,), (products, copies) = b.scan([first], [sequence], step)
    b.output(last=last, products=products, copies=copies)
    graph = b.graph()
    graph.verify()
    assert str(parse(str(graph))) == str(graph)
    names = [node.op.name for node in graph.nodes]
    assert sorted(names) == ["add", "constant", "constant", "mul", "scan"], "the weights are computed before the loop"
    assert list(graph.nodes)[-1].origin[0].startswith("test_scan.py:")
    got, state = evaluate(graph, feeds), feeds["h"]
    for t, row in enumerate(feeds["x"]):
        after = np.tanh(row @ (2 * feeds["u"]) + state @ (feeds["w"] + 1) * 0.5)
        assert_close(got["products"][t], after * state, 1e-4)
        state = after
    assert_close(got["last"], state, 1e-4)
    np.testing.assert_array_equal(got["copies"], feeds["x"])


def test_a_loop_without_sequences_and_one_within_a_loop(rng: np.random.Generator) -> None:
    feeds = floats(rng, x=(3,), a=(3,))
    b = Builder()
    x, a = (b.input(name, array.shape) for name, array in feeds.items())

    def outer(states: list[Tensor], rows: list[Tensor]) -> Rows:
        (x,) = states
        after, _ = b.scan([x * 0.5], [], lambda states, rows: ([states[0] * a + x], []), steps=2)
        return after, []

    (y,), rows = b.scan([x], [], outer, steps=3)
    assert rows == []
    b.output(y=y)
    graph = b.graph()
    assert [node.op.name for node in graph.nodes] == ["scan"]
    want, a_ = feeds["x"], feeds["a"]
    for _ in range(3):
        want = (want * 0.5 * a_ + want) * a_ + want
    assert_close(evaluate(graph, feeds)["y"], want, 1e-5)


def test_sequences_without_states(rng: np.random.Generator) -> None:
    feeds = floats(rng, x=(8, 3), y=(8, 3))
    b = Builder()
    x, y = (b.input(name, array.shape) for name, array in feeds.items())
    after, (z,) = b.scan([], [x, y], lambda states, rows: ([], [rows[0] - rows[1]]))
    assert after == []
    b.output(z=z)
    np.testing.assert_array_equal(evaluate(b.graph(), feeds)["z"], feeds["x"] - feeds["y"])


def test_a_scan_is_compiled_and_differentiated(rng: np.random.Generator) -> None:
    feeds = floats(rng, h=(2, 3), x=(9, 2, 3), w=(3, 3))
    b = Builder()
    h, x, w = (b.input(name, array.shape) for name, array in feeds.items())

    def step(states: list[Tensor], rows: list[Tensor]) -> Rows:
        after = (states[0] @ w + rows[0]).tanh()
        return [after], [after]

    _, (ys,) = b.scan([h], [x], step)
    looped = (ys * ys).sum()
    state, total = h, b.constant(0.0, "f32")
    for t in range(9):
        state = (state @ w + x[t]).tanh()
        total = total + (state * state).sum()
    for name, loss in (("looped", looped), ("unrolled", total)):
        (found,) = fusec.backward(loss, [w])
        b.output({name: loss, f"{name}.w": found})
    got = dict(zip(b.graph().output_names, fusec.compile(b, target="cpu").run(None, feeds), strict=True))
    for name in ("", ".w"):
        assert_close(got[f"looped{name}"], got[f"unrolled{name}"], 1e-4)


WRONG: dict[str, tuple[Callable[[Builder, Tensor], Any], str]] = {
    "no number": (lambda b, x: b.scan([x], [], lambda s, r: (s, [])), "needs the number of its steps"),
    "no steps": (lambda b, x: b.scan([x], [], lambda s, r: (s, []), steps=0), "scan of 0 steps"),
    "lengths": (lambda b, x: b.scan([x], [x, x.T], lambda s, r: (s, [])), "a scan of 2 and 4 steps"),
    "no rows": (lambda b, x: b.scan([x], [x.sum()], lambda s, r: (s, [])), "has no rows to scan"),
    "one list": (lambda b, x: b.scan([x], [x], wrong(lambda s, r: s)), "a step returned .*: return the list of next"),
    "a lost state": (lambda b, x: b.scan([x], [x], lambda s, r: ([], r)), "a step of 1 states returned 0"),
    "nothing": (lambda b, x: b.scan([], [x], lambda s, r: ([], [])), "a step returned no tensors"),
    "another type": (lambda b, x: b.scan([x], [x], lambda s, r: ([s[0].sum()], r)), "state 0 is .* before a step, and"),
    "a number": (lambda b, x: b.scan([x], [x], wrong(lambda s, r: ([1.0], r))), "float is no tensor of this graph"),
    "another builder": (lambda b, x: b.scan([Builder().input("y", (2,))], [], wrong(None), 2), "another builder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_line(name: str) -> None:
    use, message = WRONG[name]
    b = Builder()
    with pytest.raises(ModelError, match=rf"^test_scan\.py:\d+: .*{message}"):
        use(b, b.input("x", (2, 4)))
    assert not any(isinstance(node.op, Scan) for node in b.nodes)


def test_tensors_of_a_step_end_with_it() -> None:
    b = Builder()
    x = b.input("x", (3, 2))
    seen: list[Tensor] = []

    def step(states: list[Tensor], rows: list[Tensor]) -> Rows:
        seen.extend((states[0], rows[0], states[0] * rows[0]))
        return [states[0] + rows[0]], []

    b.scan([x[0]], [x], step)
    for tensor in seen:
        with pytest.raises(ModelError, match="exists only within the step of a scan"):
            tensor.exp()
    b.output(y=x[0] * 2.0)
    assert "identity" not in str(b.graph())


def test_gradients_within_a_step_are_refused() -> None:
    b = Builder()
    x = b.input("x", (3,))

    def step(states: list[Tensor], rows: list[Tensor]) -> Rows:
        (slope,) = fusec.backward((states[0] * x).sum(), [x])
        return [slope], []

    with pytest.raises(ModelError, match="within the step of a scan: differentiate the results of the scan"):
        b.scan([x], [], step, steps=2)

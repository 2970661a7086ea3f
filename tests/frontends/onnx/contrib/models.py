"""One node of an op of onnxruntime, imported by fusec and run by onnxruntime."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from frontends.onnx.models import info, model, run
from onnx import helper

from fusec.frontends import load
from fusec.ir import Graph
from fusec.reference import evaluate

Array = np.ndarray[Any, Any]


def floats(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


class Held:
    """An operand that the model holds, as it holds weights."""

    def __init__(self, array: Array):
        self.array = array


Operand = Array | Held | None


def one(
    op: str, operands: Sequence[Operand], outputs: Sequence[str] = ("y0",), domain: str = "com.microsoft", **given: Any
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model of one node, and what to feed. An operand of None is left out; an output of "" too."""
    operands = [x if x is None or isinstance(x, Held) else np.asarray(x) for x in operands]
    names = ["" if x is None else f"x{i}" for i, x in enumerate(operands)]
    node = helper.make_node(op, names, list(outputs), name="n", domain=domain, **given)
    feeds = {n: x for n, x in zip(names, operands, strict=True) if isinstance(x, np.ndarray)}
    held = {n: x.array for n, x in zip(names, operands, strict=True) if isinstance(x, Held)}
    inputs = [info(n, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype)) for n, a in feeds.items()]
    proto = model([node], inputs, [name for name in outputs if name], held)
    proto.opset_import.add(domain="com.microsoft", version=1)
    return proto, feeds


def imported(op: str, operands: Sequence[Operand], outputs: Sequence[str] = ("y0",), **given: Any) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(one(op, operands, outputs, **given)[0])


def both(
    op: str, operands: Sequence[Operand], outputs: Sequence[str] = ("y0",), **given: Any
) -> tuple[list[Array], list[Array]]:
    """Return the results of fusec's reference and of onnxruntime, after types and shapes were compared."""
    proto, feeds = one(op, operands, outputs, **given)
    graph = load(proto)
    values = evaluate(graph, feeds)
    got, want = [values[name] for name in graph.output_names], run(proto, feeds)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
    return got, want


def assert_floats(
    op: str,
    operands: Sequence[Operand],
    outputs: Sequence[str] = ("y0",),
    rtol: float = 2e-6,
    **given: Any,
) -> None:
    """Compare each result by its largest difference, relative to the largest number of the result."""
    for name, ours, theirs in zip(outputs, *both(op, operands, outputs, **given), strict=True):
        wide = theirs.astype(np.float64)
        size = max(1e-6, float(np.abs(wide).max(initial=0)))
        error = float(np.abs(ours.astype(np.float64) - wide).max(initial=0)) / size
        assert error <= rtol, f"{name}: error {error:.3g}"


def assert_steps(op: str, operands: Sequence[Operand], rare: float = 0.02, **given: Any) -> None:
    """Compare quantised results: never more than one step apart, and seldom one."""
    (ours,), (theirs,) = both(op, operands, **given)
    apart = np.abs(ours.astype(np.int64) - theirs.astype(np.int64))
    assert apart.max(initial=0) <= 1
    assert np.count_nonzero(apart) <= max(1, rare * apart.size), f"{np.count_nonzero(apart)} of {apart.size}"
    assert theirs.size < 8 or len(np.unique(theirs)) > 2, "a case whose results are all the same tells nothing"

"""Make models with loops, and compare them with onnxruntime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from frontends.onnx.models import info, model, run
from helpers import assert_close
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from fusec.frontends import load
from fusec.reference import evaluate

STEPS = 11
SEQUENCE = -1  # of floats
SCALARS = ("i", "go", "on", "i2", "go2", "on2")  # onnxruntime needs their shapes
I64, BOOL = TensorProto.INT64, TensorProto.BOOL
Arrays = dict[str, np.ndarray]
Held = Mapping[str, np.ndarray | np.float32]
Types = Mapping[str, int]
make = helper.make_node


def declared(name: str, array: np.ndarray) -> ValueInfoProto:
    return info(name, list(array.shape), helper.np_dtype_to_tensor_dtype(array.dtype))


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def whole(nodes: Sequence[NodeProto], feeds: Arrays, outputs: Sequence[str], held: Held | None = None, *,
          types: Types | None = None, opset: int = 21) -> onnx.ModelProto:  # fmt: skip
    """Make a model whose outputs are floats, but for those in `types`."""
    results = [info(name, None, (types or {}).get(name, TensorProto.FLOAT)) for name in outputs]
    arrays = {n: np.asarray(a) for n, a in (held or {}).items()}
    return model(nodes, [declared(n, a) for n, a in feeds.items()], results, arrays, opset)


def body(
    nodes: Sequence[NodeProto], inputs: Sequence[str], outputs: Sequence[str], held: Held | None = None, *,
    types: Types | None = None,
) -> onnx.GraphProto:  # fmt: skip
    def one(name: str) -> ValueInfoProto:
        dtype = (types or {}).get(name, TensorProto.FLOAT)
        if dtype == SEQUENCE:
            return helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None)
        return info(name, [] if name in SCALARS else None, dtype)

    initializers = [numpy_helper.from_array(np.asarray(a), n) for n, a in (held or {}).items()]
    return helper.make_graph(nodes, "body", [*map(one, inputs)], [*map(one, outputs)], initializers)


def loop(
    nodes: Sequence[NodeProto], states: dict[str, str], rows: Sequence[str] = (), held: Held | None = None, *,
    types: Types | None = None, given: Sequence[str] = (),
) -> NodeProto:  # fmt: skip
    """Make a Loop with results last0, last1, … and rows0, rows1, …

    states: the name of each state after a step, by its name before it.
    given: the inputs of the node; default: n, no condition, and the names of the states with a 0.
    """
    passed = [] if any("on" in node.output for node in nodes) else [make("Identity", ["go"], ["on"])]
    graph = body(
        [*nodes, *passed], ["i", "go", *states], ["on", *states.values(), *rows], held,
        types={"i": I64, "go": BOOL, "on": BOOL, **(types or {})},
    )  # fmt: skip
    results = [*(f"last{k}" for k in range(len(states))), *(f"rows{k}" for k in range(len(rows)))]
    return make("Loop", [*(given or ["n", "", *(f"{s}0" for s in states)])], results, "loop", body=graph)


def check(proto: onnx.ModelProto, feeds: Arrays, tolerance: float = 1e-5) -> Counter[str]:
    """Compare a model with onnxruntime, and return how often its graph has each op."""
    graph = load(proto)
    graph.verify()
    got = evaluate(graph, feeds)
    for name, want in zip(graph.output_names, run(proto, feeds), strict=True):
        assert got[name].shape == want.shape and got[name].dtype == want.dtype
        assert_close(got[name], want, tolerance)
    return Counter(n.op.name for n in graph.nodes)


def check_loop(
    node: NodeProto, feeds: Arrays, held: Held | None = None, *, steps: int = STEPS,
    before: Sequence[NodeProto] = (), types: Types | None = None,
) -> Counter[str]:  # fmt: skip
    held = {"n": np.array(steps), "yes": np.array(True), **(held or {})}
    return check(whole([*before, node], feeds, list(node.output), held, types=types), feeds)


SUM = [make("Add", ["v", "r"], ["w"]), make("Identity", ["w"], ["row"])]  # of rows that are read by number

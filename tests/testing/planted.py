"""Define properties with known faults and a strategy of small graphs, for the tests of the fuzzer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from fusec.ir import DType, Graph, TensorType
from fusec.ops import pw
from fusec.passes import PIPELINE
from fusec.passes.base import run
from fusec.passes.partition import partition
from fusec.targets.target import load
from fusec.testing.case import Case, MismatchError, Trust
from fusec.testing.properties.judges import JUDGES
from fusec.testing.runner.shrink import digest

NAMES = ("identity", "relu", "tanh", "add", "mul", "sub")


@st.composite
def sequences(draw: st.DrawFn, length: int = 8) -> Graph:
    """Draw one to eight pointwise ops of one shape."""
    graph = Graph("sequence")
    values = [graph.add_input("x", TensorType((2, 3), DType.F32))]
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=length)):
        operands = [values[-1]] if name in NAMES[:3] else [values[-1], values[draw(st.integers(0, len(values) - 1))]]
        values.append(graph.add(pw(name), *operands))
    graph.set_outputs(values[-1 - draw(st.integers(0, 1)) :])
    return graph


short_sequences = sequences(3)


def holds(graph: Graph) -> None:
    """Hold for every graph."""
    graph.verify()


def noted(graph: Graph) -> None:
    """Hold for every graph; write the process and the graph to the file FUSEC_NOTES."""
    with Path(os.environ["FUSEC_NOTES"]).open("a") as file:
        file.write(f"{os.getpid()} {digest(graph)}\n")


def compiles(graph: Graph, case: Case) -> None:
    """Run passes, partitioner and lowering, which coverage counts."""
    run(PIPELINE, graph, case.options)
    partition(graph, JUDGES[case.judge](case), load(case.target))


def _has(graph: Graph, *names: str) -> bool:
    return {n.op.name for n in graph.nodes} >= set(names)


def no_relu_and_mul(graph: Graph, case: Case) -> None:
    """Fail if a graph has both ops, unless the file FUSEC_FIXED exists."""
    if _has(graph, "relu", "mul") and not Path(os.environ.get("FUSEC_FIXED", "none")).exists():
        x = np.arange(3, dtype=np.float32)
        raise MismatchError(f"output %{graph.outputs[0].name} is off by {len(graph)}", {"y": x}, {"y": x + 1})


def two_faults(graph: Graph) -> None:
    """Fail in the same way for two reasons."""
    if _has(graph, "tanh") or _has(graph, "sub"):
        raise MismatchError("differs")


def raises(graph: Graph) -> None:
    """Raise an error inside fusec."""
    if _has(graph, "relu"):
        load("no such target")


def dies(graph: Graph) -> None:
    """Kill the process."""
    if _has(graph, "tanh", "add"):
        os.kill(os.getpid(), signal.SIGSEGV)


def hangs(graph: Graph) -> None:
    """Never return."""
    while _has(graph, "tanh"):
        time.sleep(0.01)


def doubtful(graph: Graph) -> None:
    """Fail by a weak oracle."""
    if _has(graph, "relu"):
        raise MismatchError("not what onnxruntime says", oracle=Trust.ONNXRUNTIME)


def slow(graph: Graph) -> None:
    """Be slow."""
    time.sleep(0.02)


def three(graph: Graph, case: Case, more: int) -> None:
    """Have an argument that no property gets."""

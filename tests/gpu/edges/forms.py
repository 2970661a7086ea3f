"""The forms a row runs in: as lowered graphs and as kernels, each simulated here or run by a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from gpu.edges.row import Array, Row
from gpu.kernels.cases import FIGURES, each_way

from fusec.errors import LoweringError
from fusec.gpu.kernels import find
from fusec.gpu.kernels.codegen.kernel import Kernel
from fusec.ir import DType, Value
from fusec.lower_cudnn import LOWER, Lowered, lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.known_bugs import deadly, misread
from fusec.lowering.packing import pack, unpack
from fusec.passes.partition import spellings
from fusec.reference import evaluate_node

POISON = 12345.0  # a number that no edge value leads to


def lowered(row: Row) -> Iterator[tuple[str, Lowered]]:
    """Each spelling that cuDNN can be asked to run, the one that partitions prefer first."""
    if row.whole or row.kernel_only or any(n.op.name not in LOWER for n in row.nodes):
        return
    for names, body in spellings(row.graph):
        try:
            made = lower(body, row.tensor_cores)
        except LoweringError:
            continue
        if deadly(made.graph) is None and misread(made.graph) is None:
            yield "+".join(names), made


def kernels(row: Row) -> list[tuple[str, Kernel]]:
    """The kernel of a step, and those that do the same."""
    kernel = None if row.whole else find(row.nodes, row.outputs, FIGURES)
    return [] if kernel is None else [(str(i) if i else "", way) for i, way in enumerate(each_way(kernel))]


def by_graph(
    row: Row, made: Lowered, feeds: Mapping[str, Array], run: Callable[[CudnnGraph, dict[int, Array]], None]
) -> list[Array]:
    """The outputs of a lowered graph, in the order of the row's."""
    types = {v.name: v.type for v in row.graph.values()}
    buffers = {uid: made.part(uid, pack(np, feeds[name], types[name]).copy()) for uid, name in made.inputs}
    buffers |= {b.uid: pack(np, b.literal.array, b.type).copy() for b in made.constants}
    outputs = dict(zip(row.graph.output_names, row.graph.outputs, strict=True))
    for uid, name in made.outputs:
        dtype = outputs[name].type.dtype
        poison = POISON if dtype.is_float else 1 if dtype is DType.BOOL else 77
        buffers[uid] = np.full(outputs[name].type.span, poison).astype(dtype.numpy)
    buffers |= made.spare_buffers(np)
    run(made.graph, buffers)
    got = {name: unpack(buffers[uid], outputs[name].type) for uid, name in made.outputs}
    return [got[name] for name in row.graph.output_names]


def operands(row: Row, feeds: Mapping[str, Array]) -> dict[Value, Array]:
    """Return what a kernel reads: inputs and constants by value."""
    constants = {v: v.literal.array for v in row.graph.values() if v.literal is not None}
    return constants | {v: feeds[v.name] for v in row.graph.inputs}


def ordered(row: Row, results: Sequence[Array]) -> list[Array]:
    """Results in the order of the row's outputs."""
    by_value = dict(zip(row.outputs, results, strict=True))
    return [by_value[v] for v in row.graph.outputs]


def by_reference(row: Row, feeds: Mapping[str, Array], xp: Any) -> list[Array]:
    """By the ops' own references in CuPy, as a step runs that has neither a plan nor a kernel."""
    held: dict[Value, Any] = {v: xp.asarray(a) for v, a in operands(row, feeds).items()}
    for node in row.nodes:
        results = evaluate_node(node, [held[v] for v in node.operands], xp)
        held.update(zip(node.results, results, strict=True))
    return [xp.asnumpy(held[v]) for v in row.graph.outputs]


def compiled(row: Row, target: str = "auto") -> Callable[[Mapping[str, Array]], list[Array]]:
    """The row as a model, compiled and run."""
    import fusec

    executable = fusec.compile(row.graph.clone(), target=target, precision="fp32", tune="none")
    return lambda feeds: [np.asarray(a) for a in executable.run(None, dict(feeds))]


@cache
def backend() -> Any:
    """The GPU's."""
    from fusec.gpu.backend import CudnnBackend

    return CudnnBackend("none")


@cache
def launcher() -> Any:
    """The GPU's."""
    from fusec.gpu.launch.kernel_launcher import Launcher

    return Launcher()

"""Make small graphs whose builds show that cuDNN compiles all pointwise graphs of the same kinds of calls.

Build time grows with the square of the tensors in memory. The graphs of a model have up to 32 of them, and a sequence
of the same kinds of calls has about three.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor

DIMS, STRIDES = (1, 8, 64), (512, 64, 1)
MAX_CALLS = 24  # of one graph: as many as steps have, so that several workers share the builds
TYPES = {DType.F32, DType.F16, DType.BF16}  # calls of other types are proven by the graphs that have them

Kind = tuple[str, tuple[str, ...], DType, tuple[tuple[DType, bool], ...]]


def call_kinds(graph: CudnnGraph) -> set[Hashable]:
    """Return what the code of each call of a pointwise graph depends on; nothing for a graph with other calls."""
    if any(call.op != "pointwise" for call in graph.calls):
        return set()
    return {kind_of(graph, call) for call in graph.calls}


def kind_of(graph: CudnnGraph, call: CudnnCall) -> Kind:
    """Return the mode, the attributes' names, the compute type, and for each tensor its type and if it is stored."""
    types = tuple((t.dtype, t.value is None) for t in map(graph.tensor, call.inputs + call.outputs))
    return (call.mode, tuple(name for name, _ in call.attributes), call.compute, types)


def build_seconds(graph: CudnnGraph) -> float:
    """Estimate the processor time of compiling a graph of pointwise calls, from benchmarks/results/builds.json.

    It grows with the square of the tensors in memory.
    """
    return 0.25 + 0.01 * len(graph.calls) + 0.003 * (len(graph.inputs) + len(graph.outputs)) ** 2


def proof_graphs(graphs: Iterable[CudnnGraph], seen: set[Hashable]) -> list[CudnnGraph]:
    """Make sequences of calls: one of each kind that the pointwise graphs have, without the kinds that were seen."""
    calls: dict[Kind, tuple[CudnnGraph, CudnnCall]] = {}
    for graph in graphs:
        if call_kinds(graph) and graph.tensor_cores:
            calls |= {kind_of(graph, call): (graph, call) for call in graph.calls if _fits(graph, call)}
    wanted = sorted(calls.keys() - seen, key=repr)  # equal sets of kinds make equal graphs
    starts = range(0, len(wanted), MAX_CALLS)
    return [_sequence([calls[kind] for kind in wanted[start : start + MAX_CALLS]]) for start in starts]


def _fits(graph: CudnnGraph, call: CudnnCall) -> bool:
    """Tell if a call has only types of the sequences, and no attribute that depends on the dims."""
    types = {graph.tensor(uid).dtype for uid in call.inputs + call.outputs}
    return types <= TYPES and call.attribute("axis") is None


def _sequence(made_of: Sequence[tuple[CudnnGraph, CudnnCall]]) -> CudnnGraph:
    """Make a graph of calls like these. Each reads a result that none has read yet, if one has the operand's type."""
    tensors: list[CudnnTensor] = []
    calls: list[CudnnCall] = []
    inputs: dict[DType, int] = {}
    unread: dict[DType, list[int]] = {dtype: [] for dtype in TYPES}

    def add(tensor: CudnnTensor) -> int:
        tensors.append(replace(tensor, uid=len(tensors) + 1))
        return len(tensors)

    def operand(like: CudnnTensor) -> int:
        if like.value is not None:
            return add(replace(like, dims=(1, 1, 1), strides=(1, 1, 1)))
        if unread[like.dtype]:
            return unread[like.dtype].pop(0)
        if like.dtype not in inputs:
            inputs[like.dtype] = add(CudnnTensor(0, DIMS, STRIDES, like.dtype))
        return inputs[like.dtype]

    for graph, call in made_of:
        operands = tuple(operand(graph.tensor(uid)) for uid in call.inputs)
        dtype = graph.tensor(call.outputs[0]).dtype
        result = add(CudnnTensor(0, DIMS, STRIDES, dtype, virtual=True))
        unread[dtype].append(result)
        calls.append(replace(call, inputs=operands, outputs=(result,)))
    stored = {uid for uids in unread.values() for uid in uids}
    return CudnnGraph(tuple(replace(t, virtual=t.virtual and t.uid not in stored) for t in tensors), tuple(calls))

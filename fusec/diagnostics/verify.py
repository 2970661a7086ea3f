"""Verify a compilation at each level against float64 references.

The levels are:

- the graph after all passes
- the body of each step
- each lowered graph, simulated or on a GPU
- each step as an executable runs it

Errors are relative L2. The allowed error follows from the arithmetic: each stored value is rounded once. The error of
an fp32 sum grows with the square root of its length (rounding errors of random sign: Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., section 2.8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fusec.execution.compilation import Compiled
from fusec.ir import BYTES, HALVES, DType, Graph, HostArray, Node, TensorType, Value
from fusec.lower_cudnn import Lowered
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.indexed_dims import indexed_sizes
from fusec.lowering.packing import pack, unpack
from fusec.lowering.simulator import Buffer, simulate
from fusec.ops import (
    IMAGE_CONVOLUTIONS,
    Attention,
    AttentionBackward,
    AttentionTrain,
    Cast,
    ConvTranspose,
    ConvWgrad,
    DeformConv,
    MatMul,
    PackedMatMul,
)
from fusec.reference import evaluate
from fusec.schedule.program import Partition, body_of
from fusec.system.dataclass import dataclass
from fusec.system.printable import printable

Values = Mapping[Value, HostArray]
Runner = Callable[[CudnnGraph, Mapping[int, Buffer]], None]  # reads inputs, writes outputs, as `simulate`
Execute = Callable[[int, Values], Values]  # (index of a step, operands) -> results

TIES = 1 / 64  # share of the elements that may be next to a tie
BYTE_STEP = 2.0**-4  # about the error that quantisation itself has in a deep model
NO_SOURCES = "passes: not checked, because the file was written without the weights of the imported model"
SAFETY = 16.0  # functions such as exp magnify a rounding of their argument


@dataclass(frozen=True)
class Check:
    """One comparison. `level` is passes, body, lowered or executed. An `error` of NaN never passes."""

    level: str
    what: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Report:
    """All comparisons of one verification. notes: what could not be checked, and why."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, in which an error that is not finite is null."""
        rows = [{**asdict(c), "error": c.error if math.isfinite(c.error) else None, "ok": c.ok} for c in self.checks]
        return {"ok": self.ok, "checks": rows, "notes": list(self.notes)}

    def __str__(self) -> str:
        named = [printable(c.what) for c in self.checks]
        width = max(map(len, named), default=0)
        lines = [
            f"{'ok ' if c.ok else 'BAD'} {c.level:8} {what:{width}} error {c.error:.1e} allowed {c.allowed:.1e}"
            for what, c in zip(named, self.checks, strict=True)
        ]
        bad = sum(not c.ok for c in self.checks)
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *notes, f"{len(self.checks)} checks, {bad} failed"])


def verify(
    compiled: Compiled,
    seed: int = 0,
    run: Runner | None = simulate,
    progress: Callable[[int, int], None] | None = None,
    execute: Execute | None = None,
) -> Report:
    """Check a compilation on random inputs.

    run: runs lowered graphs, in simulation or on a GPU; None to skip them.
    progress: receives the number of steps that are done, and of all steps.
    execute: runs whole steps (`Executable.verify`); None to skip them.
    """
    rng = np.random.default_rng(seed)
    feeds = random_feeds(rng, compiled.source)
    checks = _passes(compiled, feeds) if compiled.has_sources else []
    values: dict[Value, HostArray] = {v: _wide(feeds[v.name]) for v in compiled.graph.inputs}
    last_use = _last_uses(compiled)
    for index, (step, lowered) in enumerate(zip(compiled.program.steps, compiled.lowered, strict=True)):
        # each step gets stored reference values as operands, so that no error of an earlier step counts
        operands = {v: _stored(values[v], v.type.dtype) for v in step.inputs}
        results = _node_results(compiled.graph, step, operands)
        if lowered is not None:
            what = f"{index} {step.signature}"
            checks += _body(what, step, operands, results)
            if run is not None:
                checks += _lowered(what, step, lowered, operands, results, run)
        if execute is not None:
            checks += _executed(f"{index} {step.signature}", step, lowered, execute(index, operands), results)
        values.update(results)
        for value in (*step.inputs, *step.outputs):
            if last_use[value] == index:
                values.pop(value, None)
        if progress is not None:
            progress(index + 1, len(compiled.program.steps))
    return Report(tuple(checks), () if compiled.has_sources else (NO_SOURCES,))


def random_feeds(rng: np.random.Generator, graph: Graph) -> dict[str, HostArray]:
    """Return a random array for each input by name. Indices of a gather are within its bounds."""
    feeds = {v.name: random_array(rng, v.type) for v in graph.inputs}
    for value in graph.inputs:
        indexed = indexed_sizes(value)
        if indexed:
            feeds[value.name] = np.minimum(feeds[value.name], min(indexed) - 1).astype(value.type.dtype.numpy)
    return feeds


def random_array(rng: np.random.Generator, type: TensorType) -> HostArray:
    """Return random numbers: normal floats, integers 0 and 1 (valid indices of two rows), or booleans; or words."""
    if type.dtype is DType.STRING:
        letters = rng.integers(ord("a"), ord("z") + 1, (type.size, 4))
        return np.array(["".join(map(chr, word)) for word in letters], object).reshape(type.shape)
    if type.dtype.is_float:
        return rng.standard_normal(type.shape).astype(type.dtype.numpy)
    return rng.integers(0, 2, type.shape).astype(type.dtype.numpy)


def relative_l2(got: HostArray, want: HostArray) -> float:
    """Return |got - want| / |want| in float64, or |got| if want is zero.

    Equal infinities are left out, because they have no distance. The result is NaN if an element is NaN.
    """
    got, want = got.astype(np.float64), want.astype(np.float64)
    same = np.isinf(want) & (got == want)
    got, want = np.where(same, 0.0, got), np.where(same, 0.0, want)
    most = float(np.abs(want).max(initial=0.0))
    if most > 0 and math.isfinite(most):  # because squares of large numbers overflow
        got, want = got / most, want / most
    scale = float(np.linalg.norm(want))
    difference = float(np.linalg.norm(got - want))
    return difference / scale if scale else difference


def stored_error(got: HostArray, want: HostArray, dtype: DType) -> float:
    """Compute the relative L2 error of a stored result.

    An element counts as right if it differs by no more than the least number of its dtype, because smaller numbers
    become zero. Of integers of 8 bits a few may differ by one step: those that are rounded from next to a tie.
    """
    with np.errstate(invalid="ignore"):
        apart = np.abs(got.astype(np.float64) - want)
    near = apart <= dtype.least
    if dtype in BYTES and np.count_nonzero(apart == 1) <= 1 + apart.size * TIES:
        near |= apart == 1
    return relative_l2(np.where(near, want, got), want)


def _passes(compiled: Compiled, feeds: Mapping[str, HostArray]) -> list[Check]:
    # constants are folded in their own type, then stored in the precision of the compilation
    stored = [compiled.options.storage, *(v.type.dtype for v in compiled.source.values())]
    depth = sum(len(step.nodes) for step in compiled.program.steps)
    allowed = 2 * max(d.epsilon for d in stored) * math.sqrt(depth + 1)
    if any(isinstance(n.op, Cast) and n.op.to in BYTES for n in compiled.graph.nodes):
        allowed = max(allowed, BYTE_STEP)  # integers next to ties, and roundings left out, change what follows
    want = evaluate(compiled.source, feeds, precision=DType.F64)
    got = evaluate(compiled.graph, feeds, precision=DType.F64)
    return [Check("passes", name, relative_l2(got[name], array), allowed) for name, array in want.items()]


def _node_results(graph: Graph, step: Partition, operands: Values) -> dict[Value, HostArray]:
    """Return the results of the step's own nodes in float64."""
    results = evaluate(body_of(graph, step.nodes), {v.name: a for v, a in operands.items()}, precision=DType.F64)
    return {v: results[v.name] for v in step.outputs}


def _body(what: str, step: Partition, operands: Values, results: Values) -> list[Check]:
    got = evaluate(step.body, {v.name: a for v, a in operands.items()}, precision=DType.F64)
    return [Check("body", what, relative_l2(got[v.name], results[v]), v.type.dtype.epsilon) for v in step.outputs]


def _lowered(
    what: str,
    step: Partition,
    lowered: Lowered,
    operands: Values,
    results: Values,
    run: Runner,
) -> list[Check]:
    """Run a lowered graph on the operands of a step, and compare its outputs with the results."""
    buffers = {}
    by_name = {v.name: v for v in (*step.inputs, *step.outputs)}
    for uid, name in lowered.inputs:
        value = by_name[name]
        buffers[uid] = lowered.part(uid, pack(np, operands[value].astype(value.type.dtype.numpy), value.type))
    for binding in lowered.constants:
        buffers[binding.uid] = pack(np, binding.literal.array, binding.type)
    for uid, name in lowered.outputs:
        type = by_name[name].type
        buffers[uid] = np.full(type.span, np.nan if type.dtype.is_float else 77, type.dtype.numpy)
    run(lowered.graph, buffers | lowered.spare_buffers(np))
    checks: list[Check] = []
    for uid, name in lowered.outputs:
        value = by_name[name]
        error = stored_error(unpack(buffers[uid], value.type), results[value], value.type.dtype)
        checks.append(Check("lowered", what, error, allowed_error(step.body, value.type.dtype, lowered.graph)))
    return checks


def _executed(
    what: str,
    step: Partition,
    lowered: Lowered | None,
    got: Values,
    results: Values,
) -> list[Check]:
    """Compare the results of a step. A kernel may round values between its ops, so that error is allowed too."""
    between = [v.type.dtype.epsilon for n in step.nodes for v in n.results if v.type.dtype in HALVES]
    rounded = max(between, default=0.0) * math.sqrt(len(between))
    checks: list[Check] = []
    for value in step.outputs:
        dtype, nodes = value.type.dtype, step.nodes
        if lowered is None:
            allowed = _arithmetic(nodes, dtype)
        else:
            allowed = allowed_error(step.body, dtype, lowered.graph)
        checks.append(Check("executed", what, stored_error(got[value], results[value], dtype), allowed + rounded))
    return checks


def allowed_error(body: Graph, stored: DType, graph: CudnnGraph) -> float:
    """Return the error that rounding explains: of the arithmetic, and of operands that are rounded before a product.

    Operands are rounded to tf32, or to 16 bits after a prologue.
    """
    nodes = list(body.nodes)
    allowed = _arithmetic(nodes, stored)
    if any(_sum_length(node) > 1 for node in nodes) and graph.tensor_cores and stored is DType.F32:
        allowed += 2.0**-9  # tf32 has 10 bits, and some engines truncate: 8e-4 was measured
    rounded = [t.dtype.epsilon for t in graph.tensors if t.virtual and t.dtype in HALVES]
    return allowed + max(rounded, default=0.0)


def _arithmetic(nodes: Sequence[Node], stored: DType) -> float:
    """Return the error of storing once, of fp32 sums by their length, and of one rounding for each op."""
    longest = max((_sum_length(node) for node in nodes), default=1)
    return stored.epsilon + SAFETY * DType.F32.epsilon * (math.sqrt(longest) + len(nodes))


def _sum_length(node: Node) -> int:
    """Return the number of terms that one element of the result adds up."""
    if isinstance(node.op, DeformConv):  # of each element of a window four pixels
        return 4 * math.prod(node.operands[1].type.shape[1:])
    if isinstance(node.op, IMAGE_CONVOLUTIONS):
        return math.prod(node.operands[1].type.shape[1:]) * (
            node.operands[1].type.shape[0] if isinstance(node.op, ConvTranspose) else 1
        )
    if isinstance(node.op, ConvWgrad):
        return math.prod(node.operands[1].type.shape) // max(1, node.operands[1].type.shape[1])
    if isinstance(node.op, (MatMul, PackedMatMul)):
        return node.operands[0].type.shape[-1]
    if isinstance(node.op, AttentionBackward):
        return node.operands[1].type.shape[-1] + 2 * node.operands[2].type.shape[2]
    if isinstance(node.op, (Attention, AttentionTrain)):
        return node.operands[0].type.shape[-1] + node.operands[1].type.shape[2]
    if node.results[0].type.size < max((v.type.size for v in node.operands), default=0):
        return max(v.type.size for v in node.operands) // max(1, node.results[0].type.size)
    return 1


def _wide(array: HostArray) -> HostArray:
    return array.astype(np.float64) if DType.of(array.dtype).is_float else array


def _stored(array: HostArray, dtype: DType) -> HostArray:
    """Return the values after rounding to the type they are stored in, as float64."""
    return _wide(array.astype(dtype.numpy))


def _last_uses(compiled: Compiled) -> dict[Value, int]:
    """Return the index of the last step that reads or writes each value."""
    last: dict[Value, int] = {}
    for index, step in enumerate(compiled.program.steps):
        for value in (*step.inputs, *step.outputs):
            last[value] = index
    return last

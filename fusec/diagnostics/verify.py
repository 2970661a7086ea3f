"""Verify a compilation at each level, always against float64 references.

Compared are the passes against the model, each step's body against its nodes, each lowered graph against its body
(simulated, or run on a GPU), and each step as an executable runs it.

Errors are relative L2. The allowed error follows from the arithmetic: rounding to the storage type once per stored
value, and fp32 sums whose error grows with the square root of their length (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., section 2.8: rounding errors of random sign).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fusec.execution.compilation import Compiled
from fusec.ir import DType, Graph, Node, TensorType, Value
from fusec.lower_cudnn import Lowered
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.packing import pack, unpack
from fusec.lowering.simulator import Buffer, simulate
from fusec.ops import Attention, AttentionBackward, AttentionTrain, Conv, ConvTranspose, ConvWgrad, Gather, MatMul
from fusec.reference import evaluate
from fusec.schedule.program import Partition, body_of
from fusec.system.printable import printable

Runner = Callable[[CudnnGraph, Mapping[int, Buffer]], None]  # reads inputs, writes outputs, as `simulate`
Array = np.ndarray[Any, Any]
Execute = Callable[[int, Mapping[Value, Array]], Mapping[Value, Array]]  # a step, by its place: its results

SAFETY = 16.0  # functions such as exp magnify a rounding of their argument


@dataclass(frozen=True)
class Check:
    """One comparison. Level is passes, body, lowered or executed; `error` may be NaN, which never passes."""

    level: str
    what: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Report:
    """All comparisons of one verification."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; an error that is not a number is null."""
        rows = [{**asdict(c), "error": c.error if math.isfinite(c.error) else None, "ok": c.ok} for c in self.checks]
        return {"ok": self.ok, "checks": rows}

    def __str__(self) -> str:
        named = [printable(c.what) for c in self.checks]
        width = max(map(len, named), default=0)
        lines = [
            f"{'ok ' if c.ok else 'BAD'} {c.level:8} {what:{width}} error {c.error:.1e} allowed {c.allowed:.1e}"
            for what, c in zip(named, self.checks, strict=True)
        ]
        bad = sum(not c.ok for c in self.checks)
        return "\n".join([*lines, f"{len(self.checks)} checks, {bad} failed"])


def verify(
    compiled: Compiled,
    seed: int = 0,
    run: Runner | None = simulate,
    progress: Callable[[int, int], None] | None = None,
    execute: Execute | None = None,
) -> Report:
    """Check a compilation on random inputs.

    run: executes lowered graphs: the simulator, a GPU, or nobody.
    progress: is told how many of the steps are done.
    execute: runs whole steps (`Executable.verify`).
    """
    rng = np.random.default_rng(seed)
    feeds = random_feeds(rng, compiled.source)
    checks = _passes(compiled, feeds)
    values: dict[Value, Array] = {v: _wide(feeds[v.name]) for v in compiled.graph.inputs}
    uses = _uses(compiled)
    for index, (step, lowered) in enumerate(zip(compiled.program.steps, compiled.lowered, strict=True)):
        # every step starts from operands as they are stored, so that each error is its own
        operands = {v: _stored(values[v], v.type.dtype) for v in step.inputs}
        results = _by_nodes(compiled.graph, step, operands)
        if lowered is not None:
            what = f"{index} {step.signature}"
            checks += _body(what, step, operands, results)
            if run is not None:
                checks += _lowered(what, step, lowered, operands, results, run)
        if execute is not None:
            checks += _executed(f"{index} {step.signature}", step, lowered, execute(index, operands), results)
        values.update(results)
        for value in (*step.inputs, *step.outputs):
            if uses[value] == index:
                values.pop(value, None)
        if progress is not None:
            progress(index + 1, len(compiled.program.steps))
    return Report(tuple(checks))


def random_feeds(rng: np.random.Generator, graph: Graph) -> dict[str, Array]:
    """Return an array for each input by name; the indices of a gather are within its bounds."""
    feeds = {v.name: random_array(rng, v.type) for v in graph.inputs}
    for value in graph.inputs:
        indexed = [n.operands[0].type.shape[n.op.axis] for n, i in value.uses if i == 1 and isinstance(n.op, Gather)]
        if indexed:
            feeds[value.name] = np.minimum(feeds[value.name], min(indexed) - 1).astype(value.type.dtype.numpy)
    return feeds


def random_array(rng: np.random.Generator, type: TensorType) -> Array:
    """Return normal floats; integers 0 and 1, which are valid indices of two rows; fair bools."""
    if type.dtype.is_float:
        return rng.standard_normal(type.shape).astype(type.dtype.numpy)
    return rng.integers(0, 2, type.shape).astype(type.dtype.numpy)


def relative_l2(got: Array, want: Array) -> float:
    """Return |got - want| / |want| in float64 (|got| if want is zero).

    Equal infinities have no distance and are left out. NaN anywhere gives NaN.
    """
    got, want = got.astype(np.float64), want.astype(np.float64)
    alike = np.isinf(want) & (got == want)
    got, want = np.where(alike, 0.0, got), np.where(alike, 0.0, want)
    most = float(np.abs(want).max(initial=0.0))
    if most > 0 and math.isfinite(most):  # whose squares may overflow
        got, want = got / most, want / most
    scale = float(np.linalg.norm(want))
    difference = float(np.linalg.norm(got - want))
    return difference / scale if scale else difference


def stored_error(got: Array, want: Array, dtype: DType) -> float:
    """Compute the relative L2 error of a stored result.

    An element off by the least number of its dtype counts as right, because what is smaller becomes zero.
    """
    with np.errstate(invalid="ignore"):
        near = np.abs(got.astype(np.float64) - want) <= dtype.least
    return relative_l2(np.where(near, want, got), want)


def _passes(compiled: Compiled, feeds: Mapping[str, Array]) -> list[Check]:
    # constants are folded in their own type, and kept in the precision asked for
    stored = [compiled.options.storage, *(v.type.dtype for v in compiled.source.values())]
    depth = sum(len(step.nodes) for step in compiled.program.steps)
    allowed = 2 * max(d.epsilon for d in stored) * math.sqrt(depth + 1)
    want = evaluate(compiled.source, feeds, precision=DType.F64)
    got = evaluate(compiled.graph, feeds, precision=DType.F64)
    return [Check("passes", name, relative_l2(got[name], array), allowed) for name, array in want.items()]


def _by_nodes(graph: Graph, step: Partition, operands: Mapping[Value, Array]) -> dict[Value, Array]:
    """Return the results of the step's own nodes in float64."""
    results = evaluate(body_of(graph, step.nodes), {v.name: a for v, a in operands.items()}, precision=DType.F64)
    return {v: results[v.name] for v in step.outputs}


def _body(what: str, step: Partition, operands: Mapping[Value, Array], results: Mapping[Value, Array]) -> list[Check]:
    got = evaluate(step.body, {v.name: a for v, a in operands.items()}, precision=DType.F64)
    return [Check("body", what, relative_l2(got[v.name], results[v]), v.type.dtype.epsilon) for v in step.outputs]


def _lowered(
    what: str,
    step: Partition,
    lowered: Lowered,
    operands: Mapping[Value, Array],
    results: Mapping[Value, Array],
    run: Runner,
) -> list[Check]:
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
    run(lowered.graph, buffers)
    checks: list[Check] = []
    for uid, name in lowered.outputs:
        value = by_name[name]
        error = stored_error(unpack(buffers[uid], value.type), results[value], value.type.dtype)
        checks.append(Check("lowered", what, error, allowed_error(step.body, value.type.dtype, lowered.graph)))
    return checks


def _executed(
    what: str, step: Partition, lowered: Lowered | None, got: Mapping[Value, Array], results: Mapping[Value, Array]
) -> list[Check]:
    """Allow a kernel to round values between its ops, or not."""
    between = [v.type.dtype.epsilon for n in step.nodes for v in n.results if v.type.dtype in (DType.F16, DType.BF16)]
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
    """Return the error that rounding explains.

    That is storage once, fp32 sums by their length, each op once, and operands rounded before a product (tf32, or a
    prologue in half precision).
    """
    nodes = list(body.nodes)
    longest = max((_sum_length(node) for node in nodes), default=1)
    allowed = _arithmetic(nodes, stored)
    if longest > 1 and graph.tensor_cores and stored is DType.F32:
        allowed += 2.0**-9  # tf32 keeps 10 bits of both operands, and some engines cut the rest off: 8e-4 was measured
    rounded = [t.dtype.epsilon for t in graph.tensors if t.virtual and t.dtype in (DType.F16, DType.BF16)]
    return allowed + max(rounded, default=0.0)


def _arithmetic(nodes: Sequence[Node], stored: DType) -> float:
    """Storage once, sums in fp32 by their length, each op once."""
    longest = max((_sum_length(node) for node in nodes), default=1)
    return stored.epsilon + SAFETY * DType.F32.epsilon * (math.sqrt(longest) + len(nodes))


def _sum_length(node: Node) -> int:
    """Return how many terms one element of the result adds up."""
    if isinstance(node.op, (Conv, ConvTranspose)):
        return math.prod(node.operands[1].type.shape[1:]) * (
            node.operands[1].type.shape[0] if isinstance(node.op, ConvTranspose) else 1
        )
    if isinstance(node.op, ConvWgrad):
        return math.prod(node.operands[1].type.shape) // max(1, node.operands[1].type.shape[1])
    if isinstance(node.op, MatMul):
        return node.operands[0].type.shape[-1]
    if isinstance(node.op, AttentionBackward):
        return node.operands[1].type.shape[-1] + 2 * node.operands[2].type.shape[2]
    if isinstance(node.op, (Attention, AttentionTrain)):
        return node.operands[0].type.shape[-1] + node.operands[1].type.shape[2]
    if node.results[0].type.size < max((v.type.size for v in node.operands), default=0):
        return max(v.type.size for v in node.operands) // max(1, node.results[0].type.size)
    return 1


def _wide(array: Array) -> Array:
    return array.astype(np.float64) if DType.of(array.dtype).is_float else array


def _stored(array: Array, dtype: DType) -> Array:
    """Return the values after rounding to the type they are stored in, as float64."""
    return _wide(array.astype(dtype.numpy))


def _uses(compiled: Compiled) -> dict[Value, int]:
    last: dict[Value, int] = {}
    for index, step in enumerate(compiled.program.steps):
        for value in (*step.inputs, *step.outputs):
            last[value] = index
    return last

"""Propose candidate partitions: the largest convex set of nodes around an anchor, or among pointwise ops.

A candidate lists its nodes in the order they joined. Each prefix of that list is convex too, so a prefix can be
proposed when the whole is refused. The rules only propose, because cuDNN decides what is legal.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import field

from fusec.ir import BYTES, HALVES, DType, Node, Op, TensorType, Value
from fusec.lower_cudnn import WITHOUT
from fusec.ops import (
    ATTENTION_OPS,
    EPILOGUE_ANCHORS,
    FORWARD_CONVOLUTIONS,
    POINTWISE_OPS,
    STRIDED_VIEWS,
    BatchNormBackward,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    ChannelSums,
    Conv,
    Dilate,
    LayerNormBackward,
    MatMul,
    Reduce,
    Slice,
    Split,
)
from fusec.passes.partition.convexity import Condensation, Wiring
from fusec.passes.rewriting.value_facts import has_extremes
from fusec.schedule.aliasing import is_view
from fusec.schedule.program import inputs_of, outputs_of
from fusec.system.dataclass import dataclass

# Ops that take the pointwise ops after them; norms in training do so in their kernels (fusec.gpu.kernels).
EPILOGUE_OWNERS: tuple[type[Op], ...] = (
    *EPILOGUE_ANCHORS,
    BatchNormBySums,
    BatchNormBackward,
    LayerNormBackward,
)

# Build time grows faster than length (benchmarks/compile_time/plan_builds.py).
MAX_POINTWISE = 24
# Without an anchor, build time grows with the square of the tensors in memory: about 3 s for 32, 10 s for 60. Per op it
# is the same from 8 to 32 ops, so that fewer ops in a step would not save any (benchmarks/compile_time/plan_builds.py).
MAX_TENSORS = 32
# A prologue is one sequence of ops. Scale, bias, relu was measured. Two scales and biases in a row (a BatchNorm and
# the affine layer that some exporters add after it) are proposed too.
MAX_PROLOGUE = 5
# A convolution's prologue: cast, relu, swish and per-channel scale and bias build on sm_90; scaling by an
# (N,C,1,1) tensor is offered but does not build, and a prologue on the weight is refused.
CONV_PROLOGUE = frozenset({"cast", "relu", "swish", "mul", "add"})
# A matmul's: on both operands, scaled by anything that broadcasts.
MATMUL_PROLOGUE = frozenset({"cast", "relu", "swish", "mul", "relu_backward"})


@dataclass
class Candidate:
    """Node numbers in the order they joined.

    The first `core` nodes are the anchor and its epilogue, without the prologue. cuDNN accepts them more often than
    the whole. `blocked` are neighbours that would close a cycle.
    """

    nodes: list[int]
    core: int = 0
    blocked: list[int] = field(default_factory=list[int])


def _is_dilated(value: Value) -> bool:
    return value.node is not None and isinstance(value.node.op, Dilate)


class Grower:
    """Grows candidates from nodes that no step has taken yet."""

    def __init__(self, wiring: Wiring, condensation: Condensation, free: list[bool]):
        self.wiring = wiring
        self.condensation = condensation
        self.free = free
        nodes = wiring.nodes
        self.pointwise = [isinstance(n.op, POINTWISE_OPS) for n in nodes]
        # An op that cuDNN never runs would make every candidate that it joins one to refuse. A kernel reads the operand
        # of a dilate; cuDNN would read its zeros from memory.
        self.joinable = [
            self.pointwise[i] and n.op.name not in WITHOUT and not any(_is_dilated(v) for v in n.operands)
            for i, n in enumerate(nodes)
        ]
        self.type = [n.results[0].type for n in nodes]
        self.owned = self._owned()

    def _owned(self) -> list[bool]:
        """Tell for each node if it can be the epilogue of an anchor, or join a kernel of a norm in training.

        Such a node is never a prologue, because an epilogue costs nothing and keeps the precompiled engines.
        """
        nodes, owned = self.wiring.nodes, list[bool]()
        for i in range(len(nodes)):
            fed = (p for p in self.wiring.preds[i] if self.type[p].shape == self.type[i].shape)
            stored = self._widens_stored(i)  # the step before stores them, so that another may begin here
            owned.append(
                not stored
                and self.pointwise[i]
                and any(owned[p] or isinstance(nodes[p].op, EPILOGUE_OWNERS) for p in fed)
            )
        return owned

    def _widens_stored(self, i: int) -> bool:
        """Tell if a node casts what is stored anyway, so that its reader casts instead of a second tensor in memory.

        Such are 8-bit integers, which are rounded only where they are stored, and 16 bits whose range is computed, or
        the statistics of a norm.
        """
        node = self.wiring.nodes[i]
        if not isinstance(node.op, Cast):
            return False
        (x,) = node.operands
        normed = any(isinstance(user.op, (BatchNormTrain, ChannelSums)) for user in x.users)
        return x.type.dtype in BYTES or (x.type.dtype in HALVES and (normed or has_extremes(x)))

    def reset(self, condensation: Condensation, free: list[bool]) -> None:
        """Start again with no node merged."""
        self.condensation, self.free = condensation, free

    def around(self, anchor: int) -> Candidate:
        """Grow a candidate: anchor, epilogue, side branches, prologue. The nodes that save most come first."""
        candidate = Candidate([anchor], core=1)
        op = self.wiring.nodes[anchor].op
        if isinstance(op, Reduce):
            self._reduction_prologue(candidate, anchor)
            return candidate
        if isinstance(op, ATTENTION_OPS):
            self._strided_operands(candidate, anchor)
            return candidate
        if isinstance(op, BatchNormBackward):  # cuDNN takes no op around it
            return candidate
        self._epilogue(candidate, anchor)
        self._side_branches(candidate)
        if isinstance(op, Conv) and len(candidate.nodes) == 1:
            self._statistics(candidate, anchor)
        if isinstance(op, MatMul):
            self._sibling(candidate, anchor)
        candidate.core = len(candidate.nodes)
        if isinstance(op, (*FORWARD_CONVOLUTIONS, MatMul)):
            self._prologue(candidate, anchor)
        return candidate

    def cluster(self, seed: int) -> Candidate:
        """Grow a candidate of pointwise ops connected to `seed`, with its shape and memory order.

        cuDNN refuses a pointwise graph of mixed orders, because it would be a transposing copy.
        """
        candidate, kind = Candidate([seed]), self.type[seed]

        def neighbours(i: int) -> tuple[int, ...]:
            return *self.wiring.succs[i], *self.wiring.preds[i]

        def joins(i: int) -> bool:
            return self._joins(i, kind) and self.type[i].order == kind.order and not self._is_outer(i)

        if self.joinable[seed] and not self._is_outer(seed):
            self._grow(candidate, neighbours, joins, MAX_POINTWISE)
            del candidate.nodes[self._longest_with_few_tensors(candidate.nodes) :]
        return candidate

    def _longest_with_few_tensors(self, nodes: Sequence[int]) -> int:
        """Return how many of the nodes one step can hold with at most MAX_TENSORS tensors in memory."""
        length = len(nodes)
        while length > 1 and self._tensors(nodes[:length]) > MAX_TENSORS:
            length -= 1
        return length

    def _tensors(self, nodes: Sequence[int]) -> int:
        """Count the tensors that a step of these nodes reads or stores, without single numbers."""
        members = [self.wiring.nodes[i] for i in nodes]
        read = [v for v in inputs_of(members) if v.literal is None or v.type.size > 1]
        return len(read) + len(outputs_of(members))

    def _grow(
        self,
        candidate: Candidate,
        adjacent: Callable[[int], Sequence[int]],
        joins: Callable[[int], bool],
        size: int = MAX_POINTWISE + 1,
        direction: int = 1,
    ) -> None:
        """Add nodes that are reached from the candidate's first, in graph order, up to that size.

        direction: -1 to add the last node in graph order first.
        """
        (start,) = candidate.nodes
        inside = {start}
        heap = [direction * i for i in adjacent(start)]
        heapq.heapify(heap)
        seen = {direction * start, *heap}
        while heap and len(inside) < size:
            i = direction * heapq.heappop(heap)
            if not joins(i) or not self._take(candidate, inside, i):
                continue
            for j in adjacent(i):
                if direction * j not in seen:
                    seen.add(direction * j)
                    heapq.heappush(heap, direction * j)

    def _is_outer(self, i: int) -> bool:
        """Tell if a node broadcasts each of its tensors. cuDNN refuses every pointwise graph with such a call."""
        sizes = {v.type.size for v in self.wiring.nodes[i].operands}
        return len(sizes - {1}) > 0 and max(sizes) < self.type[i].size

    def _joins(self, i: int, kind: TensorType) -> bool:
        return self.free[i] and self.joinable[i] and self.type[i].shape == kind.shape

    def _take(self, candidate: Candidate, inside: set[int], i: int) -> bool:
        if not self.condensation.stays_convex(inside, i):
            candidate.blocked.append(i)
            return False
        inside.add(i)
        candidate.nodes.append(i)
        return True

    def _epilogue(self, candidate: Candidate, anchor: int) -> None:
        """Add pointwise users over the anchor's shape, in graph order.

        Graph order makes sure that operands computed inside the candidate join before their users.
        """
        kind = self.type[anchor]

        def joins(i: int) -> bool:
            return (
                self._joins(i, kind) and not self._widens_stored(i) and not self._is_recomputation(i, candidate.nodes)
            )

        self._grow(candidate, self.wiring.succs.__getitem__, joins)

    def _statistics(self, candidate: Candidate, anchor: int) -> None:
        """Add the sums of channels of a convolution's unchanged result."""
        for i in self.wiring.succs[anchor]:
            if self.free[i] and isinstance(self.wiring.nodes[i].op, ChannelSums):
                self._take(candidate, {anchor}, i)
                return

    def _is_recomputation(self, i: int, inside: Collection[int]) -> bool:
        """Tell if a member already computes the same from the same values.

        The rematerialise pass made such a node on purpose, for readers far away.
        """
        node = self.wiring.nodes[i]
        twins = (self.wiring.nodes[t] for p in self.wiring.preds[i] for t in self.wiring.succs[p] if t in inside)
        return any(twin.op == node.op and twin.operands == node.operands for twin in twins)

    def _side_branches(self, candidate: Candidate) -> None:
        """Add pointwise ops whose results only the epilogue reads."""
        inside, kind = set(candidate.nodes), self.type[candidate.nodes[0]]
        for i in candidate.nodes[1:]:
            stack = [i]
            while stack and len(inside) <= MAX_POINTWISE:
                for p in self.wiring.preds[stack.pop()]:
                    joins = self._joins(p, kind) or self._is_scaled_row(p, kind)
                    if p in inside or self.owned[p] or not joins or not self._feeds_only(p, inside):
                        continue
                    if self._take(candidate, inside, p):
                        stack.append(p)

    def _is_scaled_row(self, i: int, kind: TensorType) -> bool:
        """Tell if a node multiplies a constant of one number per column by one number, as terms of zero points do."""
        size, columns = self.type[i].size, kind.shape[-1]
        return (
            self.free[i]
            and self.wiring.nodes[i].op.name == "mul"
            and 1 < size == columns == self.type[i].shape[-1]
            and all(v.type.size == 1 or v.literal is not None for v in self.wiring.nodes[i].operands)
        )

    def _sibling(self, candidate: Candidate, anchor: int) -> None:
        """Add another matmul of the same rows that only the epilogue reads, such as the gate of a SwiGLU.

        cuDNN accepts two products that share their first operand as one graph (runtime-compiled).
        """
        inside, kind = set(candidate.nodes), self.type[anchor]
        rows = self.wiring.nodes[anchor].operands[0]
        for i in candidate.nodes[1:]:
            for p in self.wiring.preds[i]:
                sequence = [] if p in inside else self._up_to_product(p, rows, kind, inside)
                fits = sequence and len(inside) + len(sequence) <= MAX_POINTWISE
                if fits and all(self._take(candidate, inside, c) for c in sequence):
                    return

    def _up_to_product(self, i: int, rows: Value, kind: TensorType, inside: set[int]) -> list[int]:
        """List free nodes from `i` up to a matmul of the same rows, if only the next node reads each of them."""
        sequence: list[int] = []
        while self.free[i] and self.type[i].shape == kind.shape and self._feeds_only(i, {*inside, *sequence}):
            sequence.append(i)
            node = self.wiring.nodes[i]
            if isinstance(node.op, MatMul):
                return sequence if node.operands[0] is rows else []
            above = [p for p in self.wiring.preds[i] if p not in inside]
            if not self.joinable[i] or len(above) != 1:
                return []
            (i,) = above
        return []

    def _prologue(self, candidate: Candidate, anchor: int) -> None:
        """Add one sequence of ops before the image of a convolution, or before each operand of a matmul."""
        node = self.wiring.nodes[anchor]
        is_conv = isinstance(node.op, FORWARD_CONVOLUTIONS)
        inside = set(candidate.nodes)
        for operand in node.operands[:1] if is_conv else node.operands:
            kind, value = operand.type, operand
            for _ in range(MAX_PROLOGUE):
                i = self.wiring.producer(value)
                if i is None or i in inside or self.owned[i] or not self._joins(i, kind):
                    break
                if not self._feeds_only(i, inside) or not _is_prologue(self.wiring.nodes[i], is_conv):
                    break
                if not self._take(candidate, inside, i):
                    break
                sources = [v for v in self.wiring.nodes[i].operands if v.type.shape == kind.shape and v.literal is None]
                if len(sources) != 1:
                    break
                value = sources[0]

    def _strided_operands(self, candidate: Candidate, anchor: int) -> None:
        """Add slices, and the views between them and an attention's operands.

        Attention reads heads of one projection of queries, keys and values by strides. A packed tensor needs no such
        view.
        """
        views: set[int] = set()
        for value in self.wiring.nodes[anchor].operands:
            sequence: list[int] = []
            last = 0
            while (i := self.wiring.producer(value)) is not None and isinstance(self.wiring.nodes[i].op, STRIDED_VIEWS):
                sequence.append(i)
                if isinstance(self.wiring.nodes[i].op, (Slice, Split)) and not is_view(self.wiring.nodes[i]):
                    last = len(sequence)
                (value,) = self.wiring.nodes[i].operands
            views.update(sequence[:last])
        inside = {anchor}
        for i in sorted(views, reverse=True):  # users first
            if self.free[i] and self._feeds_only(i, inside):
                self._take(candidate, inside, i)

    def _reduction_prologue(self, candidate: Candidate, anchor: int) -> None:
        """Add pointwise ops before a reduction; their results may be outputs as well.

        Nothing follows a reduction, because its result must not feed another op of the same graph.
        """
        kind = self.wiring.nodes[anchor].operands[0].type

        def joins(i: int) -> bool:
            return not self.owned[i] and self._joins(i, kind)

        self._grow(candidate, self.wiring.preds.__getitem__, joins, direction=-1)

    def _feeds_only(self, i: int, inside: set[int]) -> bool:
        return not self.wiring.returned[i] and all(s in inside for s in self.wiring.succs[i])


def _is_prologue(node: Node, is_conv: bool) -> bool:
    if node.op.name not in (CONV_PROLOGUE if is_conv else MATMUL_PROLOGUE) or node.result.type.dtype is DType.I8:
        return False
    return not is_conv or sum(v.literal is None for v in node.operands) == 1

"""What is put forward to cuDNN: around an anchor (or among pointwise ops alone) the largest convex set.

A candidate lists nodes in the order they joined, so each of its beginnings is convex too and may be
asked for when the whole is refused. These rules only propose; measured facts behind them are cited.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from fusec.ir import Node, Op, TensorType, Value
from fusec.ops import (
    Attention,
    AttentionBackward,
    AttentionTrain,
    BatchNormBackward,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    ChannelSums,
    Conv,
    ConvTranspose,
    ConvWgrad,
    InstanceNorm,
    LayerNorm,
    LayerNormBackward,
    MatMul,
    Pointwise,
    Reduce,
    Relayout,
    Reshape,
    RmsNorm,
    Slice,
    Split,
    Transpose,
)
from fusec.passes.partition.convexity import Condensation, Wiring
from fusec.schedule.aliasing import is_view

EPILOGUES: tuple[type[Op], ...] = (Conv, ConvTranspose, ConvWgrad, MatMul, LayerNorm, RmsNorm, InstanceNorm)
ATTENTIONS: tuple[type[Op], ...] = (Attention, AttentionTrain, AttentionBackward)
ANCHORS: tuple[type[Op], ...] = (*EPILOGUES, *ATTENTIONS, Reduce)
STRIDED: tuple[type[Op], ...] = (Reshape, Transpose, Relayout, Slice, Split)
POINTWISE: tuple[type[Op], ...] = (Pointwise, Cast)
# What takes the pointwise ops behind it: these in their kernels (fusec.gpu.kernels).
OWNERS: tuple[type[Op], ...] = (*EPILOGUES, BatchNormTrain, BatchNormBySums, BatchNormBackward, LayerNormBackward)

# Build time grows faster than length (benchmarks/builds.py).
MAX_POINTWISE = 24
# A prologue is one chain. Scale, bias, relu was measured; two scales and biases in a row (a BatchNorm and
# the affine layer some exporters put behind it) are put to cuDNN too.
MAX_PROLOGUE = 5
# A convolution's prologue: cast, relu, swish and per-channel scale and bias build on sm_90; scaling by an
# (N,C,1,1) tensor is offered but does not build, and a prologue on the weight is refused.
CONV_PROLOGUE = frozenset({"cast", "relu", "swish", "mul", "add"})
# A matmul's: on both operands, scaled by anything that broadcasts.
MATMUL_PROLOGUE = frozenset({"cast", "relu", "swish", "mul", "relu_backward"})


@dataclass
class Candidate:
    """Nodes by number in the order they joined; `blocked` are neighbours that would close a cycle.

    The first `core` nodes are a candidate likelier to be accepted than the whole: the anchor with what
    follows it, without what comes before it.
    """

    nodes: list[int]
    core: int = 0
    blocked: list[int] = field(default_factory=list[int])


class Grower:
    """Grows candidates among the nodes that are still free."""

    def __init__(self, wiring: Wiring, condensation: Condensation, free: list[bool]):
        self.wiring = wiring
        self.condensation = condensation
        self.free = free
        nodes = wiring.nodes
        self.pointwise = [isinstance(n.op, POINTWISE) for n in nodes]
        self.type = [n.results[0].type for n in nodes]
        self.owned = self._owned()

    def _owned(self) -> list[bool]:
        """Whether a pointwise node can be an epilogue of some anchor, or join the kernel of a norm in
        training: it then is no other's prologue, since an epilogue costs nothing and keeps the precompiled engines."""
        nodes, owned = self.wiring.nodes, list[bool]()
        for i in range(len(nodes)):
            fed = (p for p in self.wiring.preds[i] if self.type[p].shape == self.type[i].shape)
            owned.append(self.pointwise[i] and any(owned[p] or isinstance(nodes[p].op, OWNERS) for p in fed))
        return owned

    def reset(self, condensation: Condensation, free: list[bool]) -> None:
        """Start over with nothing merged."""
        self.condensation, self.free = condensation, free

    def around(self, anchor: int) -> Candidate:
        """Anchor, epilogue, side chains joining it, prologue: the nodes worth most come first."""
        candidate = Candidate([anchor], core=1)
        op = self.wiring.nodes[anchor].op
        if isinstance(op, Reduce):
            self._feed(candidate, anchor)
            return candidate
        if isinstance(op, ATTENTIONS):
            self._parts(candidate, anchor)
            return candidate
        self._epilogue(candidate, anchor)
        self._sides(candidate)
        if isinstance(op, Conv) and len(candidate.nodes) == 1:
            self._statistics(candidate, anchor)
        if isinstance(op, MatMul):
            self._sibling(candidate, anchor)
        candidate.core = len(candidate.nodes)
        if isinstance(op, (Conv, MatMul)):
            self._prologue(candidate, anchor)
        return candidate

    def cluster(self, seed: int) -> Candidate:
        """Pointwise ops connected to `seed` that share its iteration space and memory order (a pointwise
        graph of mixed orders is refused: it would be a transposing copy)."""
        candidate = Candidate([seed])
        inside = {seed}
        kind = self.type[seed]
        heap = [*self.wiring.succs[seed], *self.wiring.preds[seed]]
        heapq.heapify(heap)
        seen = {seed, *heap}
        while heap and len(inside) < MAX_POINTWISE:
            i = heapq.heappop(heap)
            if not (self._joins(i, kind) and self.type[i].order == kind.order):
                continue
            if not self._take(candidate, inside, i):
                continue
            for j in (*self.wiring.succs[i], *self.wiring.preds[i]):
                if j not in seen:
                    seen.add(j)
                    heapq.heappush(heap, j)
        return candidate

    def _joins(self, i: int, kind: TensorType) -> bool:
        return self.free[i] and self.pointwise[i] and self.type[i].shape == kind.shape

    def _take(self, candidate: Candidate, inside: set[int], i: int) -> bool:
        if not self.condensation.stays_convex(inside, i):
            candidate.blocked.append(i)
            return False
        inside.add(i)
        candidate.nodes.append(i)
        return True

    def _epilogue(self, candidate: Candidate, anchor: int) -> None:
        """Pointwise consumers over the anchor's result space, in graph order, so operands that are made
        inside are there before their users."""
        inside, kind = {anchor}, self.type[anchor]
        heap = list(self.wiring.succs[anchor])
        heapq.heapify(heap)
        seen = set(heap)
        while heap and len(inside) <= MAX_POINTWISE:
            i = heapq.heappop(heap)
            if not self._joins(i, kind) or self._is_again(i, inside) or not self._take(candidate, inside, i):
                continue
            for j in self.wiring.succs[i]:
                if j not in seen:
                    seen.add(j)
                    heapq.heappush(heap, j)

    def _statistics(self, candidate: Candidate, anchor: int) -> None:
        """Sums of the channels of a convolution's result as it is."""
        for i in self.wiring.succs[anchor]:
            if self.free[i] and isinstance(self.wiring.nodes[i].op, ChannelSums):
                self._take(candidate, {anchor}, i)
                return

    def _is_again(self, i: int, inside: set[int]) -> bool:
        """Whether what is inside does the same to the same values: then it is done again on purpose, far behind."""
        node = self.wiring.nodes[i]
        twins = (self.wiring.nodes[t] for p in self.wiring.preds[i] for t in self.wiring.succs[p] if t in inside)
        return any(twin.op == node.op and twin.operands == node.operands for twin in twins)

    def _sides(self, candidate: Candidate) -> None:
        """Pointwise chains that feed the epilogue and nothing else."""
        inside, kind = set(candidate.nodes), self.type[candidate.nodes[0]]
        for i in candidate.nodes[1:]:
            stack = [i]
            while stack and len(inside) <= MAX_POINTWISE:
                for p in self.wiring.preds[stack.pop()]:
                    if p in inside or self.owned[p] or not self._feeds_only(p, inside) or not self._joins(p, kind):
                        continue
                    if self._take(candidate, inside, p):
                        stack.append(p)

    def _sibling(self, candidate: Candidate, anchor: int) -> None:
        """Another product of the same rows that the epilogue alone reads, directly or through pointwise ops: the
        gate of a SwiGLU. Two products that share their first operand are one graph (runtime-compiled)."""
        inside, kind = set(candidate.nodes), self.type[anchor]
        rows = self.wiring.nodes[anchor].operands[0]
        for i in candidate.nodes[1:]:
            for p in self.wiring.preds[i]:
                chain = [] if p in inside else self._up_to_product(p, rows, kind, inside)
                fits = chain and len(inside) + len(chain) <= MAX_POINTWISE
                if fits and all(self._take(candidate, inside, c) for c in chain):
                    return

    def _up_to_product(self, i: int, rows: Value, kind: TensorType, inside: set[int]) -> list[int]:
        """The free nodes from `i` up to a product of the same rows, if each feeds the one below it alone."""
        chain: list[int] = []
        while self.free[i] and self.type[i].shape == kind.shape and self._feeds_only(i, {*inside, *chain}):
            chain.append(i)
            node = self.wiring.nodes[i]
            if isinstance(node.op, MatMul):
                return chain if node.operands[0] is rows else []
            above = [p for p in self.wiring.preds[i] if p not in inside]
            if not self.pointwise[i] or len(above) != 1:
                return []
            (i,) = above
        return []

    def _prologue(self, candidate: Candidate, anchor: int) -> None:
        """One chain above the image of a convolution, or above each operand of a matmul."""
        node = self.wiring.nodes[anchor]
        is_conv = isinstance(node.op, Conv)
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
                chained = [v for v in self.wiring.nodes[i].operands if v.type.shape == kind.shape and v.literal is None]
                if len(chained) != 1:
                    break
                value = chained[0]

    def _parts(self, candidate: Candidate, anchor: int) -> None:
        """Parts of tensors that are no packed tensors themselves, and the views between them and an attention's
        operands: heads of a projection of queries, keys and values together are read by strides."""
        chains: set[int] = set()
        for value in self.wiring.nodes[anchor].operands:
            chain: list[int] = []
            last = 0
            while (i := self.wiring.producer(value)) is not None and isinstance(self.wiring.nodes[i].op, STRIDED):
                chain.append(i)
                if isinstance(self.wiring.nodes[i].op, (Slice, Split)) and not is_view(self.wiring.nodes[i]):
                    last = len(chain)
                (value,) = self.wiring.nodes[i].operands
            chains.update(chain[:last])
        inside = {anchor}
        for i in sorted(chains, reverse=True):  # users first
            if self.free[i] and self._feeds_only(i, inside):
                self._take(candidate, inside, i)

    def _feed(self, candidate: Candidate, anchor: int) -> None:
        """Pointwise ops before a reduction; their results may be outputs as well, but the reduced one may
        not feed another op of the same graph, so nothing follows it."""
        kind = self.wiring.nodes[anchor].operands[0].type
        inside = {anchor}
        heap = [-p for p in self.wiring.preds[anchor]]
        heapq.heapify(heap)
        seen = set(heap)
        while heap and len(inside) <= MAX_POINTWISE:
            i = -heapq.heappop(heap)
            if self.owned[i] or not self._joins(i, kind) or not self._take(candidate, inside, i):
                continue
            for p in self.wiring.preds[i]:
                if -p not in seen:
                    seen.add(-p)
                    heapq.heappush(heap, -p)

    def _feeds_only(self, i: int, inside: set[int]) -> bool:
        return not self.wiring.returned[i] and all(s in inside for s in self.wiring.succs[i])


def _is_prologue(node: Node, is_conv: bool) -> bool:
    if node.op.name not in (CONV_PROLOGUE if is_conv else MATMUL_PROLOGUE):
        return False
    return not is_conv or sum(v.literal is None for v in node.operands) == 1

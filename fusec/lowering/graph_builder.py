"""Build a cuDNN graph: choose the dims in which each node computes, and add a tensor for each value.

The anchor decides the dims. The pointwise ops of its epilogue have the dims of its result, those of a prologue the dims
of its operand. Views become strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

import numpy as np

from fusec.errors import LoweringError
from fusec.ir import Array, Constant, DType, Graph, Literal, Node, TensorType, Value, quote
from fusec.lowering.attention_heads import attention_folding
from fusec.lowering.cudnn_graph import Attribute, CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.dim_folding import (
    DimFolding,
    Strided,
    backward,
    matrix_folding,
    pointwise_folding,
    regular_strides,
    spatial_folding,
    trace,
)
from fusec.lowering.known_bugs import two_of_three
from fusec.lowering.packing import pack
from fusec.ops import (
    ANCHORS,
    ATTENTION_OPS,
    CONVOLUTIONS,
    IMAGE_CONVOLUTIONS,
    PRODUCTS,
    STRIDED_VIEWS,
    BatchNormBackward,
    BatchNormTrain,
    InstanceNorm,
    LayerNorm,
    MatMul,
    Reduce,
    RmsNorm,
)
from fusec.system.dataclass import dataclass

STORED = frozenset({DType.F32, DType.F16, DType.BF16, DType.I8, DType.F8E4M3, DType.I32, DType.BOOL})


@dataclass(frozen=True)
class ConstantBinding:
    """A tensor of the graph that holds a literal, stored in the memory order of `type`."""

    uid: int
    literal: Literal
    type: TensorType


@dataclass(frozen=True)
class Lowered:
    """A cuDNN graph, and which values of the body its tensors hold.

    inputs, outputs: (uid, name of the value); a value that is read in two shapes, or in slices, has several uids.
    constants: tensors that hold literals.
    offsets: (uid, element of the value at which the tensor begins), for slices.
    spare: outputs of the graph that hold no value of the body, because cuDNN computes more than the body does.
    """

    graph: CudnnGraph
    inputs: tuple[tuple[int, str], ...]
    outputs: tuple[tuple[int, str], ...]
    constants: tuple[ConstantBinding, ...]
    offsets: tuple[tuple[int, int], ...] = ()
    spare: tuple[int, ...] = ()

    def part(self, uid: int, buffer: Array) -> Array:
        """Return the flat memory of a tensor of the graph, from the buffer of its value."""
        start = dict(self.offsets).get(uid, 0)
        return buffer[start:] if start else buffer  # a view costs time on a GPU

    def spare_buffers(self, xp: Any) -> dict[int, Array]:
        """Allocate flat memory for the spare outputs, by uid. xp: the array module."""
        tensors = [self.graph.tensor(uid) for uid in self.spare]
        return {t.uid: xp.empty(math.prod(t.dims), t.dtype.numpy) for t in tensors}


@dataclass
class CudnnBuilder:
    """A cuDNN graph under construction, to which the functions of `lower_cudnn.LOWER` add calls.

    fold_batch: merge the batch dims of a matmul with its rows.
    pointwise_only: the body has no anchor.
    for_cudnn: False if another library reads the graph, so that known bugs of cuDNN do not matter.
    scaled: the body has a product of 8-bit numbers, whose sums are scaled.
    uids: tensors of computed values; bound: tensors of inputs and constants, by root, dims, strides and offset.
    stored: for computed values that outputs hold, the name of the output and the strides.
    feeds_anchor: values that a prologue computes.
    offsets: elements from the memory of a value to a tensor that is a slice of it.
    scalars: tensors of numbers, by value, sign and rank.
    images: stored tensors that a convolution reads.
    aliases: second tensors over the memory of another, for graphs that may not read one tensor twice.
    conversions: for the clip and the cast at the end of a conversion to 8-bit integers, the nodes from its round on.
    """

    body: Graph
    tensor_cores: bool
    fold_batch: bool = False
    pointwise_only: bool = False
    for_cudnn: bool = True
    scaled: bool = False
    tensors: list[CudnnTensor] = field(default_factory=list[CudnnTensor])
    calls: list[CudnnCall] = field(default_factory=list[CudnnCall])
    uids: dict[Value, int] = field(default_factory=dict[Value, int])
    foldings: dict[Node, DimFolding] = field(default_factory=dict[Node, DimFolding])
    stored: dict[Value, tuple[str, tuple[int, ...]]] = field(default_factory=dict[Value, tuple[str, tuple[int, ...]]])
    feeds_anchor: set[Value] = field(default_factory=set[Value])
    bound: dict[tuple[Value, tuple[int, ...], tuple[int, ...], int], int] = field(
        default_factory=dict[tuple[Value, tuple[int, ...], tuple[int, ...], int], int]
    )
    offsets: dict[int, int] = field(default_factory=dict[int, int])
    scalars: dict[tuple[float, float, int], int] = field(default_factory=dict[tuple[float, float, int], int])
    images: set[int] = field(default_factory=set[int])
    aliases: dict[int, int] = field(default_factory=dict[int, int])
    inputs: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    outputs: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    constants: list[ConstantBinding] = field(default_factory=list[ConstantBinding])
    spare: list[int] = field(default_factory=list[int])
    conversions: dict[Node, list[Node]] = field(default_factory=dict[Node, list[Node]])

    # stored values and dims --------------------------------------------------------------------------------

    def find_stored(self) -> None:
        """Find the computed values that are stored, and their strides, through the views before each output."""
        for name, value in zip(self.body.output_names, self.body.outputs, strict=True):
            strides = value.type.strides
            at = value
            while at.node is not None and isinstance(at.node.op, STRIDED_VIEWS):
                strides = backward(at.node, strides)
                at = at.node.operands[0]
            if at.node is None or isinstance(at.node.op, Constant):
                raise LoweringError(f"{quote(name)} is a view of an input, nothing is computed")
            if at in self.stored:
                raise LoweringError(f"{quote(name)} and {quote(self.stored[at][0])} are two views of one result")
            self.stored[at] = (name, strides)

    def assign_foldings(self, anchors: list[Node], compute: list[Node]) -> None:
        """Choose the dims in which each node computes."""
        for anchor in reversed(anchors):
            main, operands = self.anchor_foldings(anchor)
            self.foldings[anchor] = main
            for value, folding in operands:
                self._assign_prologue(value, folding)
        rest = [n for n in compute if n not in self.foldings]
        if not rest:
            return
        if anchors:
            main = self.foldings[anchors[-1]]
        else:
            main = self._pointwise_folding(compute)
        for node in rest:
            self.foldings[node] = main

    def _assign_prologue(self, value: Value, folding: DimFolding) -> None:
        """Let the pointwise ops that compute an operand of an anchor compute in the dims of the operand."""
        node = value.node
        if node is None or isinstance(node.op, (Constant, *STRIDED_VIEWS, *ANCHORS)):
            return
        self.feeds_anchor.add(value)
        self.foldings[node] = folding
        for operand in node.operands:
            self._assign_prologue(operand, folding)

    def anchor_foldings(self, anchor: Node) -> tuple[DimFolding, list[tuple[Value, DimFolding]]]:
        """Return the folding of an anchor's result, and those of operands that have others."""
        shape = anchor.results[0].type.shape
        if isinstance(anchor.op, CONVOLUTIONS):
            return spatial_folding(shape), [(v, spatial_folding(v.type.shape)) for v in anchor.operands]
        if isinstance(anchor.op, MatMul):
            a, b = anchor.operands
            batch = shape[:-2]
            fold = self.fold_batch and math.prod(b.type.shape[:-2]) == 1
            foldings = [
                (a, matrix_folding((*batch, *a.type.shape[-2:]), fold)),
                (b, matrix_folding((*((1,) * len(batch) if fold else batch), *b.type.shape[-2:]), False)),
            ]
            return matrix_folding(shape, fold), foldings
        if isinstance(anchor.op, ATTENTION_OPS):
            return attention_folding(shape), []
        if isinstance(anchor.op, (InstanceNorm, BatchNormTrain, BatchNormBackward)):
            return spatial_folding(shape), []
        if isinstance(anchor.op, (LayerNorm, RmsNorm)):
            return _rows_folding(shape, anchor.op.axis % len(shape)), []
        assert isinstance(anchor.op, Reduce)
        return self._reduction_folding(anchor, anchor.op), []

    def _reduction_folding(self, anchor: Node, op: Reduce) -> DimFolding:
        """Return [rows, columns, 1, 1] in channels-last memory, where rows or columns are reduced."""
        x = anchor.operands[0].type
        order = [a for a in (x.order or range(x.rank)) if x.shape[a] != 1]
        reduced = [a in op.axes for a in order]
        if not any(reduced):
            raise LoweringError("reduce: only dims of size 1 are reduced")
        split = reduced.index(not reduced[0]) if not all(reduced) else 0
        if any(r != (not reduced[0]) for r in reduced[split:]) and not all(reduced):
            raise LoweringError("reduce: the reduced dims are neither the outermost nor the innermost in memory")
        return DimFolding(x.shape, (tuple(order[:split]), tuple(order[split:]), (), ()), (0, 2, 3, 1))

    def _pointwise_folding(self, compute: list[Node]) -> DimFolding:
        """Fold the dims of a step of pointwise ops so that each tensor that it stores or reads keeps its strides."""
        values = dict.fromkeys(v for n in compute for v in (*n.results, *n.operands))
        shape = np.broadcast_shapes(*(v.type.shape for v in values))
        tensors: list[Strided] = []
        order: tuple[int, ...] | None = None
        for value in values:
            if value.scalar() is not None:
                continue
            if value in self.stored:
                strided = Strided(value, value.type.shape, self.stored[value][1])
            elif value.node is None or isinstance(value.node.op, (Constant, *STRIDED_VIEWS)):
                strided = trace(value)
            else:
                continue
            tensors.append(strided)
            if order is None and strided.shape == shape:
                order = tuple(sorted(range(len(shape)), key=lambda d: (-strided.strides[d], d)))
        order = order or tuple(range(len(shape)))
        made = {v for n in compute for v in n.results}
        for value in values:  # a virtual value has no strides, but dims along which it broadcasts
            if value in made and value not in self.stored:
                lead = len(shape) - value.type.rank
                own = tuple(a - lead for a in order if a >= lead)
                tensors.append(Strided(value, value.type.shape, value.type.with_order(own).strides))
        return pointwise_folding(shape, order, tensors)

    # tensors ---------------------------------------------------------------------------------------------

    def tensor(
        self,
        placed: tuple[tuple[int, ...], tuple[int, ...]],
        dtype: DType,
        virtual: bool = False,
        value: float | None = None,
    ) -> int:
        uid = len(self.tensors) + 1
        dims, strides = placed
        self.tensors.append(CudnnTensor(uid, dims, regular_strides(dims, strides), dtype, virtual, value))
        return uid

    def scalar(self, value: float, rank: int, fixed: bool = False) -> int:
        """Return the uid of a number: passed by value, or in memory after products of 8-bit numbers.

        The scales of a quantised model are numbers that differ from layer to layer. In memory they are no part of the
        graph, so that layers of one shape share its verdict and plans.

        fixed: the number is the same in all layers, so it is passed by value.
        """
        key = (value, math.copysign(1.0, value), rank)  # 0.0 and -0.0 are one number but two scalars
        if key in self.scalars:
            return self.scalars[key]
        ones = (1,) * rank
        if self.scaled and not fixed:
            literal = Literal.of(np.full(ones, value, np.float32))
            uid = self.tensor((ones, ones), DType.F32)
            self.constants.append(ConstantBinding(uid, literal, literal.type))
        else:
            uid = self.tensor((ones, ones), DType.F32, value=value)
        self.scalars[key] = uid
        return uid

    def operand(self, value: Value, folding: DimFolding) -> int:
        """Return the uid of a value as an operand of a node that computes in the dims of `folding`."""
        if value in self.uids:
            return self.uids[value]
        number = value.scalar()
        if number is not None and not self._in_memory(value, folding):
            return self.scalar(number, len(folding.groups))
        view = trace(value)
        root = view.root
        if root.node is not None and not isinstance(root.node.op, Constant):
            raise LoweringError(f"{quote(value.name)}: a view between two computations")
        what = quote(value.name)
        narrow = root.type.dtype is DType.F8E4M3 and self.pointwise_only  # a kernel of fusec reads it
        if root.type.dtype not in STORED or narrow:
            raise LoweringError(f"{what} is {root.type.dtype.value}, which cuDNN graphs do not take here")
        placed = folding.place(what, view.shape, view.strides)
        key = (root, *placed, view.offset)
        if key not in self.bound:
            literal = root.literal
            if literal is not None and view.offset:
                raise LoweringError(f"{what}: a slice of a constant, which the fold_constants pass should have folded")
            if literal is not None and self.pointwise_only and two_of_three(placed[0], folding.dims):
                return self.bound.setdefault(key, self._expanded(root, placed, folding))
            uid = self.bound[key] = self.tensor(placed, root.type.dtype)
            if view.offset:
                self.offsets[uid] = view.offset
            if literal is None:
                self.inputs.append((uid, root.name))
            else:
                self.constants.append(ConstantBinding(uid, literal, root.type))
        return self.bound[key]

    def _in_memory(self, value: Value, folding: DimFolding) -> bool:
        """Tell if a constant of one element must be a tensor instead of a number passed by value.

        That is so for an operand of a product, and after a convolution with one filter, where precompiled engines take
        the constant for a bias. Engines read both from device memory, and the host address of a number was an illegal
        access.
        """
        anchored = [n for n in self.foldings if isinstance(n.op, (*ATTENTION_OPS, *PRODUCTS))]
        if any(value in n.operands for n in anchored):
            return True
        return folding.dims[1] == 1 and any(isinstance(n.op, IMAGE_CONVOLUTIONS) for n in anchored)

    def _expanded(self, root: Value, placed: tuple[tuple[int, ...], tuple[int, ...]], folding: DimFolding) -> int:
        """Add a constant that broadcasts along two of three dims, repeated along the smaller of the two.

        cuDNN computes wrong results for two such dims, and right ones for one (docs/hazards.md).
        """
        literal = root.literal
        assert literal is not None
        dims, strides = list(placed[0]), placed[1]
        axis = min((a for a, d in enumerate(dims) if d == 1), key=lambda a: folding.dims[a])
        shape = tuple(folding.dims[a] if a == axis else d for a, d in enumerate(dims))

        def load() -> np.ndarray[Any, Any]:
            stored = pack(np, literal.array, root.type)
            steps = [s * stored.itemsize for s in strides]
            return np.broadcast_to(np.lib.stride_tricks.as_strided(stored, dims, steps), shape)

        type = TensorType(shape, root.type.dtype)
        uid = self.tensor((shape, type.strides), type.dtype)
        key = ("expanded", type, root.type, tuple(dims), tuple(strides), literal.key)
        self.constants.append(ConstantBinding(uid, Literal(type, load, literal.label, key), type))
        return uid

    def shared_alias(self, uid: int) -> int:
        """Return an alias of a tensor; further calls return the same one."""
        if uid not in self.aliases:
            self.aliases[uid] = self.alias(uid)
        return self.aliases[uid]

    def alias(self, uid: int) -> int:
        """Add another tensor with the memory of an input or constant of the graph."""
        tensor = self.tensors[uid - 1]
        other = self.tensor((tensor.dims, tensor.strides), tensor.dtype)
        self.inputs += [(other, name) for known, name in self.inputs if known == uid]
        self.constants += [replace(known, uid=other) for known in self.constants if known.uid == uid]
        if uid in self.offsets:
            self.offsets[other] = self.offsets[uid]
        return other

    def result(self, value: Value, folding: DimFolding) -> int:
        """Add a tensor for a computed value: stored if the body returns it, else virtual."""
        if value in self.stored:
            name, strides = self.stored[value]
            if value.type.dtype not in STORED:
                raise LoweringError(f"{quote(value.name)} is {value.type.dtype.value}; cuDNN graphs do not store that")
            uid = self.tensor(folding.place(quote(value.name), value.type.shape, strides), value.type.dtype)
            self.outputs.append((uid, name))
        else:
            # registers hold fp32 or, of integer products, i32; engines take the result of a prologue only in the type
            # of the operand
            own = value.type.dtype in (DType.BOOL, DType.I32) or value in self.feeds_anchor
            dtype = value.type.dtype if own else DType.F32
            uid = self.tensor(folding.packed(value.type.shape), dtype, virtual=True)
        self.uids[value] = uid
        return uid

    def store(self, value: Value, uid: int, folding: DimFolding) -> None:
        """Let the call that computes a virtual tensor store it as `value`, an output of another type."""
        name, strides = self.stored[value]
        dims, steps = folding.place(quote(value.name), value.type.shape, strides)
        self.tensors[uid - 1] = CudnnTensor(uid, dims, regular_strides(dims, steps), value.type.dtype)
        self.outputs.append((uid, name))
        self.uids[value] = uid

    def call(
        self,
        op: str,
        inputs: tuple[int, ...],
        output: int | tuple[int, ...],
        mode: str = "",
        compute: DType = DType.F32,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        self.calls.append(CudnnCall(op, inputs, outputs, mode, tuple((attributes or {}).items()), compute))


def _rows_folding(shape: tuple[int, ...], axis: int) -> DimFolding:
    """Return [rows, normalised, 1, 1], the shape that cuDNN's norms expect."""
    return DimFolding(shape, (tuple(range(axis)), tuple(range(axis, len(shape))), (), ()), (0, 2, 3, 1))

"""Partition to cuDNN graph: `lower` turns a body into plain data, op by op through the table LOWER.

Anchors (convolution, matmul, norms, reduction) decide the frame, the dims cuDNN sees; pointwise ops
before (prologue) and after (epilogue) are placed in it. Views become strides. Nothing is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fusec.cudnn_graph import Attribute, CudnnCall, CudnnGraph, CudnnTensor
from fusec.errors import LoweringError
from fusec.frame import (
    VIEWS,
    Frame,
    Strided,
    backward,
    matrix_frame,
    pointwise_frame,
    regular_strides,
    spatial_frame,
    trace,
)
from fusec.hazards import misread, two_of_three
from fusec.ir import Array, Constant, DType, Graph, Literal, Node, TensorType, Value, quote
from fusec.lower_attention import DTYPES, heads_frame, require_aligned, require_keys
from fusec.ops import (
    Attention,
    AttentionBackward,
    AttentionTrain,
    Conv,
    ConvTranspose,
    ConvWgrad,
    InstanceNorm,
    LayerNorm,
    MatMul,
    Pointwise,
    Reduce,
    RmsNorm,
)
from fusec.storage import pack

STORED = frozenset({DType.F32, DType.F16, DType.BF16, DType.I8, DType.I32, DType.BOOL})


@dataclass(frozen=True)
class ConstantBinding:
    """A tensor of the graph that holds a literal, stored in the memory order of `type`."""

    uid: int
    literal: Literal
    type: TensorType


@dataclass(frozen=True)
class Lowered:
    """A cuDNN graph and what its tensors are: uids of the body's inputs and outputs by name, and of
    constants. One body value may stand behind several uids (read in two shapes, or in parts); `offsets` says of
    those that do not begin where the value does how many elements further on."""

    graph: CudnnGraph
    inputs: tuple[tuple[int, str], ...]
    outputs: tuple[tuple[int, str], ...]
    constants: tuple[ConstantBinding, ...]
    offsets: tuple[tuple[int, int], ...] = ()

    def part(self, uid: int, buffer: Array) -> Array:
        """The flat memory of a tensor of the graph, in that of the value behind it."""
        start = next((offset for known, offset in self.offsets if known == uid), 0)
        return buffer[start:] if start else buffer


def lower(body: Graph, tensor_cores: bool = True, for_cudnn: bool = True) -> Lowered:
    """Lower a partition's body. `tensor_cores` False excludes engines that round fp32 to tf32. for_cudnn: refuse what
    cuDNN is known to compute wrongly; otherwise the graph is for another library to read.

    Raises LoweringError if the body cannot be written as one cuDNN graph.
    """
    anchors = [n for n in body.nodes if isinstance(n.op, ANCHORS)]
    folds = (True, False) if any(isinstance(n.op, MatMul) for n in anchors) else (False,)
    for fold_batch in folds:
        builder = _Builder(body, tensor_cores, fold_batch, pointwise_only=not anchors, for_cudnn=for_cudnn)
        try:
            return builder.lower(anchors)
        except LoweringError:
            if fold_batch == folds[-1]:
                raise
    raise AssertionError("unreachable")


@dataclass
class _Builder:
    body: Graph
    tensor_cores: bool
    fold_batch: bool
    pointwise_only: bool
    for_cudnn: bool
    tensors: list[CudnnTensor] = field(default_factory=list[CudnnTensor])
    calls: list[CudnnCall] = field(default_factory=list[CudnnCall])
    uids: dict[Value, int] = field(default_factory=dict[Value, int])  # of computed values
    frames: dict[Node, Frame] = field(default_factory=dict[Node, Frame])
    stored: dict[Value, tuple[str, tuple[int, ...]]] = field(default_factory=dict[Value, tuple[str, tuple[int, ...]]])
    feeds_anchor: set[Value] = field(default_factory=set[Value])
    bound: dict[tuple[Value, tuple[int, ...], tuple[int, ...], int], int] = field(
        default_factory=dict[tuple[Value, tuple[int, ...], tuple[int, ...], int], int]
    )
    offsets: dict[int, int] = field(default_factory=dict[int, int])
    scalars: dict[tuple[float, float, int], int] = field(default_factory=dict[tuple[float, float, int], int])
    images: set[int] = field(default_factory=set[int])  # stored tensors that a convolution reads
    twins: dict[int, int] = field(default_factory=dict[int, int])
    inputs: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    outputs: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    constants: list[ConstantBinding] = field(default_factory=list[ConstantBinding])

    def lower(self, anchors: list[Node]) -> Lowered:
        self._find_stored()
        compute = [n for n in self.body.nodes if not isinstance(n.op, (Constant, *VIEWS))]
        if not compute:
            raise LoweringError("nothing to compute")
        self._assign_frames(anchors, compute)
        for node in compute:
            if node.op.name not in LOWER:
                raise LoweringError(f"{node.op.name}: {WITHOUT.get(node.op.name, 'cuDNN has no such operation')}")
            LOWER[node.op.name](self, node)
        # only products of fp32 operands can be rounded to tf32; asking for more would lose other engines
        products = any(isinstance(n.op, (Conv, ConvTranspose, ConvWgrad, MatMul)) for n in anchors)
        fp32 = any(v.type.dtype is DType.F32 for n in anchors for v in n.operands)
        graph = CudnnGraph(tuple(self.tensors), tuple(self.calls), self.tensor_cores or not (products and fp32))
        wrong = misread(graph) if self.for_cudnn else None
        if wrong is not None:
            raise LoweringError(wrong)
        offsets = tuple(self.offsets.items())
        return Lowered(graph, tuple(self.inputs), tuple(self.outputs), tuple(self.constants), offsets)

    # what is stored, and in which frame each node computes -----------------------------------------

    def _find_stored(self) -> None:
        """Follow views back from the outputs: which computed value is stored, with which strides."""
        for name, value in zip(self.body.output_names, self.body.outputs, strict=True):
            strides = value.type.strides
            at = value
            while at.node is not None and isinstance(at.node.op, VIEWS):
                strides = backward(at.node, strides)
                at = at.node.operands[0]
            if at.node is None or isinstance(at.node.op, Constant):
                raise LoweringError(f"{quote(name)} is a view of an input, nothing is computed")
            if at in self.stored:
                raise LoweringError(f"{quote(name)} and {quote(self.stored[at][0])} are two views of one result")
            self.stored[at] = (name, strides)

    def _assign_frames(self, anchors: list[Node], compute: list[Node]) -> None:
        for anchor in reversed(anchors):
            main, operands = self._anchor_frames(anchor)
            self.frames[anchor] = main
            for value, frame in operands:
                self._claim(value, frame)
        rest = [n for n in compute if n not in self.frames]
        if not rest:
            return
        if anchors:
            main = self.frames[anchors[-1]]
        else:
            main = self._pointwise_frame(compute)
        for node in rest:
            self.frames[node] = main

    def _claim(self, value: Value, frame: Frame) -> None:
        """The pointwise ops that make an anchor's operand are its prologue: they use the operand's frame."""
        node = value.node
        if node is None or isinstance(node.op, (Constant, *VIEWS, *ANCHORS)):
            return
        self.feeds_anchor.add(value)
        self.frames[node] = frame
        for operand in node.operands:
            self._claim(operand, frame)

    def _anchor_frames(self, anchor: Node) -> tuple[Frame, list[tuple[Value, Frame]]]:
        shape = anchor.results[0].type.shape
        if isinstance(anchor.op, (Conv, ConvTranspose, ConvWgrad)):
            return spatial_frame(shape), [(v, spatial_frame(v.type.shape)) for v in anchor.operands]
        if isinstance(anchor.op, MatMul):
            a, b = anchor.operands
            batch = shape[:-2]
            fold = self.fold_batch and math.prod(b.type.shape[:-2]) == 1
            frames = [
                (a, matrix_frame((*batch, *a.type.shape[-2:]), fold)),
                (b, matrix_frame((*((1,) * len(batch) if fold else batch), *b.type.shape[-2:]), False)),
            ]
            return matrix_frame(shape, fold), frames
        if isinstance(anchor.op, ATTENTIONS):
            return heads_frame(shape), []
        if isinstance(anchor.op, InstanceNorm):
            return spatial_frame(shape), []
        if isinstance(anchor.op, (LayerNorm, RmsNorm)):
            return _rows_frame(shape, anchor.op.axis % len(shape)), []
        assert isinstance(anchor.op, Reduce)
        return self._reduction_frame(anchor, anchor.op), []

    def _reduction_frame(self, anchor: Node, op: Reduce) -> Frame:
        """[rows, columns, 1, 1] in channels-last memory, one of which is reduced."""
        x = anchor.operands[0].type
        order = [a for a in (x.order or range(x.rank)) if x.shape[a] != 1]
        reduced = [a in op.axes for a in order]
        if not any(reduced):
            raise LoweringError("reduce: only dims of size 1 are reduced")
        split = reduced.index(not reduced[0]) if not all(reduced) else 0
        if any(r != (not reduced[0]) for r in reduced[split:]) and not all(reduced):
            raise LoweringError("reduce: the reduced dims are neither the outermost nor the innermost in memory")
        return Frame(x.shape, (tuple(order[:split]), tuple(order[split:]), (), ()), (0, 2, 3, 1))

    def _pointwise_frame(self, compute: list[Node]) -> Frame:
        values = dict.fromkeys(v for n in compute for v in (*n.results, *n.operands))
        shape = np.broadcast_shapes(*(v.type.shape for v in values))
        tensors: list[Strided] = []
        order: tuple[int, ...] | None = None
        for value in values:
            if value.scalar() is not None:
                continue
            if value in self.stored:
                strided = Strided(value, value.type.shape, self.stored[value][1])
            elif value.node is None or isinstance(value.node.op, (Constant, *VIEWS)):
                strided = trace(value)
            else:
                continue
            tensors.append(strided)
            if order is None and strided.shape == shape:
                order = tuple(sorted(range(len(shape)), key=lambda d: (-strided.strides[d], d)))
        order = order or tuple(range(len(shape)))
        made = {v for n in compute for v in n.results}
        for value in values:  # virtual values take part with their broadcast pattern
            if value in made and value not in self.stored:
                lead = len(shape) - value.type.rank
                own = tuple(a - lead for a in order if a >= lead)
                tensors.append(Strided(value, value.type.shape, value.type.with_order(own).strides))
        return pointwise_frame(shape, order, tensors)

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

    def scalar(self, value: float, rank: int) -> int:
        """A number passed by value."""
        key = (value, math.copysign(1.0, value), rank)  # 0.0 and -0.0 are one number but two scalars
        if key not in self.scalars:
            ones = (1,) * rank
            self.scalars[key] = self.tensor((ones, ones), DType.F32, value=value)
        return self.scalars[key]

    def operand(self, value: Value, frame: Frame) -> int:
        """The uid of a value read by a node that computes in `frame`."""
        if value in self.uids:
            return self.uids[value]
        number = value.scalar()
        if number is not None and not self._in_memory(value, frame):
            return self.scalar(number, len(frame.groups))
        view = trace(value)
        root = view.root
        if root.node is not None and not isinstance(root.node.op, Constant):
            raise LoweringError(f"{quote(value.name)}: a view between two computations")
        what = quote(value.name)
        if root.type.dtype not in STORED:
            raise LoweringError(f"{what} is {root.type.dtype.value}, which cuDNN graphs do not take here")
        placed = frame.place(what, view.shape, view.strides)
        key = (root, *placed, view.offset)
        if key not in self.bound:
            literal = root.literal
            if literal is not None and view.offset:
                raise LoweringError(f"{what}: a part of a constant, which is folded elsewhere")
            if literal is not None and self.pointwise_only and two_of_three(placed[0], frame.dims):
                return self.bound.setdefault(key, self._expanded(root, placed, frame))
            uid = self.bound[key] = self.tensor(placed, root.type.dtype)
            if view.offset:
                self.offsets[uid] = view.offset
            if literal is None:
                self.inputs.append((uid, root.name))
            else:
                self.constants.append(ConstantBinding(uid, literal, root.type))
        return self.bound[key]

    def _in_memory(self, value: Value, frame: Frame) -> bool:
        """Whether a one-element constant is a tensor, not a number passed by value: an operand of a product,
        or what a precompiled engine takes for the bias of a convolution's only filter. Both are read from
        device memory, and a number's host address there was an illegal access."""
        anchored = [n for n in self.frames if isinstance(n.op, (*ATTENTIONS, Conv, ConvTranspose, ConvWgrad, MatMul))]
        if any(value in n.operands for n in anchored):
            return True
        return frame.dims[1] == 1 and any(isinstance(n.op, (Conv, ConvTranspose)) for n in anchored)

    def _expanded(self, root: Value, placed: tuple[tuple[int, ...], tuple[int, ...]], frame: Frame) -> int:
        """A constant broadcast along two of three dims, repeated along the smaller one: cuDNN computes
        broadcasts along one dim right (see hazards)."""
        literal = root.literal
        assert literal is not None
        dims, strides = list(placed[0]), placed[1]
        axis = min((a for a, d in enumerate(dims) if d == 1), key=lambda a: frame.dims[a])
        shape = tuple(frame.dims[a] if a == axis else d for a, d in enumerate(dims))

        def load() -> np.ndarray[Any, Any]:
            stored = pack(np, literal.array, root.type)
            steps = [s * stored.itemsize for s in strides]
            return np.broadcast_to(np.lib.stride_tricks.as_strided(stored, dims, steps), shape)

        type = TensorType(shape, root.type.dtype)
        uid = self.tensor((shape, type.strides), type.dtype)
        key = ("expanded", type, root.type, tuple(dims), tuple(strides), literal.key)
        self.constants.append(ConstantBinding(uid, Literal(type, load, literal.label, key), type))
        return uid

    def second(self, uid: int) -> int:
        """The one twin of a tensor."""
        if uid not in self.twins:
            self.twins[uid] = self.twin(uid)
        return self.twins[uid]

    def twin(self, uid: int) -> int:
        """Another tensor for the same memory as an input or constant of the graph."""
        tensor = self.tensors[uid - 1]
        other = self.tensor((tensor.dims, tensor.strides), tensor.dtype)
        self.inputs += [(other, name) for known, name in self.inputs if known == uid]
        self.constants += [replace(known, uid=other) for known in self.constants if known.uid == uid]
        if uid in self.offsets:
            self.offsets[other] = self.offsets[uid]
        return other

    def result(self, value: Value, frame: Frame) -> int:
        """A new tensor for a computed value: stored if the body returns it, else virtual."""
        if value in self.stored:
            name, strides = self.stored[value]
            if value.type.dtype not in STORED:
                raise LoweringError(f"{quote(value.name)} is {value.type.dtype.value}; cuDNN graphs do not store that")
            uid = self.tensor(frame.place(quote(value.name), value.type.shape, strides), value.type.dtype)
            self.outputs.append((uid, name))
        else:
            # fp32 in registers; a prologue's result is declared in the I/O type, or no engine takes it
            dtype = value.type.dtype if value.type.dtype is DType.BOOL or value in self.feeds_anchor else DType.F32
            uid = self.tensor(frame.packed(value.type.shape), dtype, virtual=True)
        self.uids[value] = uid
        return uid

    def hidden(self, frame: Frame, shape: tuple[int, ...], dtype: DType = DType.F32) -> int:
        """A virtual tensor for a step inside one op's expansion."""
        return self.tensor(frame.packed(shape), dtype, virtual=True)

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


def _rows_frame(shape: tuple[int, ...], axis: int) -> Frame:
    """[rows, normalised, 1, 1], the canonical form of cuDNN's norms."""
    return Frame(shape, (tuple(range(axis)), tuple(range(axis, len(shape))), (), ()), (0, 2, 3, 1))


# anchors -------------------------------------------------------------------------------------------------


def _require_float(node: Node) -> None:
    dtype = node.results[0].type.dtype
    if dtype not in (DType.F32, DType.F16, DType.BF16):
        raise LoweringError(f"{node.op.name} in {dtype.value} is not lowered")


def _convolution(b: _Builder, node: Node) -> None:
    assert isinstance(node.op, (Conv, ConvTranspose))
    _require_float(node)
    x, w = node.operands
    image = b.operand(x, spatial_frame(x.type.shape))
    weight = b.operand(w, spatial_frame(w.type.shape))
    b.images.update(uid for uid in (image, weight) if uid not in b.uids.values())
    name = "conv_fprop" if isinstance(node.op, Conv) else "conv_dgrad"
    b.call(name, (image, weight), b.result(node.result, b.frames[node]), attributes=_window(node.op))


def _filter_gradient(b: _Builder, node: Node) -> None:
    assert isinstance(node.op, ConvWgrad)
    _require_float(node)
    x, dy = node.operands
    image, loss = (b.operand(v, spatial_frame(v.type.shape)) for v in (x, dy))
    if image == loss and image not in b.uids.values():
        loss = b.twin(image)
    b.images.update(uid for uid in (image, loss) if uid not in b.uids.values())
    b.call("conv_wgrad", (image, loss), b.result(node.result, b.frames[node]), attributes=_window(node.op))


def _window(op: Conv | ConvTranspose | ConvWgrad) -> dict[str, Attribute]:
    """The attributes of a convolution; a dim of size 1 goes in front of an only spatial one."""
    n = len(op.strides)
    unit, none = ((1,), (0,)) if n == 1 else ((), ())
    return {
        "pre_padding": (*none, *op.pads[:n]),
        "post_padding": (*none, *op.pads[n:]),
        "stride": (*unit, *op.strides),
        "dilation": (*unit, *op.dilations),
    }


def _matmul(b: _Builder, node: Node) -> None:
    _require_float(node)
    _, frames = b._anchor_frames(node)  # pyright: ignore[reportPrivateUsage]  # the table's functions are its methods
    left, right = (b.operand(value, frame) for value, frame in frames)
    if left == right and left not in b.uids.values():
        right = b.twin(left)
    b.call("matmul", (left, right), b.result(node.result, b.frames[node]))


def _attention(b: _Builder, node: Node) -> None:
    op = node.op
    assert isinstance(op, ATTENTIONS)
    calls = {"attention": ("sdpa", 3), "attention_train": ("sdpa_train", 3), "attention_backward": ("sdpa_backward", 5)}
    call, heads = calls[op.name]
    if node.results[0].type.dtype not in DTYPES:
        raise LoweringError(f"{op.name} in {node.results[0].type.dtype.value}: only 16 bits are lowered")
    if isinstance(op, Attention):
        require_keys(node)
    uids: list[int] = []
    for place, value in enumerate(node.operands):
        if place < heads:
            require_aligned(quote(value.name), trace(value))
        uid = b.operand(value, heads_frame(value.type.shape))
        uids.append(b.twin(uid) if uid in uids else uid)
    results: list[int] = []
    for value in node.results:
        if value not in b.stored:
            raise LoweringError(f"{op.name}: its result may not feed another op of the graph")
        name, strides = b.stored[value]
        if value.type.shape[-1] != 1 and strides[-1] != 1:
            raise LoweringError(f"{quote(name)}: the last dim of an attention's result must lie side by side in memory")
        results.append(b.result(value, heads_frame(value.type.shape)))
    attributes: dict[str, Attribute] = {"attn_scale": op.scale, "use_causal_mask": op.causal}
    if isinstance(op, AttentionBackward) and op.ordered:
        attributes["use_deterministic_algorithm"] = True
    b.call(call, tuple(uids), tuple(results), attributes=attributes)


def _row_norm(b: _Builder, node: Node) -> None:
    op = node.op
    assert isinstance(op, (LayerNorm, RmsNorm))
    _require_float(node)
    frame, x = b.frames[node], node.operands[0]
    normal = x.type.shape[op.axis % x.type.rank :]
    for parameter in node.operands[1:]:
        if math.prod(parameter.type.shape) != math.prod(normal):
            raise LoweringError(
                f"{op.name}: {quote(parameter.name)} must have the whole normalised shape {list(normal)}"
            )
    image = b.operand(x, frame)
    parameters: list[int] = []
    for operand in node.operands[1:]:
        uid = _parameter(b, operand, normal, frame)
        # the same tensor as scale and bias is not taken for a bias when the plan runs
        parameters.append(b.twin(uid) if uid in parameters else uid)
    if isinstance(op, LayerNorm) and len(parameters) == 1:
        zero = Literal.of(np.zeros(normal, x.type.dtype.numpy))
        uid = b.tensor(frame.place("zero bias", normal, TensorType(normal, x.type.dtype).strides), x.type.dtype)
        b.constants.append(ConstantBinding(uid, zero, zero.type))
        parameters.append(uid)
    name = "layernorm" if isinstance(op, LayerNorm) else "rmsnorm"
    epsilon = b.scalar(op.epsilon, len(frame.groups))
    b.call(name, (image, *parameters, epsilon), b.result(node.result, frame))


def _parameter(b: _Builder, value: Value, shape: tuple[int, ...], frame: Frame) -> int:
    """A norm's scale or bias; one of a single element is a tensor here, never a scalar by value."""
    if value.scalar() is None or value.literal is None:
        return b.operand(value, frame)
    dims = (1,) * len(frame.groups)
    uid = b.tensor((dims, dims), value.type.dtype)
    b.constants.append(ConstantBinding(uid, value.literal, value.type))
    return uid


def _instance_norm(b: _Builder, node: Node) -> None:
    assert isinstance(node.op, InstanceNorm)
    _require_float(node)
    frame, (x, scale, bias) = b.frames[node], node.operands
    channels = (1, x.type.shape[1], *([1] * (x.type.rank - 2)))
    image = b.operand(x, frame)
    uids: list[int] = []
    for value in (scale, bias):
        placed = frame.place(quote(value.name), channels, tuple(1 for _ in channels))
        uid = b.tensor(placed, value.type.dtype)
        if value.literal is not None:
            b.constants.append(ConstantBinding(uid, value.literal, value.type))
        elif value.node is None:
            b.inputs.append((uid, value.name))
        else:
            raise LoweringError(f"{quote(value.name)}: a computed parameter of instance_norm")
        uids.append(uid)
    epsilon = b.scalar(node.op.epsilon, len(frame.groups))
    b.call("instancenorm", (image, *uids, epsilon), b.result(node.result, frame))


def _reduction(b: _Builder, node: Node) -> None:
    op = node.op
    assert isinstance(op, Reduce)
    modes = {"sum": "add", "max": "max", "min": "min"}
    if op.kind not in modes:
        raise LoweringError(f"reduce {op.kind}: cuDNN reduces by add, max, min only")
    if node.result.type.dtype is not DType.F32:
        raise LoweringError("reduce: cuDNN stores its result in fp32 only")
    if node.result not in b.stored:
        raise LoweringError("reduce: its result may not feed another op of the graph")
    frame, x = b.frames[node], node.operands[0].type
    image = b.operand(node.operands[0], frame)
    kept = TensorType(tuple(1 if i in op.axes else d for i, d in enumerate(x.shape)), DType.F32, x.order)
    name, strides = b.stored[node.result]
    wide = [d for d in range(x.rank) if kept.shape[d] != 1]
    written = [s for s, d in zip(strides, node.result.type.shape, strict=True) if d != 1]
    if written != [kept.strides[d] for d in wide]:
        raise LoweringError("reduce: the result's memory order differs from the operand's")
    uid = b.tensor(frame.place(quote(node.result.name), kept.shape, kept.strides), DType.F32)
    b.outputs.append((uid, name))
    b.uids[node.result] = uid
    b.call("reduction", (image,), uid, modes[op.kind])


# pointwise ---------------------------------------------------------------------------------------------------


class _Steps:
    """Writes one op as a chain of cuDNN pointwise calls; the last one makes the op's result."""

    def __init__(self, b: _Builder, node: Node):
        self.b, self.node, self.frame = b, node, b.frames[node]
        # an epilogue that reads the image of its convolution does so through a tensor of its own: as one, the
        # plan was an illegal access or failed when it ran
        found = [b.operand(v, self.frame) for v in node.operands]
        self.operands = [b.second(uid) if uid in b.images else uid for uid in found]

    def number(self, value: float) -> int:
        return self.b.scalar(value, len(self.frame.groups))

    def step(self, mode: str, *inputs: int, dtype: DType = DType.F32, **attributes: Attribute) -> int:
        shape = self.node.result.type.shape
        uid = self.b.hidden(self.frame, shape, dtype)
        self.b.call("pointwise", inputs, uid, mode, attributes=attributes)
        return uid

    def last(self, mode: str, *inputs: int, **attributes: Attribute) -> None:
        output = self.b.result(self.node.result, self.frame)
        compute = DType.BOOL if mode.startswith("logical") else DType.F32
        self.b.call("pointwise", inputs, output, mode, compute, attributes)


def _direct(b: _Builder, node: Node) -> None:
    """Ops that are one cuDNN mode of the same meaning."""
    assert isinstance(node.op, Pointwise)
    for value in (*node.operands, node.result):
        dtype = value.type.dtype
        if dtype in (DType.I32, DType.I8):
            # cuDNN computes them in fp32: sums and products wrap and round differently
            raise LoweringError(f"{node.op.name} in {dtype.value}: cuDNN would compute it in fp32")
    steps = _Steps(b, node)
    a = node.op.attributes
    match node.op.name:
        case "leaky_relu" if not 0.0 <= a["alpha"] <= 1.0:
            # cuDNN takes the maximum of x and slope * x, which is the other one for such a slope
            (x,) = steps.operands
            below = steps.step("mul", steps.step("min", x, steps.number(0.0)), steps.number(a["alpha"]))
            steps.last("add", steps.step("max", x, steps.number(0.0)), below)
        case "leaky_relu" | "leaky_relu_backward":
            steps.last(node.op.name, *steps.operands, negative_slope=a["alpha"])
        case "swish" | "swish_backward":
            beta: dict[str, float] = {} if a["beta"] == 1.0 else {"beta": a["beta"]}
            steps.last(node.op.name, *steps.operands, **beta)
        case "gelu_tanh" | "gelu_tanh_backward":
            steps.last(node.op.name.replace("gelu_tanh", "gelu_approx_tanh"), *steps.operands)
        case _:
            steps.last(node.op.name, *steps.operands)


def _where(b: _Builder, node: Node) -> None:
    if node.result.type.dtype not in (DType.F32, DType.F16, DType.BF16):
        raise LoweringError(f"where in {node.result.type.dtype.value}: cuDNN would compute it in fp32")
    steps = _Steps(b, node)
    mask, x, y = steps.operands
    steps.last("binary_select", x, y, mask)


def _elu(b: _Builder, node: Node) -> None:
    alpha, steps = node.op.attributes["alpha"], _Steps(b, node)
    (x,) = steps.operands
    if alpha == 1.0:
        steps.last("elu", x)
        return
    below = steps.step("sub", steps.step("exp", steps.step("min", x, steps.number(0.0))), steps.number(1.0))
    steps.last("add", steps.step("max", x, steps.number(0.0)), steps.step("mul", below, steps.number(alpha)))


def _clip(b: _Builder, node: Node) -> None:
    if not node.result.type.dtype.is_float:
        raise LoweringError(f"clip in {node.result.type.dtype.value}: cuDNN would compute it in fp32")
    low, high = node.op.attributes["min"], node.op.attributes["max"]
    steps = _Steps(b, node)
    (x,) = steps.operands
    if low == 0.0 and high == math.inf:
        steps.last("relu", x)
    elif low == 0.0:
        steps.last("relu", x, lower_clip=0.0, upper_clip=high)  # keeps the precompiled engines
    elif low == -math.inf and high == math.inf:
        steps.last("identity", x)
    elif low == -math.inf:
        steps.last("min", x, steps.number(high))
    elif high == math.inf:
        steps.last("max", x, steps.number(low))
    else:
        steps.last("min", steps.step("max", x, steps.number(low)), steps.number(high))


def _hard_sigmoid(b: _Builder, node: Node) -> None:
    a, steps = node.op.attributes, _Steps(b, node)
    line = steps.step("add", steps.step("mul", steps.operands[0], steps.number(a["alpha"])), steps.number(a["beta"]))
    steps.last("relu", line, lower_clip=0.0, upper_clip=1.0)


def _hard_swish(b: _Builder, node: Node) -> None:
    steps = _Steps(b, node)
    (x,) = steps.operands
    line = steps.step("add", steps.step("mul", x, steps.number(1.0 / 6.0)), steps.number(0.5))
    steps.last("mul", x, steps.step("relu", line, lower_clip=0.0, upper_clip=1.0))


def _mish(b: _Builder, node: Node) -> None:
    """x * tanh(softplus(x)) = x / (1 + 2/n), n = e^x (e^x + 2), which overflows to x: fused tanh would be NaN there."""
    steps = _Steps(b, node)
    (x,) = steps.operands
    two, exponential = steps.number(2.0), steps.step("exp", x)
    n = steps.step("mul", exponential, steps.step("add", exponential, two))
    steps.last("div", x, steps.step("add", steps.step("div", two, n), steps.number(1.0)))


def _selu(b: _Builder, node: Node) -> None:
    a, steps = node.op.attributes, _Steps(b, node)
    (x,) = steps.operands
    below = steps.step("sub", steps.step("exp", steps.step("min", x, steps.number(0.0))), steps.number(1.0))
    scaled = steps.step("mul", below, steps.number(a["alpha"] * a["gamma"]))
    above = steps.step("mul", steps.step("max", x, steps.number(0.0)), steps.number(a["gamma"]))
    steps.last("add", above, scaled)


def _celu(b: _Builder, node: Node) -> None:
    alpha, steps = node.op.attributes["alpha"], _Steps(b, node)
    (x,) = steps.operands
    inner = steps.step("mul", steps.step("min", x, steps.number(0.0)), steps.number(1.0 / alpha))
    below = steps.step("mul", steps.step("sub", steps.step("exp", inner), steps.number(1.0)), steps.number(alpha))
    steps.last("add", steps.step("max", x, steps.number(0.0)), below)


def _softsign(b: _Builder, node: Node) -> None:
    steps = _Steps(b, node)
    (x,) = steps.operands
    steps.last("div", x, steps.step("add", steps.step("abs", x), steps.number(1.0)))


def _thresholded_relu(b: _Builder, node: Node) -> None:
    steps = _Steps(b, node)
    (x,) = steps.operands
    above = steps.step("cmp_gt", x, steps.number(node.op.attributes["alpha"]), dtype=DType.BOOL)
    steps.last("binary_select", x, steps.number(0.0), above)


def _prelu(b: _Builder, node: Node) -> None:
    steps = _Steps(b, node)
    x, slope = steps.operands
    # a choice, not max(x, 0) + slope * min(x, 0): an infinite slope times zero would be NaN
    above = steps.step("cmp_ge", x, steps.number(0.0), dtype=DType.BOOL)
    steps.last("binary_select", x, steps.step("mul", x, slope), above)


def _floor_mod(b: _Builder, node: Node) -> None:
    if not node.result.type.dtype.is_float:
        raise LoweringError(f"floor_mod in {node.result.type.dtype.value}: cuDNN would compute it in fp32")
    steps = _Steps(b, node)
    x, y = steps.operands
    steps.last("sub", x, steps.step("mul", steps.step("floor", steps.step("div", x, y)), y))


def _cast(b: _Builder, node: Node) -> None:
    source, target = node.operands[0].type.dtype, node.result.type.dtype
    if not target.is_float or source not in STORED:
        raise LoweringError(f"cast {source.value} to {target.value}: cuDNN's rounding is not the op's")
    value = node.operands[0]
    virtual = node.result not in b.stored and node.result not in b.feeds_anchor
    if virtual and source.is_float and value.scalar() is None:
        b.uids[node.result] = b.operand(value, b.frames[node])  # registers hold fp32: nothing to do
        return
    steps = _Steps(b, node)
    steps.last("identity", *steps.operands)


ATTENTIONS = (Attention, AttentionTrain, AttentionBackward)
ANCHORS = (*ATTENTIONS, Conv, ConvTranspose, ConvWgrad, MatMul, LayerNorm, RmsNorm, InstanceNorm, Reduce)

_SAME_MODE = (
    *("abs", "ceil", "cos", "erf", "exp", "floor", "identity", "log", "neg", "reciprocal", "relu", "rsqrt"),
    *("sigmoid", "sin", "softplus", "sqrt", "tan", "tanh", "gelu", "gelu_tanh", "swish", "leaky_relu", "logical_not"),
    *("add", "add_square", "sub", "mul", "div", "max", "min", "mod", "pow"),
    *("cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le", "logical_and", "logical_or"),
    *("relu_backward", "leaky_relu_backward", "sigmoid_backward", "tanh_backward", "gelu_backward"),
    *("gelu_tanh_backward", "softplus_backward", "swish_backward"),
)

LOWER: Mapping[str, Callable[[_Builder, Node], None]] = {
    **dict.fromkeys(_SAME_MODE, _direct),
    "where": _where,
    "elu": _elu,
    "clip": _clip,
    "hard_sigmoid": _hard_sigmoid,
    "hard_swish": _hard_swish,
    "mish": _mish,
    "selu": _selu,
    "celu": _celu,
    "softsign": _softsign,
    "thresholded_relu": _thresholded_relu,
    "prelu": _prelu,
    "floor_mod": _floor_mod,
    "cast": _cast,
    "conv": _convolution,
    "conv_transpose": _convolution,
    "conv_wgrad": _filter_gradient,
    "matmul": _matmul,
    **dict.fromkeys(("attention", "attention_train", "attention_backward"), _attention),
    "layer_norm": _row_norm,
    "rms_norm": _row_norm,
    "instance_norm": _instance_norm,
    "reduce": _reduction,
}

_NO_MODE = "cuDNN has no pointwise mode for it"
_MOVES = "moves elements; cuDNN graphs only read and write strided tensors"
WITHOUT: Mapping[str, str] = {
    **dict.fromkeys(("sign", "round", "acos", "asin", "atan", "cosh", "sinh", "acosh", "asinh", "atanh"), _NO_MODE),
    **dict.fromkeys(("is_nan", "is_inf", "logical_xor"), _NO_MODE),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _NO_MODE),
    **dict.fromkeys(("shift_left", "shift_right"), _NO_MODE),
    "gen_index": "the axis is lost when dims are merged to the frame",
    "elu_backward": "cuDNN's takes no alpha",
    "batch_norm": "cuDNN has no engine for inference batch norm; fold it or decompose it",
    "group_norm": "cuDNN normalises whole channels only",
    "lrn": "cuDNN graphs have no local response norm",
    "max_pool": "the cuDNN frontend's Python binding has no resample operation",
    "avg_pool": "the cuDNN frontend's Python binding has no resample operation",
    "rotary": _MOVES,
    "softmax": "a reduction may not feed another op of the same cuDNN graph",
    **dict.fromkeys(("reshape", "transpose", "relayout"), "a view; it becomes strides where no copy is needed"),
    **dict.fromkeys(("expand", "concat", "split", "slice", "pad", "gather"), _MOVES),
    "resize": "cuDNN plans no upsampling",
    "top_k": "cuDNN graphs cannot sort",
    "scatter": _MOVES,
    "cumulate": "cuDNN graphs have no running sums",
    "max_pool_backward": "the cuDNN frontend's Python binding has no resample operation",
    **dict.fromkeys(
        ("batch_norm_train", "batch_norm_backward", "layer_norm_backward"),
        "an operation with several results is not lowered",
    ),
    "random_bits": "cuDNN's random numbers are no function of a state that the graph carries",
    "all_finite": "a cuDNN graph reduces one tensor",
}

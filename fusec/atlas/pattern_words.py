"""Define the words of patterns: anchors, and the ops before and after them, with the operands that each needs."""

from __future__ import annotations

from fusec.system.dataclass import dataclass

Shape = tuple[int, ...]
_IMAGE = (8, 64, 28, 28)


@dataclass(frozen=True)
class Anchor:
    """An anchor as a word.

    reads, gives: shape of the tensor it reads, and of its result
    others: shapes of its other operands
    op: the op; empty for a pattern of pointwise ops alone
    order: memory order of the other operands, where that of images or rows is not meant
    """

    reads: Shape
    gives: Shape
    others: tuple[Shape, ...] = ()
    op: str = ""
    attributes: str = ""
    order: str | None = None


def _window(kernel: int, stride: int = 1, *, groups: int = 1, dilation: int = 1, dims: int = 2) -> str:
    pad = dilation * (kernel - 1) // 2
    lists = {"strides": [stride] * dims, "pads": [pad] * (2 * dims), "dilations": [dilation] * dims}
    return "{" + ", ".join(f"{name}={value}" for name, value in lists.items()) + f", groups={groups}}}"


def _conv(reads: Shape, gives: Shape, filters: Shape, attributes: str) -> Anchor:
    return Anchor(reads, gives, (filters,), "conv", attributes)


def _reduce(kind: str, reads: Shape, axes: list[int]) -> Anchor:
    gives = tuple(1 if axis in axes else size for axis, size in enumerate(reads))
    return Anchor(reads, gives, (), "reduce", f'{{kind="{kind}", axes={axes}, keepdims=true}}')


_ROWS = (512, 1024)
_EPSILON = "epsilon=0.00001"
ANCHORS: dict[str, Anchor] = {
    "conv": _conv(_IMAGE, _IMAGE, (64, 64, 3, 3), _window(3)),
    "conv1x1": _conv(_IMAGE, (8, 128, 28, 28), (128, 64, 1, 1), _window(1)),
    "conv_stride2": _conv(_IMAGE, (8, 128, 14, 14), (128, 64, 3, 3), _window(3, 2)),
    "conv_dilated": _conv(_IMAGE, _IMAGE, (64, 64, 3, 3), _window(3, dilation=2)),
    "conv_groups4": _conv(_IMAGE, _IMAGE, (64, 16, 3, 3), _window(3, groups=4)),
    "depthwise": _conv(_IMAGE, _IMAGE, (64, 1, 3, 3), _window(3, groups=64)),
    "conv_3channels": _conv((8, 3, 224, 224), (8, 64, 112, 112), (64, 3, 7, 7), _window(7, 2)),
    "conv_30channels": _conv((8, 30, 28, 28), (8, 30, 28, 28), (30, 30, 3, 3), _window(3)),
    "conv1d": _conv((8, 64, 256), (8, 64, 256), (64, 64, 3), _window(3, dims=1)),
    "conv3d": _conv((2, 32, 8, 16, 16), (2, 32, 8, 16, 16), (32, 32, 3, 3, 3), _window(3, dims=3)),
    "conv_transpose": Anchor(
        (8, 64, 14, 14),
        _IMAGE,
        ((64, 64, 2, 2),),
        "conv_transpose",
        "{strides=[2, 2], pads=[0, 0, 0, 0], dilations=[1, 1], output_padding=[0, 0], groups=1}",
    ),
    "conv_wgrad": Anchor(
        _IMAGE,
        (64, 64, 3, 3),
        (_IMAGE,),
        "conv_wgrad",
        "{window=[3, 3], " + _window(3)[1:],
    ),
    "matmul": Anchor(_ROWS, (512, 512), ((1024, 512),), "matmul"),
    "matmul_transposed": Anchor(_ROWS, (512, 512), ((1024, 512),), "matmul", order="{1,0}"),
    "matmul_batched": Anchor((16, 128, 64), (16, 128, 128), ((16, 64, 128),), "matmul"),
    "matmul_shared": Anchor((16, 128, 512), (16, 128, 512), ((512, 512),), "matmul"),
    "matmul_odd": Anchor((512, 1023), (512, 511), ((1023, 511),), "matmul"),
    "matmul_1row": Anchor((1, 4096), (1, 4096), ((4096, 4096),), "matmul"),
    "layer_norm": Anchor(_ROWS, _ROWS, ((1024,), (1024,)), "layer_norm", f"{{axis=1, {_EPSILON}}}"),
    "rms_norm": Anchor(_ROWS, _ROWS, ((1024,),), "rms_norm", f"{{axis=1, {_EPSILON}}}"),
    "instance_norm": Anchor(_IMAGE, _IMAGE, ((64,), (64,)), "instance_norm", f"{{{_EPSILON}}}"),
    "sum_rows": _reduce("sum", _ROWS, [1]),
    "mean_rows": _reduce("mean", _ROWS, [1]),
    "max_rows": _reduce("max", _ROWS, [1]),
    "sum_columns": _reduce("sum", _ROWS, [0]),
    "mean_image": _reduce("mean", _IMAGE, [2, 3]),
    "sum_image": _reduce("sum", _IMAGE, [2, 3]),
    "max_image": _reduce("max", _IMAGE, [2, 3]),
    "image": Anchor(_IMAGE, _IMAGE),
    "rows": Anchor(_ROWS, _ROWS),
}

_PLAIN = """relu sigmoid tanh elu leaky_relu gelu gelu_tanh swish hard_swish hard_sigmoid mish softplus selu softsign
  exp log sqrt rsqrt reciprocal erf abs neg ceil sign sin softmax"""
# Words for ops of one operand, with their attributes.
UNARY: dict[str, tuple[str, str]] = {"relu6": ("clip", "{min=0.0, max=6.0}")} | {op: (op, "") for op in _PLAIN.split()}

# Words for ops with a second operand: the op, and what the operand holds. That is one number for each channel (in rows:
# for each column), for each channel of each image, for each element, or one in all.
BINARY: dict[str, tuple[str, str]] = {
    "bias": ("add", "channel"),
    "scale": ("mul", "channel"),
    "gate": ("mul", "image channel"),
    "add": ("add", "element"),
    "mul": ("mul", "element"),
    "sub": ("sub", "element"),
    "max": ("max", "element"),
    "times": ("mul", "number"),
    "plus": ("add", "number"),
}
CASTS: dict[str, str] = {"to_fp32": "f32", "to_fp16": "f16", "to_int8": "i8"}
# Words for reductions after an anchor: over all dims but one, or over the last.
REDUCTIONS: dict[str, tuple[str, bool]] = {
    "channel_sum": ("sum", True),
    "row_sum": ("sum", False),
    "row_max": ("max", False),
}

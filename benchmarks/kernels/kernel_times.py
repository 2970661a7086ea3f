"""Time fusec's own kernels on this machine's GPU, and measure what each kernel family is worth to a model.

python -m benchmarks.kernels.kernel_times [PART OF A NAME ...]
Time each kernel, and print the time its bytes take at the GPU's bandwidth.
python -m benchmarks.kernels.kernel_times --leave-one-out [MODEL:BATCH ...]
Time models without one family (benchmarks/kernels/leave_one_out.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.common.cold_cache import cold_timer
from benchmarks.common.result_files import parser
from benchmarks.kernels import leave_one_out
from fusec.gpu import device
from fusec.gpu.kernels import GpuFigures, Kernel, find
from fusec.ir import DType, Graph, TensorType, Value, channels_last
from fusec.lowering.packing import code_bytes
from fusec.ops import (
    Attention,
    AttentionBackward,
    AttentionTrain,
    BatchNormBackward,
    BatchNormTrain,
    Cast,
    Concat,
    Conv,
    Gather,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LayerNormBackward,
    MaxPool,
    MaxPoolBackward,
    PackedMatMul,
    Pad,
    Recurrent,
    Reduce,
    Relayout,
    Resize,
    Softmax,
    Transpose,
    pw,
)
from fusec.schedule.program import inputs_of, outputs_of
from fusec.targets.target import Target

RUNS = 20
F16, F32 = DType.F16, DType.F32


def nhwc(*shape: int) -> TensorType:
    return TensorType(shape, F16, channels_last(len(shape)))


def rows(*shape: int, dtype: DType = F16) -> TensorType:
    return TensorType(shape, dtype)


def depthwise(channels: int, window: int, stride: int) -> Callable[..., Value]:
    """Make a depthwise convolution with bias and clip."""

    def make(g: Graph, x: Value) -> Value:
        w = g.constant(np.full((channels, 1, window, window), 0.1, np.float16))
        bias = g.constant(np.linspace(0, 1, channels).astype(np.float16).reshape(-1, 1, 1))
        pad = window // 2
        y = g.add(Conv((stride, stride), (pad,) * 4, (1, 1), channels), x, w)
        return g.add(pw("clip", min=0.0, max=6.0), g.add(pw("add"), y, bias))

    return make


def few_filters(filters: int, channels: int, window: int) -> Callable[..., Value]:
    """Make the last convolution of a network from image to image, with bias and tanh."""

    def make(g: Graph, x: Value) -> Value:
        w = g.constant(np.full((filters, channels, window, window), 0.01, np.float16))
        bias = g.constant(np.linspace(0, 1, filters).astype(np.float16).reshape(-1, 1, 1))
        y = g.add(Conv((1, 1), (window // 2,) * 4, (1, 1)), x, w)
        return g.insert(Relayout((0, 1, 2, 3)), [g.add(pw("tanh"), g.add(pw("add"), y, bias))]).result

    return make


def convolution(filters: int, channels: int, window: int, stride: int = 1) -> Callable[..., Value]:
    """Make a convolution with bias and relu."""

    def make(g: Graph, x: Value) -> Value:
        w = g.constant(np.full((filters, channels, window, window), 0.01, np.float16))
        bias = g.constant(np.linspace(0, 1, filters).astype(np.float16).reshape(-1, 1, 1))
        y = g.add(Conv((stride, stride), (window // 2,) * 4, (1, 1)), x, w)
        return g.add(pw("relu"), g.add(pw("add"), y, bias))

    return make


def image(g: Graph, x: Value) -> Value:
    """Cast an image, pad it to four channels, and store it channels last."""
    padded = g.add(Pad((0, 0, 0, 0, 0, 1, 0, 0)), g.add(Cast(F16), x))
    return g.insert(Relayout(channels_last(4)), [padded]).result


def residual(g: Graph, x: Value, y: Value) -> Value:
    return g.add(pw("relu"), g.add(pw("add"), x, y))


def normalised(g: Graph, x: Value, z: Value, scale: Value, bias: Value) -> Sequence[Value]:
    """Make the end of a residual block in training: batch norm, add, relu."""
    y, mean, inverse = g.insert(BatchNormTrain(), [x, scale, bias]).results
    return g.add(pw("relu"), g.add(pw("add"), y, z)), mean, inverse


def normalised_backward(g: Graph, dy: Value, y: Value, *others: Value) -> Sequence[Value]:
    """Make the gradients of a relu and of the batch norm before it, from the relu's result."""
    return g.insert(BatchNormBackward(), [g.add(pw("relu_backward"), dy, y), *others]).results


def batch_norm(*shape: int) -> tuple[Sequence[TensorType], Callable[..., Any]]:
    x, p = nhwc(*shape), rows(shape[1], dtype=F32)
    return [x, x, p, p], normalised


def batch_norm_backward(*shape: int) -> tuple[Sequence[TensorType], Callable[..., Any]]:
    x, p = nhwc(*shape), rows(shape[1], dtype=F32)
    return [x, x, x, p, p, p], normalised_backward


def backward_of_norm(g: Graph, dy: Value, x: Value, scale: Value, z: Value) -> Sequence[Value]:
    """Make the gradient of a layer norm in a residual block: the skip connection's gradient is added."""
    dx, *sums = g.insert(LayerNormBackward(), [dy, x, scale]).results
    return g.add(pw("add"), dx, z), *sums


def blocks_of_four_bits(g: Graph, x: Value, scale: Value) -> Value:
    """Make weights of 4 bits wide: each block has a scale, the zero point is 8."""
    centred = g.add(pw("sub"), g.add(Cast(F32), x), g.constant(np.float32(8)))
    return g.add(Cast(F16), g.add(pw("mul"), centred, g.add(Cast(F32), scale)))


def packed_product(dtype: DType, depth: int, columns: int) -> Callable[..., Value]:
    """Make a product with weights of 4 or 8 bits in blocks of 32, with a scale of 16 bits each."""

    def make(g: Graph, x: Value) -> Value:
        codes, scales = np.ones((columns, depth), dtype.numpy), np.full((columns, depth // 32), 0.01, np.float16)
        return g.add(PackedMatMul(32), x, g.constant(codes), g.constant(scales))

    return make


P32, P768 = rows(32), rows(768)
CASES: dict[str, tuple[Sequence[TensorType], Callable[..., Any]]] = {
    "max pool 3x3/2, 256x64x112x112": (
        [nhwc(256, 64, 112, 112)],
        lambda g, x: g.add(MaxPool((3, 3), (2, 2), (1,) * 4, (1, 1)), x),
    ),
    "mean over space, 256x2048x7x7": ([nhwc(256, 2048, 7, 7)], lambda g, x: g.add(Reduce("mean", (2, 3)), x)),
    "mean over space, 32x96x56x56": ([nhwc(32, 96, 56, 56)], lambda g, x: g.add(Reduce("mean", (2, 3)), x)),
    "depthwise 3x3, 32x96x112x112": ([nhwc(32, 96, 112, 112)], depthwise(96, 3, 1)),
    "depthwise 3x3/2, 32x96x112x112": ([nhwc(32, 96, 112, 112)], depthwise(96, 3, 2)),
    "depthwise 5x5, 32x240x28x28": ([nhwc(32, 240, 28, 28)], depthwise(240, 5, 1)),
    "depthwise 7x7, 32x96x56x56": ([nhwc(32, 96, 56, 56)], depthwise(96, 7, 1)),
    "attention, 2x8x4096x40": ([rows(2, 8, 4096, 40)] * 3, lambda g, *x: g.add(Attention(0.158), *x)),
    "attention in training, 32x12x197x64": (
        [rows(32, 12, 197, 64)] * 3,
        lambda g, *x: g.insert(AttentionTrain(0.125), x).results,
    ),
    "attention backward, 32x12x197x64": (
        [*[rows(32, 12, 197, 64)] * 5, rows(32, 12, 197, 1, dtype=F32)],
        lambda g, *x: g.insert(AttentionBackward(0.125), x).results,
    ),
    "few filters 7x7, 1x32x256x256": ([nhwc(1, 32, 256, 256)], few_filters(3, 32, 7)),
    "few filters 7x7, 32x32x256x256": ([nhwc(32, 32, 256, 256)], few_filters(3, 32, 7)),
    "few channels 7x7, 32x4x256x256 to 32": ([nhwc(32, 4, 256, 256)], convolution(32, 4, 7)),
    "few channels 7x7/2, 32x4x224x224 to 64": ([nhwc(32, 4, 224, 224)], convolution(64, 4, 7, 2)),
    "few pixels 3x3, 1x256x14x14 to 256": ([nhwc(1, 256, 14, 14)], convolution(256, 256, 3)),
    "few pixels 3x3, 1x512x7x7 to 512": ([nhwc(1, 512, 7, 7)], convolution(512, 512, 3)),
    "few pixels 1x1, 1x2048x7x7 to 512": ([nhwc(1, 2048, 7, 7)], convolution(512, 2048, 1)),
    "gate, 32x96x56x56": ([nhwc(32, 96, 56, 56), rows(32, 96, 1, 1)], lambda g, x, y: g.add(pw("mul"), x, y)),
    "add, relu, 256x64x56x56": ([nhwc(256, 64, 56, 56)] * 2, residual),
    "lstm, 400x16x512": (
        [rows(400, 16, 2048), rows(1, 2048, 512), rows(1, 16, 512), rows(1, 16, 512)],
        lambda g, *v: g.insert(Recurrent("lstm"), v).results,
    ),
    "softmax, 4096x1000": ([rows(4096, 1000)], lambda g, x: g.add(Softmax(), x)),
    "softmax, 384x197x197": ([rows(384, 197, 197)], lambda g, x: g.add(Softmax(), x)),
    "layer norm, 6304x768": ([rows(6304, 768), P768, P768], lambda g, *v: g.add(LayerNorm(), *v)),
    "layer norm backward, 6304x768": ([rows(6304, 768)] * 2 + [P768, rows(6304, 768)], backward_of_norm),
    "max pool 3x3/2 backward, 64x64x112x112": (
        [nhwc(64, 64, 56, 56), nhwc(64, 64, 112, 112)],
        lambda g, *v: g.add(pw("relu_backward"), g.add(MaxPoolBackward((3, 3), (2, 2), (1,) * 4, (1, 1)), *v), v[1]),
    ),
    "instance norm, 1x32x256x256": ([nhwc(1, 32, 256, 256), P32, P32], lambda g, *v: g.add(InstanceNorm(), *v)),
    "instance norm, 32x32x256x256": ([nhwc(32, 32, 256, 256), P32, P32], lambda g, *v: g.add(InstanceNorm(), *v)),
    "group norm, 2x320x64x64": ([nhwc(2, 320, 64, 64), rows(320), rows(320)], lambda g, *v: g.add(GroupNorm(32), *v)),
    "group norm, 8x320x64x64": ([nhwc(8, 320, 64, 64), rows(320), rows(320)], lambda g, *v: g.add(GroupNorm(32), *v)),
    "batch norm, add, relu, 64x256x56x56": batch_norm(64, 256, 56, 56),
    "batch norm, add, relu, 64x64x56x56": batch_norm(64, 64, 56, 56),
    "batch norm, add, relu, 64x2048x7x7": batch_norm(64, 2048, 7, 7),
    "relu and batch norm backward, 64x256x56x56": batch_norm_backward(64, 256, 56, 56),
    "relu and batch norm backward, 64x64x56x56": batch_norm_backward(64, 64, 56, 56),
    "relu and batch norm backward, 64x2048x7x7": batch_norm_backward(64, 2048, 7, 7),
    "image to 4 channels last, 256x3x224x224": ([rows(256, 3, 224, 224, dtype=F32)], image),
    "to rows, 32x256x56x56": ([nhwc(32, 256, 56, 56)], lambda g, x: g.insert(Relayout(()), [x]).result),
    "heads, 32x197x12x64": ([rows(32, 197, 12, 64)], lambda g, x: g.add(Transpose((0, 2, 1, 3)), x)),
    "upsampling by 2, 8x64x128x128": (
        [nhwc(8, 64, 128, 128)],
        lambda g, x: g.add(Resize((8, 64, 256, 256), (1.0, 1.0, 2.0, 2.0), "nearest"), x),
    ),
    "bilinear by 2, 8x64x128x128": (
        [nhwc(8, 64, 128, 128)],
        lambda g, x: g.add(Resize((8, 64, 256, 256), (1.0, 1.0, 2.0, 2.0), "linear"), x),
    ),
    "concat, 32x(256+32)x28x28": ([nhwc(32, 256, 28, 28), nhwc(32, 32, 28, 28)], lambda g, *v: g.add(Concat(1), *v)),
    "embedding, 32x128 of 30522x768": (
        [rows(30522, 768), rows(32, 128, dtype=DType.I64)],
        lambda g, *v: g.add(Gather(0), *v),
    ),
    "f8e4m3 to f16, 4096x14336": ([rows(4096, 14336, dtype=DType.F8E4M3)], lambda g, x: g.add(Cast(F16), x)),
    "f16 to f8e4m3, 4096x14336": ([rows(4096, 14336)], lambda g, x: g.add(Cast(DType.F8E4M3), x)),
    "f8e5m2 to f16, 4096x14336": ([rows(4096, 14336, dtype=DType.F8E5M2)], lambda g, x: g.add(Cast(F16), x)),
    "u4 by 32 to f16, 4096x14336": (
        [rows(4096, 448, 32, dtype=DType.U4), rows(4096, 448, 1)],
        blocks_of_four_bits,
    ),
    "4-bit product, 1x14336 to 4096": ([rows(1, 14336)], packed_product(DType.I4, 14336, 4096)),
    "4-bit product, 1x4096 to 14336": ([rows(1, 4096)], packed_product(DType.I4, 4096, 14336)),
    "4-bit product, 1x4096 to 1024": ([rows(1, 4096)], packed_product(DType.I4, 4096, 1024)),
    "4-bit product, 16x4096 to 14336": ([rows(16, 4096)], packed_product(DType.I4, 4096, 14336)),
    "8-bit product, 1x4096 to 14336": ([rows(1, 4096)], packed_product(DType.I8, 4096, 14336)),
}


def kernel_of(types: Sequence[TensorType], make: Callable[..., Any], target: Target) -> tuple[Kernel | None, int]:
    """Return the kernel of a case, and how many bytes it must read and write."""
    graph = Graph("case")
    made = make(graph, *(graph.add_input(f"x{i}", type) for i, type in enumerate(types)))
    graph.set_outputs([made] if isinstance(made, Value) else list(made))
    nodes = [node for node in graph.nodes if all(v.literal is None for v in node.results)]
    outputs = outputs_of(nodes)
    read = [v for v in inputs_of(nodes) if not any(isinstance(n.op, Gather) and n.operands[0] is v for n in nodes)]
    moved = sum(code_bytes(v.type.size, v.type.dtype) for v in (*read, *outputs))
    return find(nodes, outputs, GpuFigures.of(target)), moved


def main() -> None:
    options = parser(__doc__, "leave_one_out.json")
    options.add_argument("names", nargs="*", help="parts of the cases' names, or MODEL:BATCH")
    options.add_argument("--leave-one-out", action="store_true", help="measure models, and write the result file")
    given = options.parse_args()
    if given.leave_one_out:
        leave_one_out.main(given.names, given.output, given.commit)
    else:
        time_kernels(given.names)


def time_kernels(wanted: Sequence[str]) -> None:
    """Print the median time of each kernel, its limit, and the times of its variants."""
    from fusec.gpu.launch.kernel_launcher import Launcher
    from fusec.gpu.measure.random_inputs import RandomInputs

    target, launcher = device.detect(), Launcher()
    if target is None:
        raise SystemExit("this machine has no GPU")
    time_us = cold_timer(RUNS)
    print(f"{'':42} {'us':>8} {'limit':>8} {'share':>6}  us of other variants")
    for name, (types, make) in CASES.items():
        if wanted and not any(part in name for part in wanted):
            continue
        kernel, nbytes = kernel_of(types, make, target)
        assert kernel is not None, name
        launcher.compile((kernel, *kernel.others))
        running = [each for each in (kernel, *kernel.others) if launcher.runs(each)]
        us, *others = (time_us(launcher.bind(each, RandomInputs().memory)) for each in running)
        limit = 1e6 * nbytes / target.memory_bandwidth
        print(f"{name:42} {us:8.1f} {limit:8.1f} {limit / us:6.1%}  {' '.join(f'{t:.1f}' for t in others)}", flush=True)


if __name__ == "__main__":
    main()

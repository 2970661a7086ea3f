"""Generate sequences of small products, as in a squeeze-and-excitation.

Each sample is one vector. The products are 1x1 convolutions of one pixel, or matmuls, with pointwise ops between them.
A block handles a sample: vectors are passed from layer to layer in shared memory, weights are read from the cache.
cuDNN would launch two to five kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import (
    C_TYPES,
    MAX_VECTOR,
    Arguments,
    Kernel,
    Launch,
    ceil_div,
    compute_type,
    with_variants,
)
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, can_generate
from fusec.gpu.kernels.convolution.depthwise import depthwise_with_mean
from fusec.gpu.kernels.convolution.depthwise_source import DepthwiseSource
from fusec.ir import Node, TensorType, Value
from fusec.ops import Conv, MatMul, Reduce
from fusec.system.dataclass import dataclass

THREADS = 512
WARPS = THREADS // 32
SIDE_BY_SIDE = 4  # sums that a warp computes together
SPLITS = (1, 2, 4)  # blocks that share the last layer of a sample; each computes the layers before it
MANY_WEIGHT_BYTES = 64 << 10  # with more, two blocks share the last layer, because reading takes long
MAX_WEIGHT_BYTES = 1 << 20  # of all layers, because each block reads them all
MAX_SHARED_BYTES = 40 << 10  # of vectors between layers, of the 48 KB of static memory that every GPU has
MIN_SAMPLES, MAX_SAMPLES = 1, 512  # bounds of what is tried; tuning times the kernel on each GPU
_CUDA = cuda_template(__package__, "squeeze_excite.cuh")


@dataclass
class Layer:
    """A product and the pointwise ops after it; the first layer has pointwise ops only."""

    product: Node | None
    x: Value
    nodes: list[Node] = field(default_factory=list[Node])

    @property
    def y(self) -> Value:
        return self.x if self.product is None else self.product.result

    @property
    def made(self) -> set[Value]:
        return {self.y, *(v for node in self.nodes for v in node.results)}


def squeeze_excite(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of at least two small products in sequence; None for other steps."""
    name = "+".join(node.op.name for node in nodes)
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, Reduce)), None)
    if at is not None:
        return _after_depthwise(nodes, at + 1, outputs, figures)
    layers = match_layers(nodes)
    if layers is None:
        return None
    splits = [n for n in SPLITS if n == 1 or not any(v in layer.made for layer in layers[:-1] for v in outputs)]
    return with_variants(Kernel(name, (SqueezeExciteSource(layers, outputs, n).launch(),)) for n in splits)


def _after_depthwise(nodes: Sequence[Node], end: int, outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel that includes the depthwise convolution whose mean over space is the first vector.

    end: the number of nodes up to the mean.
    """
    nodes, rest = nodes[:end], nodes[end:]
    mean, made = nodes[-1].result, {v for node in nodes for v in node.results}
    layers = match_layers(rest) if nodes[0].op.name == "conv" else None
    if layers is None or layers[0].x is not mean:
        return None
    begin = {*layers[0].nodes, layers[1].product}  # they read the mean, and nothing else of the convolution
    if any(v in made and (v is not mean or node not in begin) for node in rest for v in node.operands):
        return None
    kernels: list[Kernel] = []
    stored = [v for v in outputs if v not in made or v is mean]
    shared = any(v in layer.made for layer in layers[:-1] for v in stored)
    splits = 2 if _weight_bytes(layers) > MANY_WEIGHT_BYTES and not shared else 1
    name = "+".join(["depthwise", *(node.op.name for node in (*nodes[1:], *rest))])
    stored_before = [v for v in outputs if v in made and v is not mean]
    for blocks in depthwise_with_mean(nodes, stored_before, figures):
        launch = SqueezeExciteSource(layers, stored, splits, blocks).launch()
        kernels.append(Kernel(name, (blocks.elements(), launch), blocks.scratch_bytes))
    return with_variants(kernels)


def match_layers(nodes: Sequence[Node], least: int = 2) -> list[Layer] | None:
    """Sort the nodes into layers, each of which reads the vector of the layer before; None if there is no such order.

    least: the fewest products.
    """
    layers: list[Layer] = []
    for node in nodes:
        if is_small_product(node):
            x = node.operands[0]
            if not layers:
                layers.append(Layer(None, x))
            if x not in layers[-1].made or any(v in layer.made for layer in layers for v in node.operands[1:]):
                return None
            layers.append(Layer(node, x))
        elif not can_generate(node) or node.op.name == "gen_index":
            return None
        elif not layers:
            layers.append(Layer(None, node.operands[0], [node]))
        else:
            layers[-1].nodes.append(node)
    if sum(layer.product is not None for layer in layers) < least:
        return None
    for number, layer in enumerate(layers):
        earlier = {v for before in layers[:number] for v in before.made}
        earlier.discard(layers[0].x)  # the first vector is read from memory
        if any(v in earlier for node in layer.nodes for v in node.operands):
            return None
        if any(v.type.shape != layer.y.type.shape for node in layer.nodes for v in node.results):
            return None
    vectors = sum(math.prod(layer.y.type.shape[1:]) * 8 for layer in layers[:-1])
    fits = _weight_bytes(layers) <= MAX_WEIGHT_BYTES and vectors <= MAX_SHARED_BYTES
    return layers if fits and MIN_SAMPLES <= layers[0].x.type.shape[0] <= MAX_SAMPLES else None


def _weight_bytes(layers: Sequence[Layer]) -> int:
    return sum(layer.product.operands[1].type.nbytes for layer in layers if layer.product is not None)


def is_small_product(node: Node) -> bool:
    """Tell if a node maps one vector of each sample to another, by constant weights."""
    if not isinstance(node.op, (Conv, MatMul)):
        return False
    x, w = (v.type for v in node.operands)
    if node.operands[1].literal is None or not x.dtype.is_float or not x.size or not w.size or x.dtype not in C_TYPES:
        return False
    if isinstance(node.op, MatMul):
        return x.rank == 2 and w.rank == 2
    alone = math.prod(x.shape[2:]) == math.prod(w.shape[2:]) == 1 and not any(node.op.pads)
    return alone and node.op.groups == 1


@dataclass(frozen=True, eq=False)
class SqueezeExciteSource:
    """The launch of a sequence.

    splits: blocks that share the last layer of a sample.
    begin: the depthwise convolution whose sums in scratch memory give the first vector.
    """

    layers: Sequence[Layer]
    outputs: Sequence[Value]
    splits: int
    begin: DepthwiseSource | None = None

    def launch(self) -> Launch:
        first, *rest = self.layers
        samples, arguments = first.x.type.shape[0], Arguments()
        cuda = _CUDA.bind(TYPE=self.kind, THREADS=THREADS, WARPS=WARPS, SAMPLES=samples, SIZE=first.x.type.shape[1])
        begin = self._first_layer(cuda, arguments)
        layers = [self._layer(cuda, number, arguments) for number in range(len(rest))]
        sizes = [layer.y.type.shape[1] for layer in self.layers[:-1]]
        lines = cuda(
            "kernel",
            SPLITS=self.splits,
            SPLIT=[f"const u32 split = blockIdx.x % {self.splits}u;"] if self.splits > 1 else [],
            VECTORS=[f"__shared__ {self.kind} in{number}[{size}];" for number, size in enumerate(sizes)],
            LAYERS=[line for layer in layers for line in layer],
            **begin,
        )
        return arguments.launch("gate", lines, samples * self.splits, THREADS)

    @property
    def kind(self) -> str:
        return compute_type(self.layers[0].x.type.dtype)

    def _first_layer(self, cuda: CudaTemplate, arguments: Arguments) -> dict[str, list[str]]:
        """Compute the input of the first product in shared memory."""
        layer, mean = self.layers[0], list[str]()
        code = PointwiseCode(_space(layer.x.type), arguments, "f")
        if self.begin is not None:
            sums = arguments.scratch(f"const {self.begin.kind}")
            mean = cuda("merge_sums", TYPE=self.begin.kind, CHUNKS=self.begin.chunks, SUMS=sums)
            code.define(layer.x, self.begin.total("sum"))
        return {"MEAN": mean, "FIRST_LAYER": self._finish(code, 0, "c1")}

    def _layer(self, cuda: CudaTemplate, number: int, arguments: Arguments) -> list[str]:
        """Compute the vector of layer `number` + 1 from that of the layer before."""
        layer, last = self.layers[number + 1], number + 2 == len(self.layers)
        depth, columns, splits = layer.x.type.shape[1], layer.y.type.shape[1], self.splits if last else 1
        by_rows = depth >= columns
        weights, depth_stride, result_stride, type = _weights(layer, arguments, inner="k" if by_rows else "o")
        if by_rows:
            vector = _vector(depth, depth_stride, result_stride, max(1, depth // 32))
            items, space = columns, _space(layer.y.type)
        else:
            vector = _vector(columns, result_stride, depth_stride, max(1, columns // (THREADS * splits // 2)))
            items, space = columns // vector, _space(layer.y.type, vector)
        own = ceil_div(items, splits)
        each = min(SIDE_BY_SIDE, ceil_div(own, WARPS))
        code = PointwiseCode(space, arguments, f"g{number}_")
        code.define(layer.y, "acc[u]" if by_rows else "acc[j]")
        return cuda(
            "by_rows" if by_rows else "by_columns",
            STORED=C_TYPES[type.dtype],
            INPUT=f"in{number}",
            BEGIN=f"split * {own}u" if splits > 1 else "0u",
            LIMIT=f"(split + 1) * {own}u < {items}u ? (split + 1) * {own}u : {items}u" if splits > 1 else f"{items}u",
            VECTOR=vector,
            DEPTH=depth,
            STEP=32 * vector,
            EACH=each,
            TURNS=ceil_div(own, WARPS * each),  # the same for all warps, because they shuffle together
            WEIGHTS=weights,
            RESULT_STRIDE=result_stride,
            DEPTH_STRIDE=depth_stride,
            FINISH=self._finish(code, number + 1, "c1" if by_rows else "c1 + j"),
        )

    def _finish(self, code: PointwiseCode, number: int, place: str) -> list[str]:
        """Apply the pointwise ops of a layer, store its outputs, and pass its vector to the next layer."""
        layer, following = self.layers[number], self.layers[number + 1 :]
        code.compute(layer.nodes, (v for v in self.outputs if v in layer.made))
        if following:
            code.body.append(f"in{number}[{place}] = {code.get(following[0].x)};")
        return code.lines()


def _space(type: TensorType, vector: int = 1) -> Space:
    return Space(type.shape, ("c0", "c1", *[None] * (type.rank - 2)), 1, vector, packs=False)


def _weights(layer: Layer, arguments: Arguments, inner: str) -> tuple[str, int, int, TensorType]:
    """Return pointer, strides along depth and results, and type of the weights.

    inner: the contiguous dim.
    """
    assert layer.product is not None
    w = layer.product.operands[1]
    is_matrix = isinstance(layer.product.op, MatMul)
    dims = {"k": 0, "o": 1} if is_matrix else {"o": 0, "k": 1}
    others = [d for d in range(w.type.rank) if d != dims[inner]]
    type = w.type.with_order((*reversed(others), dims[inner]))
    return arguments.read(w, type), type.strides[dims["k"]], type.strides[dims["o"]], type


def _vector(size: int, own: int, other: int, most: int) -> int:
    """Return how many weights one load moves: as many as divide all strides, at most `most`."""
    vector = 1
    while own == 1 and 2 * vector <= min(most, MAX_VECTOR) and size % (2 * vector) == 0 and other % (2 * vector) == 0:
        vector *= 2
    return vector

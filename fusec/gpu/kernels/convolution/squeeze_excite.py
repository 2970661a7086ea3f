"""Generate sequences of small products, as in the gate of a squeeze-and-excitation.

Each sample is one vector. The products are 1x1 convolutions of one pixel, or matmuls, with pointwise ops between them.
A
block handles a sample: vectors are passed from layer to layer in shared memory, weights are read from the cache. cuDNN
would launch two to five kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fusec.gpu.kernels.codegen.kernel import C_TYPES, MAX_VECTOR, Arguments, Kernel, Launch, ceil_div, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, can_generate
from fusec.gpu.kernels.convolution.depthwise import depthwise_with_mean
from fusec.gpu.kernels.convolution.depthwise_source import DepthwiseSource
from fusec.ir import Node, TensorType, Value
from fusec.ops import Conv, MatMul, Reduce

THREADS = 512
WARPS = THREADS // 32
SIDE_BY_SIDE = 4  # sums that a warp computes together
SPLITS = (1, 2, 4)  # blocks that share the last layer of a sample; each computes the layers before it
MANY_WEIGHT_BYTES = 64 << 10  # with more, two blocks share the last layer, because reading takes long
MAX_WEIGHT_BYTES = 1 << 20  # of all layers, because each block reads them all
MAX_SHARED_BYTES = 40 << 10  # of vectors between layers
MIN_SAMPLES, MAX_SAMPLES = 1, 512


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


def gate(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """Return the kernel of at least two small products in sequence; None for other steps."""
    name = "+".join(node.op.name for node in nodes)
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, Reduce)), None)
    if at is not None:
        return _after_depthwise(name, nodes[: at + 1], nodes[at + 1 :], outputs)
    layers = match_layers(nodes)
    if layers is None:
        return None
    splits = [n for n in SPLITS if n == 1 or not any(v in layer.made for layer in layers[:-1] for v in outputs)]
    kernels = [Kernel(name, (SqueezeExciteSource(layers, outputs, n).launch(),)) for n in splits]
    return replace(kernels[0], others=tuple(kernels[1:]))


def _after_depthwise(name: str, nodes: Sequence[Node], rest: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """Return the kernel that includes the depthwise convolution whose mean over space is the first vector."""
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
    for blocks in depthwise_with_mean(nodes, [v for v in outputs if v in made and v is not mean]):
        launch = SqueezeExciteSource(layers, stored, splits, blocks).launch()
        kernels.append(Kernel(f"depthwise+{name[5:]}", (blocks.elements(), launch), blocks.scratch_bytes))
    return replace(kernels[0], others=tuple(kernels[1:])) if kernels else None


def match_layers(nodes: Sequence[Node], least: int = 2) -> list[Layer] | None:
    """Sort the nodes into layers, each with the vector of the one before; None if they are no such sequence.

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
        earlier = {v for before in layers[:number] for v in before.made} - {
            layers[0].x
        }  # the first vector is read from memory
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
    splits: int = 1
    begin: DepthwiseSource | None = None

    def launch(self) -> Launch:
        arguments = Arguments()
        lines = [f"const u32 c0 = blockIdx.x / {self.splits}u;"]
        if self.splits > 1:
            lines.append(f"const u32 split = blockIdx.x % {self.splits}u;")
        lines.append("const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;")
        first, *rest = self.layers
        for number, layer in enumerate(self.layers[:-1]):
            lines.append(f"__shared__ {self.kind} in{number}[{layer.y.type.shape[1]}];")
        lines += self._first(first, rest[0].x, arguments)
        for number, layer in enumerate(rest):
            lines.append("__syncthreads();")
            follower = rest[number + 1].x if number + 1 < len(rest) else None
            k, columns = layer.x.type.shape[1], layer.y.type.shape[1]
            along = self._across if k >= columns else self._down
            lines += ["{", *(f"  {line}" for line in along(number, layer, follower, arguments)), "}"]
        samples = first.x.type.shape[0]
        return arguments.launch("gate", lines, samples * self.splits, THREADS)

    @property
    def kind(self) -> str:
        return compute_type(self.layers[0].x.type.dtype)

    def _first(self, layer: Layer, x: Value, arguments: Arguments) -> list[str]:
        """Compute the input of the first product in shared memory."""
        size = layer.x.type.shape[1]
        code = PointwiseCode(_space(layer.x.type), arguments, "f")
        lines = [f"for (u32 c1 = threadIdx.x; c1 < {size}u; c1 += {THREADS}u) {{"]
        if self.begin is not None:
            blocks, samples = self.begin, layer.x.type.shape[0]
            pointer = arguments.scratch(f"const {blocks.kind}")
            lines += [f"  {blocks.kind} sum = 0;", "  #pragma unroll 8"]
            at = f"(s * {samples}u + c0) * {size}u + c1"
            lines.append(f"  for (u32 s = 0; s < {blocks.chunks}u; ++s) sum += {pointer}[{at}];")
            code.define(layer.x, blocks.total("sum"))
        self._finish(code, layer, x, "in0[c1]", [v for v in self.outputs if v in layer.made])
        return [*lines, *(f"  {line}" for line in code.lines()), "}"]

    def _finish(self, code: PointwiseCode, layer: Layer, x: Value | None, place: str, outputs: Sequence[Value]) -> None:
        """Apply the pointwise ops of a layer, store its outputs, and pass its vector to the next layer."""
        for node in layer.nodes:
            code.apply(node)
        for value in outputs:
            code.store(value)
        if x is not None:
            code.body.append(f"{place} = {code.get(x)};")

    def _across(self, number: int, layer: Layer, x: Value | None, arguments: Arguments) -> list[str]:
        """Multiply by rows: a warp computes a result, and some others at the same time."""
        k, columns = layer.x.type.shape[1], layer.y.type.shape[1]
        weights, step_k, step_o, type = _weights(layer, arguments, inner="k")
        vector = _vector(k, step_k, step_o, max(1, k // 32))
        own = ceil_div(columns, self.splits) if x is None else columns
        begin = f"split * {own}u + " if x is None and self.splits > 1 else ""
        limit = f"(split + 1) * {own}u < {columns}u ? (split + 1) * {own}u : {columns}u" if begin else f"{columns}u"
        each = min(SIDE_BY_SIDE, ceil_div(own, WARPS))
        kind, c_type = self.kind, C_TYPES[type.dtype]
        lines = [f"const u32 limit = {limit};"]
        turns = ceil_div(own, WARPS * each)  # the same for all warps, because they shuffle together
        lines.append(f"for (u32 turn = 0; turn < {turns}u; ++turn) {{")
        lines.append(f"  const u32 first = {begin}turn * {WARPS * each}u + warp;")
        lines += [f"  {kind} acc[{each}];", f"  for (int u = 0; u < {each}; ++u) acc[u] = 0;"]
        lines += ["  #pragma unroll 4", f"  for (u32 k = lane * {vector}u; k < {k}u; k += {32 * vector}u) {{"]
        lines += ["    #pragma unroll", f"    for (int u = 0; u < {each}; ++u) {{"]
        lines.append(f"      const u32 o = first + u * {WARPS}u < limit ? first + u * {WARPS}u : limit - 1;")
        pack = f"Pack<{c_type}, {vector}>"
        at = f"{weights} + (o * {step_o} + k * {step_k})"
        lines.append(f"      const {pack} w = load_pack<{c_type}, {vector}>({at});")
        lines.append(f"      for (int j = 0; j < {vector}; ++j) acc[u] += wide(w.v[j]) * in{number}[k + j];")
        lines += ["    }", "  }", f"  reduce_threads<{THREADS}, 32, 1, {each}>(acc, ({kind}*)0, Add());"]
        lines += ["  #pragma unroll", f"  for (int u = 0; u < {each}; ++u) {{"]
        lines += [f"    const u32 c1 = first + u * {WARPS}u;", "    if (lane != 0 || c1 >= limit) continue;"]
        code = PointwiseCode(_space(layer.y.type), arguments, f"g{number}_")
        code.define(layer.y, "acc[u]")
        self._finish(code, layer, x, f"in{number + 1}[c1]", [v for v in self.outputs if v in layer.made])
        return [*lines, *(f"    {line}" for line in code.lines()), "  }", "}"]

    def _down(self, number: int, layer: Layer, x: Value | None, arguments: Arguments) -> list[str]:
        """Multiply by columns: a thread computes some neighbouring results."""
        k, columns = layer.x.type.shape[1], layer.y.type.shape[1]
        weights, step_k, step_o, type = _weights(layer, arguments, inner="o")
        splits = self.splits if x is None else 1
        vector = _vector(columns, step_o, step_k, max(1, columns // (THREADS * splits // 2)))
        packs = columns // vector
        own = ceil_div(packs, splits)
        kind, c_type = self.kind, C_TYPES[type.dtype]
        begin = f"split * {own}u + " if splits > 1 else ""
        limit = f"(split + 1) * {own}u < {packs}u ? (split + 1) * {own}u : {packs}u" if begin else f"{packs}u"
        lines = [f"const u32 limit = {limit};"]
        lines.append(f"for (u32 pack = {begin}threadIdx.x; pack < limit; pack += {THREADS}u) {{")
        lines += [f"  const u32 c1 = pack * {vector}u;", f"  {kind} acc[{vector}];"]
        lines.append(f"  for (int j = 0; j < {vector}; ++j) acc[j] = 0;")
        lines += ["  #pragma unroll 16", f"  for (u32 k = 0; k < {k}u; ++k) {{"]
        at = f"{weights} + (c1 * {step_o} + k * {step_k})"
        lines.append(f"    const Pack<{c_type}, {vector}> w = load_pack<{c_type}, {vector}>({at});")
        lines.append(f"    for (int j = 0; j < {vector}; ++j) acc[j] += wide(w.v[j]) * in{number}[k];")
        lines.append("  }")
        code = PointwiseCode(_space(layer.y.type, vector), arguments, f"g{number}_")
        code.define(layer.y, "acc[j]")
        self._finish(code, layer, x, f"in{number + 1}[c1 + j]", [v for v in self.outputs if v in layer.made])
        return [*lines, *(f"  {line}" for line in code.lines()), "}"]


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

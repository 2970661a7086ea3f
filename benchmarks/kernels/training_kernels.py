"""Time the norms and the attention of training steps: each variant of fusec's kernel, and each plan of cuDNN.

Usage: python -m benchmarks.kernels.training_kernels [--dry] [--plans 6] [PART OF A NAME ...]
The shapes are those of ResNet-50 with batch 64 and ViT-B/16 with batch 32. All times are with a cold cache. `--dry`
needs no GPU: it lists the launches of the kernels, and counts the plans that cuDNN offers for an H200.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.common.cold_cache import cold_timer
from benchmarks.kernels.kernel_cases import backward_of_norm, nhwc, normalised, normalised_backward, rows
from fusec.errors import LoweringError
from fusec.gpu import device
from fusec.gpu.kernels import GpuFigures, Kernel, find
from fusec.ir import DType, Graph, TensorType, Value
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.ops import AttentionBackward, AttentionTrain, BatchNormBackward, BatchNormTrain, Reduce, pw
from fusec.schedule.program import inputs_of, outputs_of
from fusec.targets.target import Target, load

RUNS = 15
F32 = DType.F32
IMAGES = ((256, 14), (64, 56), (1024, 14), (512, 28), (2048, 7), (256, 56))  # channels and side, batch 64
TOKENS, WIDTH, HEADS, FEATURES = 197, 768, 12, 64
NORM_GRADIENT = "layer norm backward with given statistics"
Make = Callable[..., Any]
Timer = Callable[[Callable[[], object]], float]


def cases() -> Iterator[tuple[str, Sequence[TensorType], Make]]:
    """Yield names, types of operands, and functions that build a step."""
    for channels, side in IMAGES:
        x, p = nhwc(64, channels, side, side), rows(channels, dtype=F32)
        name = f"64x{channels}x{side}x{side}"
        yield f"batch norm, relu, {name}", [x, p, p], _with_relu
        yield f"batch norm, add, relu, {name}", [x, x, p, p], normalised
        yield f"batch norm backward, {name}", [x, x, p, p, p], _gradients
        yield f"batch norm backward with its mask, {name}", [x, x, p, p, p, p], _masked
        yield f"two batch norms of one gradient, {name}", [x, x, x, *[p] * 6], _two_gradients
        yield f"relu backward, {name}", [x, x], lambda g, dy, y: g.add(pw("relu_backward"), dy, y)
        yield f"relu and batch norm backward, {name}", [x, x, x, p, p, p], _stored_gradients
    tokens = rows(32 * TOKENS, WIDTH)
    yield f"layer norm backward, add, {32 * TOKENS}x{WIDTH}", [tokens, tokens, rows(WIDTH), tokens], backward_of_norm
    yield f"layer norm backward, add, reduce, {32 * TOKENS}x{WIDTH}", [tokens, tokens, rows(WIDTH), tokens], _with_sum
    head, sums = rows(32, HEADS, TOKENS, FEATURES), rows(32, HEADS, TOKENS, 1, dtype=F32)
    name = f"32x{HEADS}x{TOKENS}x{FEATURES}"
    yield f"attention in training, {name}", [head] * 3, lambda g, *v: g.insert(AttentionTrain(0.125), v).results
    yield (
        f"attention backward, {name}",
        [*[head] * 5, sums],
        lambda g, *v: g.insert(AttentionBackward(0.125), v).results,
    )
    hidden = rows(32 * TOKENS, 4 * WIDTH)
    yield f"gelu backward, reduce, {32 * TOKENS}x{4 * WIDTH}", [hidden] * 2, _gelu_and_sum


def _with_relu(g: Graph, x: Value, scale: Value, bias: Value) -> Sequence[Value]:
    y, mean, inverse = g.insert(BatchNormTrain(), [x, scale, bias]).results
    return g.add(pw("relu"), y), mean, inverse


def _gradients(g: Graph, *operands: Value) -> Sequence[Value]:
    return g.insert(BatchNormBackward(), operands).results


def _two_gradients(g: Graph, dy: Value, x: Value, z: Value, *numbers: Value) -> Sequence[Value]:
    return *_gradients(g, dy, x, *numbers[:3]), *_gradients(g, dy, z, *numbers[3:])


def _masked(g: Graph, *operands: Value) -> Sequence[Value]:
    return g.insert(BatchNormBackward(True), operands).results


def _stored_gradients(g: Graph, dy: Value, y: Value, *others: Value) -> Sequence[Value]:
    """Make the gradients of a relu and of the norm before it; the relu's gradient is stored for the residual."""
    dx, *sums = normalised_backward(g, dy, y, *others)
    assert dx.node is not None
    return dx, dx.node.operands[0], *sums


def _with_sum(g: Graph, *operands: Value) -> Sequence[Value]:
    dx, *sums = backward_of_norm(g, *operands)
    return dx, g.add(Reduce("sum", (0,), False), dx), *sums


def _gelu_and_sum(g: Graph, dy: Value, x: Value) -> Sequence[Value]:
    dx = g.add(pw("gelu_backward"), dy, x)
    return dx, g.add(Reduce("sum", (0,), False), dx)


def built(types: Sequence[TensorType], make: Make) -> Graph:
    graph = Graph("step")
    made = make(graph, *(graph.add_input(f"x{i}", type) for i, type in enumerate(types)))
    graph.set_outputs([made] if isinstance(made, Value) else list(made))
    return graph


def kernel_and_bytes(graph: Graph, target: Target) -> tuple[Kernel | None, int]:
    """Return the kernel of a step, and the bytes that it must read and write."""
    nodes = list(graph.nodes)
    outputs = outputs_of(nodes)
    moved = sum(value.type.device_bytes for value in (*inputs_of(nodes), *outputs))
    return find(nodes, outputs, GpuFigures.of(target)), moved


def cudnn_graph(graph: Graph) -> CudnnGraph | None:
    """Return the step as a cuDNN graph; None if cuDNN does not run it as one."""
    try:
        return lower(graph).graph
    except LoweringError:
        return None


def planned(graph: CudnnGraph, **where: Any) -> Any:
    """Return the frontend graph with its list of plans; None if cuDNN refuses it."""
    import cudnn

    from fusec.gpu.cudnn.plans.emit import emit

    pygraph = emit(graph, **where)
    try:
        pygraph.validate()
        pygraph.build_operation_graph()
        pygraph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
        return None
    return pygraph


def norm_gradient(**where: Any) -> tuple[Any, dict[int, tuple[int, ...]]]:
    """Plan cuDNN's gradients of layer norm, which fusec does not lower: they read the statistics of each row.

    Returns the frontend graph, and the shapes of its tensors by uid; those from 5 on are outputs.
    """
    import cudnn

    half, single = cudnn.data_type.HALF, cudnn.data_type.FLOAT
    g = cudnn.pygraph(io_data_type=half, intermediate_data_type=single, compute_data_type=single, **where)
    rows, row, column = (32 * TOKENS, WIDTH, 1, 1), (1, WIDTH, 1, 1), (32 * TOKENS, 1, 1, 1)
    shapes = dict(enumerate((rows, rows, row, column, column, rows, row, row)))
    given = [
        g.tensor(dim=list(shape), stride=_strides(shape), data_type=single if shape == column else half, uid=uid)
        for uid, shape in list(shapes.items())[:5]
    ]
    names = ("grad", "input", "scale", "mean", "inv_variance")
    made = g.layernorm_backward(**dict(zip(names, given, strict=True)), compute_data_type=single)
    for uid, result in enumerate(made, 5):
        shape = list(shapes[uid])
        result.set_uid(uid).set_dim(shape).set_stride(_strides(shapes[uid])).set_data_type(half).set_output(True)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return g, shapes


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Return the strides of rows of columns, as channels last has them."""
    return [shape[1], 1, shape[1], shape[1]]


def time_norm_gradient(handle: Any, time_us: Timer) -> Mapping[str, float]:
    """Return the times of cuDNN's plans for the gradients of layer norm, by name."""
    import cupy

    pygraph, shapes = norm_gradient(handle=handle)
    arrays = {uid: cupy.random.standard_normal(shape).astype(cupy.float32) for uid, shape in shapes.items()}
    arrays = {uid: a if uid in (3, 4) else a.astype(cupy.float16) for uid, a in arrays.items()}
    pack = {uid: array.data.ptr for uid, array in arrays.items()}
    return times_of(pygraph, pack, pygraph.get_execution_plan_count(), handle, time_us)


def time_plans(graph: CudnnGraph, most: int, handle: Any, time_us: Timer) -> Mapping[str, float]:
    """Return the times of the first plans, by name. most: plans to time. handle: of cuDNN."""
    import numpy as np

    from fusec.gpu.measure.random_inputs import random_data

    pygraph = planned(graph, handle=handle)
    if pygraph is None:
        return {}
    arrays = {t.uid: random_data(t) for t in (*graph.inputs, *graph.outputs)}
    scalars = {t.uid: np.full(1, t.value, t.dtype.numpy) for t in graph.tensors if t.value is not None}
    pack = {uid: array.data.ptr for uid, array in arrays.items()}
    pack |= {uid: scalar.ctypes.data for uid, scalar in scalars.items()}
    return times_of(pygraph, pack, most, handle, time_us)


def times_of(pygraph: Any, pack: Mapping[int, int], most: int, handle: Any, time_us: Timer) -> Mapping[str, float]:
    """Build and time the first plans of a frontend graph. pack: addresses by uid."""
    import cudnn
    import cupy

    found: dict[str, float] = {}
    for place in range(min(pygraph.get_execution_plan_count(), most)):
        try:
            pygraph.build_plan_at_index(place)
            room = cupy.empty(max(1, pygraph.get_workspace_size_plan_at_index(place)), cupy.uint8)
            run = partial(pygraph.execute_plan_at_index, dict(pack), room.data.ptr, place, handle)
            found[pygraph.get_plan_name_at_index(place)] = time_us(run)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
            continue  # not every plan that cuDNN lists can be built
    return found


def list_cases(wanted: Sequence[str]) -> None:
    """Print the launches of each kernel's variants, and how many plans cuDNN offers."""
    import cudnn

    from fusec.gpu.cudnn.without_driver.deviceless import bring_up

    target = load("h200")
    bring_up(target.sm)
    for name, types, make in cases():
        if wanted and not any(part in name for part in wanted):
            continue
        graph = built(types, make)
        kernel, moved = kernel_and_bytes(graph, target)
        variants = [] if kernel is None else [kernel, *kernel.others]
        lowered = cudnn_graph(graph)
        pygraph = None if lowered is None else planned(lowered, target=target)
        plans = 0 if pygraph is None else pygraph.get_execution_plan_count()
        limit = 1e6 * moved / target.memory_bandwidth
        shapes = [" + ".join(f"{launch.grid}x{launch.block}" for launch in each.launches) for each in variants]
        print(f"{name:52} limit {limit:6.1f}  cuDNN {cudnn.backend_version()}: {plans} plans  {'; '.join(shapes)}")
    where = {"device_property": cudnn.create_device_properties(target.properties), "sm_version": target.sm}
    print(f"{NORM_GRADIENT:52} cuDNN: {norm_gradient(**where)[0].get_execution_plan_count()} plans")


def time_cases(wanted: Sequence[str], plans: int) -> None:
    """Print a row for each case: limit, the kernel's variants, and the fastest of cuDNN's plans."""
    import cudnn
    import cupy

    from fusec.gpu.launch.kernel_launcher import Launcher
    from fusec.gpu.measure.random_inputs import RandomInputs

    target, launcher = device.detect(), Launcher()
    if target is None:
        raise SystemExit("this machine has no GPU")
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, cupy.cuda.get_current_stream().ptr)
    time_us = cold_timer(RUNS)
    print(f"{'':52} {'limit':>7} {'kernel':>7} {'cuDNN':>7}  us; variants of the kernel; plans of cuDNN")
    for name, types, make in cases():
        if wanted and not any(part in name for part in wanted):
            continue
        graph = built(types, make)
        kernel, moved = kernel_and_bytes(graph, target)
        variants: list[float] = []
        if kernel is not None:
            launcher.compile((kernel, *kernel.others))
            running = [each for each in (kernel, *kernel.others) if launcher.runs(each)]
            variants = [time_us(launcher.bind(each, RandomInputs().memory)) for each in running]
        lowered = cudnn_graph(graph)
        times = {} if lowered is None else time_plans(lowered, plans, handle, time_us)
        best = min(times, key=times.__getitem__, default="")
        limit = 1e6 * moved / target.memory_bandwidth
        numbers = [f"{t:.1f}" if t else "-" for t in (limit, min(variants, default=0.0), times.get(best, 0.0))]
        row = f"{name:52} " + " ".join(f"{text:>7}" for text in numbers)
        print(f"{row}  {' '.join(f'{t:.1f}' for t in variants)}; {best} of {len(times)}", flush=True)
    for plan, us in time_norm_gradient(handle, time_us).items():
        print(f"{NORM_GRADIENT:52} {'-':>7} {'-':>7} {us:7.1f}  {plan}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="parts of the cases' names")
    options.add_argument("--plans", type=int, default=6, help="plans of cuDNN to time for each step, at most")
    options.add_argument("--dry", action="store_true", help="list only, without a GPU")
    given = options.parse_args()
    if given.dry:
        list_cases(given.names)
    else:
        time_cases(given.names, given.plans)


if __name__ == "__main__":
    main()

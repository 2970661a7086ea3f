"""Compare several GPUs of one machine with one of them: ResNet-50, inference and training.

Usage: python -m benchmarks.serving.several_gpus [pool|dask|train|overlap ...]
pool: batches through `fusec.pool`, from and to arrays of this process. dask: a folder of .npy files through
`fusec.dask.map_folder`. train: `fusec.data_parallel`; one GPU runs the undivided program, and for the losses the whole
batch. overlap: the same, with gradients that are sent while the backward pass goes on. Writes
benchmarks/results/scale.json: cases that are not measured again keep their rows. --dry runs small models on the CPU,
and measures nothing of worth.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import fusec
from benchmarks.common.result_files import KEYS, gpu, parser, write_row
from examples.models import light, randomised
from examples.training_models import training_step
from fusec.scale.communicator import Communicator
from fusec.scale.devices import HOST, gpus

CASES = ("pool", "dask", "train", "overlap")
TOLERANCE = 2e-2  # relative, of a loss
STEPS = 5  # whose losses are compared
ROUNDS = 5


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    batches: of a round of the pool. files, rows: the folder for Dask. steps: of a round of training.
    budget_s: seconds to time plans, per compilation.
    """

    devices: Sequence[str]
    model: str = "resnet50"
    batch: int = 64
    side: int = 224
    batches: int = 400
    files: int = 32
    rows: int = 1024
    steps: int = 20
    budget_s: float = float("inf")


# inference -----------------------------------------------------------------------------------------------


def inference_model(folder: Path, sizes: Sizes) -> Path:
    """Write ResNet-50 with random weights for fp16 images, or a small network for a dry run."""
    if sizes.model == "resnet50":
        made = randomised(onnx.load(light("resnet50")), seed=1)
        for tensor in made.graph.initializer:
            if tensor.data_type == TensorProto.INT64:  # the shape [1, 2048] before the last layer
                array = numpy_helper.to_array(tensor).copy()
                array[0] = -1
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        (images,) = [v for v in made.graph.input if v.name not in {t.name for t in made.graph.initializer}]
        name = images.name
        for node in made.graph.node:
            for place, operand in enumerate(node.input):
                if operand == name:
                    node.input[place] = "images in fp32"
        made.graph.node.insert(0, helper.make_node("Cast", [name], ["images in fp32"], to=TensorProto.FLOAT))
        made.graph.output[0].type.tensor_type.shape.dim[0].dim_value = sizes.batch
    else:
        weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
        nodes = [
            helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT),
            helper.make_node("Conv", ["y", "w"], ["z"]),
            helper.make_node("GlobalAveragePool", ["z"], ["out"]),
        ]
        out = helper.make_tensor_value_info("out", TensorProto.FLOAT, [sizes.batch, 4, 1, 1])
        first = helper.make_tensor_value_info("x", TensorProto.FLOAT16, [1, 3, 1, 1])
        graph = helper.make_graph(nodes, "g", [first], [out], [numpy_helper.from_array(weight, "w")])
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
        images = made.graph.input[0]
    tensor = images.type.tensor_type
    tensor.elem_type = TensorProto.FLOAT16
    del tensor.shape.dim[:]
    for size in (sizes.batch, 3, sizes.side, sizes.side):
        tensor.shape.dim.add().dim_value = size
    path = folder / "model.onnx"
    onnx.save(made, path)
    return path


def options_of(sizes: Sizes) -> dict[str, Any]:
    return {} if sizes.devices[0] in HOST else {"precision": "fp16", "budget": sizes.budget_s}


def pool_rate(model: Path, devices: Sequence[str], sizes: Sizes) -> tuple[float, np.ndarray[Any, Any]]:
    """Return images a second (median of rounds), and the first result."""
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((sizes.batch, 3, sizes.side, sizes.side)).astype(np.float16) for _ in range(8)]
    with fusec.pool(model, devices=devices, **options_of(sizes)) as pool:
        first = next(pool.map(batches))
        seconds: list[float] = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in pool.map(batches[i % 8] for i in range(sizes.batches)):
                pass
            seconds.append(time.perf_counter() - start)
    return sizes.batches * sizes.batch / statistics.median(seconds), first


def pool_case(sizes: Sizes, folder: Path) -> dict[str, Any]:
    model = inference_model(folder, sizes)
    one, first = pool_rate(model, sizes.devices[:1], sizes)
    several, same = pool_rate(model, sizes.devices, sizes)
    error = float(np.linalg.norm((first - same).astype(np.float64)) / np.linalg.norm(first.astype(np.float64)))
    return {"one_images_per_s": one, "images_per_s": several, "error": error, "ok": error < TOLERANCE}


def dask_case(sizes: Sizes, folder: Path) -> dict[str, Any]:
    from dask.distributed import Client

    import fusec.dask

    model, rng = inference_model(folder, sizes), np.random.default_rng(0)
    for number in range(sizes.files):
        (folder / "in").mkdir(exist_ok=True)
        rows = rng.standard_normal((sizes.rows, 3, sizes.side, sizes.side), np.float32).astype(np.float16)
        np.save(folder / "in" / f"{number:03}.npy", rows)
    rates: list[float] = []
    for devices in (sizes.devices[:1], sizes.devices):
        with fusec.dask.gpu_cluster(devices) as cluster, Client(cluster):
            seconds: list[float] = []
            for number in range(3):  # the first loads the model in each worker
                out = folder / f"out-{len(devices)}-{number}"
                start = time.perf_counter()
                files = fusec.dask.map_folder(folder / "in", out, model, **options_of(sizes))
                seconds.append(time.perf_counter() - start)
            rates.append(sizes.files * sizes.rows / min(seconds[1:]))
    whole = len(files) == sizes.files and all(len(np.load(path)) == sizes.rows for path in files)
    return {"one_images_per_s": rates[0], "images_per_s": rates[1], "ok": whole}


# training ------------------------------------------------------------------------------------------------


def first_values(builder: fusec.Builder) -> dict[str, np.ndarray[Any, Any]]:
    """Draw weights for a training step, the same on all workers."""
    rng, found = np.random.default_rng(0), dict[str, np.ndarray[Any, Any]]()
    for value in builder.graph().inputs:
        if builder.parameters.get(value.name, 0) is not None or " as " in value.name:
            continue
        shape = value.type.shape
        if len(shape) > 1:
            array = rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
        else:
            array = np.full(shape, 1.0 if value.name.endswith(("weight", "var")) else 0.0)
        found[value.name] = array.astype(value.type.dtype.numpy)
    return found


def train_worker(communicator: Communicator, sizes: dict[str, Any], batch: int, how: str) -> dict[str, Any]:
    """Train one worker on its part of each batch.

    how: `undivided` is one program, on one GPU; `divided` two programs with a reduction between them; `overlapped`
        sends gradients earlier.
    Returns the losses of the first steps, the milliseconds of a step, and those of the reduction alone.
    """
    setup = Sizes(**sizes)
    small = {"blocks": (1, 1), "width": 8} if setup.model != "resnet50" else {}
    on_host = setup.devices[0] in HOST
    options: dict[str, Any] = {"target": "cpu"} if on_host else {"budget": setup.budget_s}
    builder = training_step("resnet50", batch, setup.side, **small)
    values = first_values(builder)
    divided = how != "undivided"
    if divided:
        step: Any = fusec.data_parallel(builder, communicator, overlap=how == "overlapped", **options)
    else:
        step = fusec.compile(builder, **options)
    step.bind(**values)
    mine, data = slice(communicator.rank * batch, (communicator.rank + 1) * batch), []
    for number in range(STEPS):
        rng = np.random.default_rng(number)
        whole = batch * communicator.size
        images = rng.standard_normal((whole, 3, setup.side, setup.side), np.float32).astype(np.float16)
        data.append((images[mine], rng.integers(0, 1000, whole)[mine]))
    if not on_host:
        import cupy

        data = [(cupy.asarray(images), cupy.asarray(labels)) for images, labels in data]
    losses = [float(step.step(images=images, labels=labels)) for images, labels in data]
    if divided:
        losses = [step.average(loss) for loss in losses]

    def timed(run: Any) -> float:
        rounds: list[float] = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            result: Any = None
            for number in range(setup.steps):
                result = run(number)
            if not on_host:
                cupy.cuda.get_current_stream().synchronize()
            del result
            rounds.append(1e3 * (time.perf_counter() - start) / setup.steps)
        return statistics.median(rounds)

    images, labels = data[0]
    ms = timed(lambda number: step.step(images=images, labels=labels))
    reduce_ms = timed(lambda number: [communicator.mean(b.memory) for b in step.buckets]) if divided else 0.0
    early = [step.early, len(step.buckets)] if divided else []
    return {"losses": losses, "ms": ms, "reduce_ms": reduce_ms, "early": early}


def train_case(sizes: Sizes, folder: Path, how: str = "divided") -> dict[str, Any]:
    setup, count = dict(sizes.__dict__), len(sizes.devices)

    def run(devices: Sequence[str], batch: int, how: str) -> dict[str, Any]:
        arguments = {"sizes": setup, "batch": batch, "how": how}
        return fusec.run_workers("benchmarks.serving.several_gpus:train_worker", devices, arguments)[0]

    one = run(sizes.devices[:1], sizes.batch, "undivided")
    split = run(sizes.devices[:1], sizes.batch, how)
    whole = run(sizes.devices[:1], sizes.batch * count, "undivided")
    several = run(sizes.devices, sizes.batch, how)
    error = float(np.max(np.abs(np.subtract(several["losses"], whole["losses"]) / np.array(whole["losses"]))))
    return {
        "one_images_per_s": 1e3 * sizes.batch / one["ms"],
        "one_split_images_per_s": 1e3 * sizes.batch / split["ms"],
        "images_per_s": 1e3 * sizes.batch * count / several["ms"],
        "reduce_ms": several["reduce_ms"],
        "early_buckets": several["early"],
        "losses": several["losses"],
        "whole_batch_losses": whole["losses"],
        "error": error,
        "ok": error < TOLERANCE,
    }


def main() -> int:
    options = parser(__doc__, "scale.json", budget=True)
    options.add_argument("cases", nargs="*", default=CASES, help=f"of {', '.join(CASES)}")
    options.add_argument("--devices", nargs="+", help="such as cuda:0 cuda:1; default: all")
    options.add_argument("--dry", action="store_true", help="small models on the CPU; writes no result")
    given = options.parse_args()
    devices = given.devices or [f"cuda:{i}" for i in range(len(gpus()))]
    sizes = Sizes(devices, budget_s=given.budget)
    if given.dry:
        sizes = Sizes(given.devices or ["cpu", "cpu"], "small", 4, 32, batches=20, files=4, rows=8, steps=2)
    measure = {
        "pool": pool_case,
        "dask": dask_case,
        "train": train_case,
        "overlap": partial(train_case, how="overlapped"),
    }
    good = True
    for name in given.cases:
        with tempfile.TemporaryDirectory() as folder:
            found = measure[name](sizes, Path(folder))
        row = {"case": name, "model": sizes.model, "batch": sizes.batch, "devices": len(sizes.devices), **found}
        row["over_one"] = row["images_per_s"] / row["one_images_per_s"]
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        good = good and row["ok"]
        if not given.dry:
            write_row(given.output, gpu(), given.commit, row, KEYS["scale.json"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

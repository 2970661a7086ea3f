"""Compare several GPUs of one machine with one of them: ResNet-50, inference and training.

Usage: python -m benchmarks.serving.several_gpus [pool|bytes|train|overlap|dask|prepare ...]
pool: batches through `fusec.pool`, from arrays of this process, and (`shared`) from arrays that lie in `input_buffers`.
bytes: the same with images in uint8. train: `fusec.data_parallel`; one GPU runs the undivided program, and for the
losses the whole batch. overlap: the same, with gradients that are sent while the backward pass goes on. dask: a folder
of .npy files of such images through `fusec.dask.map_folder`.

First the programs of these parts are compiled, different ones on different GPUs, so that later processes find the
choices in the cache; `prepare` alone does only that. A figure is printed as soon as it is known, and goes to the row of
its part in benchmarks/results/scale.json. Parts that are not measured again keep their rows. A part that fails or takes
longer than `--part-seconds` is reported with the place where it was, and the next one begins. --dry runs small models
on the CPU, and measures nothing of worth.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import fusec
from benchmarks.common.attempt import TooLongError, within
from benchmarks.common.live_rows import LiveRows
from benchmarks.common.result_files import KEYS, gpu, parser
from examples.models import light, randomised
from examples.training_models import training_step
from fusec.gpu.device import visible_gpus
from fusec.scale.communicator import Communicator
from fusec.scale.devices import HOST

CASES = ("pool", "bytes", "train", "overlap", "dask")
TOLERANCE = 2e-2  # relative, of a loss
STEPS = 5  # whose losses are compared
ROUNDS = 5
GRACE_S = 5.0  # to end the workers of a part that takes too long
DISTINCT = 4  # files of the folder for Dask; the others are links to them

Tell = Callable[..., None]  # takes figures of a part by name


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    batches: batches in a round of the pool. files, rows: the folder for Dask. steps: steps in a round of training.
    budget_s: seconds to time plans, per compilation.
    tune: tuning level.
    """

    devices: Sequence[str]
    model: str = "resnet50"
    batch: int = 64
    side: int = 224
    batches: int = 400
    files: int = 576
    rows: int = 1024
    steps: int = 20
    budget_s: float = float("inf")
    tune: str = "quick"


@dataclass(frozen=True)
class Run:
    """The parts of a measurement, their sizes, and what `prepare` found for them."""

    sizes: Sizes
    parts: Sequence[str]
    prepared: dict[str, Any] = field(default_factory=dict[str, Any])


# inference -----------------------------------------------------------------------------------------------


def inference_model(folder: Path, sizes: Sizes, kind: str = "pool") -> Path:
    """Write ResNet-50 with random weights, or a small network for a dry run.

    kind: `bytes` makes a model of images in uint8, which it scales itself; others take fp16.
    """
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
    if kind == "bytes":
        tensor.elem_type = TensorProto.UINT8
        scale_bytes(made)
    del tensor.shape.dim[:]
    for size in (sizes.batch, 3, sizes.side, sizes.side):
        tensor.shape.dim.add().dim_value = size
    path = folder / "model.onnx"
    onnx.save(made, path)
    return path


def scale_bytes(model: onnx.ModelProto) -> None:
    """Let the first cast of a model scale bytes to about -2..2."""
    nodes = model.graph.node
    (cast,) = [node for node in nodes if node.op_type == "Cast"]
    (name,), cast.output[0] = cast.output, "bytes in fp32"
    for constant, value in (("middle", 127.5), ("scale", 1 / 64)):
        model.graph.initializer.append(numpy_helper.from_array(np.float32(value), constant))
    nodes.insert(1, helper.make_node("Sub", ["bytes in fp32", "middle"], ["centred"]))
    nodes.insert(2, helper.make_node("Mul", ["centred", "scale"], [name]))


def options_of(sizes: Sizes) -> dict[str, Any]:
    return {} if sizes.devices[0] in HOST else {"precision": "fp16", "budget": sizes.budget_s}


def pool_rates(
    model: Path, devices: Sequence[str], sizes: Sizes, kind: str
) -> tuple[float, float, np.ndarray[Any, Any]]:
    """Return images a second (medians of rounds), copied and from shared memory, and the first result."""
    rng = np.random.default_rng(0)
    shape = (sizes.batch, 3, sizes.side, sizes.side)
    if kind == "bytes":
        batches = [rng.integers(0, 256, shape, np.uint8) for _ in range(8)]
    else:
        batches = [rng.standard_normal(shape, np.float32).astype(np.float16) for _ in range(8)]
    rates: list[float] = []
    with fusec.pool(model, devices=devices, **options_of(sizes)) as pool:
        shared = [next(iter(pool.input_buffers().values())) for _ in batches]
        for buffer, batch in zip(shared, batches, strict=True):
            buffer[...] = batch
        for source in (batches, shared):
            first, *_ = pool.map(source * len(devices))  # each worker captures its steps
            seconds: list[float] = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                for _ in pool.map(source[i % 8] for i in range(sizes.batches)):
                    pass
                seconds.append(time.perf_counter() - start)
            rates.append(sizes.batches * sizes.batch / statistics.median(seconds))
    return rates[0], rates[1], first


def pool_case(sizes: Sizes, folder: Path, tell: Tell, kind: str) -> bool:
    model = inference_model(folder, sizes, kind)
    one, one_shared, first = pool_rates(model, sizes.devices[:1], sizes, kind)
    tell(one_images_per_s=one, one_shared_images_per_s=one_shared)
    several, shared, same = pool_rates(model, sizes.devices, sizes, kind)
    error = float(np.linalg.norm((first - same).astype(np.float64)) / np.linalg.norm(first.astype(np.float64)))
    tell(images_per_s=several, over_one=several / one, error=error)
    tell(shared_images_per_s=shared, shared_over_one=shared / one_shared)
    return error < TOLERANCE


def write_folders(folder: Path, sizes: Sizes) -> None:
    """Write files of random images in uint8 to `in`. Most are links to a few, because the disk is not what is measured.

    `first` has two for each device: a run of these loads the model in each worker.
    """
    (folder / "in").mkdir()
    (folder / "first").mkdir()
    shape = (sizes.rows, 3, sizes.side, sizes.side)
    rows = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    for number in range(sizes.files):
        path = folder / "in" / f"{number:03}.npy"
        if number < DISTINCT:
            np.save(path, np.roll(rows, number, 0))
        else:
            os.link(folder / "in" / f"{number % DISTINCT:03}.npy", path)
        if number < 2 * len(sizes.devices):
            os.link(path, folder / "first" / path.name)


def dask_case(sizes: Sizes, folder: Path, tell: Tell) -> bool:
    from dask.distributed import Client

    import fusec.dask

    model = inference_model(folder, sizes, "bytes")
    write_folders(folder, sizes)
    tell(files=sizes.files, rows_a_file=sizes.rows)
    rates: list[float] = []
    found: list[np.ndarray[Any, Any]] = []
    for prefix, devices in (("one_", sizes.devices[:1]), ("", sizes.devices)):
        with fusec.dask.gpu_cluster(devices) as cluster, Client(cluster) as client:
            client.wait_for_workers(len(devices))
            seconds: list[float] = []
            for given in ("first", "in", "in"):
                shutil.rmtree(folder / "out", ignore_errors=True)  # its memory is used again
                start = time.perf_counter()
                files = fusec.dask.map_folder(folder / given, folder / "out", model, **options_of(sizes))
                seconds.append(time.perf_counter() - start)
            if len(files) != sizes.files or any(len(np.load(path, mmap_mode="r")) != sizes.rows for path in files):
                return False
            found.append(np.concatenate([np.load(path) for path in files[-DISTINCT:]]))
            rates.append(sizes.files * sizes.rows / min(seconds[1:]))
            tell(**{f"{prefix}images_per_s": rates[-1], f"{prefix}seconds": seconds[1:]})
    one, several = (results.astype(np.float64) for results in found)
    error = float(np.linalg.norm(several - one) / np.linalg.norm(one))
    tell(over_one=rates[1] / rates[0], error=error)
    return error < TOLERANCE


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
    options: dict[str, Any] = {"target": "cpu"} if on_host else {"budget": setup.budget_s, "tune": setup.tune}
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


def trained(sizes: Sizes, devices: Sequence[str], batch: int, how: str, end: float) -> dict[str, Any]:
    """Run `train_worker` on each device, and return what the first one found.

    end: the time (`time.perf_counter`) at which the workers are ended.
    """
    arguments = {"sizes": dict(sizes.__dict__), "batch": batch, "how": how}
    limit = max(1.0, end - time.perf_counter())
    return fusec.run_workers("benchmarks.serving.several_gpus:train_worker", devices, arguments, timeout_s=limit)[0]


def train_case(sizes: Sizes, prepared: dict[str, Any], tell: Tell, how: str, end: float) -> bool:
    """Measure training. prepared: what `prepare` found; it gets the figures of one GPU."""
    if "undivided" not in prepared:
        prepared["undivided"] = trained(sizes, sizes.devices[:1], sizes.batch, "undivided", end)
    one = 1e3 * sizes.batch / prepared["undivided"]["ms"]
    tell(one_images_per_s=one)
    if split := prepared.get("divided"):  # measured while other GPUs compiled
        tell(one_split_images_per_s=1e3 * sizes.batch / split["ms"])
    found = trained(sizes, sizes.devices, sizes.batch, how, end)
    several = 1e3 * sizes.batch * len(sizes.devices) / found["ms"]
    tell(images_per_s=several, over_one=several / one, reduce_ms=found["reduce_ms"], early_buckets=found["early"])
    tell(losses=found["losses"])
    if "whole" not in prepared:
        tell(failed="the losses of the whole batch are not known, so these were compared with nothing")
        return False
    whole = prepared["whole"]["losses"]
    error = float(np.max(np.abs(np.subtract(found["losses"], whole) / np.array(whole))))
    tell(whole_batch_losses=whole, error=error)
    return error < TOLERANCE


# all parts -----------------------------------------------------------------------------------------------


def jobs_of(sizes: Sizes, parts: Sequence[str], folder: Path, end: float) -> dict[str, Callable[[str], Any]]:
    """Return functions that compile the programs of some parts on a device, the most important ones first.

    The program of the whole batch gives losses alone, so its plans are not timed.
    """
    jobs: dict[str, Callable[[str], Any]] = {}
    training = {"train", "overlap", "prepare"} & set(parts)
    if training:
        jobs["divided"] = lambda device: trained(sizes, [device], sizes.batch, "divided", end)
        jobs["undivided"] = lambda device: trained(sizes, [device], sizes.batch, "undivided", end)
    for kind, users in (("pool", {"pool", "prepare"}), ("bytes", {"bytes", "dask", "prepare"})):
        if users & set(parts):
            (folder / kind).mkdir()
            model = inference_model(folder / kind, sizes, kind)
            jobs[kind] = lambda device, model=model: fusec.pool(model, devices=[device], **options_of(sizes)).close()
    if training:
        alone, whole = replace(sizes, tune="none", steps=1), sizes.batch * len(sizes.devices)
        jobs["whole"] = lambda device: trained(alone, [device], whole, "undivided", end)
    return jobs


def prepare(sizes: Sizes, jobs: dict[str, Callable[[str], Any]], tell: Tell, found: dict[str, Any]) -> bool:
    """Compile programs: each device takes the next one when it is free.

    found: gets what the worker of each program found.
    """
    waiting = deque(jobs)

    def work(device: str) -> None:
        while waiting:
            with contextlib.suppress(IndexError):  # another device took the last one
                name = waiting.popleft()
                start = time.perf_counter()
                try:
                    found[name] = jobs[name](device)
                except Exception as error:  # noqa: BLE001  # the other programs may do
                    tell(failed=f"{name}: {error}")
                tell(**{f"{name}_s": time.perf_counter() - start})

    threads = [threading.Thread(target=work, args=(device,), daemon=True) for device in sizes.devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found.keys() == jobs.keys()


def run_part(name: str, run: Run, tell: Tell, end: float) -> bool:
    """Run one of all parts; return if its results are right.

    end: the time (`time.perf_counter`) at which it must be done.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if name == "prepare":
            return prepare(run.sizes, jobs_of(run.sizes, run.parts, Path(folder), end), tell, run.prepared)
        if name in ("train", "overlap"):
            return train_case(run.sizes, run.prepared, tell, "divided" if name == "train" else "overlapped", end)
        if name == "dask":
            return dask_case(run.sizes, Path(folder), tell)
        return pool_case(run.sizes, Path(folder), tell, name)


def main() -> int:
    options = parser(__doc__, "scale.json", budget=True)
    options.add_argument("parts", nargs="*", default=CASES, help=f"of {', '.join((*CASES, 'prepare'))}")
    options.add_argument("--devices", nargs="+", help="such as cuda:0 cuda:1; default: all")
    options.add_argument("--seconds", type=float, default=1e6, help="for all parts; the rest is left out")
    options.add_argument("--part-seconds", type=float, default=1e6, help="for each part")
    options.add_argument("--dry", action="store_true", help="small models on the CPU; writes no result")
    given = options.parse_args()
    if unknown := set(given.parts) - {*CASES, "prepare"}:
        options.error(f"no part is named {', '.join(sorted(unknown))}")
    end = time.perf_counter() + given.seconds
    sizes = Sizes(given.devices or [f"cuda:{i}" for i in range(len(visible_gpus()))], budget_s=given.budget)
    if given.dry:
        sizes = Sizes(given.devices or ["cpu", "cpu"], "small", 4, 32, batches=20, files=6, rows=8, steps=2)
    if not sizes.devices:
        options.error("this machine shows no GPU; --dry runs on the CPU")
    machine = {} if given.dry else gpu()
    rows = LiveRows(None if given.dry else given.output, given.commit, machine, KEYS["scale.json"])
    same = {"model": sizes.model, "batch": sizes.batch, "devices": len(sizes.devices)}
    good, run = True, Run(sizes, given.parts)
    for name in ("prepare", *(name for name in given.parts if name != "prepare")):
        tell, right = partial(rows, name, {} if name == "prepare" else {"case": name, **same}), False
        try:
            limit = max(1e-3, min(given.part_seconds, end - time.perf_counter()))
            with within(limit + GRACE_S):  # workers of training end by themselves at the limit, and say where they were
                right = run_part(name, run, tell, time.perf_counter() + limit)
            tell(ok=right)
        except (Exception, TooLongError):  # noqa: BLE001  # the next part is worth its time
            tell(ok=False, failed=traceback.format_exc(limit=-3).strip()[-1500:])
        good = good and right
    return 0 if good else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # without waiting for a thread of a part that hangs; its processes end with this one

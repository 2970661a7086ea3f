"""Compare several GPUs of one machine with one of them: ResNet-50, inference and training.

Usage: python -m benchmarks.serving.several_gpus [pool|train|overlap|dask|prepare ...]
pool: batches through `fusec.pool`, from and to arrays of this process. train: `fusec.data_parallel`; one GPU runs the
undivided program, and for the losses the whole batch. overlap: the same, with gradients that are sent while the
backward pass goes on. dask: a folder of .npy files through `fusec.dask.map_folder`.

First the programs of these parts are compiled, different ones on different GPUs, so that later processes find the
choices in the cache; `prepare` alone does only that. A figure is printed as soon as it is known, and goes to the row of
its part in benchmarks/results/scale.json. Parts that are not measured again keep their rows. A part that fails or takes
longer than `--part-seconds` is reported, and the next one begins. --dry runs small models on the CPU, and measures
nothing of worth.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from fusec.scale.communicator import Communicator
from fusec.scale.devices import HOST, gpus

CASES = ("pool", "train", "overlap", "dask")
TOLERANCE = 2e-2  # relative, of a loss
STEPS = 5  # whose losses are compared
ROUNDS = 5
DISTINCT = 4  # files of the folder for Dask; the others are links to them

Tell = Callable[..., None]  # takes figures of a part by name


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    batches: of a round of the pool. files, rows: the folder for Dask. steps: of a round of training.
    budget_s: seconds to time plans, per compilation.
    tune: tuning level.
    """

    devices: Sequence[str]
    model: str = "resnet50"
    batch: int = 64
    side: int = 224
    batches: int = 400
    files: int = 32
    rows: int = 512
    steps: int = 20
    budget_s: float = float("inf")
    tune: str = "quick"


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
    shape = (sizes.batch, 3, sizes.side, sizes.side)
    batches = [rng.standard_normal(shape, np.float32).astype(np.float16) for _ in range(8)]
    with fusec.pool(model, devices=devices, **options_of(sizes)) as pool:
        first, *_ = pool.map(batches * len(devices))  # each worker captures its steps
        seconds: list[float] = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in pool.map(batches[i % 8] for i in range(sizes.batches)):
                pass
            seconds.append(time.perf_counter() - start)
    return sizes.batches * sizes.batch / statistics.median(seconds), first


def pool_case(sizes: Sizes, folder: Path, tell: Tell) -> bool:
    model = inference_model(folder, sizes)
    one, first = pool_rate(model, sizes.devices[:1], sizes)
    tell(one_images_per_s=one)
    several, same = pool_rate(model, sizes.devices, sizes)
    error = float(np.linalg.norm((first - same).astype(np.float64)) / np.linalg.norm(first.astype(np.float64)))
    tell(images_per_s=several, over_one=several / one, error=error)
    return error < TOLERANCE


def write_folder(folder: Path, sizes: Sizes) -> None:
    """Write files of random rows. Most are links to a few, because the disk is not what is measured."""
    folder.mkdir()
    shape = (sizes.rows, 3, sizes.side, sizes.side)
    rows = np.random.default_rng(0).standard_normal(shape, np.float32).astype(np.float16)
    for number in range(sizes.files):
        path = folder / f"{number:03}.npy"
        if number < DISTINCT:
            np.save(path, np.roll(rows, number, 0))
        else:
            os.link(folder / f"{number % DISTINCT:03}.npy", path)


def dask_case(sizes: Sizes, folder: Path, tell: Tell) -> bool:
    from dask.distributed import Client

    import fusec.dask

    model = inference_model(folder, sizes)
    write_folder(folder / "in", sizes)
    rates: list[float] = []
    files: list[Path] = []
    for name, devices in (("one_images_per_s", sizes.devices[:1]), ("images_per_s", sizes.devices)):
        with fusec.dask.gpu_cluster(devices) as cluster, Client(cluster) as client:
            client.wait_for_workers(len(devices))
            seconds: list[float] = []
            for number in range(3):  # the first loads the model in each worker
                out = folder / f"out-{len(devices)}-{number}"
                start = time.perf_counter()
                files = fusec.dask.map_folder(folder / "in", out, model, **options_of(sizes))
                seconds.append(time.perf_counter() - start)
            rates.append(sizes.files * sizes.rows / min(seconds[1:]))
            tell(**{name: rates[-1]})
    tell(over_one=rates[1] / rates[0])
    return len(files) == sizes.files and all(len(np.load(path)) == sizes.rows for path in files)


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


def trained(sizes: Sizes, devices: Sequence[str], batch: int, how: str) -> dict[str, Any]:
    """Run `train_worker` on each device, and return what the first one found."""
    arguments = {"sizes": dict(sizes.__dict__), "batch": batch, "how": how}
    return fusec.run_workers("benchmarks.serving.several_gpus:train_worker", devices, arguments)[0]


def train_case(sizes: Sizes, prepared: dict[str, Any], tell: Tell, how: str = "divided") -> bool:
    """Measure training. prepared: what `prepare` found; it gets the figures of one GPU."""
    if "one" not in prepared:
        prepared["one"] = trained(sizes, sizes.devices[:1], sizes.batch, "undivided")
    one = 1e3 * sizes.batch / prepared["one"]["ms"]
    tell(one_images_per_s=one)
    if split := prepared.get("divided"):  # measured while other GPUs compiled
        tell(one_split_images_per_s=1e3 * sizes.batch / split["ms"])
    found = trained(sizes, sizes.devices, sizes.batch, how)
    several = 1e3 * sizes.batch * len(sizes.devices) / found["ms"]
    tell(images_per_s=several, over_one=several / one, reduce_ms=found["reduce_ms"], early_buckets=found["early"])
    tell(losses=found["losses"])
    whole = prepared["whole"]["losses"]
    error = float(np.max(np.abs(np.subtract(found["losses"], whole) / np.array(whole))))
    tell(whole_batch_losses=whole, error=error)
    return error < TOLERANCE


# all parts -----------------------------------------------------------------------------------------------


def prepare(sizes: Sizes, parts: Sequence[str], folder: Path, tell: Tell, found: dict[str, Any]) -> bool:
    """Compile the programs of some parts, as many at a time as there are devices.

    The program of the whole batch gives losses alone, so its plans are not timed.
    found: gets what the worker of each program found.
    """
    alone = replace(sizes, tune="none", steps=1)
    jobs: dict[str, Callable[[str], Any]] = {}
    if {"train", "overlap", "prepare"} & set(parts):
        whole = sizes.batch * len(sizes.devices)
        jobs["divided"] = lambda device: trained(sizes, [device], sizes.batch, "divided")
        jobs["undivided"] = lambda device: trained(sizes, [device], sizes.batch, "undivided")
        jobs["whole"] = lambda device: trained(alone, [device], whole, "undivided")
    if {"pool", "dask", "prepare"} & set(parts):
        model = inference_model(folder, sizes)
        jobs["inference"] = lambda device: fusec.pool(model, devices=[device], **options_of(sizes)).close()
    by_device: dict[str, list[str]] = defaultdict(list)
    for number, name in enumerate(jobs):
        by_device[sizes.devices[number % len(sizes.devices)]].append(name)

    def work(device: str) -> None:
        for name in by_device[device]:
            start = time.perf_counter()
            try:
                found[name] = jobs[name](device)
            except Exception as error:  # noqa: BLE001  # the other programs may do
                tell(failed=f"{name}: {error}")
            tell(**{f"{name}_s": time.perf_counter() - start})

    threads = [threading.Thread(target=work, args=(device,), daemon=True) for device in by_device]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found.keys() == jobs.keys()


def run_part(name: str, sizes: Sizes, parts: Sequence[str], prepared: dict[str, Any], tell: Tell) -> bool:
    """Run one of all parts; return if its results are right."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if name == "prepare":
            return prepare(sizes, parts, Path(folder), tell, prepared)
        if name in ("train", "overlap"):
            return train_case(sizes, prepared, tell, "divided" if name == "train" else "overlapped")
        return (pool_case if name == "pool" else dask_case)(sizes, Path(folder), tell)


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
    sizes = Sizes(given.devices or [f"cuda:{i}" for i in range(len(gpus()))], budget_s=given.budget)
    if given.dry:
        sizes = Sizes(given.devices or ["cpu", "cpu"], "small", 4, 32, batches=20, files=6, rows=8, steps=2)
    if not sizes.devices:
        options.error("this machine shows no GPU; --dry runs on the CPU")
    machine = {} if given.dry else gpu()
    rows = LiveRows(None if given.dry else given.output, given.commit, machine, KEYS["scale.json"])
    same = {"model": sizes.model, "batch": sizes.batch, "devices": len(sizes.devices)}
    good, prepared = True, dict[str, Any]()
    for name in ("prepare", *(name for name in given.parts if name != "prepare")):
        tell, right = partial(rows, name, {} if name == "prepare" else {"case": name, **same}), False
        try:
            with within(max(1e-3, min(given.part_seconds, end - time.perf_counter()))):
                right = run_part(name, sizes, given.parts, prepared, tell)
            tell(ok=right)
        except (Exception, TooLongError):  # noqa: BLE001  # the next part is worth its time
            tell(ok=False, failed=traceback.format_exc(limit=-3).strip()[-1500:])
        good = good and right
    return 0 if good else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # without waiting for a thread of a part that hangs; its processes end with this one

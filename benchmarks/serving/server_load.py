"""Measure `fusec serve` against the executable that it runs: throughput with few images a request, then latency.

Usage: python -m benchmarks.serving.server_load [resnet50 | small …]. On a GPU the default is resnet50 in fp16 with
images of 224²; without one it is a small network in simulation. Images are bytes; preprocessing is part of the model.
The extra `serve` must be installed.

1. The executable alone, with the largest batch: images on the device (on the host in simulation), and on the host.
2. The server at full load: processes with many connections send requests of one image (`--rows`: of several), as fast
   as answers come; the server forms the batches.
3. The server at 70 % of that load: requests at random times. Latency counts from when a request was due.

The case `stub` has a device that only waits, so that the server itself is measured, also without a GPU.

A figure is printed as soon as it is known, and goes to the row of its case in benchmarks/results/serving.json. Cases
that are not measured again keep their rows. `--limit` stops a run that takes too long.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import fusec
from benchmarks.common.attempt import within
from benchmarks.common.live_rows import LiveRows
from benchmarks.common.result_files import KEYS, ROOT, gpu, parser
from benchmarks.serving import stub_device
from examples.models import light, randomised
from fusec.gpu import device

_FRONT_END = ("server.front_end import", "run('front_end')")  # in the command of such a process, the latter with a stub
REGION, REGION_BYTES = "images", 64 << 20  # more than caches hold
LOAD = 0.7  # of the throughput, at which latency is measured


@dataclass(frozen=True)
class Case:
    """A model and how it is served and asked."""

    model: str
    side: int
    batches: tuple[int, ...]
    precision: str


CASES = {
    "resnet50": Case("resnet50", 224, (1, 8, 16, 32, 48, 64), "fp16"),
    "small": Case("small", 64, (1, 2, 4, 8), "fp32"),
    "stub": Case("stub", 224, (1, 8, 16, 32, 48, 64), "fp16"),
}


@dataclass(frozen=True)
class Clients:
    """The load of a server: client processes, their connections and the rows of a request.

    stub_us: microseconds of a row and of a batch, if the server has a device that only waits. options: of the server.
    shared_memory: images are in shared memory, and requests refer to them.
    """

    processes: int
    connections: int
    seconds: float
    front_ends: int
    rows: int = 1
    stub_us: tuple[float, float] | None = None
    options: tuple[str, ...] = ()
    shared_memory: bool = False


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    address: str
    pid: int


@dataclass(frozen=True)
class Requests:
    """A file with whole HTTP requests, one after the other, and their lengths."""

    file: Path
    lengths: list[int]


@dataclass(frozen=True)
class Measured:
    """Answers that clients got.

    answers: rows of time, seconds from when the request was due, seconds that it waited in its client, and status;
        without the first fifth of the time.
    cpu_s: CPU time of a request by where it was used.
    """

    answers: np.ndarray
    cpu_s: Mapping[str, float]

    @property
    def good(self) -> np.ndarray:
        """Return the answers that are no refusals."""
        return self.answers[self.answers[:, 3] == 200]


def with_preprocessing(model: onnx.ModelProto, side: int) -> onnx.ModelProto:
    """Let a network for one float image take any number of images as bytes, and normalise them itself."""
    graph = model.graph
    taken = {tensor.name for tensor in graph.initializer}
    (image,) = (value for value in graph.input if value.name not in taken)
    name = image.name
    graph.input.remove(image)
    graph.input.insert(0, helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", 3, side, side]))
    mean = np.array([123.675, 116.28, 103.53], np.float32).reshape(1, 3, 1, 1)  # of ImageNet, as torchvision has it
    scale = (1 / np.array([58.395, 57.12, 57.375], np.float32)).reshape(1, 3, 1, 1)
    graph.initializer.extend([numpy_helper.from_array(mean, "mean"), numpy_helper.from_array(scale, "scale")])
    if model.ir_version < 4:
        graph.input.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3, 1, 1]) for n in ("mean", "scale"))
    first = [
        helper.make_node("Cast", ["image"], ["as_float"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["as_float", "mean"], ["centred"]),
        helper.make_node("Mul", ["centred", "scale"], [name]),
    ]
    nodes = [*first, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    shapes = {node.input[1] for node in nodes if node.op_type == "Reshape"}
    for tensor in graph.initializer:
        if tensor.name in shapes:
            sizes = numpy_helper.to_array(tensor).copy()
            sizes[0] = -1
            tensor.CopyFrom(numpy_helper.from_array(sizes, tensor.name))
    for value in graph.output:
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    return model


def network(case: Case) -> onnx.ModelProto:
    """Return the network of a case."""
    if case.model == "resnet50":
        return with_preprocessing(randomised(onnx.load(light("resnet50")), 0), case.side)
    rng = np.random.default_rng(0)
    weights = {"w0": (32, 3, 3, 3), **{f"w{i}": (32, 32, 3, 3) for i in range(1, 5)}, "fc": (32, 10)}
    drawn = {n: (rng.standard_normal(s) * np.sqrt(2 / np.prod(s[1:]))).astype(np.float32) for n, s in weights.items()}
    nodes = [
        helper.make_node("Conv", ["x" if i == 0 else f"r{i - 1}", f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1])
        for i in range(5)
    ]
    nodes += [helper.make_node("Relu", [f"c{i}"], [f"r{i}"]) for i in range(5)]
    nodes.sort(key=lambda node: (int(node.output[0][1:]), node.op_type != "Conv"))
    nodes += [
        helper.make_node("GlobalAveragePool", ["r4"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "fc"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, case.side, case.side])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])],
        [numpy_helper.from_array(array, name) for name, array in drawn.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return with_preprocessing(model, case.side)


def compiled(case: Case, folder: Path, tune: str, budget: float) -> Path:
    """Compile and tune a case for all its batches, and return the file."""
    path = folder / f"{case.model}.fusec"
    if case.model == "stub":
        return stub_device.compiled(case.side, case.batches, path)
    sizes = {"N": (case.batches[0], case.batches[-1])}
    made = fusec.compile(
        network(case), precision=case.precision, shapes=sizes, buckets={"N": case.batches}, tune=tune, budget=budget
    )
    made.save(path)
    return path


def images(case: Case, count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, 3, case.side, case.side)).astype(np.uint8)


def alone(case: Case, path: Path, seconds: float) -> dict[str, Any]:
    """Time the executable with its largest batch, and return images a second, and the answer for these images."""
    predictor = fusec.Predictor(path).load()
    executable: Any = predictor.executable
    size = case.batches[-1]
    x = images(case, size)
    program = executable.at({"image": x.shape})
    xp, finish = program.backend.xp, program.backend.finish
    row: dict[str, Any] = {"device": executable.device}
    on_device = x if xp is np else xp.asarray(x)
    for name, array in (("device", on_device), ("host", x)):
        row[f"{name}_images_s"] = size / seconds_of(
            lambda array=array: program.run(None, {"image": array}), finish, seconds
        )
    row["answer"] = predictor({"image": x})[executable.outputs[0].name]
    return row


def seconds_of(run: Any, finish: Any, seconds: float) -> float:
    """Return the seconds of a run, of many in a row."""
    for _ in range(2):
        run()
    finish()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        run()
        count += 1
        if count % 16 == 0:
            finish()
    finish()
    return (time.perf_counter() - start) / count


@contextmanager
def served(path: Path, clients: Clients) -> Generator[Server]:
    """Run `fusec serve`, and yield its address and its first process."""
    options = ["--port", "0", "--front-ends", str(clients.front_ends), *clients.options]
    options += ["--shared-memory"] * clients.shared_memory
    serve = ["fusec", "serve", str(path)]
    if clients.stub_us:
        serve = ["benchmarks.serving.stub_device", str(path), *(str(us / 1e6) for us in clients.stub_us)]
    command = [sys.executable, "-m", *serve, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield Server(urlparse(process.stdout.readline().split()[-1]).netloc, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        if process.stdout is not None:
            process.stdout.close()


def request_bytes(model: str, output: str, x: np.ndarray, place: int | None = None) -> bytes:
    """Return a whole HTTP request for some images, binary or at a place in the shared memory."""
    given = {"binary_data_size": x.nbytes}
    if place is not None:
        given = {"shared_memory_region": REGION, "shared_memory_byte_size": x.nbytes, "shared_memory_offset": place}
    tensor = {"name": "image", "shape": list(x.shape), "datatype": "UINT8", "parameters": given}
    wanted = {"name": output, "parameters": {"binary_data": True}}
    text = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
    body = text if place is not None else text + x.tobytes()
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(body)}\r\nInference-Header-Content-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def requests_of(case: Case, output: str, clients: Clients, address: str) -> Generator[Requests]:
    """Write the requests to a file. With shared memory, each of some hundred refers to images of its own."""
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.NamedTemporaryFile()).name)
        places: list[int | None] = [None]
        x = images(case, case.batches[-1])[: clients.rows]
        if clients.shared_memory:
            count = max(1, REGION_BYTES // x.nbytes)
            block = SharedMemory(create=True, size=count * x.nbytes)
            stack.callback(block.unlink)
            stack.callback(block.close)
            for number in range(count):
                block.buf[number * x.nbytes : (number + 1) * x.nbytes] = x.tobytes()
            places = [number * x.nbytes for number in range(count)]
            register(address, block.name, count * x.nbytes)
        written = [request_bytes(case.model, output, x, place) for place in places]
        file.write_bytes(b"".join(written))
        yield Requests(file, [len(each) for each in written])


def register(address: str, key: str, nbytes: int) -> None:
    """Tell a server about shared memory."""
    body = json.dumps({"key": key, "offset": 0, "byte_size": nbytes})
    connection = http.client.HTTPConnection(address)
    connection.request("POST", f"/v2/systemsharedmemory/region/{REGION}/register", body)
    reply = connection.getresponse()
    if reply.status != 200:
        raise SystemExit(reply.read().decode())
    connection.close()


def loaded(server: Server, requests: Requests, clients: Clients, rate: float = 0.0) -> Measured:
    """Load a server. rate: requests a second; 0: as many as are answered."""
    host, port = server.address.split(":")
    start = time.monotonic() + 0.6 + 0.2 * clients.processes
    load = {"host": host, "port": int(port), "connections": clients.connections}
    load |= {"request": str(requests.file), "lengths": requests.lengths}
    load |= {"start": start, "seconds": clients.seconds, "rate": rate / clients.processes}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.load_client", json.dumps({**load, "seed": seed})],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for seed in range(clients.processes)
    ]
    before = cpu_seconds(server.pid)
    told = [process.communicate(timeout=clients.seconds + 120)[0] for process in processes]
    after = cpu_seconds(server.pid)
    if any(process.returncode for process in processes):
        raise SystemExit("a client failed")
    reports = [json.loads(text) for text in told]
    answers = np.array([answer for report in reports for answer in report["answers"]]).reshape(-1, 4)
    cpu = {part: after[part] - before[part] for part in after}
    cpu["clients"] = sum(report["cpu_s"] for report in reports)
    own = answers[(answers[:, 0] >= start + 0.2 * clients.seconds) & (answers[:, 0] <= start + clients.seconds)]
    return Measured(own, {part: seconds / max(1, len(answers)) for part, seconds in cpu.items()})


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the CPU time of the processes of a server, by what they do."""
    found = {"front_ends": 0.0, "workers": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            folder = Path("/proc") / child
            is_front_end = any(text in (folder / "cmdline").read_bytes().decode() for text in _FRONT_END)
            part = "front_ends" if is_front_end else "workers"
            ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
            found[part] += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return found


def measured(case: Case, path: Path, clients: Clients, figures: Mapping[str, Any], tell: Callable[..., None]) -> None:
    """Measure one case. figures: of the executable alone. tell: takes figures by name."""
    own = dict(figures)
    if clients.stub_us:
        a_row, a_batch = clients.stub_us
        speed = 1e6 * case.batches[-1] / (a_batch + a_row * case.batches[-1])
        own |= {"device": "stub", "device_images_s": speed, "host_images_s": speed}
    answer = own.pop("answer")[: clients.rows]
    tell(precision=case.precision, side=case.side, **own)
    tell(front_ends=clients.front_ends, clients=clients.processes, connections=clients.connections)
    output = "y" if case.model in ("small", "stub") else fusec.Predictor(path, warm_up=False).outputs[0].name
    window_s = 0.8 * clients.seconds
    with served(path, clients) as server, requests_of(case, output, clients, server.address) as requests:
        tell(error=error(case, server.address, requests, answer))
        full = loaded(server, requests, clients)
        rate = clients.rows * len(full.good) / window_s
        tell(images_s=rate, of_device=rate / own["device_images_s"], of_host=rate / own["host_images_s"])
        tell(**{f"full_{name}": value for name, value in quantiles(full).items()})
        tell(**{f"{part}_cpu_us": 1e6 * seconds for part, seconds in full.cpu_s.items()})
        at_load = loaded(server, requests, clients, LOAD * rate / clients.rows)
    latency = quantiles(at_load)
    tell(**{f"load_{name}": value for name, value in latency.items()})
    tell(
        load_images_s=clients.rows * len(at_load.answers) / window_s,
        load_p99_in_client_ms=1e3 * float(np.quantile(at_load.good[:, 2], 0.99)),
        p99_of_median=latency["p99_ms"] / latency["median_ms"],
        refused=sum(len(each.answers) - len(each.good) for each in (full, at_load)),
    )


def quantiles(measured: Measured) -> dict[str, float]:
    """Return median and 99th percentile of the latency in milliseconds."""
    times = measured.good[:, 1] * 1e3
    if not times.size:
        raise SystemExit("no request was answered within the time of the measurement: give more --seconds")
    return {"median_ms": float(np.median(times)), "p99_ms": float(np.quantile(times, 0.99))}


def error(case: Case, address: str, requests: Requests, answer: np.ndarray) -> float:
    """Return the relative distance of a served answer from the executable's."""
    head, _, body = requests.file.read_bytes()[: requests.lengths[0]].partition(b"\r\n\r\n")
    headers = dict(line.decode().split(": ", 1) for line in head.split(b"\r\n")[1:])
    connection = http.client.HTTPConnection(address)
    connection.request("POST", f"/v2/models/{case.model}/infer", body, headers)
    reply = connection.getresponse()
    data = reply.read()
    got = np.frombuffer(data[int(reply.headers["Inference-Header-Content-Length"]) :], answer.dtype).astype(np.float64)
    connection.close()
    want = answer.reshape(-1).astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def machine() -> Mapping[str, Any]:
    """Name the GPU, or the CPU that simulates."""
    if device.device_name() is not None:
        return gpu()
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}


def main() -> int:
    options = parser(__doc__, "serving.json", budget=True)
    options.add_argument("cases", nargs="*", help=", ".join(CASES))
    options.add_argument("--tune", default="quick")
    options.add_argument("--processes", type=int, default=max(1, min(6, (os.cpu_count() or 1) // 3)), help="clients")
    options.add_argument("--connections", type=int, default=0, help="of each client; default: five batches in all")
    options.add_argument("--rows", type=int, nargs="+", default=[1], help="images of a request: a run for each number")
    options.add_argument("--batches", type=int, nargs="+", help="sizes to compile for; the last is the largest batch")
    options.add_argument("--limit", type=float, default=0.0, help="stop after so many seconds; 0: no limit")
    options.add_argument("--front-ends", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    options.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    options.add_argument("--file", type=Path, help="a .fusec file of the case, in place of compiling it")
    options.add_argument(
        "--stub-us", type=float, nargs=2, metavar=("ROW", "BATCH"), default=(25.0, 100.0), help="times of the case stub"
    )
    options.add_argument("--shared-memory", action="store_true", help="images are in shared memory of the clients")
    options.add_argument("--option", action="append", default=[], help="of fusec serve, as --option=--delay-ms=1")
    given = options.parse_args()
    on_gpu = device.device_name() is not None
    output = None if given.cases == ["stub"] else given.output  # a stub is no result
    rows = LiveRows(output, given.commit, machine(), KEYS["serving.json"])
    with tempfile.TemporaryDirectory() as folder, within(given.limit):
        for name in given.cases or ["resnet50" if on_gpu else "small"]:
            case = replace(CASES[name], batches=tuple(given.batches or CASES[name].batches))
            start = time.perf_counter()
            path = given.file or compiled(case, Path(folder), given.tune, given.budget)
            rows(name, {}, compile_s=time.perf_counter() - start)
            own = alone(case, path, given.seconds / 2)
            for count in given.rows:
                connections = given.connections or max(2, -(-5 * case.batches[-1] // (given.processes * count)))
                stub_us = tuple(given.stub_us) if name == "stub" else None
                served_as = (given.front_ends, count, stub_us, tuple(given.option), given.shared_memory)
                clients = Clients(given.processes, connections, given.seconds, *served_as)
                key = {"model": name, "batch": case.batches[-1], "rows": count, "shared_memory": given.shared_memory}
                measured(case, path, clients, own, partial(rows, f"{name}, requests of {count}", key))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Send requests to a server from several processes, and read their reports."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np

from benchmarks.common.result_files import ROOT
from benchmarks.serving.served_models import Case, images
from benchmarks.serving.server_process import REGION, Clients, Server, cpu_seconds, killed_at_end, register

REGION_BYTES = 64 << 20  # more than caches hold


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


def loaded(server: Server, requests: Requests, clients: Clients, rate: float = 0.0) -> Measured:
    """Load a server. rate: requests a second; 0: as many as are answered."""
    host, port = server.address.split(":")
    start = time.monotonic() + 0.6 + 0.2 * clients.processes
    load = {"host": host, "port": int(port), "connections": clients.connections}
    load |= {"request": str(requests.file), "lengths": requests.lengths}
    load |= {"start": start, "seconds": clients.seconds, "rate": rate / clients.processes}
    processes: list[subprocess.Popen[str]] = []
    with killed_at_end(processes):
        for seed in range(clients.processes):
            command = [sys.executable, "-m", "benchmarks.serving.load_client", json.dumps({**load, "seed": seed})]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        before = cpu_seconds(server.pid)
        texts = [process.communicate(timeout=clients.seconds + 120)[0] for process in processes]
        after = cpu_seconds(server.pid)
    if any(process.returncode for process in processes):
        raise SystemExit("a client failed")
    reports = [json.loads(text) for text in texts]
    answers = np.array([answer for report in reports for answer in report["answers"]]).reshape(-1, 4)
    cpu = {part: after[part] - before[part] for part in after}
    cpu["clients"] = sum(report["cpu_s"] for report in reports)
    own = answers[(answers[:, 0] >= start + 0.2 * clients.seconds) & (answers[:, 0] <= start + clients.seconds)]
    return Measured(own, {part: seconds / max(1, len(answers)) for part, seconds in cpu.items()})


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

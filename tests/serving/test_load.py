"""Test a server under load, in simulation: throughput against the executable that it runs, and latency."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from serving.running import Running, serving

import fusec
from benchmarks.common.live_rows import LiveRows
from benchmarks.common.result_files import KEYS
from benchmarks.serving import client_processes
from benchmarks.serving import server_load as benchmark
from benchmarks.serving.client_processes import Measured, Requests
from benchmarks.serving.executable_rate import alone, seconds_of
from benchmarks.serving.served_models import CASES, Case, compiled, images, network
from benchmarks.serving.server_process import Clients, Server
from fusec.dynamic_shapes.batch_proof import require_batches
from fusec.frontends import Source

pytestmark = [pytest.mark.cudnn, pytest.mark.usefixtures("no_gpu")]

BATCH, CLIENTS, ROUNDS = 4, 12, 6
CASE = Case("small", 48, (1, BATCH), "fp32")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(CASE, tmp_path_factory.mktemp("files"), "quick", 60.0)


def run_seconds(server: Running) -> tuple[float, float, float]:
    """Return the seconds that batches ran, their number and their rows."""
    text = server.request("GET", "/metrics")[1].decode()

    def of(name: str) -> float:
        found = re.search(rf'^{name}{{model="small"}} (\S+)$', text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    return of("fusec_run_seconds_sum"), of("fusec_batch_rows_count"), of("fusec_batch_rows_sum")


@pytest.mark.manual  # the ratio needs both cores of a small machine
def test_a_loaded_server_is_as_fast_as_the_executable(file: Path) -> None:
    """Requests of one image each, from many threads of a real client, are as good as calls with whole batches.

    The two take turns, because other work of this machine slows both. A few rounds may be disturbed, so one of them
    has to reach the goal, and in all of them the device must be busy with full batches.
    """
    predictor = fusec.Predictor(file).load()
    x = images(CASE, BATCH)
    want = predictor({"image": x})["y"]
    ended = threading.Event()
    times: list[float] = []

    def ask(number: int) -> None:
        row = number % BATCH
        tensor = triton.InferInput("image", [1, *x.shape[1:]], "UINT8")
        tensor.set_data_from_numpy(x[row : row + 1])
        with triton.InferenceServerClient(server.address, network_timeout=60) as client:
            while not ended.is_set():
                start = time.perf_counter()
                result = client.infer("small", [tensor])
                got = result.as_numpy("y")
                assert got is not None
                times.append(time.perf_counter() - start)
                np.testing.assert_allclose(got[0], want[row], rtol=1e-5, atol=1e-6)

    ratios: list[float] = []
    with serving(file, "--front-ends", 1, "--max-wait-ms", 30000) as server:
        while len(ratios) < ROUNDS and max(ratios, default=0.0) < 0.9:
            own = BATCH / seconds_of(lambda: predictor.executable.run(None, {"image": x}), int, 0.8)
            ended.clear()
            threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
            for thread in threads:
                thread.start()
            time.sleep(0.4)
            before, start = run_seconds(server), time.perf_counter()
            time.sleep(1.6)
            after, seconds = run_seconds(server), time.perf_counter() - start
            ended.set()
            for thread in threads:
                thread.join(60)
            ran, batches, rows = (b - a for a, b in zip(before, after, strict=True))
            ratios.append(rows / seconds / own)
            print(f"{ratios[-1]:.3f} of {own:.1f} images/s, {ran / seconds:.3f} busy, {rows / batches:.2f} rows")
            assert rows / batches > 0.9 * BATCH
    milliseconds = [f"{1e3 * float(np.quantile(times, q)):.0f}" for q in (0.5, 0.99)]
    print(f"median {milliseconds[0]} ms, p99 {milliseconds[1]} ms")
    assert max(ratios) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [False, True])
def test_the_benchmark_measures_a_server(file: Path, tmp_path: Path, shared_memory: bool) -> None:
    """It writes the same rows as for a GPU, here of the simulation."""
    output = tmp_path / "new" / "serving.json"
    key = {"model": CASE.model, "batch": BATCH, "rows": 2, "shared_memory": shared_memory}
    clients = Clients(processes=1, connections=BATCH, seconds=3.0, front_ends=1, rows=2, shared_memory=shared_memory)
    rows = LiveRows(output, "abc", {"cpu": "x"}, KEYS["serving.json"])
    told: list[set[str]] = []

    def tell(**figures: Any) -> None:
        rows("small", key, **figures)
        told.append(json.loads(output.read_text())["rows"][0].keys())

    benchmark.measured(CASE, file, clients, alone(CASE, file, 1.0), tell)
    assert all(before < after for before, after in pairwise(told)), "each figure is written when it is known"
    (row,) = json.loads(output.read_text())["rows"]
    assert row["error"] < 1e-6
    assert row["refused"] == 0
    assert row["images_s"] > 0
    assert row["load_p99_ms"] >= row["load_median_ms"] > 0
    assert row["workers_cpu_us"] > 0
    assert row["load_p99_in_client_ms"] <= row["load_p99_ms"]
    assert {"of_device", "of_host", "p99_of_median", "full_p99_ms", "load_images_s"} <= row.keys()
    assert set(KEYS["serving.json"]) <= row.keys()


def test_resnet50_takes_bytes_and_any_batch() -> None:
    """The model that the benchmark serves on a GPU is the exported one, after its preprocessing."""
    source = Source(network(CASES["resnet50"]))
    graphs = [source.load({"image": (size, 3, 224, 224)}) for size in (1, 2, 64)]
    assert [str(v.type) for v in graphs[1].inputs] == ["u8[2,3,224,224]"]
    assert [str(v.type) for v in graphs[1].outputs] == ["f32[2,1000]"]
    require_batches(graphs)


@pytest.mark.slow
def test_a_limit_ends_the_benchmark_without_traces(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The limit comes while clients load the server, whose case has a row of an earlier run."""
    output = tmp_path / "serving.json"
    earlier = {"model": "small", "batch": BATCH, "rows": 1, "shared_memory": False, "images_s": 7.0, "load_p99_ms": 1.0}
    earlier |= {"date": "2026-01-01", "commit": "earlier"}
    output.write_text(json.dumps({"cpu": "x", "rows": [earlier]}))
    turns: list[float] = []

    def loaded(server: Server, requests: Requests, clients: Clients, rate: float = 0.0) -> Measured:
        turns.append(rate)
        if rate:
            clients = replace(clients, seconds=600.0)
            signal.setitimer(signal.ITIMER_REAL, 3.0)  # the clients have started by then
        return client_processes.loaded(server, requests, clients, rate)

    monkeypatch.setattr(benchmark, "loaded", loaded)
    monkeypatch.setattr(benchmark, "machine", lambda: {"cpu": "x"})
    monkeypatch.setattr(benchmark, "CASES", {"small": CASE})
    options = ["--file", file, "--rows", 1, 2, "--seconds", 3, "--processes", 2, "--front-ends", 1, "--limit", 900]
    command = ["server_load", "small", *map(str, options), "--output", str(output), "--commit", "new"]
    monkeypatch.setattr(sys, "argv", command)
    assert benchmark.main() == 1
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == "small, requests of 1: stopped by --limit: not ready after 900 s"
    assert "Traceback" not in out + err
    assert len(turns) == 2
    assert json.loads(output.read_text())["rows"] == [earlier]
    running = " ".join(task.read_text() for task in Path("/proc/self/task").glob("*/children")).split()
    commands = [Path(f"/proc/{process}/cmdline").read_bytes().decode() for process in running]
    assert not [command for command in commands if "load_client" in command or "serve" in command]


def test_a_row_that_is_given_up_is_as_before(tmp_path: Path) -> None:
    output = tmp_path / "serving.json"
    key = {"model": "small", "batch": 1, "rows": 1, "shared_memory": False}

    def rows_of(commit: str) -> LiveRows:
        return LiveRows(output, commit, {"cpu": "x"}, KEYS["serving.json"])

    first = rows_of("first")
    first("small", key, images_s=1.0)
    first("small", key, load_p99_ms=1.0)
    before = json.loads(output.read_text())
    second = rows_of("second")
    second("small", key, images_s=2.0)
    second("small", {**key, "rows": 2}, images_s=3.0)
    second.give_up(key)
    second.give_up({**key, "rows": 2})
    second.give_up({})
    after = json.loads(output.read_text())
    assert after["rows"][0] == before["rows"][0]
    assert after["rows"][1]["images_s"] == 3.0, "there was none before"
    other = LiveRows(output, "third", {"cpu": "y"}, KEYS["serving.json"])
    other("small", key, images_s=4.0)
    other.give_up(key)
    assert [row["images_s"] for row in json.loads(output.read_text())["rows"]] == [4.0], "of another machine"

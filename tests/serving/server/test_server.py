"""Test `fusec serve` as clients see it: a real client of the protocol, limits, overload, dead workers, and the end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from cli.command import fusec as command
from dynamic_shapes.test_executable import image_net
from frontends.onnx.models import run
from helpers import assert_close
from serving.files import classifier, images, saved, slow
from serving.running import Running, at_once, binary_request, serving
from tritonclient.utils import InferenceServerException

import fusec
from fusec.serving.server import supervisor
from fusec.serving.server.server_options import ServerOptions

pytestmark = [pytest.mark.cudnn]
ROWS = 'fusec_batch_rows_sum{model="classifier"}'
INFER = "/v2/models/classifier/infer"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("files"), [1, 4, 8])


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[Running]:
    sized = file.with_name("sized.fusec")
    exe: Any = fusec.compile(image_net(), target="h200", shapes={"N": (1, 2), "H": (8, 10)}, simulate=True)
    exe.save(sized)
    limits = (sized, "--front-ends", 2, "--max-body", 1, "--memory", 8, "--delay-ms", 20)
    with serving(file, f"other.name={file}", *limits) as running:
        yield running


def client(server: Running) -> Any:
    return triton.InferenceServerClient(server.address)


def asked(x: np.ndarray, binary: bool = True) -> list[Any]:
    tensor = triton.InferInput("image", list(x.shape), "UINT8")
    tensor.set_data_from_numpy(x, binary_data=binary)
    return [tensor]


def test_what_a_client_learns(server: Running) -> None:
    with client(server) as c:
        assert c.is_server_live()
        assert c.is_server_ready()
        assert c.is_model_ready("classifier")
        assert not c.is_model_ready("none")
        assert c.get_server_metadata()["name"] == "fusec"
        metadata = c.get_model_metadata("classifier", "1")
        assert metadata["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, 3, 8, 8]}]
        assert [(o["name"], o["datatype"], o["shape"]) for o in metadata["outputs"]] == [
            ("logits", "FP32", [-1, 5]),
            ("label", "INT64", [-1]),
        ]
        config = c.get_model_config("classifier")
        assert config["max_batch_size"] == 8
        assert config["dynamic_batching"] == {
            "preferred_batch_size": [1, 4, 8],
            "max_queue_delay_microseconds": 20000,
        }
        assert {m["name"]: m["state"] for m in c.get_model_repository_index()} == {
            "classifier": "READY",
            "other.name": "READY",
            "sized": "READY",
        }


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("rows", [1, 3, 11])
def test_results_are_those_of_the_model(server: Running, rows: int, binary: bool) -> None:
    x = images(rows, seed=rows)
    logits, label = run(classifier(), {"image": x})
    with client(server) as c:
        wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("logits", "label")]
        result = c.infer("classifier", asked(x, binary), outputs=wanted, request_id="me")
        assert result.get_response()["id"] == "me"
        assert_close(result.as_numpy("logits"), logits, 1e-5)
        np.testing.assert_array_equal(result.as_numpy("label"), label)
        only = c.infer("other.name", asked(x, binary), outputs=wanted[1:])
        assert only.as_numpy("logits") is None
        np.testing.assert_array_equal(only.as_numpy("label"), label)


def test_front_ends_share_connections_evenly(server: Running) -> None:
    """If one had many more, its requests would wait while the others are idle."""
    front_ends = server.children("front_end")

    def handles() -> list[int]:
        return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in front_ends]

    before = handles()
    host, port = server.address.split(":")
    connections = [socket.create_connection((host, int(port))) for _ in range(20)]
    end = time.monotonic() + 10
    while sum(handles()) < sum(before) + 20 and time.monotonic() < end:
        time.sleep(0.01)
    assert [now - then for now, then in zip(handles(), before, strict=True)] == [10, 10]
    for connection in connections:
        connection.close()


def test_requests_share_batches(server: Running) -> None:
    """Threads ask at the same time; each gets the rows it gave, and fewer batches ran than requests came."""
    x = images(32, seed=5)
    want = run(classifier(), {"image": x})[0]
    got = np.zeros_like(want)

    def ask(number: int) -> None:
        with client(server) as c:
            for row in range(number, 32, 8):
                got[row] = c.infer("classifier", asked(x[row : row + 1])).as_numpy("logits")[0]

    before = counts(server)
    at_once(8, ask)
    assert_close(got, want, 1e-5)
    until(lambda: counts(server).get(ROWS, 0.0) >= before.get(ROWS, 0.0) + 32)
    after = counts(server)

    def more(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert more(ROWS) == 32
    assert more('fusec_batch_rows_count{model="classifier"}') < 24
    assert more('fusec_requests_total{model="classifier",status="200"}') == 32
    assert more('fusec_request_seconds_count{model="classifier"}') == 32
    until(lambda: counts(server)["fusec_requests_in_progress"] == counts(server)["fusec_request_bytes"] == 0)
    assert after["fusec_workers_ready"] == 1


def counts(server: Running) -> dict[str, float]:
    status, text, _ = server.request("GET", "/metrics")
    assert status == 200
    lines = [line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_bad_requests_are_refused(server: Running) -> None:
    """Each request gets its reason, and the server goes on."""
    x = images(1)
    body, headers = binary_request({"image": x}, "UINT8")
    length = "Inference-Header-Content-Length"
    cases: list[tuple[int, str, bytes, dict[str, str]]] = [
        (400, "the request is not JSON", b"{", {}),
        (400, "must be an object", b"[]", {}),
        (400, "nested too deep", b"[" * 100_000, {}),
        (400, "takes UINT8, not 'FP32'", *binary_request({"image": x}, "FP32")),
        (400, "the model has no input '\\\\x1bx'", *binary_request({"\x1bx": x}, "UINT8")),
        (400, "is missing", b'{"inputs": []}', {}),
        (400, "has shape [-1, 3, 8, 8], not [1, 3, 8, 4]", *binary_request({"image": x[..., :4]}, "UINT8")),
        (400, "bytes, but only", body[:-1], headers),
        (400, "the binary inputs are", body + b"x", headers),
        (400, "must be at most the", body, {length: "999999"}),
        (400, "must be at most the", body, {length: "-1"}),
        (400, "no output 'none'", *binary_request({"image": x}, "UINT8", outputs=[{"name": "none"}])),
        (400, "asks for sequence_id", *binary_request({"image": x}, "UINT8", parameters={"sequence_id": 3})),
        (413, "the limit is 1048576", bytes(1 << 21), {}),
        (415, "must not be compressed", body, {**headers, "Content-Encoding": "gzip"}),
    ]
    for status, reason, data, more in cases:
        got, told, _ = server.request("POST", INFER, data, more)
        assert (got, reason in told["error"]) == (status, True), (told, reason)
    assert server.request("POST", "/v2/models/none/infer", body, headers)[0] == 404
    assert server.request("POST", "/v2/models/classifier/versions/2/infer", body, headers)[0] == 404
    assert server.request("GET", "/v2/models/classifier/infer")[0] == 405
    assert server.request("GET", "/none")[:2] == (404, {"error": "Not Found: '/none'"})
    assert server.request("POST", INFER, body, headers)[0] == 200
    tensor = triton.InferInput("image", [1, 3, 8, 8], "FP32")
    tensor.set_data_from_numpy(x.astype(np.float32))
    with pytest.raises(InferenceServerException, match="takes UINT8, not 'FP32'"), client(server) as c:
        c.infer("classifier", [tensor])


def test_shapes_that_no_program_has_are_refused(server: Running) -> None:
    """However often: that is no failure of the device, after which a worker would start again."""
    path = "/v2/models/sized/infer"
    assert server.request("GET", "/v2/models/sized")[1]["inputs"][0]["shape"] == [-1, 3, -1, -1]
    for _ in range(5):
        status, told, _ = server.request("POST", path, *binary_request({"x": np.ones((1, 3, 9, 9), "f")}, "FP32"))
        assert (status, "has no program for" in told["error"]) == (400, True), told
        status, told, _ = server.request("POST", path, *binary_request({"x": np.ones((1, 3, 8, 9), "f")}, "FP32"))
        assert (status, "dim 'H' is 8 in input %x, 9 in" in told["error"]) == (400, True), told
    x = np.random.default_rng(0).standard_normal((3, 3, 10, 10)).astype(np.float32)
    want = run(image_net(), {"x": x})[0]
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    status, told, headers = server.request("POST", path, *binary_request({"x": x}, "FP32", outputs=outputs))
    assert status == 200, told
    start = int(headers["Inference-Header-Content-Length"])
    assert_close(np.frombuffer(told[start:], np.float32).reshape(3, 5), want, 1e-5)


def test_a_body_without_a_length_is_refused(server: Running) -> None:
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), 10) as raw:
        raw.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 411 ")


def test_numbers_that_json_lacks(server: Running) -> None:
    """An unknown model name adds no series to the metrics."""
    server.request("POST", "/v2/models/%22%0a/infer", b"{}")
    assert 'fusec_requests_total{model="",status="404"}' in counts(server)
    assert not [name for name in counts(server) if "%22" in name or '\\"' in name]


def test_an_overload_is_refused_soon(tmp_path: Path) -> None:
    """A model that takes long: more requests than the queue holds are refused immediately, late ones within the wait.

    Then SIGTERM: what is in progress is answered, and nothing stays.
    """
    limits = ("--front-ends", 1, "--queue", 6, "--max-wait-ms", 300, "--preferred", 1)
    with serving(slow(tmp_path), *limits) as server:
        x = np.ones((1, 3, 64, 64), np.float32)
        body, headers = binary_request({"x": x}, "FP32")
        told: list[tuple[int, float, Any]] = []

        def ask(number: int) -> None:
            start = time.perf_counter()
            status, _, more = server.request("POST", "/v2/models/slow/infer", body, headers)
            told.append((status, time.perf_counter() - start, more.get("Retry-After")))

        ask(0)
        one = told.pop()[1]
        at_once(24, ask)
        assert len(told) == 24
        assert {status for status, _, _ in told} == {200, 503}
        refused = [each for each in told if each[0] == 503]
        assert len(refused) >= 12, "18 if all 24 come before the first one is answered, fewer on a busy machine"
        assert all(retry == "1" for _, _, retry in refused)
        assert max(seconds for _, seconds, _ in refused) < 0.3 + 3 * one + 1
        assert counts(server)["fusec_requests_in_progress"] == 0
        told.clear()
        asking = threading.Thread(target=ask, args=(0,))
        asking.start()
        until(lambda: told or counts(server)["fusec_requests_in_progress"])
        pids = [*server.children("model_worker"), *server.children("front_end")]
        assert (server.end(), len(pids)) == (0, 2)
        asking.join(10)
        assert [status for status, _, _ in told] == [200]
        assert not any(alive(pid) for pid in pids)
        assert not list(server.folder.iterdir())
        with pytest.raises(OSError, match="refused"):
            server.request("GET", "/v2/health/live")


def test_a_body_that_is_on_its_way_at_the_end_is_answered(file: Path) -> None:
    x = images(1)
    body, headers = binary_request({"image": x}, "UINT8", parameters={"binary_data_output": True})
    with serving(file, "--front-ends", 1) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), 20) as raw:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
            raw.sendall(head.encode() + body[:100])
            until(lambda: counts(server)["fusec_request_bytes"])
            server.process.send_signal(signal.SIGTERM)
            until(lambda: not accepts(host, int(port)))
            raw.sendall(body[100:])
            answer = b""
            while data := raw.recv(1 << 16):
                answer += data
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert server.process.wait(20) == 0


def accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_a_worker_is_killed(file: Path) -> None:
    """Each request is answered once, with its own rows, or refused; then the worker is there again.

    A front end is started again, too; and when the first process is killed, all others end.
    """
    askers = 6
    with (
        serving(file, "--front-ends", 1, "--workers", 2, "--delay-ms", 1, "--timeout", 5) as server,
        ThreadPoolExecutor(askers) as pool,
    ):
        x = images(64, seed=9)
        want = run(classifier(), {"image": x})[0]
        ended = threading.Event()
        answers: list[list[int]] = [[] for _ in range(askers)]

        def ask(number: int) -> None:
            with client(server) as c:
                turn = number
                while not ended.is_set():
                    row = turn % 64
                    turn += 1
                    try:
                        result = c.infer("classifier", asked(x[row : row + 1]), request_id=str(turn))
                    except InferenceServerException as error:
                        answers[number].append(int(str(error.status())))
                        time.sleep(0.02)
                        continue
                    assert result.get_response()["id"] == str(turn)
                    assert_close(result.as_numpy("logits"), want[row : row + 1], 1e-5)
                    answers[number].append(200)

        def given(status: int) -> int:
            return sum(each.count(status) for each in answers)

        asking = [pool.submit(ask, number) for number in range(askers)]
        try:
            for _ in range(2):
                before = given(200)
                until(lambda least=before + 50: given(200) > least)
                os.kill(server.children("model_worker")[0], signal.SIGKILL)
                until(lambda: counts(server)["fusec_workers_ready"] < 2)
                until(lambda: counts(server)["fusec_workers_ready"] == 2)
        finally:
            ended.set()
        for each in asking:
            each.result()
        assert given(200) + given(503) == sum(map(len, answers))
        assert given(503) <= 2 * askers, "only requests that a killed worker had are refused"
        held = counts(server)
        assert held['fusec_requests_total{model="classifier",status="200"}'] == given(200)
        assert held.get('fusec_requests_total{model="classifier",status="503"}', 0) == given(503)
        assert held["fusec_request_bytes"] == 0
        (front_end,) = server.children("front_end")
        os.kill(front_end, signal.SIGKILL)
        until(lambda: front_end not in server.children("front_end") and server.children("front_end"))
        body, headers = binary_request({"image": x[:1]}, "UINT8")
        until(lambda: server.request("POST", INFER, body, headers)[0] == 200)
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), 30) as raw:
            raw.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nslow".encode())
            assert raw.recv(100).startswith(b"HTTP/1.1 408 ")
        pids = [*server.children("model_worker"), *server.children("front_end")]
        server.process.kill()
        until(lambda: not any(alive(pid) for pid in pids))


def until(met: Any) -> None:
    end = time.monotonic() + 20
    while not met():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_missing_package_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command("serve", file).stderr.endswith("fusec serve needs aiohttp: pip install 'fusec[serve]'\n")


def test_errors_of_the_command(file: Path, tmp_path: Path) -> None:
    assert "is no .fusec file" in command("serve", "model.onnx").stderr
    assert "No such file" in command("serve", tmp_path / "none.fusec").stderr
    assert "is no name for a model" in command("serve", f"a b={file}").stderr
    assert "the name 'classifier' is taken" in command("serve", file, file).stderr
    assert "--device gpu0: must be all" in command("serve", file, "--device", "gpu0").stderr
    assert "--preferred 0: must be batch sizes" in command("serve", file, "--preferred", "0").stderr
    assert "give at least --memory" in command("serve", file, "--memory", 1, "--front-ends", 2).stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = command("serve", file, "--port", port)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"fusec: error: cannot listen on 127.0.0.1:{port}: " in result.stderr


def test_a_file_that_does_not_load_ends_the_server(tmp_path: Path) -> None:
    bad = tmp_path / "bad.fusec"
    bad.write_bytes(b"no zip")
    result = command("serve", bad, "--port", 0)
    assert result.exit_code == 2
    assert "model_worker 0 did not start" in result.stderr


def test_json_tells_where_it_serves(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(options: ServerOptions, announce: Any) -> None:
        assert (options.delay_s, options.devices, options.preferred) == (0.001, ("simulated", "simulated"), (4, 8))
        announce("http://here:1")

    monkeypatch.setattr(supervisor, "serve", serve)
    monkeypatch.setenv("FUSEC_DEVICE", "none")
    result = command("serve", f"a={file}", "--json", "--delay-ms", 1, "--workers", 2, "--preferred", "4,8")
    told = {"url": "http://here:1", "models": ["a"], "devices": ["simulated", "simulated"], "pid": os.getpid()}
    assert json.loads(result.stdout) == told
    assert result.stderr == "fusec: models run in simulation, which is slow: no GPU is used\n"

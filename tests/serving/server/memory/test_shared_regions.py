"""Test tensors in shared memory of a client: Triton's extension `system_shared_memory`, with NVIDIA's client."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from frontends.onnx.models import run
from helpers import assert_close
from serving.files import classifier, images, saved
from serving.running import Running, binary_request, serving
from serving.server.test_server import INFER, asked, until
from tritonclient.utils import InferenceServerException

from fusec.serving.server.memory.shared_regions import MappedRegions, RegionError, RegionRegistry

pytestmark = [pytest.mark.cudnn]
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("files"), [1, 4, 8])


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[Running]:
    with serving(file, "--front-ends", 2, "--shared-memory") as running:
        yield running


@contextmanager
def made(nbytes: int, key: str = "") -> Generator[tuple[Any, str]]:
    """Make a shared-memory object, and yield its handle and key."""
    key = key or f"fusec-test-{os.getpid()}-{next(NUMBERS)}"
    handle = shm.create_shared_memory_region("mine", key, nbytes)
    try:
        yield handle, key
    finally:
        shm.destroy_shared_memory_region(handle)


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with triton.InferenceServerClient(server.address) as each:
        yield each
        each.unregister_system_shared_memory()


def from_region(name: str, rows: int, offset: int = 0) -> list[Any]:
    tensor = triton.InferInput("image", [rows, 3, 8, 8], "UINT8")
    tensor.set_shared_memory(name, rows * 3 * 64, offset)
    return [tensor]


def to_region(output: str, name: str, nbytes: int, offset: int = 0) -> Any:
    wanted = triton.InferRequestedOutput(output)
    wanted.set_shared_memory(name, nbytes, offset)
    return wanted


@pytest.mark.parametrize("rows", [1, 3, 11])
def test_inputs_and_outputs_are_in_regions(client: Any, server: Running, rows: int) -> None:
    """One region has the images and the logits; labels come in the answer. Every front end knows the region."""
    x = images(rows, seed=rows)
    logits, label = run(classifier(), {"image": x})
    with made(64 + x.nbytes + 256 * rows) as (handle, key):
        shm.set_shared_memory_region(handle, [x], offset=64)
        client.register_system_shared_memory("mine", key, x.nbytes + 256 * rows, offset=32)
        assert client.get_system_shared_memory_status() == [
            {"name": "mine", "key": key, "offset": 32, "byte_size": x.nbytes + 256 * rows}
        ]
        wanted = [to_region("logits", "mine", logits.nbytes, 32 + x.nbytes), triton.InferRequestedOutput("label")]
        for _ in range(4):  # of connections, which the front ends get in turn
            with triton.InferenceServerClient(server.address) as other:
                result = other.infer("classifier", from_region("mine", rows, 32), outputs=wanted)
            np.testing.assert_array_equal(result.as_numpy("label"), label)
            got = shm.get_contents_as_numpy(handle, np.float32, [rows, 5], offset=64 + x.nbytes)
            assert_close(np.array(got), logits, 1e-5)
            output = result.get_output("logits")
            assert output is not None
            given = output["parameters"]
            assert given == {
                "shared_memory_region": "mine",
                "shared_memory_byte_size": logits.nbytes,
                "shared_memory_offset": 32 + x.nbytes,
            }
            got[:] = 0


def test_regions_join_batches_with_bodies(client: Any, server: Running) -> None:
    x = images(4, seed=3)
    want = run(classifier(), {"image": x})[0]
    with made(x.nbytes) as (handle, key):
        shm.set_shared_memory_region(handle, [x])
        client.register_system_shared_memory("mine", key, x.nbytes)
        first = client.async_infer("classifier", from_region("mine", 1, 3 * 64 * 2))
        with triton.InferenceServerClient(server.address) as other:
            second = other.infer("classifier", asked(x[3:]))
        assert_close(first.get_result().as_numpy("logits"), want[2:3], 1e-5)
        assert_close(second.as_numpy("logits"), want[3:], 1e-5)


def test_a_region_is_there_until_it_is_removed(client: Any, server: Running) -> None:
    x = images(1)
    with made(x.nbytes) as (handle, key):
        shm.set_shared_memory_region(handle, [x])
        client.register_system_shared_memory("mine", key, x.nbytes)
        client.infer("classifier", from_region("mine", 1))
        workers = server.children("model_worker")
        assert any(maps(pid, key) for pid in workers)
        with triton.InferenceServerClient(server.address) as other:  # of the other front end
            other.unregister_system_shared_memory("mine")
            other.unregister_system_shared_memory("mine")
        until(lambda: not any(maps(pid, key) for pid in (*workers, *server.children("front_end"))))
        with pytest.raises(InferenceServerException, match="no shared-memory region 'mine' is registered"):
            client.infer("classifier", from_region("mine", 1))
        with pytest.raises(InferenceServerException, match="no shared-memory region 'mine' is registered"):
            client.get_system_shared_memory_status("mine")
        client.register_system_shared_memory("mine", key, x.nbytes)
        client.infer("classifier", from_region("mine", 1))


def maps(pid: int, key: str) -> bool:
    return key in Path(f"/proc/{pid}/maps").read_text()


def test_another_object_of_the_same_key_is_not_read(client: Any) -> None:
    x = images(1)
    key = f"fusec-test-{os.getpid()}-again"
    with made(x.nbytes, key):
        client.register_system_shared_memory("mine", key, x.nbytes)
    with made(x.nbytes, key) as (handle, _):
        shm.set_shared_memory_region(handle, [x])
        with pytest.raises(InferenceServerException, match="is another object now: register it again"):
            client.infer("classifier", from_region("mine", 1))
        client.unregister_system_shared_memory("mine")
        client.register_system_shared_memory("mine", key, x.nbytes)
        want = run(classifier(), {"image": x})[0]
        assert_close(client.infer("classifier", from_region("mine", 1)).as_numpy("logits"), want, 1e-5)


def test_an_object_that_became_smaller_is_refused(client: Any, server: Running) -> None:
    x = images(2)
    with made(x.nbytes) as (_, key):
        client.register_system_shared_memory("mine", key, x.nbytes)
        os.truncate(f"/dev/shm/{key}", x.nbytes // 2)
        with pytest.raises(InferenceServerException, match="is smaller now: register it again"):
            client.infer("classifier", from_region("mine", 2))
    body, headers = binary_request({"image": x}, "UINT8")
    assert server.request("POST", INFER, body, headers)[0] == 200


def test_what_does_not_fit_a_region_is_refused(client: Any) -> None:
    x = images(2)
    with made(x.nbytes) as (_, key):
        client.register_system_shared_memory("mine", key, x.nbytes)
        cases: list[tuple[str, list[Any], list[Any]]] = [
            ("region 'mine' has 384 bytes, not 384 from 1 on", from_region("mine", 2, 1), []),
            ("region 'mine' has 384 bytes, not 576 from 0 on", from_region("mine", 3), []),
            ("no shared-memory region 'other'", from_region("other", 1), []),
            ("region's name has letters", from_region("../mine", 1), []),
            ("no shared-memory region 'other'", asked(x), [to_region("logits", "other", 40)]),
            ("not 40 from 380 on", asked(x), [to_region("logits", "mine", 40, 380)]),
            (
                "output 'logits' has 40 bytes, but shared_memory_byte_size is 8",
                asked(x),
                [to_region("logits", "mine", 8)],
            ),
        ]
        for reason, inputs, outputs in cases:
            with pytest.raises(InferenceServerException, match=re.escape(reason)):
                client.infer("classifier", inputs, outputs=outputs or None)
        wrong = triton.InferInput("image", [2, 3, 8, 8], "UINT8")
        wrong.set_shared_memory("mine", 100)
        with pytest.raises(InferenceServerException, match="has 384 bytes, but shared_memory_byte_size is 100"):
            client.infer("classifier", [wrong])


def test_what_cannot_be_registered(client: Any, server: Running) -> None:
    with made(100) as (_, key):
        client.register_system_shared_memory("mine", key, 100)
        cases: list[tuple[str, tuple[str, Any, Any, Any]]] = [
            ("is registered already", ("mine", key, 100, 0)),
            ("not 100 from 1 on", ("more", key, 100, 1)),
            ("key must be the name of a POSIX", ("more", "../etc/passwd", 10, 0)),
            ("key must be the name of a POSIX", ("more", "a/b", 10, 0)),
            ("cannot open shared memory 'fusec-none'", ("more", "/fusec-none", 10, 0)),
            ("whole number from 0", ("more", key, 10, -1)),
            ("whole number from 0", ("more", key, 0, 0)),
            ("whole number from 0", ("more", key, "10", 0)),
            ("region's name has letters", ("a b", key, 10, 0)),
        ]
        for reason, (name, at, nbytes, offset) in cases:
            with pytest.raises(InferenceServerException, match=re.escape(reason)):
                client.register_system_shared_memory(name, at, nbytes, offset)
        for body, reason in ((b"{", "is not JSON"), (b"[]", "key must be")):
            status, told, _ = server.request("POST", "/v2/systemsharedmemory/region/x/register", body)
            assert (status, reason in told["error"]) == (400, True), told
        assert server.request("POST", "/v2/systemsharedmemory/region/x/register", bytes(2 << 20))[0] == 413
        assert server.request("GET", "/v2/systemsharedmemory/region/x/register")[0] == 405
        assert len(client.get_system_shared_memory_status()) == 1


def test_a_worker_that_starts_again_maps_regions_again(file: Path) -> None:
    x = images(1)
    want = run(classifier(), {"image": x})[0]
    with serving(file, "--front-ends", 1, "--shared-memory") as server, made(x.nbytes) as (handle, key):
        shm.set_shared_memory_region(handle, [x])
        with triton.InferenceServerClient(server.address) as client:
            client.register_system_shared_memory("mine", key, x.nbytes)
            client.infer("classifier", from_region("mine", 1))
            (worker,) = server.children("model_worker")
            os.kill(worker, signal.SIGKILL)
            until(lambda: server.children("model_worker") not in ([], [worker]))
            until(answered(lambda: client.infer("classifier", from_region("mine", 1))))
            assert_close(client.infer("classifier", from_region("mine", 1)).as_numpy("logits"), want, 1e-5)


def answered(ask: Callable[[], Any]) -> Callable[[], bool]:
    def tell() -> bool:
        try:
            ask()
        except InferenceServerException as error:
            if error.status() != "503":
                raise
            return False
        return True

    return tell


def test_a_server_uses_regions_only_if_an_option_allows_it(file: Path) -> None:
    with serving(file, "--front-ends", 1) as server, made(192) as (_, key):
        client: Any = triton.InferenceServerClient(server.address)
        with client:
            assert "system_shared_memory" not in client.get_server_metadata()["extensions"]
            for use in (
                lambda: client.register_system_shared_memory("mine", key, 192),
                client.get_system_shared_memory_status,
                client.unregister_system_shared_memory,
                lambda: client.infer("classifier", from_region("mine", 1)),
            ):
                with pytest.raises(InferenceServerException, match="it runs without --shared-memory"):
                    use()


def test_the_list_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusec.serving.server.memory.shared_regions.MOST_REGIONS", 2)
    registry = RegionRegistry(tmp_path)
    with made(100) as (_, key):
        body = f'{{"key": "{key}", "byte_size": 50}}'.encode()
        for name in "ab":
            registry.register(name, body)
        with pytest.raises(RegionError, match="2 regions are registered: unregister one first"):
            registry.register("c", body)
        assert [region.name for region in registry.unregister("")] == ["a", "b"]
        assert not list(tmp_path.iterdir())


def test_only_regular_objects_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusec.serving.server.memory.shared_regions.OBJECTS", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name, reason in (("pipe", "is no shared memory"), ("link", "cannot open shared memory 'link'")):
        with pytest.raises(RegionError, match=reason):
            MappedRegions(np).memory(f"{name} 1", 1)

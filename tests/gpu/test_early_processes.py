"""Test what a first compilation starts before most of fusec is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusec.compiler import early_processes
from fusec.compiler.early_processes import with_early_processes
from fusec.gpu.cudnn.deviceless import nvrtc_libraries
from fusec.gpu.cudnn.oracle import PROBE, Oracle
from fusec.gpu.cudnn.worker_process import WorkerDeath, environment
from fusec.gpu.launch.nvrtc_process import NvrtcChild
from fusec.plans.cache_folder import ANSWERS
from fusec.plans.sqlite_cache import Store
from fusec.plans.verdict import Legal
from fusec.system.fork_server import OPEN, ForkServer, OpenServer
from fusec.targets.target import load

H200 = load("h200")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """A machine with an H200 and an empty cache, on which a server only seems to start. The list says what started."""
    what: list[Any] = []

    class Server:
        """A server that starts and closes."""

        def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
            what.append(arguments[0])

        def close(self) -> None:
            what.append("closed")

    monkeypatch.setattr(early_processes, "ForkServer", Server)
    monkeypatch.setattr(early_processes, "OPEN", OpenServer())
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    monkeypatch.setattr(early_processes.device, "wanted", lambda target: H200 if target in ("auto", "h200") else None)
    monkeypatch.setattr(early_processes.device, "is_described", lambda target: True)
    monkeypatch.setattr(early_processes.device, "hold_context", lambda: None)
    monkeypatch.setattr(early_processes.driver_stand_in, "is_available", lambda: True)
    return what


def joined() -> None:
    for thread in threading.enumerate():
        if thread.name == "fusec-early":
            thread.join()


@with_early_processes
def compile(model: object = None, **options: Any) -> None:
    joined()


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({}, True),
        ({"target": "h200"}, True),
        ({"target": "cpu"}, False),
        ({"target": "t4"}, False),
        ({"simulate": True}, False),
        ({"oracle": object()}, False),
        ({"family": object()}, False),
    ],
)
def test_a_server_starts_only_for_this_gpu_and_for_one_model(
    started: list[Any], options: dict[str, Any], starts: bool
) -> None:
    compile(**options)
    assert started == (["h200", "closed"] if starts else [])


@pytest.mark.parametrize(
    ("model", "target", "imported"),
    [
        ("a.onnx", "auto", ["onnx", "cudnn", "cupy"]),
        (b"", "t4", ["onnx"]),
        (Path("a.onnx"), "t4", ["onnx"]),
        ("a.txt", "h200", ["cudnn", "cupy"]),
    ],
)
def test_packages_are_imported_that_a_compilation_needs(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, model: object, target: str, imported: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setattr(early_processes.importlib, "import_module", found.append)
    monkeypatch.setattr(early_processes.deviceless, "load_cudnn", lambda: None)
    monkeypatch.setattr(early_processes.device, "device_name", lambda: "NVIDIA H200")
    early_processes.import_packages(target, model)
    assert found == imported


def test_none_starts_where_answers_are_stored(started: list[Any], tmp_path: Path) -> None:
    (tmp_path / ANSWERS).touch()
    compile()
    assert started == []


def test_threads_have_ended_when_a_compilation_fails(started: list[Any]) -> None:
    @with_early_processes
    def fails() -> None:
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        fails()
    assert not any(thread.name == "fusec-early" for thread in threading.enumerate())
    assert started == ["h200", "closed"]


def test_workers_and_compilers_are_forked_from_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They answer as others, and one that dies does so alone."""
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    libraries = nvrtc_libraries()
    OPEN.want()
    try:
        arguments = "h200", "fusec.gpu.launch.nvrtc_process"
        OPEN.open("h200", lambda: ForkServer("fusec.gpu.cudnn.worker", arguments, environment()))
        server = OPEN.of("h200")
        assert server is not None
        compiler = NvrtcChild(libraries)
        with Oracle(H200, store=Store(tmp_path / "other.sqlite"), workers=2) as oracle:
            assert isinstance(oracle.judge([PROBE])[0], Legal)
            (worker,) = oracle._all[:1]
            os.kill(worker.pid, signal.SIGSEGV)
            death = worker.exchange({"ask": "verdict"})
            assert isinstance(death, WorkerDeath) and death.by_own_fault and death.signal == "SIGSEGV"
        assert compiler.cubin('extern "C" __global__ void k() {}', ("--gpu-architecture=sm_90",))
        parents = {
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in (compiler._child.pid,)
        }
        assert parents == {str(server._process.pid)}
        compiler.close()
    finally:
        OPEN.release()


def test_driver_is_imported_without_the_packages_that_take_long() -> None:
    code = "import sys, fusec.driver; print([name for name in ('numpy', 'onnx', 'fusec.ir') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

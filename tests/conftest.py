"""Fixtures and hooks of all tests: skips for what the machine lacks, a cache of the run, seeded random numbers."""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gpu.cudnn import recorded_answers

from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.plans.sqlite_cache import Store
from fusec.targets.target import load

SEED = int(os.environ.get("FUSEC_TEST_SEED", "0"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write the current results as the expected ones")
    parser.addoption("--ask-cudnn", action="store_true", help="ask cuDNN also what a file of its answers says")


def pytest_report_header(config: pytest.Config) -> str:
    return "cuDNN is asked everything" if config.getoption("--ask-cudnn") else recorded_answers.summary()


def _gpu_missing() -> str:
    """Say why tests marked `gpu` cannot run here; return an empty string if they can."""
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed"
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA driver"
    import cupy  # only with a driver: the import takes a second

    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no usable GPU ({error})"


def _cudnn_missing() -> str:
    """Say why tests marked `cudnn` cannot run here; return an empty string if they can."""
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    nvidia = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (nvidia.submodule_search_locations or [])] if nvidia else []
    for library in ("libcudnn.so.*", "libnvrtc.so.*", "libnvrtc-builtins.so.*"):
        if not any(next(folder.glob(f"*/lib/{library}"), None) for folder in folders):
            return f"{library.removesuffix('.*')} is not installed"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items):
        _skip(items, "gpu", _gpu_missing())
    # with FUSEC_REQUIRE_CUDNN=1, these tests run and fail where the libraries are missing
    if os.environ.get("FUSEC_REQUIRE_CUDNN") != "1":
        _skip(items, "cudnn", _cudnn_missing())


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's GPU."""
    from fusec.gpu import device

    monkeypatch.setenv("FUSEC_DEVICE", "none")
    device._first_gpu.cache_clear()


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items if reason else ():
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def fusec_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Path]:
    """Use the given FUSEC_CACHE, or else one folder for all workers of this run. It begins with recorded answers."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fusec-cache"
    place = Path(os.environ.get("FUSEC_CACHE") or shared)
    if not pytestconfig.getoption("--ask-cudnn"):
        recorded_answers.seed(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEC_CACHE", str(place))
        yield place


@pytest.fixture(scope="session")
def asked_once(fusec_cache: Path) -> Iterator[Oracle]:
    """Share one oracle for an H200 among tests that do not test the oracle: `driver.build(..., oracle=asked_once)`.

    Of graphs that differ in size alone, it builds a plan for one, because builds take most of a compilation.
    """
    with Oracle(load("h200"), store=Store(fusec_cache / "answers.sqlite"), reuse_builds=True) as oracle:
        yield oracle


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Skip fsync, because files of tests need not outlive a power failure, and a thousand of them took a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def fusec_workers() -> Iterator[None]:
    """Let each test use few worker processes where many tests run in parallel.

    On a GPU each worker process has a context, and contexts wait for each other.
    """
    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 4:
            patch.setenv("FUSEC_WORKERS", "2")
        yield


def seeded(test: str) -> tuple[list[int], np.random.Generator]:
    """Return the seed of a test, from its name, and a generator with that seed."""
    seed = [SEED, zlib.crc32(test.encode())]
    return seed, np.random.default_rng(seed)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seed random numbers by the test's name and FUSEC_TEST_SEED; both are printed if the test fails."""
    seed, generator = seeded(request.node.nodeid)
    print(f"rng seeded with {seed}: repeat with FUSEC_TEST_SEED={SEED}")
    return generator

"""What all tests share: markers that look at the machine, a cache of their own, seeded random numbers."""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fusec.gpu.cudnn.legality import Oracle
from fusec.targets.target import load

SEED = int(os.environ.get("FUSEC_TEST_SEED", "0"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write what text cases now give as what they should give")


def _gpu_missing() -> str:
    """Why tests marked `gpu` cannot run here; empty if they can."""
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
    """Why tests marked `cudnn` cannot run here; empty if they can."""
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
    # FUSEC_REQUIRE_CUDNN: where the libraries ought to be, their absence is a failure of the tests themselves
    if os.environ.get("FUSEC_REQUIRE_CUDNN") != "1":
        _skip(items, "cudnn", _cudnn_missing())


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items if reason else ():
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def fusec_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """FUSEC_CACHE as given, else a folder of this run that all its workers share."""
    if given := os.environ.get("FUSEC_CACHE"):
        yield Path(given)
        return
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fusec-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEC_CACHE", str(shared))
        yield shared


@pytest.fixture(scope="session")
def asked_once() -> Iterator[Oracle]:
    """Ask cuDNN about an H200 for all tests that do not test the asking: `driver.build(..., oracle=asked_once)`. It
    compiles a plan for one of the graphs that differ in size alone, which takes most of what building a model takes."""
    with Oracle(load("h200"), reuse_builds=True) as oracle:
        yield oracle


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """What tests write need not outlive a power failure: tests that write a thousand files waited a minute for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def fusec_workers() -> Iterator[None]:
    """Where many tests run at once, each asks cuDNN in few processes: on a GPU each has a context, and contexts wait
    for each other."""
    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 4:
            patch.setenv("FUSEC_WORKERS", "2")
        yield


def seeded(test: str) -> tuple[list[int], np.random.Generator]:
    """The seed of a test, by its name, and a generator that starts from it."""
    seed = [SEED, zlib.crc32(test.encode())]
    return seed, np.random.default_rng(seed)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name and FUSEC_TEST_SEED; both are printed if the test fails."""
    seed, generator = seeded(request.node.nodeid)
    print(f"rng seeded with {seed}: repeat with FUSEC_TEST_SEED={SEED}")
    return generator

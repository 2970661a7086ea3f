"""Test on a GPU that a serialized plan computes the same when it is read back, for every kind of graph."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close, cudnn_backend, one_program
from lowering.bodies import BODIES, load

from fusec.lower_cudnn import lower
from fusec.plans.plan_cache import PlanStore

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def backend(folder: Path) -> Any:
    from fusec.gpu.backend import CudnnBackend

    return CudnnBackend("none", store=PlanStore(folder))


@pytest.mark.parametrize("title", BODIES)
def test_a_revived_plan_computes_the_same(title: str, folder: Path, rng: np.random.Generator) -> None:
    from gpu.plan_check import random_buffers

    graph = lower(load(BODIES[title])).graph
    given = random_buffers(graph, rng)
    results: list[dict[int, np.ndarray]] = []
    for revived in (False, True):
        machine, buffers = backend(folder), {uid: buffer.copy() for uid, buffer in given.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a plan that is not stored warns
            machine.prepare({graph.key: graph}, 0)
            machine.run_on_host(graph, buffers)
        assert machine.plans.ranked[graph.key].revived is revived
        results.append(buffers)
    for tensor in graph.outputs:
        first, second = (result[tensor.uid] for result in results)
        if tensor.dtype.is_float:
            assert_close(second, first, 1e-6 if tensor.dtype.numpy == np.float32 else 1e-3)
        else:
            np.testing.assert_array_equal(second, first)


def test_a_truncated_blob_is_a_clear_error_and_the_plan_is_built(folder: Path) -> None:
    graph = lower(load(next(iter(BODIES.values())))).graph
    first = backend(folder)
    first.prepare({graph.key: graph}, 0)
    (entry,) = first.entries([graph.key]).values()
    assert entry.blob is not None
    store = first.plans.cache.plan_store
    key = first.plans.cache.environment.key(graph.key, "none")
    store.put(key, type(entry)(entry.choice, entry.blob[: len(entry.blob) // 2]))  # whole, as far as the file goes
    second = backend(folder)
    with pytest.warns(UserWarning, match="dropped the serialized plan .*cuDNN does not read"):
        second.prepare({graph.key: graph}, 0)
    assert second.plans.ranked[graph.key].revived is False


def test_locked_choices_are_used_without_timing_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    from gpu.test_device import net

    import fusec
    from fusec import lockfile
    from fusec.gpu.measure.timer import Stopwatch

    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "first"))
    x = rng.standard_normal((2, 8, 16, 16)).astype(np.float32)
    tuned = one_program(fusec.compile(net(), precision="fp16", tune="quick"))
    want = tuned(x)
    lockfile.write(tmp_path / "fusec.lock", tuned.lock())
    tuned.save(tmp_path / "model.fusec")
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "second"))
    monkeypatch.setattr(Stopwatch, "us", None)  # nothing is timed
    locked = one_program(fusec.compile(net(), precision="fp16", lock=tmp_path / "fusec.lock"))
    steps = [[(s.signature, s.kind, s.spelling) for s in e.compiled.program.steps] for e in (tuned, locked)]
    assert steps[0] == steps[1]
    chosen = [{key: choice.identity for key, choice in cudnn_backend(e).choices().items()} for e in (tuned, locked)]
    assert chosen[1].items() <= chosen[0].items()
    assert_close(locked(x), want, 1e-3)
    assert_close(locked(x), want, 1e-3)
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "first"))
    loaded = fusec.load(tmp_path / "model.fusec")
    assert all(result.revived for result in cudnn_backend(loaded).plans.ranked.values())
    assert_close(loaded(x), want, 1e-3)


def test_a_file_made_without_the_gpu_runs_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    import subprocess
    import sys

    from gpu.test_device import net

    import fusec
    from fusec import driver
    from fusec.artifacts import fusec_file

    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "elsewhere"))
    fusec_file.save(tmp_path / "plain.fusec", [driver.build(net(), target="h200", precision="fp16")])
    make = [
        "-m",
        "fusec",
        "compile",
        str(tmp_path / "plain.fusec"),
        "--target",
        "h200",
        "-o",
        str(tmp_path / "m.fusec"),
    ]
    with monkeypatch.context() as patch:
        patch.setenv("FUSEC_DEVICE", "none")
        subprocess.run([sys.executable, *make], check=True, capture_output=True)
    x = rng.standard_normal((2, 8, 16, 16)).astype(np.float32)
    want = driver.compile(net(), precision="fp16", tune="none")(x)
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "here"))
    with pytest.warns(UserWarning, match=r"of its (plans|kernels) were not") as warned:
        strange = fusec.load(tmp_path / "m.fusec")
    assert any("of its plans were not built here and are built anew" in str(one.message) for one in warned)
    assert_close(strange(x), want, 3e-3)
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "trusting"))
    fusec_file.trust(tmp_path / "m.fusec")
    trusted = fusec.load(tmp_path / "m.fusec")
    backend = cudnn_backend(trusted)
    assert any(entry.blob for entry in backend.entries(backend.choices()).values())
    assert_close(trusted(x), want, 3e-3)

"""On a real GPU: what cuDNN serializes and revives computes the same, for every kind of graph there is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from lower.bodies import BODIES, load

from fusec.lower_cudnn import lower
from fusec.plan_store import PlanStore

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def backend(folder: Path) -> Any:
    from fusec.gpu.backend import CudnnBackend

    return CudnnBackend("none", store=PlanStore(folder))


@pytest.mark.parametrize("title", BODIES)
def test_a_revived_plan_computes_the_same(title: str, folder: Path, rng: np.random.Generator) -> None:
    from fusec.gpu.check import random_buffers

    graph = lower(load(BODIES[title])).graph
    given = random_buffers(graph, rng)
    results: list[dict[int, np.ndarray]] = []
    for revived in (False, True):
        machine, buffers = backend(folder), {uid: buffer.copy() for uid, buffer in given.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a plan that is not kept says so
            machine.run_on_host(graph, buffers)
        assert machine._tuned[graph.key].revived is revived
        results.append(buffers)
    for tensor in graph.outputs:
        first, second = (result[tensor.uid] for result in results)
        if tensor.dtype.is_float:
            assert_close(second, first, 1e-6 if tensor.dtype.numpy == np.float32 else 1e-3)
        else:
            np.testing.assert_array_equal(second, first)


def test_a_blob_that_was_cut_is_a_clear_error_and_the_plan_is_built(folder: Path, rng: np.random.Generator) -> None:
    from fusec.gpu.check import random_buffers

    graph = lower(load(next(iter(BODIES.values())))).graph
    buffers = random_buffers(graph, rng)
    first = backend(folder)
    first.run_on_host(graph, buffers)
    (entry,) = first.entries([graph.key]).values()
    assert entry.blob is not None
    store = first._kept.store
    key = first._kept.place.key(graph.key, "none")
    store.put(key, type(entry)(entry.choice, entry.blob[: len(entry.blob) // 2]))  # whole, as far as the file goes
    second = backend(folder)
    with pytest.warns(UserWarning, match="dropped the serialized plan .*cuDNN does not read"):
        second.prepare({graph.key: graph}, 0)
    assert second._tuned[graph.key].revived is False

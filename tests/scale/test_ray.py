"""Test inference in Ray Data and Ray Serve on this machine, with an actor that is killed midway."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close

from fusec.errors import ExecutionError

pytest.importorskip("ray")

from scale.page import run_examples

from fusec.ray.predictor import BatchPredictor
from fusec.ray.serving import RequestBatches

Array = np.ndarray[Any, Any]
Meaning = Callable[[Array], Array]
pytestmark = pytest.mark.filterwarnings("ignore")  # those of Ray's own threads


@pytest.fixture
def session() -> Iterator[None]:
    """Start Ray, which takes long: so one test does all that needs it."""
    import ray

    environment = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": environment},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


class KillsOnce(BatchPredictor):
    """Kill its actor at one row, the first time."""

    def __init__(self, model: str, flag: str):
        super().__init__(model, target="cpu", pad=True)
        self._flag = Path(flag)

    def __call__(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        if 60 in batch["number"] and not self._flag.exists():
            self._flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def dataset_although_an_actor_is_killed(model: Path, meaning: Meaning, rng: np.random.Generator, flag: Path) -> None:
    import ray

    rows = rng.standard_normal((100, 6)).astype(np.float32)
    data = ray.data.from_items([{"number": i, "x": row} for i, row in enumerate(rows)], override_num_blocks=5)
    results = data.map_batches(
        KillsOnce,
        fn_constructor_args=(str(model), str(flag)),
        batch_size=16,
        compute=ray.data.ActorPoolStrategy(size=1),
    ).take_all()
    assert flag.exists()
    assert sorted(row["number"] for row in results) == list(range(100)), "nothing is lost or doubled"
    for row in results:
        assert_close(row["z"], meaning(rows[row["number"]]), 1e-6)
        assert_close(row["x"], rows[row["number"]], 0)


class Request:
    """A request over HTTP, as far as the deployment reads it."""

    def __init__(self, body: Any):
        self._body = body

    async def json(self) -> Any:
        return self._body


def test_requests_are_checked_and_split(model: Path, meaning: Meaning, rng: np.random.Generator) -> None:
    requests = RequestBatches(BatchPredictor(model, target="cpu", pad=True))
    rows = rng.standard_normal((7, 6)).astype(np.float32)
    parts = [requests.checked({"x": part.tolist()}) for part in (rows[:2], rows[2:3], rows[3:])]
    assert_close(np.concatenate([r["z"] for r in requests.run(parts)]), meaning(rows), 1e-6)
    with pytest.raises(ExecutionError, match="the inputs are %x, not %y"):
        requests.checked({"y": rows})
    with pytest.raises(ExecutionError, match="input %x: could not convert"):
        requests.checked({"x": [["a"]]})
    with pytest.raises(ExecutionError, match="lacks the input %x; its columns are %y"):
        BatchPredictor(model, target="cpu")({"y": rows})


@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_data_and_serve(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meaning: Meaning, rng: np.random.Generator
) -> None:
    from ray import serve

    dataset_although_an_actor_is_killed(model, meaning, rng, tmp_path / "flag")
    serve.start(proxy_location="Disabled")
    monkeypatch.chdir(tmp_path)
    names = run_examples("Ray")
    assert_close(names["data_z"], meaning(names["batches"][0]), 1e-6)
    assert_close(names["y"], meaning(names["x"]), 1e-6)
    handle = names["handle"]
    rows = rng.standard_normal((12, 6)).astype(np.float32)
    parts = [rows[:3], rows[3:4], rows[4:]]
    responses = [handle.predict.remote({"x": part}) for part in parts]
    bad = handle.predict.remote({"x": rows[:, :5]})
    assert_close(np.concatenate([r.result()["z"] for r in responses]), meaning(rows), 1e-6)
    with pytest.raises(ExecutionError, match=r"input %x takes rows of \[6\], the array is \[12, 5\]"):
        bad.result()
    answer = handle.remote(Request({"inputs": {"x": rows[:4].tolist()}})).result()
    assert_close(np.array(answer["outputs"]["z"]), meaning(rows[:4]), 1e-6)
    with pytest.raises(ExecutionError, match="the body is"):
        handle.remote(Request([])).result()

"""Test how calls are sent to Dask's workers, and how their results come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fusec.errors import ExecutionError

pytest.importorskip("distributed")
from distributed import Client

import fusec.dask
from fusec.dask.calls import PER_THREAD, finished_calls
from fusec.scale.devices import WorkerDevice

SECONDS = 20.0  # after which a test that waits has failed
pytestmark = pytest.mark.filterwarnings("ignore")  # those of Dask's own threads


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with fusec.dask.gpu_cluster(["cpu", "cpu"]) as cluster, Client(cluster) as client:
        client.wait_for_workers(2)
        yield client


def appears(flag: Path) -> None:
    """Wait for a file. Raises ExecutionError if it does not appear."""
    end = time.monotonic() + SECONDS
    while not flag.exists():
        if time.monotonic() > end:
            raise ExecutionError(f"{flag.name} did not appear")
        time.sleep(0.01)


def doubled(number: int, flag: Path, *, fails: int = -1, waits: int = -1, kills: int = -1) -> int:
    """Double a number, after what happens with one of the numbers."""
    if number == fails:
        raise ExecutionError(f"{number} is bad")
    if number == waits:
        appears(flag)
    if number == kills and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def test_a_cluster_runs_calls_in_order_although_a_worker_is_killed(client: Client, tmp_path: Path) -> None:
    numbers = list(range(50))
    kills_once = partial(doubled, flag=tmp_path / "flag", kills=20)
    assert client.gather(finished_calls(client, kills_once, numbers)) == [2 * number for number in numbers]
    assert (tmp_path / "flag").exists()
    client.wait_for_workers(2)


def test_progress_is_reported_while_other_calls_run(client: Client, tmp_path: Path) -> None:
    flag, told = tmp_path / "flag", list[tuple[int, int]]()

    def done(count: int, total: int) -> None:
        told.append((count, total))
        flag.touch()

    futures = finished_calls(client, partial(doubled, flag=flag, waits=2), range(3), done)
    assert client.gather(futures) == [0, 2, 4]
    assert told == [(1, 3), (2, 3), (3, 3)]


class SentLater:
    """A number that is sent to a worker when another call has run."""

    def __init__(self, number: int, flag: Path):
        self.number, self.flag = number, flag

    def __reduce__(self) -> Any:
        appears(self.flag)
        return SentLater, (self.number, self.flag)


def number_of(item: int | SentLater, flag: Path) -> int:
    flag.touch()
    return item.number if isinstance(item, SentLater) else item


def test_calls_begin_before_the_last_ones_are_sent(client: Client, tmp_path: Path) -> None:
    flag, count = tmp_path / "flag", 2 * PER_THREAD
    items = [*range(count), SentLater(count, flag)]
    assert client.gather(finished_calls(client, partial(number_of, flag=flag), items)) == list(range(count + 1))


def tasks_of(client: Client) -> list[Any]:
    """Return the unfinished tasks of each worker. Dask declares what its asynchronous clients return."""
    found: Any = client.processing()
    return list(found.values())


def test_an_error_ends_the_run_and_drops_what_has_not_begun(client: Client, tmp_path: Path) -> None:
    fails = partial(doubled, flag=tmp_path / "flag", fails=0, waits=1)
    with pytest.raises(ExecutionError, match="0 is bad"):
        finished_calls(client, fails, [1, *[0] * 100])
    (tmp_path / "flag").touch()
    end = time.monotonic() + SECONDS
    while any(tasks_of(client)):
        assert time.monotonic() < end, "calls are still there"
        time.sleep(0.01)


def test_a_worker_on_a_gpu_runs_two_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One reads and copies rows while batches of the other one run."""
    monkeypatch.setattr("fusec.dask.cluster.worker_devices", lambda devices: (WorkerDevice("cuda:0", "0"),))
    with fusec.dask.gpu_cluster() as cluster:
        (worker,) = cluster.scheduler_info["workers"].values()
    assert worker["nthreads"] == 2

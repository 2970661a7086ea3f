"""Test processes that train together on the host: collectives, and errors of one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from scale.page import run_examples

import fusec
from fusec.errors import ExecutionError, FusecError
from fusec.scale.training import worker_group

TWO = ["cpu", "cpu"]


def test_workers_average_and_broadcast() -> None:
    first, second = fusec.run_workers("scale.training.group_functions:together", TWO, {"scale": 2.0})
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["last"] == second["last"] == 3.0 * 299_999
    assert first["first"] == second["first"] == [5, 5, 5]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_raises", "worker 1 on cpu: no data here"),
        ("one_dies", "worker 0 on cpu ended: the process was killed by SIGKILL"),
        ("one_returns", "worker 0 on cpu waits for worker 1 on cpu, which has returned already"),
        (
            "one_is_ahead",
            r"(?s)worker 0 on cpu waits for worker 1 on cpu, .* at one_is_ahead \(group_functions.py",
        ),
        ("they_disagree", "workers ask for different things"),
        ("no_such_function", "has no attribute 'no_such_function'"),
    ],
)
def test_an_error_of_one_ends_all(name: str, words: str) -> None:
    with pytest.raises(ExecutionError, match=words):
        fusec.run_workers(f"scale.training.group_functions:{name}", TWO)


def test_a_worker_may_return_later_than_others() -> None:
    assert fusec.run_workers("scale.training.group_functions:one_takes_long", TWO) == [0, 1]


def test_a_time_limit_tells_where_each_worker_is() -> None:
    where = r"worker 0 on cpu: all_hang \(group_functions.py:\d+\), called by .*\nworker 1 on cpu: all_hang"
    with pytest.raises(ExecutionError, match=rf"workers have not returned in time:\n{where}"):
        fusec.run_workers("scale.training.group_functions:all_hang", TWO, timeout_s=6)


def test_a_group_that_is_not_joined_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "WORKER", "scale.training.stuck_group_worker")
    monkeypatch.setattr(worker_group, "JOIN_S", 0.3)
    with pytest.raises(ExecutionError, match=r"have not joined the group; with NCCL_DEBUG=INFO.*\nworker 0 on cpu: no"):
        fusec.run_workers("scale.training.group_functions:together", TWO)


def test_bad_arguments() -> None:
    with pytest.raises(FusecError, match="arguments for workers are numbers"):
        fusec.run_workers("scale.training.group_functions:together", TWO, {"scale": print})


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FUSEC_DEVICE", "none")
    run_examples("Training on several GPUs")

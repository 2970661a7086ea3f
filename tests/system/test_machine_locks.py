"""Test locks among processes: slots bound them, a claim excludes them, and a killed process holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from fusec.system import machine_locks
from fusec.system.machine_locks import FOLDER, MachineLocks

HOLDER = """
import sys, time
from pathlib import Path
from fusec.system.machine_locks import MachineLocks
locks = MachineLocks(Path(sys.argv[1]), 2)
with locks.slot(lambda: None), locks.claim("ab" * 32, lambda: None):
    print("held", flush=True)
    time.sleep(100)
"""
WORKER = """
import sys, time
from pathlib import Path
from fusec.system.machine_locks import MachineLocks
locks = MachineLocks(Path(sys.argv[1]), 2)
for _ in range(5):
    with locks.slot(lambda: None):
        begin = time.monotonic()
        time.sleep(0.02)
        print(begin, time.monotonic())
"""


class StopError(Exception):
    pass


def stop() -> None:
    raise StopError


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_no_more_processes_work_than_there_are_slots(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    lines = [line.split() for process in processes for line in process.communicate()[0].splitlines()]
    events = sorted((float(at), change) for begin, end in lines for at, change in ((begin, 1), (end, -1)))
    running = [sum(change for _, change in events[: i + 1]) for i in range(len(events))]
    assert len(lines) == 25 and max(running) == 2


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    locks, held = MachineLocks(tmp_path, 2), [holder(tmp_path)]
    try:
        with pytest.raises(StopError), locks.claim("ab" * 32, stop):
            pass
        with locks.claim("cd" * 32, stop), locks.slot(stop), locks.free_slot() as is_free:
            assert not is_free, "one slot is held here, the other one by the other process"
            with pytest.raises(StopError), locks.slot(stop):
                pass
            os.kill(held[0].pid, signal.SIGKILL)
            held.pop().communicate()
            with locks.slot(stop), locks.claim("ab" * 32, stop):
                pass
    finally:
        for process in held:
            process.kill()
            process.communicate()


def test_one_waits_for_the_claim_of_another(tmp_path: Path) -> None:
    locks, process = MachineLocks(tmp_path, 2), holder(tmp_path)
    waited: list[float] = []

    def check() -> None:
        waited.append(time.monotonic())
        if len(waited) == 3:
            process.kill()
            process.communicate()

    with locks.claim("ab" * 32, check):
        assert len(waited) >= 3


def test_who_waits_opens_each_file_once_and_closes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening files is slow on some machines, and many processes wait at the same time."""
    opened: list[str] = []
    one, other, waited = MachineLocks(tmp_path, 2), MachineLocks(tmp_path, 2), list[int]()
    original = machine_locks._OpenFiles._open

    def recorded(files: machine_locks._OpenFiles, name: str) -> int:
        opened.append(name)
        return original(files, name)

    def check() -> None:
        waited.append(0)
        if len(waited) == 5:
            held.close()

    before = {each.name for each in Path("/proc/self/fd").iterdir()}
    with ExitStack() as held:
        held.enter_context(one.slot(stop))
        held.enter_context(one.slot(stop))
        monkeypatch.setattr(machine_locks._OpenFiles, "_open", recorded)
        with other.slot(check):
            assert len(waited) >= 5 and opened == ["slot-0", "slot-1"]
            with one.free_slot() as is_free:
                assert is_free
    assert {each.name for each in Path("/proc/self/fd").iterdir()} <= before


def test_slots_of_other_work_are_other_slots(tmp_path: Path) -> None:
    one, other = MachineLocks(tmp_path, 1), MachineLocks(tmp_path, 1, "compiler")
    with one.slot(stop), other.slot(stop), pytest.raises(StopError), other.slot(stop):
        pass


def test_a_claim_is_seen_without_waiting(tmp_path: Path) -> None:
    locks = MachineLocks(tmp_path, 1)
    assert not locks.is_claimed("ab" * 32)
    with MachineLocks(tmp_path, 1).claim("ab" * 32, stop):
        assert locks.is_claimed("ab" * 32)
        assert not locks.is_claimed("ab" * 32, "proof") and not locks.is_claimed("cd" * 32)
    assert not locks.is_claimed("ab" * 32)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write any folder")
def test_in_a_read_only_folder_each_process_works_for_itself(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    locks = MachineLocks(tmp_path, 1)
    with locks.slot(stop), locks.slot(stop), locks.claim("ab" * 32, stop):
        assert not (tmp_path / FOLDER).exists()


def test_where_there_can_be_no_folder_each_process_works_for_itself(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    locks = MachineLocks(tmp_path, 1)
    with locks.slot(stop) as first, locks.slot(stop) as second, locks.claim("ab" * 32, stop):
        assert first and second, "the only slot is held twice"

"""Test atomic writes with two writers of one path, planted symlinks, files of dead writers, and failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fusec.artifacts import container
from fusec.cli.common import files
from fusec.errors import FusecError, ModelError
from fusec.lockfile import toml_text
from fusec.plans.lock_record import Lock
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry, PlanKey
from fusec.plans.sqlite_cache import Store
from fusec.system import atomic_write

HALF = """
import sys, time
from pathlib import Path
from fusec.system import atomic_write as atomic
goal = Path(sys.argv[1])
with atomic.folder(goal.parent) as made, atomic.written(goal, durable=True) as file:
    (made / "half").write_text("half")
    file.write(b"half"); file.flush()
    print("half", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def temporary(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.startswith(".")]


def save(path: Path) -> None:
    with container.written(path) as file:
        file.add("a", os.urandom(200_000))
        file.finish({})


def load(path: Path) -> None:
    container.Reader(path).check("a")


def write_lock(path: Path) -> None:
    toml_text.write(path, Lock({"fusec": str(threading.get_ident()) * 5000}, ()))


def write_file(path: Path) -> None:
    files.write_whole(path, lambda file: [file.write(bytes([threading.get_ident() % 251]) * 50_000) for _ in range(4)])


def read_file(path: Path) -> None:
    data = path.read_bytes()
    if len(data) != 200_000 or len(set(data)) != 1:
        raise ModelError("torn")


WRITERS: list[tuple[Callable[[Path], None], Callable[[Path], object]]] = [
    (save, load),
    (write_lock, toml_text.read),
    (write_file, read_file),
]


@pytest.mark.parametrize(("write", "read"), WRITERS, ids=["container", "lock", "file"])
def test_two_threads_that_write_one_path_leave_a_whole_file(
    write: Callable[[Path], None], read: Callable[[Path], object], tmp_path: Path
) -> None:
    """The name of the process alone does not tell two writers apart, and one removed the other's file."""
    path, end = tmp_path / "file", time.monotonic() + 1.5
    write(path)
    failed: list[FusecError] = []
    count = [0, 0, 0, 0]

    def repeat(number: int, action: Callable[[Path], object]) -> None:
        while time.monotonic() < end and not failed:
            try:
                action(path)
                count[number] += 1
            except FusecError as error:
                failed.append(error)

    threads = [threading.Thread(target=repeat, args=pair) for pair in enumerate((write, write, read, read))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert min(count) > 3
    assert names(tmp_path) == ["file"]


def test_a_planted_symlink_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the very name that the writer draws."""
    victim, goal = tmp_path / "victim", tmp_path / "goal"
    victim.write_text("precious")
    monkeypatch.setattr("os.urandom", bytes)
    (tmp_path / f".fusec-{'0' * 32}.tmp").symlink_to(victim)
    with pytest.raises(FusecError, match="File exists"):
        files.write_whole(goal, lambda file: file.write(b"new"))
    assert (victim.read_text(), goal.exists()) == ("precious", False)


def test_no_temporary_name_can_be_guessed(tmp_path: Path) -> None:
    """Symlinks under the names that are known before: the target's and the process's."""
    victim, plans, places = tmp_path / "victim", PlanStore(tmp_path / "plans"), list[Path]()
    victim.write_text("precious")
    key, pid = PlanKey("a", "h200", "", "", "", "", "quick"), os.getpid()
    (tmp_path / "plans" / "plans").mkdir(parents=True)
    places += [tmp_path / f".{name}.{pid}.tmp" for name in ("lock", "file", "container", "export")]
    places += [tmp_path / f"answers.new-{pid}"]
    places += [tmp_path / "plans" / "plans" / f".{key.digest[:16]}-{pid}-{threading.get_ident()}.tmp"]
    for place in places:
        place.symlink_to(victim)
    write_lock(tmp_path / "lock")
    write_file(tmp_path / "file")
    save(tmp_path / "container")
    plans.put(key, Entry(Choice(7, ()), None))
    plans.export(tmp_path / "export")
    Store(tmp_path / "answers.sqlite").put({"a": "b"})
    assert victim.read_text() == "precious"
    assert all(place.is_symlink() for place in places)
    assert not any((tmp_path / name).is_symlink() for name in ("lock", "file", "container", "export"))


def test_only_the_next_writer_removes_files_of_a_killed_writer(tmp_path: Path) -> None:
    goal = tmp_path / "goal"
    command = [sys.executable, "-c", HALF, str(goal)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
    assert len(temporary(tmp_path)) == 4
    killed, living = writers
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    files.write_whole(goal, lambda file: file.write(b"whole"))
    assert goal.read_bytes() == b"whole"
    assert len(temporary(tmp_path)) == 2  # of the one that is still at work
    living.send_signal(signal.SIGKILL)
    living.communicate()
    with atomic_write.folder(tmp_path) as made:
        assert temporary(tmp_path) == [made.name]
    assert names(tmp_path) == ["goal"]


def test_a_failed_writer_removes_its_own_file_and_no_other(tmp_path: Path) -> None:
    goal = tmp_path / "goal"
    goal.write_text("old")
    goal.chmod(0o640)
    with atomic_write.written(goal, durable=False) as other:
        other.write(b"new")
        with pytest.raises(ZeroDivisionError):
            files.write_whole(goal, lambda file: file.write(b"half") / 0)
        assert len(temporary(tmp_path)) == 1
        assert goal.read_text() == "old"
    assert goal.read_text() == "new"
    assert goal.stat().st_mode & 0o777 == 0o640
    assert names(tmp_path) == ["goal"]


def test_a_folder_that_is_renamed_stays(tmp_path: Path) -> None:
    with atomic_write.folder(tmp_path) as made:
        (made / "a").write_text("a")
        made.rename(tmp_path / "kept")
    assert (tmp_path / "kept" / "a").read_text() == "a"
    assert names(tmp_path) == ["kept"]


def test_names_that_only_look_temporary_stay(tmp_path: Path) -> None:
    """A user's hidden file, and a link under a name of ours: neither is a dead writer's."""
    (tmp_path / ".fusec-notes.tmp").write_text("mine")
    (tmp_path / f".fusec-{'a' * 32}.tmp").symlink_to(tmp_path / ".fusec-notes.tmp")
    files.write_whole(tmp_path / "goal", lambda file: file.write(b"whole"))
    assert len(temporary(tmp_path)) == 2

"""Test the fuzzer's database: chunks are claimed once, or again if their process died; findings stay until fixed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusec.errors import FusecError
from fusec.testing.runner.database import State

CLAIM = (
    "import sys; from pathlib import Path; from fusec.testing.runner.database import State; "
    "state = State(Path(sys.argv[1]))\n"
)


def test_each_chunk_is_claimed_once_by_many_processes(tmp_path: Path) -> None:
    program = CLAIM + "print([state.claim('run') for _ in range(20)], flush=True); sys.stdin.read()"
    claimed: list[int] = []
    command = [sys.executable, "-c", program, tmp_path]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:  # all alive until all have claimed
        assert process.stdout is not None
        claimed += json.loads(process.stdout.readline())
    for process in processes:
        process.communicate()
    assert sorted(claimed) == list(range(60))


def test_chunks_of_dead_processes_are_claimed_again(tmp_path: Path) -> None:
    program = (
        CLAIM + "import os; state.claim('run'); state.finish('run', state.claim('run'), 25); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=False)
    state = State(tmp_path)
    assert state.examples("run") == 25
    assert [state.claim("run") for _ in range(3)] == [0, 2, 3]
    assert state.claim("other") == 0
    state.release("run", 3)
    assert state.claim("run") == 3
    state.forget()
    assert (state.examples("run"), state.claim("run")) == (0, 0)


def test_findings_stay_until_they_are_dropped(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "finding.json").write_text("{}")
        state.add(f"signature {name}", "p", tmp_path / name)
    first, second = State(tmp_path / "state").open_findings()
    assert (first.signature, first.property) == ("signature one", "p")
    state.rename("signature one", "in other words")
    assert state.open_findings()[0].signature == "in other words"
    state.drop("in other words")
    assert not first.folder.exists()
    (second.folder / "finding.json").unlink()
    assert state.open_findings() == []


def test_error_names_a_damaged_database(tmp_path: Path) -> None:
    (tmp_path / "fuzz.sqlite").write_text("no database, but long enough to be read as the head of one" * 20)
    with pytest.raises(FusecError, match=r"cannot use the database .*fuzz.sqlite .*--database"):
        State(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FusecError, match="cannot make the database folder"):
        State(tmp_path / "file" / "x")

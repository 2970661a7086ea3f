"""Test commands that need no cuDNN: tables of the package, start, end, interrupts and progress."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.command import fusec

import fusec as library
from fusec import driver
from fusec.cli.common import bars, output
from fusec.gpu import doctor
from fusec.ops import ALL

FUSEC = (sys.executable, "-m", "fusec")


def test_version_and_help_answer_at_once() -> None:
    """In a process of its own: also what `python -m fusec` is for. Half a second, and nothing heavy imported.

    It is time of the processor, because other processes may use all cores.
    """
    took: list[float] = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([*FUSEC, "--version"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.stdout.startswith(f"fusec {library.__version__}, ")
    assert min(took) < 0.5
    program = (
        "import sys; sys.argv = ['fusec', '--help']; import fusec.cli.commands, atexit\n"
        "heavy = {'numpy', 'onnx', 'networkx', 'cudnn', 'cupy', 'onnxruntime'}\n"
        "try: fusec.cli.commands.main()\n"
        "finally: assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for command in ("compile", "run", "explain", "verify", "targets", "doctor"):
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize(
    "command",
    [
        *("compile", "run", "explain", "verify", "quantize", "report write", "report diff"),
        *("serve", "export-triton", "targets", "doctor"),
    ],
)
def test_every_command_has_help_and_json(command: str) -> None:
    result = fusec(*command.split(), "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_an_error_in_a_process_of_its_own(tmp_path: Path) -> None:
    result = subprocess.run([*FUSEC, "verify", tmp_path / "none.onnx"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"fusec: error: {tmp_path / 'none.onnx'}: No such file or directory\n"


def test_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run([*FUSEC, "targets"], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


def test_an_interrupt_ends_with_130(tmp_path: Path) -> None:
    """The signal comes while the command waits in its own code."""
    program = (
        "import signal, sys; from fusec.cli import commands as cli; from fusec import driver\n"
        # a job in the background starts with interrupts ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def wait(*args, **options): print('ready', flush=True); signal.pause()\n"
        "driver.build_model = wait; sys.argv = ['fusec', 'verify', 'm.onnx']; cli.main()"
    )
    assert interrupted(program, "ready") == (130, "fusec: interrupted\n")


def interrupted(program: str, *lines: str, timeout: float = 30) -> tuple[int, str]:
    """Run a program, interrupt it after each line that it prints, and return its status and what it wrote on stderr.

    timeout: in seconds, after the last interrupt; the program is killed then.
    """
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in lines:
                assert process.stdout.readline() == f"{line}\n"
                process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return process.returncode, err


def test_an_interrupt_that_is_lost_still_ends_the_command(tmp_path: Path) -> None:
    """Python loses a KeyboardInterrupt that is raised while an object is finalized."""
    program = (
        "import signal, sys; from fusec.cli import commands as cli; from fusec import driver\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def lose(*args, **options):\n"
        "    print('ready', flush=True)\n"
        "    while True:\n"
        "        try: signal.pause()\n"
        "        except KeyboardInterrupt: pass\n"
        "driver.build_model = lose; sys.argv = ['fusec', 'verify', 'm.onnx']; cli.main()"
    )
    assert interrupted(program, "ready", timeout=2) == (130, "fusec: interrupted\n")


def test_a_second_interrupt_does_not_disturb_the_end() -> None:
    """It comes in a function that Python calls at its end, where a KeyboardInterrupt would print a traceback."""
    program = (
        "import atexit, signal, sys, time; from fusec.cli import commands as cli; from fusec import driver\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def leave(): print('leaving', flush=True); time.sleep(0.3)\n"
        "def wait(*args, **options): atexit.register(leave); print('ready', flush=True); signal.pause()\n"
        "driver.build_model = wait; sys.argv = ['fusec', 'verify', 'm.onnx']; cli.main()"
    )
    assert interrupted(program, "ready", "leaving") == (130, "fusec: interrupted\n")


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object, **options: object) -> None:
        raise MemoryError("Unable to allocate 1.00 TiB")

    monkeypatch.setattr(driver, "build_model", build)
    result = fusec("verify", "m.onnx")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "fusec: error: out of memory: Unable to allocate 1.00 TiB\n"


def test_targets() -> None:
    rows = json.loads(fusec("targets", "--json").stdout)
    assert [row["name"] for row in rows] == ["t4", "a100", "l4", "h100", "h200", "b200"]
    assert [row["name"] for row in rows if not row["derived"]] == ["h200"]
    assert all("https://" in row["source"] for row in rows)
    lines = fusec("targets").stdout.splitlines()
    assert lines[-1].split()[:5] == ["b200", "NVIDIA", "B200", "10.0", "derived"]


def test_doctor_fails_for_a_required_piece_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = doctor.Requirement("GPU", False, "none", required=False)
    nvrtc = doctor.Requirement("nvrtc", False, "no libnvrtc", "pip install it")
    monkeypatch.setattr(doctor, "diagnose", lambda: [gpu])
    assert fusec("doctor").exit_code == 0
    monkeypatch.setattr(doctor, "diagnose", lambda: [gpu, nvrtc])
    result = fusec("doctor")
    assert (result.exit_code, result.stderr) == (1, "fusec: missing: nvrtc\n")
    assert "MISSING nvrtc: no libnvrtc; remedy: pip install it" in result.stdout
    data = json.loads(fusec("doctor", "--json").stdout)
    assert data["ok"] is False
    assert data["checks"][1]["remedy"] == "pip install it"


def test_doctor_ops_accounts_for_every_op() -> None:
    result = fusec("doctor", "--ops", "--json")
    rows = {row["op"]: row for row in json.loads(result.stdout)}
    assert result.exit_code == 0
    assert set(rows) == {op.name for op in ALL}
    assert (rows["conv"]["lowered"], rows["conv"]["anchor"]) == (True, True)
    assert (rows["relu"]["lowered"], rows["relu"]["anchor"]) == (True, False)
    assert "pointwise mode" in rows["sign"]["why_not"]
    assert all(row["lowered"] != bool(row["why_not"]) for row in rows.values())


def test_doctor_ops_fails_for_an_op_in_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec import lower_cudnn

    monkeypatch.setattr(lower_cudnn, "WITHOUT", {k: v for k, v in lower_cudnn.WITHOUT.items() if k != "sign"})
    result = fusec("doctor", "--ops")
    assert (result.exit_code, result.stderr) == (1, "fusec: neither lowered nor explained: sign\n")


def test_no_bars_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress() as report:
        report("import", 0, 1)
        report("pass layout", 3, 9)
    assert capsys.readouterr() == ("", "")


def test_bars_for_slow_stages_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.progress() as report:
        report("import", 0, 1)
        time.sleep(0.3)
    quick = capsys.readouterr()
    assert quick.out == ""
    assert "import" not in quick.err
    monkeypatch.setattr(bars, "PATIENCE_S", 0.1)
    with output.progress() as report:
        report("import", 0, 1)
        report("partition", 3, 9)
        time.sleep(0.5)
        report("verify", 0, 0)
    slow = capsys.readouterr()
    assert slow.out == ""
    assert "partition" in slow.err
    assert "3/9" in slow.err
    assert "import" not in slow.err


@pytest.mark.parametrize(
    "command",
    [
        *("compile", "run", "explain", "verify", "quantize", "targets", "doctor", "lock write", "lock diff"),
        *("report write", "report diff", "serve", "export-triton"),
    ],
)
def test_the_manual_names_every_option(command: str) -> None:
    manual = (Path(library.__file__).parent.parent / "docs" / "cli.md").read_text()
    assert f"`fusec {command.removesuffix(' write')}" in manual
    for option in re.findall(
        r"(?<![\w`])--?[a-z][a-z-]*", fusec(*command.split(), "--help").stdout.partition("Options:")[2]
    ):
        assert f"`{option}" in manual or f"{option}`" in manual, option

"""Test habits of a command line: help without arguments, versions, completion, -v and -q, written files, progress."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from cli.command import SHAPE, fusec
from rich.console import Console

import fusec as library
from fusec.cli.common import bars, output
from fusec.diagnostics.text_table import bytes_text
from fusec.gpu.cudnn.without_driver import deviceless
from fusec.system import installed

FUSEC = (sys.executable, "-m", "fusec")


def test_fusec_alone_prints_its_help() -> None:
    result = fusec()
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == fusec("--help").stdout
    assert "Commands:" in result.stdout


def test_the_version_names_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def frontend(name: str) -> str:
        assert name == "nvidia-cudnn-frontend"
        return "1.2.3"

    monkeypatch.setattr(deviceless, "cudnn_version", lambda: "9.19.0.56")
    monkeypatch.setattr(installed, "installed_version", frontend)
    assert fusec("--version").stdout == f"fusec {library.__version__}, cuDNN 9.19.0.56 with frontend 1.2.3\n"
    monkeypatch.setattr(deviceless, "cudnn_version", lambda: "")
    assert fusec("--version").stdout == f"fusec {library.__version__}, no cuDNN\n"


def complete(*words: str) -> list[str]:
    """Return what bash would offer for the last word."""
    asked = {"_FUSEC_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    run = subprocess.run(FUSEC, capture_output=True, text=True, check=True, env={**os.environ, **asked})
    return run.stdout.split()


def test_the_shell_completes_commands_and_options() -> None:
    assert complete("fusec", "expl") == ["explain"]
    assert "--must-fuse" in complete("fusec", "explain", "--mu")
    assert complete("fusec", "cache", "ex") == ["export"]


def test_the_script_of_the_completion_names_fusec() -> None:
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    run = subprocess.run([*FUSEC, "--show-completion", "bash"], capture_output=True, text=True, check=True, env=env)
    assert "_FUSEC_COMPLETE=complete_bash" in run.stdout


@pytest.mark.parametrize("before", [True, False])
def test_verbose_tells_what_is_done(model: Path, before: bool) -> None:
    def verbose(flag: str) -> str:
        args = (flag, "compile", model, *SHAPE) if before else ("compile", model, *SHAPE, flag)
        result = fusec(*args, "--target", "cpu")
        assert result.exit_code == 0
        assert "fusec.compiler" not in result.stdout
        return result.stderr

    once, twice = verbose("-v"), verbose("-vv")
    assert "fusec.compiler.build_program: model read: " in once and "pass " not in once
    assert "fusec.compiler.build_program: pass " in twice
    assert fusec("compile", model, *SHAPE, "--target", "cpu").stderr == "", "the next command is as quiet as ever"
    assert not logging.getLogger("fusec").level


def test_quiet_prints_the_result_alone(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "y.npz"
    loud, quiet = (fusec(*flag, "run", model, *SHAPE, "--target", "cpu", "-o", file) for flag in ((), ("-q",)))
    assert loud.stdout.splitlines()[-1] == f"wrote {file}, {bytes_text(file.stat().st_size)}"
    assert quiet.stderr == "" and "wrote" not in quiet.stdout and quiet.stdout.startswith("y: float32")
    failed = fusec("run", "-q", tmp_path / "none.onnx")
    assert (failed.exit_code, failed.stderr) == (
        2,
        f"fusec: error: {tmp_path / 'none.onnx'}: No such file or directory\n",
    )


def test_quiet_hides_warnings_of_one_command(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec import driver

    build = driver.build_model

    def warns(*args: object, **options: object) -> object:
        warnings.warn("look out", UserWarning, stacklevel=1)
        return build(*args, **options)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(driver, "build_model", warns)
    assert fusec("compile", "-q", model, *SHAPE, "--target", "cpu").stderr == ""
    with pytest.warns(UserWarning, match="look out"):
        fusec("compile", model, *SHAPE, "--target", "cpu")


def test_a_library_prints_no_records() -> None:
    """A program that did not set up logging sees none of them, also no warnings."""
    program = "import fusec, logging; logging.getLogger('fusec.compiler').warning('slow')"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "")


def test_records_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    from fusec.cli.common import verbosity

    with verbosity.restored():
        verbosity.begin(1, quiet=False)
        logging.getLogger("fusec.artifacts").info("%s: read", "a\x1b[31m\nb")
    assert capsys.readouterr().err.count("\n") == 1
    verbosity.begin(0, quiet=False)


def test_progress_moves_where_no_part_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of one part, such as the import, pulses; one of several counts."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(bars, "PATIENCE_S", 0.0)
    seen = io.StringIO()
    monkeypatch.setattr(bars, "Console", lambda stderr: Console(file=seen, force_terminal=True, width=100))
    with output.progress() as report:
        report("import", 0, 1)
    assert "import" in seen.getvalue() and "0/1" not in seen.getvalue() and "0/?" not in seen.getvalue()
    with output.progress() as report:
        report("partition", 3, 9)
    assert "3/9" in seen.getvalue()
    monkeypatch.setattr(output, "quiet", True)
    before = seen.getvalue()
    with output.progress() as report:
        report("partition", 3, 9)
    assert seen.getvalue() == before

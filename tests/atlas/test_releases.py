"""Test releases: which wheels pip is asked for, what its process sees, and clear errors."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from fusec.atlas import releases
from fusec.errors import FusecError
from fusec.gpu.cudnn.without_driver import deviceless


class Pip:
    """Stand-in for subprocess.run: pip that makes folders as the wheels do, or fails."""

    def __init__(self, fails: bool = False):
        self.fails = fails
        self.wanted: list[str] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--target") + 1])
        self.wanted = command[command.index("--target") + 2 :]
        if self.fails:
            return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution\n")
        package, version = self.wanted[0].split("==")
        full = version.replace(".*", ".0.7")
        (folder / f"{package.replace('-', '_')}-{full}.dist-info").mkdir()
        (folder / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("9.28", ["nvidia-cudnn-cu13==9.28.*"]),
        ("9.19.0.55", ["nvidia-cudnn-cu13==9.19.0.55"]),
        ("9.10", ["nvidia-cudnn-cu12==9.10.*", "nvidia-cuda-nvrtc-cu12", "nvidia-cublas-cu12"]),
    ],
)
def test_a_release_is_installed_and_removed(version: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/own")
    with releases.release(version) as installed:
        paths = installed.environment["LD_LIBRARY_PATH"].split(":")
        assert Path(paths[0]).parts[-3:] == ("nvidia", "cudnn", "lib")
        assert Path(paths[0]).is_dir()
        assert paths[-1] == "/usr/own"
        assert installed.version.startswith(version)
    assert pip.wanted == wanted
    assert not Path(paths[0]).exists()


@pytest.mark.parametrize("version", ["8.9", "9", "newest", "9.1;rm", "--upgrade"])
def test_a_malformed_version_is_refused(version: str) -> None:
    with pytest.raises(FusecError, match=r"a release is written 9\.28"), releases.release(version):
        pass


def test_the_reason_that_pip_gives_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Pip(fails=True))
    with pytest.raises(FusecError, match=r"--cudnn 9\.99: .*No matching distribution"), releases.release("9.99"):
        pass


@pytest.mark.cudnn
def test_the_installed_one_needs_no_download() -> None:
    with releases.release("installed") as here:
        assert here.version == deviceless.cudnn_version()
        done = releases.run(here, "print(sys.argv[1:], sys.stdin.read())", ["a"], "b")
    assert done.stdout == "['a'] b\n"

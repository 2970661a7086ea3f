"""Install a release of cuDNN in a folder that is thrown away, and run this fusec with it.

The frontend and cuDNN's own libraries are found through `LD_LIBRARY_PATH`. The loader reads it when a process starts.
So each release gets a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from fusec.errors import FusecError
from fusec.gpu.cudnn.without_driver import deviceless
from fusec.system.dataclass import dataclass

FIRST_OF_CUDA_13 = (9, 12)  # earlier releases exist for CUDA 12 only


@dataclass(frozen=True)
class Release:
    """A release of cuDNN that a process can be started with. environment: the variables for that process."""

    version: str
    environment: Mapping[str, str]


@contextlib.contextmanager
def release(version: str) -> Generator[Release]:
    """Install a release, such as `9.28` or `9.19.0.56`, until the end of the block.

    `installed`, or the version that is installed, needs no download.

    Raises FusecError if the version is malformed or pip does not find it.
    """
    here = deviceless.cudnn_version()
    if version in ("installed", here):
        if not here:
            raise FusecError(f"--cudnn {version}: no cuDNN is installed: {deviceless.INSTALL}")
        yield Release(here, dict(os.environ))
        return
    if not re.fullmatch(r"9(\.\d+){1,3}", version):
        raise FusecError(f"--cudnn {version}: a release is written 9.28 or 9.19.0.56, or `installed`")
    with tempfile.TemporaryDirectory(prefix="fusec-cudnn-") as folder:
        major = 13 if tuple(map(int, version.split(".")[:2])) >= FIRST_OF_CUDA_13 else 12
        _install(version, major, Path(folder))
        found = next(Path(folder).glob(f"nvidia_cudnn_cu{major}-*.dist-info"))
        libraries = [*sorted(Path(folder).glob("nvidia/*/lib")), *deviceless.library_folders()]
        paths = [*map(str, libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)}
        yield Release(found.name.split("-")[1].removesuffix(".dist"), environment)


def run(installed: Release, code: str, arguments: Sequence[str] = (), text: str = "") -> CompletedProcess[str]:
    """Run Python code in a process that loads a release, and return how it ended.

    The import path is this process's, so that the same fusec and frontend are used.

    arguments: `sys.argv` of the process, after its name
    text: its standard input
    """
    start = f"import sys; sys.path[:] = {sys.path!r}; {code}"
    command = [sys.executable, "-P", "-c", start, *arguments]
    environment = dict(installed.environment)
    return subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False)


def _install(version: str, major: int, folder: Path) -> None:
    """Install the wheel; for CUDA 12 also NVRTC and cuBLAS, which an environment for CUDA 13 does not have."""
    exact = version if version.count(".") == 3 else f"{version}.*"
    wanted = [f"nvidia-cudnn-cu{major}=={exact}"]
    if major == 12:
        wanted += ["nvidia-cuda-nvrtc-cu12", "nvidia-cublas-cu12"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command += ["--no-cache-dir", "--target", str(folder), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise FusecError(f"--cudnn {version}: pip does not install nvidia-cudnn-cu{major}: {errors[-1]}")

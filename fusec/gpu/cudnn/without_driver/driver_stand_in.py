"""Build a stand-in for the driver library libcuda, with which cuDNN plans on a machine without a driver.

cuDNN loads modules and reads kernel attributes while it finalises plans. A handle that is never launched is enough for
that. All other functions of the stand-in report CUDA_ERROR_NO_DEVICE.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from importlib import resources
from pathlib import Path

from fusec.errors import TargetError
from fusec.gpu.cudnn.without_driver import private_library
from fusec.plans.cache_folder import cache_folder

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_HANDLES = ("cuLibraryLoadData", "cuLibraryGetKernel", "cuModuleLoadData", "cuModuleGetFunction")
_SUCCEED = ("cuLibraryUnload", "cuModuleUnload", "cuKernelSetAttribute")
_MESSAGES = ("cuGetErrorString", "cuGetErrorName")
_DRIVER_VERSION = 13000


def load_driver() -> str:
    """Load the stand-in for libcuda.so.1, built the first time, or the real driver where it cannot be built.

    The stand-in comes first, also on a machine with a GPU. A driver for another GPU, or without one, refuses to load
    what cuDNN compiles, so verdicts would differ from machine to machine.

    Returns `stand-in` or `real`. Raises TargetError if there is neither.
    """
    try:
        library = stand_in()
    except TargetError:
        try:
            ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        except OSError:
            pass
        else:
            return "real"
        raise
    private_library.load(library)
    return "stand-in"


def stand_in() -> Path:
    """Return the stand-in library in the user's private folder of the cache, checked; compile it the first time.

    One that root built is used, too, because an image may contain one.

    Raises TargetError for a folder that another user owns or can write, or when the library cannot be built.
    """
    source = _source()
    stem = f"libcuda-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    own, roots = (cache_folder() / f"native-{user}" for user in (os.geteuid(), 0))
    library = private_library.find(own, stem)
    if library is None and roots != own and os.access(roots, os.X_OK):
        library = private_library.find(roots, stem)
    return _built(source, own, stem) if library is None else library


def compiler() -> str | None:
    """Return the C compiler on the path, or None."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _source() -> str:
    """Return the stand-in in C, with one line for each function of the driver's interface."""
    lines: list[str] = []
    for name in resources.files("fusec.gpu.cudnn.without_driver").joinpath("driver_api.txt").read_text().split():
        if name in _HANDLES:
            body = "(void **p) { *p = (void *)0x1000; return 0; }"
        elif name in _SUCCEED:
            body = "(void) { return 0; }"
        elif name in _MESSAGES:
            body = '(int e, const char **s) { *s = "no CUDA device: fusec stand-in"; return 0; }'
        elif name == "cuDriverGetVersion":
            body = f"(int *v) {{ *v = {_DRIVER_VERSION}; return 0; }}"
        elif name == "cuKernelGetAttribute":
            body = "(int *v) { *v = 0; return 0; }"
        else:
            body = f"(void) {{ return {_NO_DEVICE}; }}"
        lines.append(f"int {name}{body}\n")
    return "".join(lines)


def _built(source: str, own: Path, stem: str) -> Path:
    """Compile the stand-in into the user's own folder."""
    cc = compiler()
    if cc is None:
        raise TargetError(
            "no C compiler to build the stand-in for the missing driver library that cuDNN needs: "
            "install gcc or clang (apt install gcc)"
        )
    private_library.make_folder(own)
    with _scratch(own) as scratch:
        c_file, made = Path(scratch) / "cuda.c", Path(scratch) / "cuda.so"
        c_file.write_text(source)
        command = [cc, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(made), str(c_file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TargetError(f"{cc} could not build the stand-in for libcuda: {done.stderr.strip()[-300:]}")
        library = own / private_library.library_name(stem, made.read_bytes())
        made.chmod(0o644)  # the umask may let others write it
        made.replace(library)  # atomic: another process may be doing the same
    return library


@contextlib.contextmanager
def _scratch(own: Path) -> Generator[str]:
    """Make a temporary folder inside the private one."""
    try:
        with tempfile.TemporaryDirectory(dir=own) as scratch:
            yield scratch
    except OSError as error:
        raise TargetError(f"cannot build the stand-in for libcuda in {own} ({error}); set FUSEC_CACHE") from error

"""Find the installed cuDNN and NVRTC, and bring cuDNN up on a machine without a driver.

cuDNN plans for described GPUs without a driver. But its runtime-compiled engines link the driver library and compile
with NVRTC. If one of these is missing, cuDNN silently leaves those engines out. So both are loaded before the first
question, or there is an error.
"""

from __future__ import annotations

import ctypes
import fnmatch
import importlib.util
import os
import re
import sysconfig
from functools import cache
from pathlib import Path

from fusec.errors import TargetError
from fusec.gpu.cudnn.without_driver.driver_stand_in import load_driver
from fusec.system.installed import installed_version

INSTALL = "pip install 'fusec[cu13]' (CUDA 12: 'fusec[cu12]')"


@cache
def library_folders() -> tuple[Path, ...]:
    """Return the library folders of NVIDIA's wheels."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return tuple(lib for root in roots for lib in sorted(root.glob("*/lib")))


@cache
def _files_in(folder: Path) -> list[str]:
    """List a folder once, because listing all of them takes a tenth of a second on some file systems."""
    return [each.name for each in folder.iterdir()]


def find_library(pattern: str) -> Path | None:
    """Return the newest library of NVIDIA's wheels that matches a glob such as `libcudnn.so.*`; None without one."""
    found = [lib / name for lib in library_folders() for name in fnmatch.filter(_files_in(lib), pattern)]
    return max(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)]) if found else None


def cudnn_library() -> Path | None:
    """Return the libcudnn that the frontend loads: that of LD_LIBRARY_PATH, else that of the wheel.

    None means that the system's loader finds it.
    """
    given = [Path(folder) / "libcudnn.so.9" for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return next((path for path in given if path.exists()), None) or find_library("libcudnn.so.*")


def load_cudnn() -> None:
    """Load the wheel's libcudnn where cuDNN's frontend does not look for it; call this before cudnn is imported.

    The frontend looks in the site-packages of this interpreter alone: not in those of the user, nor of the system under
    a virtual environment, nor in PYTHONPATH. It then takes a library of this name that is already loaded.
    """
    library = cudnn_library()
    if library is not None and not library.is_relative_to(sysconfig.get_path("purelib")):
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            raise TargetError(f"{library} does not load ({error}): {INSTALL}; or take --target cpu") from error


def cudnn_wheel() -> tuple[int, str] | None:
    """Return CUDA major and version of the cuDNN wheel; None if cuDNN does not come from a wheel."""
    library = cudnn_library()
    if library is None or library != find_library("libcudnn.so.*"):
        return None
    for major in (13, 12):
        if (version := installed_version(f"nvidia-cudnn-cu{major}")) is not None:
            return major, version
    return None


def cudnn_version() -> str:
    """Return cuDNN's version without loading a wheel; empty if there is no cuDNN."""
    wheel = cudnn_wheel()
    if wheel is not None:
        return wheel[1]
    try:
        return str(ctypes.CDLL(str(cudnn_library() or "libcudnn.so.9")).cudnnGetVersion())
    except (OSError, AttributeError):
        return ""


def is_absent() -> bool:
    """Tell if neither cuDNN's frontend nor its library is installed.

    Then fusec's rules judge graphs. If only one of the two is installed, that is an error.
    """
    return importlib.util.find_spec("cudnn") is None and not cudnn_version()


def cudnn_number() -> str:
    """Return cuDNN's version as one number, `91900` for 9.19.0, without loading a wheel; empty if there is no cuDNN."""
    version = cudnn_version()
    if "." not in version:
        return version
    major, minor, patch = (int(part) for part in version.split(".")[:3])
    return str(10_000 * major + 100 * minor + patch)


def nvrtc_libraries() -> list[str]:
    """List NVRTC's builtins and NVRTC, in the order to load, of the CUDA major that cuDNN was built for.

    cuDNN loads libnvrtc.so.<major> only. A library that no wheel has is listed by its name without a path.
    """
    wheel = cudnn_wheel()
    major = wheel[0] if wheel else ""
    names = (f"libnvrtc-builtins.so.{major}", f"libnvrtc.so.{major}")
    return [str(find_library(f"{name}*") or name.removesuffix(".")) for name in names]


def load_nvrtc() -> ctypes.CDLL:
    """Load NVRTC and its builtins so that cuDNN finds them. Raises TargetError naming the missing library."""
    library: ctypes.CDLL | None = None
    for name in nvrtc_libraries():
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise TargetError(
                f"{Path(name).name} does not load ({error}); without it cuDNN hides its runtime-compiled engines: "
                f"{INSTALL}; or take --target cpu"
            ) from error
    assert library is not None
    return library


def check_nvrtc(library: ctypes.CDLL, sm: int) -> str:
    """Compile a trivial kernel for a compute capability, and return NVRTC's version. Raises TargetError if it fails."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    program = ctypes.c_void_p()
    source = b'extern "C" __global__ void probe(float *x) { x[threadIdx.x] = __expf(x[threadIdx.x]); }'
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"probe.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{sm}".encode())
    status = library.nvrtcCompileProgram(program, 1, options)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if status:
        raise TargetError(
            f"NVRTC {major.value}.{minor.value} does not compile for sm_{sm} (status {status}); without it cuDNN hides "
            "its runtime-compiled engines: reinstall the nvidia-cuda-nvrtc wheel"
        )
    return f"{major.value}.{minor.value}"


def bring_up(sm: int) -> str:
    """Load a driver and NVRTC before cudnn is imported, and return NVRTC's version.

    Raises TargetError naming what is missing.
    """
    load_driver()
    return check_nvrtc(load_nvrtc(), sm)

"""Bring cuDNN up in this process on a machine without a driver: a stand-in libcuda, NVRTC, a check.

cuDNN plans for described GPUs without one, but its runtime-compiled engines link the driver library and
compile with NVRTC; where one is missing they silently drop out of its answers. So both must be in place
before the first question, or there is no answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from importlib import resources
from pathlib import Path

from fusec.errors import TargetError
from fusec.gpu.cudnn import private_library
from fusec.plans.sqlite_cache import folder

INSTALL = "pip install 'fusec[cu13]' (CUDA 12: 'fusec[cu12]')"

# What the stand-in answers. cuDNN loads modules and reads kernel attributes while it finalises plans; a
# handle that is never launched serves. Everything else reports CUDA_ERROR_NO_DEVICE (100), the truth.
_NO_DEVICE = 100
_HANDLES = ("cuLibraryLoadData", "cuLibraryGetKernel", "cuModuleLoadData", "cuModuleGetFunction")
_SUCCEED = ("cuLibraryUnload", "cuModuleUnload", "cuKernelSetAttribute")
_MESSAGES = ("cuGetErrorString", "cuGetErrorName")
_DRIVER_VERSION = 13000


def load_driver() -> str:
    """Load the stand-in for libcuda.so.1, building it the first time; `real` if it cannot be built and the
    machine has a driver. TargetError if there is neither.

    The stand-in comes first, also if there is a real GPU: a driver without a GPU, or with one of another
    capability, refuses to load what cuDNN compiles, and the answers would differ from machine to machine.
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


def compiler() -> str | None:
    """The C compiler on the path, or None."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _source() -> str:
    """The stand-in in C: every entry point of the driver's interface, each a line."""
    lines: list[str] = []
    for name in resources.files("fusec.gpu.cudnn").joinpath("driver_api.txt").read_text().split():
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


def stand_in() -> Path:
    """The stand-in library in the user's private folder of the cache, checked; compiled once.

    Root's serves too: an image may hold a stand-in that another user built. TargetError for a folder that another
    user owns or can write, and where nothing can be built.
    """
    source = _source()
    stem = f"libcuda-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    own, roots = (folder() / f"native-{user}" for user in (os.geteuid(), 0))
    library = private_library.find(own, stem)
    if library is None and roots != own and os.access(roots, os.X_OK):
        library = private_library.find(roots, stem)
    return _built(source, own, stem) if library is None else library


def _built(source: str, own: Path, stem: str) -> Path:
    """The stand-in, compiled now."""
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
    """A folder to compile in, inside the private one."""
    try:
        with tempfile.TemporaryDirectory(dir=own) as scratch:
            yield scratch
    except OSError as error:
        raise TargetError(f"cannot build the stand-in for libcuda in {own} ({error}); set FUSEC_CACHE") from error


def library_folders() -> list[Path]:
    """The library folders of NVIDIA's wheels."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return [lib for root in roots for lib in sorted(root.glob("*/lib"))]


def find_library(pattern: str) -> Path | None:
    """The newest library of NVIDIA's wheels that matches a glob such as `libcudnn.so.*`."""
    found = [path for lib in library_folders() for path in lib.glob(pattern)]
    return max(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)]) if found else None


def cudnn_library() -> Path | None:
    """The libcudnn the frontend takes, in its own order: LD_LIBRARY_PATH, then the wheel; None leaves the
    choice to the system's loader."""
    given = [Path(folder) / "libcudnn.so.9" for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return next((path for path in given if path.exists()), None) or find_library("libcudnn.so.*")


def cudnn_wheel() -> tuple[int, str] | None:
    """(CUDA major, version) of the cuDNN wheel, None if cuDNN comes from elsewhere."""
    library = cudnn_library()
    if library is None or library != find_library("libcudnn.so.*"):
        return None
    for major in (13, 12):
        try:
            return major, importlib.metadata.version(f"nvidia-cudnn-cu{major}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cudnn_version() -> str:
    """cuDNN's version; empty if there is none. A wheel is not loaded for it."""
    wheel = cudnn_wheel()
    if wheel is not None:
        return wheel[1]
    try:
        return str(ctypes.CDLL(str(cudnn_library() or "libcudnn.so.9")).cudnnGetVersion())
    except (OSError, AttributeError):
        return ""


def is_absent() -> bool:
    """Say whether nothing of cuDNN is installed, neither its frontend nor its library.

    Then fusec's rules answer. Where a part of it is there, the rest is missing by mistake, and that is an error."""
    return importlib.util.find_spec("cudnn") is None and not cudnn_version()


def cudnn_number() -> str:
    """cuDNN's version as it numbers itself, `91900` for 9.19.0, without loading a wheel; empty if there is none."""
    version = cudnn_version()
    if "." not in version:
        return version
    major, minor, patch = (int(part) for part in version.split(".")[:3])
    return str(10_000 * major + 100 * minor + patch)


def nvrtc_libraries() -> list[str]:
    """List what to load, in order: NVRTC's builtins, then NVRTC, of the CUDA major that cuDNN was built for.

    cuDNN asks for libnvrtc.so.<major> and takes no other. Libraries that no wheel has are given by their bare names.
    """
    wheel = cudnn_wheel()
    major = wheel[0] if wheel else ""
    names = (f"libnvrtc-builtins.so.{major}", f"libnvrtc.so.{major}")
    return [str(find_library(f"{name}*") or name.removesuffix(".")) for name in names]


def load_nvrtc() -> ctypes.CDLL:
    """Load NVRTC and its builtins so that cuDNN finds them; TargetError naming the missing piece."""
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
    """Compile a trivial kernel for the capability; returns NVRTC's version. TargetError if it fails."""
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
    """All of it, before cudnn is imported: returns NVRTC's version. TargetError naming what is missing."""
    load_driver()
    return check_nvrtc(load_nvrtc(), sm)

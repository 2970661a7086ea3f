"""Check what fusec needs on this machine, and name the remedy for each missing piece."""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Callable

from fusec.errors import FusecError
from fusec.gpu.cublaslt import algorithms
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.without_driver import deviceless, driver_stand_in
from fusec.gpu.cudnn.without_driver.deviceless import INSTALL
from fusec.gpu.device import device_name
from fusec.plans.cache_folder import cache_folder
from fusec.plans.sqlite_cache import Store
from fusec.system.dataclass import dataclass
from fusec.system.installed import installed_version
from fusec.targets.target import load, names


@dataclass(frozen=True)
class Requirement:
    """One piece. One that is not `required`, such as a GPU, may be absent."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = True

    def __str__(self) -> str:
        mark = "ok     " if self.ok else "MISSING" if self.required else "absent "
        return f"{mark} {self.name}: {self.detail}{'' if self.ok or not self.remedy else f'; remedy: {self.remedy}'}"


def diagnose() -> list[Requirement]:
    """Check every piece, in the order of their dependencies. Starts cuDNN in a worker process."""
    return [check() for check in CHECKS]


def _python() -> Requirement:
    version = ".".join(map(str, sys.version_info[:3]))
    return Requirement("python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer")


def _numpy() -> Requirement:
    return _package("numpy", "numpy", "pip install 'numpy>=2.0'")


def _frontend() -> Requirement:
    return _package("cudnn frontend", "nvidia-cudnn-frontend", INSTALL)


def _cupy() -> Requirement:
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        check = _package("cupy", package, "", required=False)
        if check.ok:
            return check
    return Requirement("cupy", False, "not installed (only needed to run on a GPU)", INSTALL, device_name() is not None)


def _cublaslt() -> Requirement:
    found = algorithms.version()
    what = found or "not installed: products are left to cuDNN alone"
    return Requirement("cublasLt", bool(found), what, INSTALL, required=False)


def _package(name: str, package: str, remedy: str, required: bool = True) -> Requirement:
    installed = installed_version(package)
    if installed is None:
        return Requirement(name, False, f"{package} is not installed", remedy, required)
    return Requirement(name, True, installed)


def _cudnn() -> Requirement:
    version = deviceless.cudnn_version()
    library = deviceless.cudnn_library()
    detail = f"{version}, {library or 'libcudnn.so.9'}" if version else "no libcudnn.so.9"
    return Requirement("cudnn", bool(version), detail, INSTALL)


def _nvrtc() -> Requirement:
    """Load NVRTC and compile a kernel for each target, because an installed NVRTC may be broken."""
    sms = sorted({load(name).sm for name in names()})
    try:
        library = deviceless.load_nvrtc()
        versions = {deviceless.check_nvrtc(library, sm) for sm in sms}
    except FusecError as error:
        return Requirement("nvrtc", False, str(error), INSTALL)
    return Requirement("nvrtc", True, f"{versions.pop()}, compiles for {', '.join(f'sm_{sm}' for sm in sms)}")


def _c_compiler() -> Requirement:
    found = driver_stand_in.compiler()
    detail = found or "none of cc, gcc, clang (to build the stand-in for the driver library, once)"
    return Requirement("C compiler", found is not None, detail, "apt install gcc", required=not _driver().ok)


def _driver() -> Requirement:
    try:
        library = driver_stand_in.stand_in()
        return Requirement(
            "libcuda", True, f"stand-in in {library.parent}, which nobody else can write; its SHA-256 is right"
        )
    except (FusecError, OSError) as error:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return Requirement("libcuda", False, f"no driver, and no stand-in: {error}", "as named above")
        return Requirement("libcuda", True, f"the driver's own, without a stand-in: {error}")


def _gpu() -> Requirement:
    name = device_name()
    return Requirement("GPU", name is not None, name or "none: programs run in simulation", required=False)


def _cache_folder() -> Requirement:
    try:
        folder = cache_folder()
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        return Requirement("cache folder", True, f"{folder}, {len(Store())} answers")
    except (FusecError, OSError) as error:
        return Requirement(
            "cache folder", False, str(error.__cause__ or error), "set FUSEC_CACHE to a folder that can be written"
        )


def _answers() -> Requirement:
    """Ask cuDNN a question that only a runtime-compiled engine can answer, which needs all the pieces."""
    try:
        with Oracle(load("h200"), workers=1) as oracle:
            versions = oracle.prove()
    except FusecError as error:
        return Requirement(
            "cudnn answers", False, str(error), f"the first MISSING line above; if there is none, {INSTALL} again"
        )
    found = f"cuDNN {versions['cudnn']} with NVRTC {versions['nvrtc']}"
    return Requirement("cudnn answers", True, f"{found} builds a runtime-compiled plan for an H200")


CHECKS: tuple[Callable[[], Requirement], ...] = (
    _python,
    _numpy,
    _frontend,
    _cudnn,
    _nvrtc,
    _cache_folder,
    _c_compiler,
    _driver,
    _gpu,
    _cupy,
    _cublaslt,
    _answers,
)

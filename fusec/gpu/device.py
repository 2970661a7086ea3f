"""Find the GPU of this machine by asking the driver directly; no CUDA package is imported."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from fusec.errors import TargetError
from fusec.targets.target import Target, load, names

# CUdevice_attribute values, CUDA driver API (cuda.h): CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def cuda_driver() -> ctypes.CDLL | None:
    """Load the library of the NVIDIA driver; None without one, or with FUSEC_DEVICE=none. No GPU is initialised."""
    if os.environ.get("FUSEC_DEVICE") != "none":
        with suppress(OSError):
            return ctypes.CDLL("libcuda.so.1")
    return None


def visible_gpus() -> tuple[str, ...]:
    """List the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. No context is created."""
    driver, count = cuda_driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    named = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return tuple((named or list(map(str, range(count.value))))[: count.value])


@functools.cache
def _first_gpu() -> tuple[str, int] | None:
    """Return name and compute capability (90 for 9.0) of GPU 0; None without a driver or a GPU."""
    driver = cuda_driver()
    if driver is None:
        return None
    count, device = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    if driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    text = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(text, len(text), device)
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    return text.value.decode(), 10 * major.value + minor.value


def device_name() -> str | None:
    """Return the name of GPU 0; None without a GPU, or with FUSEC_DEVICE=none."""
    found = _first_gpu()
    return found[0] if found else None


def detect() -> Target | None:
    """Return the target of this machine's GPU; None without a GPU, or with FUSEC_DEVICE=none.

    A GPU without a target file has the figures of a known GPU of its compute capability.

    Raises TargetError for a GPU of an unknown compute capability.
    """
    found = _first_gpu()
    if found is None:
        return None
    name, sm = found
    words = name.upper().replace("-", " ").split()
    by_name = next((known for known in names() if known.upper() in words), None)
    if by_name is not None:
        return load(by_name)
    by_capability = next((known for known in names() if load(known).sm == sm), None)
    if by_capability is None:
        raise TargetError(f"{name} (sm_{sm}) is none of the targets {', '.join(names())}; name one with --target")
    return load(by_capability)


def is_present(target: Target) -> bool:
    """Return True if this machine's GPU is of that target."""
    here = detect() if _first_gpu() is not None else None
    return here is not None and here.name == target.name


@contextmanager
def woken(target: str, also: Callable[[], None] | None = None) -> Generator[None]:
    """Initialise the GPU during the body and after it, because that takes some tenths of a second.

    It is detected when the body has ended. Its context may come later; who needs it waits in the driver.

    target: `auto`, or a name; a GPU of another target is not initialised
    also: is called in another thread if the GPU is initialised; the process waits for it before it ends
    """
    detected = threading.Event()
    thread = threading.Thread(target=_wake, args=(target, detected, also), name="fusec-init-gpu", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        thread.join()  # because the process may end now
        raise
    detected.wait()


def _wake(target: str, detected: threading.Event, also: Callable[[], None] | None) -> None:
    try:
        with suppress(TargetError):  # the caller loads the target again, and reports the error
            is_wanted = _first_gpu() is not None and (target == "auto" or is_present(load(target)))
            if is_wanted and also is not None:
                threading.Thread(target=also, name="fusec-init-also").start()
            detected.set()
            if is_wanted:
                with _CONTEXT:
                    _hold_context()
    finally:
        detected.set()


_CONTEXT = threading.Lock()  # so that one thread creates it


@functools.cache
def _hold_context() -> None:
    """Create the context of GPU 0, which CuPy and cuDNN use, and hold it until the process ends."""
    driver, device, context = cuda_driver(), ctypes.c_int(), ctypes.c_void_p()
    if driver is not None and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

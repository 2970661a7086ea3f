"""Compile CUDA C by NVRTC through CuPy, which stores the machine code on disk for all processes."""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any

import cupy

from fusec.gpu.kernels.codegen.kernel import prelude

OPTIONS = ("--std=c++17",)
_VERSION_LOCK = Lock()


def function_of(source: str, entry: str, cooperative: bool = False, architecture: str = "") -> Any:
    """Compile a source after the shared prelude, and return one of its functions; see `module_of`."""
    return module_of(source, cooperative, architecture).get_function(entry)


def module_of(source: str, cooperative: bool = False, architecture: str = "") -> Any:
    """Return the module of a source after the shared prelude. It is compiled when it is first used, or by `compile`.

    cooperative: all blocks of a launch run at the same time, because they wait for each other.
    architecture: see `Launch`; the only one that a source is for, such as `sm_90a`, is passed to NVRTC.
    """
    own = (f"-arch={architecture}",) if architecture.endswith("a") else ()
    options = (*OPTIONS, *own)
    with _VERSION_LOCK:
        _compile_nothing(options, cooperative)
    return _module(prelude() + source, options, cooperative)


@cache
def _compile_nothing(options: tuple[str, ...], cooperative: bool) -> None:
    """Compile an empty kernel, because CuPy asks NVRTC for its version before the first module with the same options.

    Several threads would all ask, and wait for each other.
    """
    _module('extern "C" __global__ void fusec_nothing() {}', options, cooperative).compile()


def _module(code: str, options: tuple[str, ...], cooperative: bool) -> Any:
    return cupy.RawModule(code=code, options=options, backend="nvrtc", enable_cooperative_groups=cooperative)


def compute_capability() -> int:
    """Return the compute capability of this GPU, such as 90."""
    return int(cupy.cuda.Device().compute_capability)

"""Wake the GPU and start the processes of a first compilation while most of fusec is imported.

To import fusec takes a second where files are read slowly, and so does a process that asks cuDNN or compiles kernels.
This module and what it imports are a small part of fusec.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from fusec.gpu import device
from fusec.gpu.cudnn import deviceless, driver_stand_in
from fusec.gpu.cudnn.worker_process import environment
from fusec.plans.cache_folder import ANSWERS, cache_folder
from fusec.system.fork_server import OPEN, ForkServer
from fusec.targets.target import CPU

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


def with_early_processes(function: Callable[P, R]) -> Callable[P, R]:
    """Start processes before a function that compiles is called: see `early_processes`.

    Its keywords `target`, `simulate`, `oracle` and `family` tell if it needs any.
    """

    @functools.wraps(function)
    def started(*args: P.args, **kwargs: P.kwargs) -> R:
        target = str(kwargs.get("target", "auto"))
        shares = any(kwargs.get(name) is not None for name in ("oracle", "family"))
        if target == CPU or kwargs.get("simulate") or shares:
            return function(*args, **kwargs)
        with early_processes(target, args[0] if args else kwargs.get("model")):
            return function(*args, **kwargs)

    return started


@contextmanager
def early_processes(target: str, model: object) -> Generator[None]:
    """Wake the GPU, start the server that forks processes, and import other packages, during the body.

    After the body the server ends with its last process.
    """
    threads = [
        threading.Thread(target=_quietly, args=(work,), name="fusec-early", daemon=True)
        for work in (partial(wake, target), partial(start_server, target), partial(import_packages, target, model))
    ]
    OPEN.want()
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException:
        for thread in threads:  # because the process may end now
            thread.join()
        raise
    finally:
        OPEN.release()


def wake(target: str) -> None:
    """Create the context of the GPU if it is wanted."""
    if device.wanted(target) is not None:
        device.hold_context()


def start_server(target: str) -> None:
    """Start a server that forks the processes which ask cuDNN without the GPU and compile kernels.

    Only where no answer of cuDNN is stored, because a compilation may find all that it needs.
    """
    here = device.wanted(target)
    is_new = here is not None and device.is_described(here) and not (cache_folder() / ANSWERS).exists()
    if here is None or not is_new or deviceless.is_absent() or not driver_stand_in.is_available():
        return
    variables = {**environment(), "OPENBLAS_NUM_THREADS": "1"}  # because a process with threads must not fork
    arguments = here.name, "fusec.gpu.launch.nvrtc_process"
    OPEN.open(here.name, partial(ForkServer, "fusec.gpu.cudnn.worker", arguments, variables))


def import_packages(target: str, model: object) -> None:
    """Import packages that do not depend on fusec: what reads the model, and what runs it on the GPU."""
    if isinstance(model, bytes) or (isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".onnx")):
        importlib.import_module("onnx")
    if device.device_name() and device.wanted(target) is not None and not deviceless.is_absent():
        deviceless.load_cudnn()
        for name in ("cudnn", "cupy"):
            importlib.import_module(name)


def _quietly(work: Callable[[], Any]) -> None:
    try:
        work()
    except Exception:  # noqa: BLE001  # the compilation reports what fails again
        _log.debug("work ahead of a compilation failed", exc_info=True)

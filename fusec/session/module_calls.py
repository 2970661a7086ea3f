"""Offer functions of onnxruntime's module that set up a process or describe it. Most change nothing: each says why."""

from __future__ import annotations

from pathlib import Path

INTERFACE = "1.31.1"  # the release of onnxruntime whose names and parameters the tests compare


def get_version_string() -> str:
    """Return the release of onnxruntime whose interface fusec.session follows."""
    return INTERFACE


def get_build_info() -> str:
    """Return a line that says that fusec answers, and which release of it."""
    from fusec import __version__

    return f"fusec {__version__}, with the interface of onnxruntime {INTERFACE}"


def preload_dlls(cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: str | Path | None = None) -> None:
    """Do nothing, because fusec finds the libraries of NVIDIA's wheels itself."""


def disable_telemetry_events() -> None:
    """Do nothing, because fusec sends no telemetry."""


def enable_telemetry_events() -> None:
    """Do nothing, because fusec sends no telemetry."""


def set_default_logger_verbosity(verbosity: int) -> None:
    """Do nothing, because there is one level of detail."""


def set_global_thread_pool_sizes(intra_op_num_threads: int = 0, inter_op_num_threads: int = 0) -> None:
    """Do nothing, because steps do not run on threads of the host."""

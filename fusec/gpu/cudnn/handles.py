"""Create cuDNN handles."""

from __future__ import annotations

import ctypes
from typing import Any

import cudnn


def create_handle() -> Any:
    """Create a cuDNN handle for the current device, on its default stream.

    `cudnn.create_handle` does the same. To name the device it also imports CUDA's Python bindings where they are
    installed, which takes a tenth of a second in each process.
    """
    raw = ctypes.c_void_p()
    library = ctypes.CDLL("libcudnn.so.9")  # which the frontend has loaded
    if library.cudnnCreate(ctypes.byref(raw)):
        return cudnn.create_handle()  # whose error says why
    return cudnn.Handle(raw.value, None, 0)

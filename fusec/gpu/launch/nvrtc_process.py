"""Run a process that compiles CUDA sources by NVRTC. It imports neither CuPy nor cuDNN, which take long to load."""

from __future__ import annotations

import base64
import ctypes
import json
import sys
from collections.abc import Sequence

from fusec.system.json_child import JsonChild, ParentPipe

SECONDS = 120.0  # for one source; the largest kernel takes a second


class NvrtcChild:
    """A process that compiles one source after the other. Raises OSError if it does not start, or dies.

    libraries: NVRTC's libraries, in the order to load.
    """

    def __init__(self, libraries: Sequence[str]):
        self._child = JsonChild("fusec.gpu.launch.nvrtc_process")
        self._child.tell({"libraries": list(libraries)})

    def cubin(self, code: str, options: Sequence[str]) -> bytes | None:
        """Compile a source; None if NVRTC refuses it."""
        answer = self._child.ask({"code": code, "options": list(options)}, SECONDS)
        if answer is None or "failed" in answer:
            why = self._child.last_line() if answer is None else answer["failed"]
            self.close()
            raise OSError(why)
        return None if answer["cubin"] is None else base64.b64decode(answer["cubin"])

    def close(self) -> None:
        """End the process."""
        self._child.close()


def main() -> None:
    """Answer one JSON question a line with one JSON answer a line, until the input ends; the first names libraries."""
    pipe = ParentPipe()
    nvrtc: ctypes.CDLL | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if nvrtc is None:
                nvrtc = [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in message["libraries"]][-1]
                continue
            cubin = compile_source(nvrtc, message["code"], message["options"])
        except (OSError, AttributeError, IndexError) as error:  # of another version, or not there
            pipe.tell({"failed": f"NVRTC does not load: {error}"})
            return
        pipe.tell({"cubin": None if cubin is None else base64.b64encode(cubin).decode()})


def compile_source(nvrtc: ctypes.CDLL, code: str, options: Sequence[str]) -> bytes | None:
    """Compile a source by NVRTC into a cubin; None if NVRTC refuses it."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"fusec.cu", 0, None, None):
        return None
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), texts):
            return None
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw

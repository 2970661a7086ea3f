"""Run kernels on the CPU: their CUDA C, built by g++ with host.h, over NumPy buffers with guarded ends."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from fusec.gpu.kernels.codegen.kernel import Kernel, Launch, prelude
from fusec.ir import TensorType, Value
from fusec.lowering.packing import code_bytes, from_codes, pack, to_codes, unpack

OPTIONS = ("-O0", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-strict-aliasing")  # compiling takes longest
GUARD = 64  # bytes after each buffer that must stay as they are


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


class Emulator:
    """The launches of some kernels as one library, built once for equal sources."""

    def __init__(self, kernels: Sequence[Kernel]):
        sources = {launch.entry: launch.source for kernel in kernels for launch in kernel.launches}
        self._functions = functions(prelude() + "".join(sources.values()))

    def run(
        self,
        kernel: Kernel,
        arrays: Mapping[Value, np.ndarray],
        outputs: Sequence[Value],
        over: Mapping[Value, Value] | None = None,
    ) -> list[np.ndarray]:
        """The outputs as logical arrays, from logical arrays of what is read. over: outputs that are written over an
        input of the same type."""
        buffers: dict[tuple[Value | None, TensorType | None], np.ndarray] = {}
        for value in outputs:
            buffers[value, value.type] = _guarded(code_bytes(value.type.span, value.type.dtype))
        for value, old in (over or {}).items():
            buffers[old, old.type] = buffers[value, value.type]
            buffers[old, old.type][:-GUARD] = pack(np, arrays[old], old.type).view(np.uint8)
        buffers[None, None] = _guarded(kernel.scratch_bytes)
        for launch in kernel.launches:
            for argument in launch.arguments:
                key = (argument.value, argument.type)
                if key not in buffers and argument.value is None and argument.type is not None:
                    buffers[key] = _guarded(argument.type.nbytes)
                    buffers[key][:-GUARD] = 0
                if key not in buffers:
                    assert argument.value is not None and argument.type is not None
                    flat = pack(np, arrays[argument.value], argument.type)
                    buffers[key] = _guarded(code_bytes(argument.type.span, argument.type.dtype))
                    buffers[key][:-GUARD] = to_codes(flat, argument.type.dtype)
            pointers = [buffers[a.value, a.type].ctypes.data for a in launch.arguments]
            pointers += [value for _, value in launch.numbers]
            try:
                self._functions[launch.entry](launch, pointers)
            except AssertionError as error:
                raise AssertionError(f"{error} in\n{launch.source}") from None
        for buffer in buffers.values():
            assert (buffer[-GUARD:] == 0xA5).all(), "written after the end"
        for value in outputs:
            assert _gaps(buffers[value, value.type][:-GUARD], value.type), "written next to the tensor"
        results = (
            from_codes(buffers[value, value.type][:-GUARD], value.type.span, value.type.dtype) for value in outputs
        )
        return [unpack(flat, value.type) for flat, value in zip(results, outputs, strict=True)]


def _guarded(nbytes: int) -> np.ndarray:
    """Bytes of no number anyone would expect, aligned as the memory plan aligns them."""
    raw = np.full(nbytes + GUARD + 256, 0xA5, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes + GUARD]


def _gaps(raw: np.ndarray, type: TensorType) -> bool:
    """Tell if the memory between the elements of a tensor is unchanged."""
    itemsize = type.dtype.itemsize
    if type.dtype.bits < 8:
        assert not type.within
        return True
    written = np.zeros(type.span, np.bool_)
    unpack(written, type)[...] = True
    return bool((raw.reshape(-1, itemsize)[~written] == 0xA5).all())


Function = Callable[[Launch, Sequence[int]], None]
_wanted: list[str] = []  # sources whose functions nobody has run yet
_built_by_source: dict[str, dict[str, Function]] = {}
_one_builds = threading.Lock()


def function(code: str, entry: str) -> Function:
    """Run a kernel of a source that begins with the prelude. The first run builds all sources that were asked for
    since the last build, because starting a compiler takes longer than one more source."""
    head = prelude()
    assert code.startswith(head)
    with _one_builds:
        if code not in _built_by_source and code not in _wanted:
            _wanted.append(code)

    def run(launch: Launch, pointers: Sequence[int]) -> None:
        with _one_builds:
            if code not in _built_by_source:
                built = functions(head + "".join(source.removeprefix(head) for source in _wanted))
                _built_by_source.update((source, built) for source in _wanted)
                _wanted.clear()
        _built_by_source[code][entry](launch, pointers)

    return run


def functions(code: str) -> dict[str, Function]:
    """Return functions that run the kernels of some CUDA C as a launch does, over addresses."""
    bounds = r"__launch_bounds__\([\d, ]+\)(?: __cluster_dims__\(\d+\))?"
    found = re.findall(rf"__global__ void {bounds} (\w+)\((.*?)\) \{{(.*?)\n\}}\n", code, re.DOTALL)
    library = ctypes.CDLL(str(_built(code, [(entry, parameters) for entry, parameters, _ in found])))

    def bound(entry: str, body: str) -> Callable[[Launch, Sequence[int]], None]:
        function = getattr(library, f"run_{entry}")
        function.restype = ctypes.c_char_p
        waits = int(any(word in body for word in ("reduce_threads", "__syncthreads", "__syncwarp", "any_of_warp")))

        def run(launch: Launch, pointers: Sequence[int]) -> None:
            kept, addresses = ctypes.c_size_t(launch.resident_bytes), (ctypes.c_void_p * len(pointers))(*pointers)
            together = launch.grid if launch.cooperative else launch.cluster
            problem = function(launch.grid, launch.block, waits, together, kept, addresses)
            assert problem is None, problem.decode()

        return run

    return {entry: bound(entry, body) for entry, _, body in found}


def _built(code: str, entries: Sequence[tuple[str, str]]) -> Path:
    """The code as a library, with a function that the outside can call for each kernel."""
    calls = ""
    for entry, parameters in entries:
        types = [
            each.split("__restrict__")[0] if "*" in each else each.rsplit(" ", 1)[0] + ")(size_t"  # a number
            for each in parameters.split(",")
        ]
        passed = ", ".join(f"({c_type})a[{i}]" for i, c_type in enumerate(types))
        calls += f'extern "C" const char* run_{entry}(unsigned grid, unsigned block, int waits, int together, '
        calls += "size_t kept, void** a) {\n"
        calls += f"  return run_blocks(grid, block, waits, together, kept, [&] {{ {entry}({passed}); }});\n}}\n"
    host = Path(__file__).with_name("host.h")
    source = code + calls
    library = _folder() / f"{_digest(host.read_text() + source)}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            file, made = Path(scratch) / "kernels.cpp", Path(scratch) / "kernels.so"
            file.write_text(f'#include "{host.name}"\n{source}')
            subprocess.run(["g++", *OPTIONS, f"-I{_precompiled(host)}", str(file), "-o", str(made)], check=True)
            made.replace(library)
    return library


def _precompiled(header: Path) -> Path:
    """A folder that holds a header and its precompiled form, because reading it takes most of a build."""
    folder = _folder() / _digest(header.read_text())
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            made = Path(scratch) / "headers"
            made.mkdir()
            shutil.copy(header, made)
            copy = made / header.name
            subprocess.run(["g++", *OPTIONS, "-x", "c++-header", str(copy), "-o", f"{copy}.gch"], check=True)
            with contextlib.suppress(OSError):  # another process was faster
                made.rename(folder)
    return folder


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / "fusec-kernel-emulator"
    folder.mkdir(exist_ok=True)
    return folder


def _digest(text: str) -> str:
    return hashlib.sha256((text + str(OPTIONS)).encode()).hexdigest()[:32]

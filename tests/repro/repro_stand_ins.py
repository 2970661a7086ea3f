"""Stand in for the GPU of the scripts of fusec.repro: cupy over host memory, and cuDNN's graphs in the simulator."""

from __future__ import annotations

import ctypes
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusec.gpu.cudnn.without_driver.deviceless import bring_up
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.simulator import extent, simulate
from fusec.targets.target import load

Run = Callable[[CudnnGraph, Mapping[int, np.ndarray]], None]


class DeviceArray:
    """The part of a cupy array that a script may use: its address, and its copy to the host."""

    def __init__(self, array: np.ndarray):
        self._array = array.copy()
        self.data = SimpleNamespace(ptr=self._array.ctypes.data)

    def get(self) -> np.ndarray:
        return self._array


def cupy() -> ModuleType:
    module = ModuleType("cupy")
    runtime = SimpleNamespace(driverGetVersion=lambda: 13000, getDeviceProperties=lambda index: {"name": b"stand-in"})
    contents = {
        "asarray": DeviceArray,
        "empty": lambda size, dtype: DeviceArray(np.empty(size, dtype)),
        "uint8": np.uint8,
        "cuda": SimpleNamespace(runtime=runtime),
    }
    vars(module).update(contents)
    return module


def build(source: str, plans: bool = True) -> dict[str, Any]:
    """Run a script without cupy, up to where it needs a device; returns its variables. Without `plans`
    cuDNN validates the graph and is not asked for any."""
    variables: dict[str, Any] = {}
    skipped = () if plans else ("build_operation_graph", "create_execution_plans")
    with pytest.MonkeyPatch.context() as patch:
        _deviceless(patch, {name: lambda *arguments: None for name in skipped})
        patch.setitem(sys.modules, "cupy", ModuleType("cupy"))
        with pytest.raises(AttributeError, match="cupy"):
            exec(compile(source, "repro.py", "exec"), variables)
    return variables


def run(folder: Path, graph: CudnnGraph, arguments: Sequence[str] = (), execute: Run = simulate) -> int:
    """The exit status of `repro.py`. Plan 0 is never built; plan 1 executes `graph` through `execute`."""

    def build_plan(self: Any, index: int) -> None:
        if index != 1:
            raise RuntimeError("no such engine today")

    def execute_plan(self: Any, pointers: Mapping[int, int], workspace: int, index: int, handle: object) -> None:
        assert (index, handle) == (1, "handle")
        for tensor in graph.tensors:
            if tensor.value is not None:
                assert _memory(pointers[tensor.uid], tensor.dtype.numpy, 1)[0] == tensor.value
        stored = (*graph.inputs, *graph.outputs)
        execute(graph, {t.uid: _memory(pointers[t.uid], t.dtype.numpy, extent(t)) for t in stored})

    methods = {
        "get_execution_plan_count": lambda self: 2,
        "get_plan_name_at_index": lambda self, index: f"engine{index}",
        "build_plan_at_index": build_plan,
        "get_workspace_size_plan_at_index": lambda self, index: 16,
        "execute_plan_at_index": execute_plan,
    }
    with pytest.MonkeyPatch.context() as patch:
        _deviceless(patch, methods)
        patch.setitem(sys.modules, "cupy", cupy())
        patch.setattr(sys, "argv", ["repro.py", *arguments])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(folder / "repro.py"), run_name="__main__")
    return int(left.value.code or 0)


def _deviceless(patch: pytest.MonkeyPatch, methods: Mapping[str, Any]) -> None:
    bring_up(90)
    import cudnn  # wants the driver library loaded

    target = load("h200")
    described: dict[str, Any] = {
        "device_property": cudnn.create_device_properties(target.properties),
        "sm_version": target.sm,
    }

    def start(self: Any, *, handle: object, **types: Any) -> None:
        assert handle == "handle"
        original.__init__(self, **types, **described)

    original = cudnn.pygraph
    patch.setattr(cudnn, "pygraph", type("pygraph", (original,), {"__init__": start, **methods}))
    patch.setattr(cudnn, "create_handle", lambda: "handle")


def _memory(address: int, dtype: np.dtype, size: int) -> np.ndarray:
    return np.frombuffer(memoryview((ctypes.c_char * (size * dtype.itemsize)).from_address(address)), dtype)

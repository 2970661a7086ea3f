"""CuPy and cuDNN's frontend as far as the GPU backend uses them, on the CPU: arrays are NumPy's, plans simulate.

Streams do their work immediately, captures record calls and replay them, so that whoever forgets to go through what was
captured, or gives the wrong address, gets a wrong answer here, too.
"""

from __future__ import annotations

import ctypes
import json
import types
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from gpu.kernels.emulator import function

from fusec.errors import ExecutionError
from fusec.gpu.kernels.codegen.kernel import Launch
from fusec.gpu.launch.cubins import CudaSource
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.simulator import extent, simulate

PROCESSORS = 4  # each of them runs one block at a time


class Array(np.ndarray):
    """An array `on the device`: never mixed with NumPy's own by accident. Copies into it are captured like all work."""

    machine: ClassVar[Machine | None] = None

    def __setitem__(self, key: Any, value: Any) -> None:
        def copy() -> None:
            np.ndarray.__setitem__(self, key, value)

        if Array.machine is None:
            copy()
        else:
            Array.machine.do(copy)

    @property
    def data(self) -> Any:  # as CuPy has it
        address = self.__array_interface__["data"][0]

        def memset_async(value: int, nbytes: int) -> None:
            def fill() -> None:
                ctypes.memset(address, value, nbytes)

            fill() if Array.machine is None else Array.machine.do(fill)

        return types.SimpleNamespace(ptr=address, memset_async=memset_async)

    def get(self, out: np.ndarray | None = None, blocking: bool = True) -> np.ndarray:
        if out is None:
            return np.array(self.view(np.ndarray))
        assert (out.shape, out.dtype, out.flags.c_contiguous, blocking) == (self.shape, self.dtype, True, False)
        np.copyto(out, self.view(np.ndarray))
        return out

    def set(self, array: np.ndarray, stream: Any = None) -> None:
        assert (array.shape, array.dtype, array.flags.c_contiguous) == (self.shape, self.dtype, True)
        np.copyto(self.view(np.ndarray), array)

    def __dlpack_device__(self) -> tuple[int, int]:  # type: ignore[override]  # as an array on a GPU
        return (2, 0)


def at_address(array: Any) -> Array:
    """As `cupy.asarray`: memory of another's is shared, by its address; what is on the host is copied."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return on_device(array)
    return np.asarray(types.SimpleNamespace(__array_interface__=interface)).view(Array)


def void(result: Any) -> None:
    pass


def on_device(array: Any) -> Array:
    return np.array(array).view(Array)


class RuntimeFaultError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class CompileError(Exception):
    pass


class Machine:
    """The state of the stand-in: what is captured, what time it is, what plans exist and how they behave."""

    def __init__(self) -> None:
        self.recording: list[Callable[[], None]] | None = None
        self.captured = 0
        self.replayed = 0
        self.replayed_on: list[int] = []
        self.cudnn_streams: list[int] = []
        self.now_us = 0.0
        self.times_us: dict[int, float] = {}  # by engine; 10 where not said
        self.within_us: dict[int, float] = {}  # the same in what was captured, where that is another time
        self.within = False
        self.engines: tuple[int, ...] = (7, 4, 3)
        self.wrong: set[int] = set()
        self.failing: set[int] = set()
        self.unordered: set[int] = set()  # engines that are not deterministic
        self.modes: list[list[int]] = []  # of the heuristics that listed plans
        self.built: list[int] = []
        self.launched: list[str] = []  # kernels, by entry
        self.allocated = 0
        self.limit = 1 << 40
        self.runtime_compiled = False  # whether its engines are compiled at run time
        self.emitted: list[tuple[CudnnGraph, Any]] = []  # with the kernel cache
        self.needs_sizes = False
        self.uncapturable: list[Callable[[], None]] = []
        self.refuses_blobs = False
        self.page_locked: list[int] = []  # addresses
        self.refuses_page_locks = False
        self.copied: list[tuple[int, int]] = []  # kinds of copies between a caller's memory and a model's, and streams
        self.streams = 0
        self.current: Any = None  # the caller's stream
        self.waits: list[tuple[int, int]] = []  # a stream, and that of the event it waits for
        self.revived: list[int] = []  # engines
        self.cudnn_version = 91900
        self.spoils_blobs = False  # whether what is revived computes something else
        self.compiled: list[str] = []  # sources put to NVRTC
        self.compiled_elsewhere: list[str] = []  # sources that child processes compiled; their cubins are these texts
        self.loaded: list[str] = []  # cubins
        self.refuses_cubins = False
        self.refused_word = ""  # in sources that NVRTC refuses

    def do(self, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(work)
        else:
            work()

    # cuDNN -----------------------------------------------------------------------------------------

    def compile_elsewhere(
        self, sources: Sequence[CudaSource], libraries: Sequence[str], processes: int = 1
    ) -> dict[str, Future[Any]]:
        """Compile sources as child processes do."""
        found: dict[str, Future[Any]] = {source.key: Future() for source in sources}
        for source in sources:
            self.compiled_elsewhere.append(source.code)
            is_refused = self.refused_word and self.refused_word in source.code
            found[source.key].set_result(None if is_refused else source.code.encode())
        return found

    def emit(self, graph: CudnnGraph, *, handle: Any = None, target: Any = None, kernels: Any = None) -> Any:
        self.emitted.append((graph, kernels))
        return Pygraph(self, graph, kernels)

    def revive(self, blob: bytes, handle: Any) -> Any:
        """As `fusec.gpu.cudnn.plans.built_plan.revive`."""
        try:
            data = json.loads(blob)
            graph = CudnnGraph.from_json(data["graph"])
        except (ValueError, KeyError) as error:
            raise ExecutionError(f"cuDNN does not read a serialized plan: {error}") from error
        if data["cudnn"] != self.cudnn_version or self.refuses_blobs:
            raise ExecutionError("cuDNN does not read a serialized plan: version mismatch")
        self.revived.append(data["engine"])
        return Pygraph(self, graph, revived=(data["engine"], data["place"]))

    def cudnn(self) -> Any:
        return types.SimpleNamespace(
            destroy_handle=lambda handle: None,
            set_stream=lambda handle, stream: self.cudnn_streams.append(stream),
            backend_version=lambda: self.cudnn_version,
            __version__="1.28.0",
            heur_mode=types.SimpleNamespace(A=0, FALLBACK=1, B=2),
            behavior_note=types.SimpleNamespace(RUNTIME_COMPILATION=1),
            numerical_note=types.SimpleNamespace(TENSOR_CORE=1, NONDETERMINISTIC=2),
            knob_type=int,
            cudnnGraphNotSupportedError=type("cudnnGraphNotSupportedError", (Exception,), {}),
        )

    # CuPy ------------------------------------------------------------------------------------------

    def cupy(self) -> Any:
        machine = self

        class Event:
            def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
                self.at = 0.0
                self.stream = 0

            def record(self, stream: Any = None) -> None:
                self.at, self.stream = machine.now_us, (stream or current()).ptr

            def synchronize(self) -> None:
                pass

        class Graph:
            def __init__(self, work: list[Callable[[], None]]) -> None:
                self.work = work

            def upload(self, stream: Any) -> None:
                pass

            def launch(self, stream: Any) -> None:
                machine.replayed += 1
                machine.replayed_on.append(stream.ptr)
                machine.within = True
                for each in self.work:
                    each()
                machine.within = False

        class Stream:
            def __init__(self, non_blocking: bool = False) -> None:
                machine.streams += 1
                self.ptr = machine.streams

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *error: Any) -> None:
                pass

            def synchronize(self) -> None:
                pass

            def record(self) -> Event:
                event = Event()
                event.record(self)
                return event

            def wait_event(self, event: Event) -> None:
                machine.waits.append((self.ptr, event.stream))

            def begin_capture(self, mode: int) -> None:
                machine.recording = []

            def end_capture(self) -> Graph:
                work, machine.recording = machine.recording, None
                if any(one in machine.uncapturable for one in work or []):
                    raise RuntimeFaultError("operation not permitted when stream is capturing")
                machine.captured += 1
                return Graph(work or [])

        def empty(shape: Any, dtype: Any = np.float32) -> Array:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            machine.allocated += nbytes
            if machine.allocated > machine.limit:
                raise OutOfMemoryError("out of memory allocating")
            return np.full(nbytes, 0xA5, np.uint8).view(dtype).reshape(shape).view(Array)

        def memcpy_async(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
            machine.copied.append((kind, stream))
            machine.do(lambda: void(ctypes.memmove(target, source, nbytes)))

        def host_register(address: int, nbytes: int, flags: int) -> None:
            if machine.refuses_page_locks:
                raise RuntimeFaultError("operation not supported")
            machine.page_locked.append(address)

        def current() -> Stream:
            machine.current = machine.current or Stream()
            return machine.current

        @contextmanager
        def using_allocator(allocator: Any) -> Generator[None]:
            yield

        class RawKernel:
            """A function of a module. Blocks may wait for each other only in a cooperative launch."""

            def __init__(self, entry: str, function: Any, cooperative: bool) -> None:
                self.entry, self.function, self.cooperative = entry, function, cooperative
                self.kernel = types.SimpleNamespace(ptr=self)
                self.shared_size_bytes, self.max_dynamic_shared_size_bytes = 1 << 14, 0

            def __call__(
                self, grid: tuple[int], block: tuple[int], arguments: tuple[Array | int, ...], *, shared_mem: int = 0
            ) -> None:
                assert shared_mem <= max(self.max_dynamic_shared_size_bytes, 32 << 10), "more than was asked for"
                assert not self.cooperative or grid[0] <= PROCESSORS, "blocks that never meet"
                addresses = [a.data.ptr if isinstance(a, Array) else int(a) for a in arguments]
                launch = Launch(self.entry, "", *grid, *block, (), (), shared_mem, self.cooperative)
                machine.launched.append(self.entry)
                machine.do(lambda: self.function(launch, addresses))

        class RawModule:
            def __init__(
                self, code: str, options: tuple[str, ...], backend: str, enable_cooperative_groups: bool
            ) -> None:
                self.code, self.cooperative = code, enable_cooperative_groups
                if machine.refused_word and machine.refused_word in code:
                    raise CompileError("error: identifier is undefined")

            def compile(self) -> None:
                """Its attributes are never called."""

            def get_function(self, entry: str) -> Any:
                machine.compiled.append(self.code)
                return RawKernel(entry, function(self.code, entry), self.cooperative)

        class LoadedFunction(RawKernel):
            """A function of a cubin. Its launch says if blocks may wait for each other."""

            def __init__(self, entry: str, function: Any) -> None:
                super().__init__(entry, function, cooperative=False)
                self.ptr = self

            def __call__(  # type: ignore[override]  # cupy's two kinds of functions take other arguments
                self,
                grid: tuple[int],
                block: tuple[int],
                arguments: tuple[Array | int, ...],
                shared_mem: int = 0,
                enable_cooperative_groups: bool = False,
            ) -> None:
                self.cooperative = enable_cooperative_groups
                super().__call__(grid, block, arguments, shared_mem=shared_mem)

        class Module:
            """A module that is loaded from a cubin, which here is the source."""

            def load(self, cubin: bytes) -> None:
                if machine.refuses_cubins:
                    raise RuntimeFaultError("no kernel image is available")
                self.code = cubin.decode()
                machine.loaded.append(self.code)

            def get_function(self, entry: str) -> Any:
                return LoadedFunction(entry, function(self.code, entry))

        attributes = {"MaxSharedMemoryPerBlockOptin": 227 << 10, "MultiProcessorCount": PROCESSORS}
        rng = np.random.default_rng(0)
        runtime = types.SimpleNamespace(
            memcpyAsync=memcpy_async,
            hostRegister=host_register,
            hostUnregister=machine.page_locked.remove,
            CUDARuntimeError=RuntimeFaultError,
            memGetInfo=lambda: (1 << 34, 1 << 37),
            driverGetVersion=lambda: 13000,
            getDevice=lambda: 0,
            getDeviceProperties=lambda device: {"l2CacheSize": 1 << 20},
        )
        cuda = types.SimpleNamespace(
            alloc_pinned_memory=lambda nbytes: bytearray(b"\xa5" * (nbytes + 512)),  # more, as CuPy rounds it up
            Stream=Stream,
            Event=Event,
            MemoryPool=lambda: types.SimpleNamespace(malloc=None),
            Device=lambda: types.SimpleNamespace(id=0, attributes=attributes, compute_capability="90"),
            driver=types.SimpleNamespace(
                occupancyMaxActiveBlocksPerMultiprocessor=lambda function, threads, nbytes: 1,
                CUDADriverError=RuntimeFaultError,
                CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="shared_size_bytes",
                CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="max_dynamic_shared_size_bytes",
                funcGetAttribute=lambda name, function: getattr(function, name),
                funcSetAttribute=lambda function, name, value: setattr(function, name, value),
            ),
            using_allocator=using_allocator,
            get_current_stream=current,
            get_elapsed_time=lambda start, stop: (stop.at - start.at) / 1000.0,
            runtime=runtime,
            memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            compiler=types.SimpleNamespace(CompileException=CompileError),
            function=types.SimpleNamespace(Module=Module),
        )
        names = ("matmul", "where", "isnan", "isfinite", "linalg", "float32", "float64", "uint8", "uint16")
        return types.SimpleNamespace(
            **{name: getattr(np, name) for name in (*names, "uint32")},
            ndarray=Array,
            RawModule=RawModule,
            cuda=cuda,
            empty=empty,
            zeros=lambda size, dtype: on_device(np.zeros(size, dtype)),
            full=lambda size, value, dtype: on_device(np.full(size, value, dtype)),
            asarray=at_address,
            array=on_device,
            pad=lambda array, widths, mode: np.pad(array, widths, mode=mode).view(Array),
            ascontiguousarray=lambda array: np.ascontiguousarray(array).view(Array),
            get_default_memory_pool=lambda: types.SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None),
            random=types.SimpleNamespace(
                standard_normal=lambda size: on_device(rng.standard_normal(size)),
                random_sample=lambda size: on_device(rng.random(size)),
                randint=lambda low, high, size: on_device(rng.integers(low, high, size)),
            ),
        )


def install(machine: Machine, patch: Callable[[Any, str, Any], None]) -> None:
    """Put the stand-ins where the GPU backend looks for CuPy and cuDNN, with `setattr` or what undoes it later."""
    from fusec.gpu import backend, device_arrays, host_buffers, nvrtc, warm_up
    from fusec.gpu.autotune.cache import tuning_environment
    from fusec.gpu.autotune.plans import plan_bench
    from fusec.gpu.cublaslt import algorithms
    from fusec.gpu.cudnn.plans import frontend_plans, plan_list
    from fusec.gpu.launch import (
        cubin_function,
        cubins,
        cuda_graph,
        device_constants,
        full_edges,
        memset_nodes,
        reorder,
        stream_calls,
        workspace,
    )
    from fusec.gpu.launch import kernel_launcher as launch
    from fusec.gpu.measure import device_distance, random_inputs, timer

    cupy, cudnn = machine.cupy(), machine.cudnn()
    patch(Array, "machine", machine)
    for module in (stream_calls, cuda_graph, device_arrays, host_buffers, launch, random_inputs, timer):
        patch(module, "cupy", cupy)
    for module in (nvrtc, device_distance, device_constants, reorder):
        patch(module, "cupy", cupy)
    for module in (backend, plan_bench, tuning_environment, workspace):
        patch(module, "cupy", cupy)
        patch(module, "cudnn", cudnn)
    for module in (backend, warm_up):
        patch(module, "create_handle", lambda: "handle")
    patch(plan_list, "cudnn", cudnn)
    patch(cubin_function, "cupy", cupy)
    patch(reorder, "_loaded", {})
    patch(warm_up, "cudnn", cudnn)
    patch(warm_up, "emit", machine.emit)
    patch(cubins, "compiled", machine.compile_elsewhere)
    patch(launch, "driver", lambda: None)  # launches run one after the other
    for module in (full_edges, memset_nodes):  # no driver, even where that of cuDNN without a GPU is loaded
        patch(module, "driver_function", lambda name: None)
    patch(timer, "Gate", Gate)
    patch(frontend_plans, "emit", machine.emit)
    patch(plan_bench, "revive", machine.revive)
    patch(backend.CudnnBackend, "xp", cupy)
    patch(algorithms, "version", lambda: "")


class Gate:
    """Streams here do their work immediately: there is nothing to wait at."""

    def shut(self) -> None:
        pass

    open = shut


class Pygraph:
    """A frontend graph whose plans read and write host memory by address."""

    def __init__(
        self, machine: Machine, graph: CudnnGraph, kernels: Any = None, revived: tuple[int, int] | None = None
    ) -> None:
        self.machine, self.graph, self.kernels = machine, graph, kernels
        self.revived = revived
        self.selected: int | None = None
        self.deselected: set[int] = set()
        self.named: list[int] = []  # places of the plans that were created by name

    def create_execution_plan(self, engine: int, knobs: dict[int, int]) -> None:
        if engine not in self.machine.engines or knobs != {2: self.machine.engines.index(engine)}:
            raise RuntimeError("no such plan")
        self.named.append(self.machine.engines.index(engine))

    def at(self, place: int) -> int:
        return self.named[place] if self.named else place

    def validate(self) -> None:
        pass

    build_operation_graph = validate

    def create_execution_plans(self, modes: Any) -> None:
        self.machine.modes.append(list(modes))
        if self.kernels is not None and self.machine.needs_sizes:
            raise RuntimeError("no engine proposed a plan for this graph")

    def deselect_numeric_notes(self, notes: Any) -> None:
        self.deselected |= set(notes)

    def get_execution_plan_count(self) -> int:
        return len(self.named or self.machine.engines)

    def get_engine_and_knobs_at_index(self, place: int) -> tuple[int, dict[int, int]]:
        place = self.at(place)
        return self.machine.engines[place], {2: place}

    def get_behavior_notes_for_plan_at_index(self, place: int) -> list[int]:
        return [1] if self.machine.runtime_compiled else []

    def build_plan_at_index(self, place: int) -> None:
        assert self.revived is None, "what is deserialized is built"
        place = self.at(place)
        if 2 in self.deselected and self.machine.engines[place] in self.machine.unordered:
            raise RuntimeError("Deselecting execution plan due to numerical notes")
        self.machine.built.append(self.machine.engines[place])
        self.selected = place

    def serialize(self) -> list[int]:
        assert self.selected is not None
        data = {"graph": self.graph.to_json(), "engine": self.machine.engines[self.selected], "place": self.selected}
        return list(json.dumps({**data, "cudnn": self.machine.cudnn_version}).encode())

    def get_workspace_size(self) -> int:
        assert self.revived is not None
        return 64 * self.revived[1]

    def get_workspace_size_plan_at_index(self, place: int) -> int:
        return 64 * self.at(place)

    def execute_plan_at_index(self, addresses: dict[int, int], workspace: int, place: int, handle: Any) -> None:
        machine = self.machine
        assert self.revived is None or place == 0, "a deserialized graph has one plan"
        engine, place = self.revived or (machine.engines[self.at(place)], self.at(place))
        assert workspace or not place, "no scratch memory"

        def work() -> None:
            times_us = {**machine.times_us, **machine.within_us} if machine.within else machine.times_us
            machine.now_us += times_us.get(engine, 10.0)
            buffers = {
                t.uid: _at(addresses[t.uid], extent(t), t.dtype.numpy)
                for t in (*self.graph.inputs, *self.graph.outputs)
            }
            simulate(self.graph, buffers)
            if engine in machine.wrong or (self.revived is not None and machine.spoils_blobs):
                for tensor in self.graph.outputs:
                    buffers[tensor.uid][...] = 0

        if engine in machine.failing:
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
        machine.do(work)


def _at(address: int, size: int, dtype: Any) -> np.ndarray:
    nbytes = size * np.dtype(dtype).itemsize
    raw = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memoryview(raw), np.uint8).view(dtype)

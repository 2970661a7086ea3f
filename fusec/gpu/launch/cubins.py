"""Compile kernels in child processes, and take compiled ones (cubins) from a file or the cache.

NVRTC compiles one source at a time in a process, however many threads ask it. So several processes compile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial

from fusec.gpu.kernels.codegen.kernel import Kernel, Launch, prelude, variants_of
from fusec.gpu.launch import nvrtc_process
from fusec.plans.cache_folder import cache_folder
from fusec.plans.plan_record import NVRTC, Choice, Entry
from fusec.system.dataclass import dataclass
from fusec.system.machine_locks import MachineLocks

# As CuPy compiles sources, so that a kernel computes the same bits whoever compiled it.
OPTIONS = ("--std=c++17", "-ftz=true", "--device-as-default-execution-space")
MAX_AHEAD = 12  # processes while cuDNN's workers start, when most cores have nothing else to do
MAX_PROCESSES = 8  # otherwise, because each loads NVRTC, and others build plans meanwhile
CALLS = 2  # of one process that compile at the same time: kernels ahead, and those that the program needs
IDLE_S = 60.0  # after which a process without work ends
KEY_PREFIX = "kernel "  # of the name of a source, before its digest
NO_CHOICE = Choice(NVRTC, ())

CompiledKernels = Mapping[tuple[str, str], Entry]  # by target and key of the source


def most_compilers() -> int:
    """Return how many sources are compiled at the same time, at most: three for four cores; others ask cuDNN."""
    return max(1, len(os.sched_getaffinity(0)) * 3 // 4)


@dataclass(frozen=True)
class CudaSource:
    """A CUDA source with the architecture to compile it for, such as `sm_90` or `sm_90a`."""

    code: str
    architecture: str

    @cached_property
    def key(self) -> str:
        """Return a text that is equal for equal sources; files and the cache name a cubin by it."""
        digest = hashlib.sha256("\n".join((*OPTIONS, self.architecture, self.code)).encode())
        return KEY_PREFIX + digest.hexdigest()


def source_of(launch: Launch, sm: int) -> CudaSource:
    """Return the source of a launch for a compute capability, such as 90."""
    own = launch.architecture if launch.architecture.endswith("a") else f"sm_{sm}"
    return CudaSource(prelude() + launch.source, own)


def entry_of(key: str, cubin: bytes) -> Entry:
    """Return a cubin as an entry of a file or the cache. Its blob has the key, so that it is trusted for that alone."""
    return Entry(NO_CHOICE, key.encode() + b"\n" + cubin)


def cubin_in(key: str, entry: Entry | None) -> bytes | None:
    """Return the cubin of an entry; None if it has none, or one of another source."""
    found, _, cubin = (b"" if entry is None else entry.blob or b"").partition(b"\n")
    return cubin if found == key.encode() else None


class Cubins:
    """Cubins that are known, and those that child processes compile.

    known: returns the entry that a file or the cache has for a key; only of a cubin that is trusted
    store: receives the entries of new cubins, by key
    libraries: NVRTC's libraries, in the order to load
    """

    def __init__(
        self,
        known: Callable[[str], Entry | None] = lambda key: None,
        store: Callable[[Mapping[str, Entry]], None] = lambda entries: None,
        libraries: Sequence[str] = (),
    ):
        self._known, self._store, self._libraries = known, store, libraries
        self._coming: dict[str, Future[bytes | None]] = {}

    def has(self, source: CudaSource) -> bool:
        """Tell if the cubin of a source is known, or comes from a child process."""
        coming = source.key in self._coming or source.key in _AHEAD
        return coming or cubin_in(source.key, self._known(source.key)) is not None

    def expect(self, sources: Iterable[CudaSource]) -> None:
        """Start to compile sources that are not known, in child processes; `get` waits for them."""
        wanted = {source.key: source for source in sources if source.key not in self._coming}
        self._coming |= {key: future for key in wanted if (future := _AHEAD.pop(key, None)) is not None}
        wanted = {key: source for key, source in wanted.items() if key not in self._coming}
        unknown = [source for key, source in wanted.items() if cubin_in(key, self._known(key)) is None]
        self._coming |= compiled(unknown, self._libraries)

    def get(self, source: CudaSource) -> bytes | None:
        """Return the cubin of a source; None if it is not known and no child process compiled it.

        Warns if child processes fail.
        """
        coming = self._coming.get(source.key)
        if coming is None:
            return cubin_in(source.key, self._known(source.key))
        try:
            return coming.result()
        except OSError as error:
            warnings.warn(f"a kernel is compiled in this process, because another one failed: {error}", stacklevel=2)
            return None

    def store(self, sources: Iterable[CudaSource]) -> None:
        """Store the cubins that child processes compiled of these sources, for the next process."""
        coming = {source.key: future for source in sources if (future := self._coming.pop(source.key, None))}
        good = {key: future for key, future in coming.items() if future.exception() is None}
        found = {key: cubin for key, future in good.items() if (cubin := future.result()) is not None}
        if found:
            self._store({key: entry_of(key, cubin) for key, cubin in found.items()})


# What is compiled before it is known which `Cubins` need it, by key of the source.
_AHEAD: dict[str, Future[bytes | None]] = {}


def compile_ahead(
    kernels: Iterable[Kernel],
    sm: int,
    libraries: Sequence[str],
    known: Callable[[str], Entry | None] = lambda key: None,
) -> Mapping[str, Future[bytes | None]]:
    """Begin to compile kernels that a launcher may need later for a compute capability; its `Cubins` take them over.

    known: see `Cubins`; what is known is not compiled.

    Returns the cubins to come, by key of the source.
    """
    new = [source for source in _sources(kernels, sm) if source.key not in _AHEAD]
    new = [source for source in new if cubin_in(source.key, known(source.key)) is None]
    coming = compiled(new, libraries, MAX_AHEAD)
    _AHEAD.update(coming)
    return coming


def forget_ahead() -> None:
    """Drop what was compiled ahead and nothing needed; what is still waiting is not compiled. End idle processes."""
    while _AHEAD:
        _AHEAD.popitem()[1].cancel()
    threading.Thread(target=_IDLE.close, name="fusec-end-nvrtc", daemon=True).start()


def compile_all(
    kernels: Iterable[Kernel], sm: int, libraries: Sequence[str], report: Callable[[int, int], None]
) -> dict[str, Entry]:
    """Compile kernels with their variants for a compute capability, by the key of the source.

    report: receives the number of sources that are compiled, and that of all.
    Sources that are not compiled are left out, because NVRTC on the GPU's machine may compile them.
    """
    sources = _sources((variant for kernel in kernels for variant in variants_of(kernel)), sm)
    found: dict[str, Entry] = {}
    for count, (key, coming) in enumerate(compiled(sources, libraries).items(), 1):
        if coming.exception() is None and (cubin := coming.result()) is not None:
            found[key] = entry_of(key, cubin)
        report(count, len(sources))
    return found


def _sources(kernels: Iterable[Kernel], sm: int) -> list[CudaSource]:
    """List the different sources of kernels that a compute capability has the instructions for."""
    launches = (launch for kernel in kernels for launch in kernel.launches if launch.runs_on(sm))
    return list({source.key: source for launch in launches for source in [source_of(launch, sm)]}.values())


def compiled(
    sources: Sequence[CudaSource], libraries: Sequence[str], processes: int = MAX_PROCESSES
) -> dict[str, Future[bytes | None]]:
    """Start to compile sources in at most `processes` child processes, and return a cubin for each key.

    It is None for a source that NVRTC refuses. It raises OSError if the child process failed. Long sources come first,
    because they take longest, and the last one should not run alone. The first child process always compiles. The
    others wait for slots that the processes of this machine share, because each start takes a second.
    """
    futures = {source.key: Future[bytes | None]() for source in sources}
    waiting: queue.SimpleQueue[CudaSource] = queue.SimpleQueue()
    for source in sorted(sources, key=lambda source: -len(source.code)):
        waiting.put(source)
    slots = MachineLocks(cache_folder(), CALLS * most_compilers(), "compiler")
    for number in range(min(len(sources), most_compilers(), processes)):
        slot = nullcontext if number == 0 else partial(slots.slot, partial(_require_waiting, waiting))
        each = (waiting, futures, list(libraries), slot)
        threading.Thread(target=_work, args=each, name="fusec-nvrtc", daemon=True).start()
    return futures


def _work(
    waiting: queue.SimpleQueue[CudaSource],
    futures: Mapping[str, Future[bytes | None]],
    libraries: list[str],
    slot: Callable[[], AbstractContextManager[object]],
) -> None:
    """Compile what is waiting in a process, each source in a slot, until nothing is left.

    If the process dies, its source fails, and another one starts.
    """
    child: nvrtc_process.NvrtcChild | None = None
    with contextlib.suppress(queue.Empty):
        while True:
            with slot():
                source = waiting.get_nowait()
                if not futures[source.key].set_running_or_notify_cancel():
                    continue
                try:
                    child = child or _IDLE.take(libraries)
                    cubin = child.cubin(source.code, (*OPTIONS, f"--gpu-architecture={source.architecture}"))
                except OSError as error:
                    child = None
                    futures[source.key].set_exception(error)
                else:
                    futures[source.key].set_result(cubin)
    if child is not None:
        _IDLE.give(child, libraries)


def _require_waiting(waiting: queue.SimpleQueue[CudaSource]) -> None:
    """Raise queue.Empty if no source is waiting."""
    if waiting.empty():
        raise queue.Empty


class _IdleProcesses:
    """Processes that have nothing to compile. They end after some seconds, because each holds NVRTC in memory.

    The first source of a process takes up to a second longer than the next ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[nvrtc_process.NvrtcChild, list[str], object]] = []

    def take(self, libraries: list[str]) -> nvrtc_process.NvrtcChild:
        """Return a process that loaded these libraries, or start one. Raises OSError if it does not start."""
        with self._lock:
            for place, (child, loaded, _) in enumerate(self._held):
                if loaded == libraries:
                    del self._held[place]
                    return child
        return nvrtc_process.NvrtcChild(libraries)

    def give(self, child: nvrtc_process.NvrtcChild, libraries: list[str]) -> None:
        """Hold a process for the next source."""
        turn = object()
        with self._lock:
            self._held.append((child, libraries, turn))
        timer = threading.Timer(IDLE_S, self._end, [turn])
        timer.daemon = True
        timer.start()

    def _end(self, turn: object) -> None:
        """End the process that was given at a turn, if nobody took it since."""
        with self._lock:
            ended = [child for child, _, given in self._held if given is turn]
            self._held = [item for item in self._held if item[2] is not turn]
        for child in ended:
            child.close()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            ended, self._held = self._held, []
        for child, *_ in ended:
            child.close()


_IDLE = _IdleProcesses()

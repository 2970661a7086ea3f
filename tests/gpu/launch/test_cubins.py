"""Test the compilation of kernels in child processes, by NVRTC, which needs no GPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fusec.gpu.cudnn.without_driver.deviceless import nvrtc_libraries
from fusec.gpu.kernels import Kernel
from fusec.gpu.kernels.codegen.kernel import Arguments, Launch
from fusec.gpu.launch import cubins as module
from fusec.gpu.launch.cubins import (
    Cubins,
    CudaSource,
    compile_ahead,
    compile_all,
    cubin_in,
    entry_of,
    forget_ahead,
    source_of,
)
from fusec.plans.plan_record import Entry
from fusec.system.machine_locks import MachineLocks

SOURCES = [
    CudaSource(f'extern "C" __global__ void k{i}(float* x) {{ x[threadIdx.x] = {i}.0f; }}', "sm_90a") for i in range(3)
]
needs_nvrtc = pytest.mark.skipif(
    not all(Path(each).exists() for each in nvrtc_libraries()), reason="NVRTC is not from a wheel"
)


def launch(name: str, text: str, architecture: str = "") -> Launch:
    made = Arguments().launch(name, [text], 1)
    return Launch(made.entry, made.source, 1, 256, (), (), architecture=architecture)


@needs_nvrtc
def test_child_processes_compile_each_source_once_and_store_it() -> None:
    stored: dict[str, Entry] = {}
    cubins = Cubins(stored.get, stored.update, nvrtc_libraries())
    cubins.expect(SOURCES)
    for number, source in enumerate(SOURCES):
        cubin = cubins.get(source)
        assert cubin is not None
        assert cubin.startswith(b"\x7fELF")
        assert f"k{number}".encode() in cubin
    assert not stored
    cubins.store(SOURCES[:2])
    assert stored.keys() == {source.key for source in SOURCES[:2]}
    again = Cubins(stored.get, libraries=("not asked",))
    again.expect(SOURCES[:2])
    assert again.get(SOURCES[0]) == cubins.get(SOURCES[0])


@needs_nvrtc
def test_a_source_that_nvrtc_refuses_has_no_cubin() -> None:
    wrong = CudaSource("no C", "sm_90")
    cubins = Cubins(libraries=nvrtc_libraries())
    cubins.expect([*SOURCES, wrong])
    assert cubins.get(wrong) is None
    assert cubins.get(SOURCES[2]) is not None


def test_without_nvrtc_there_is_a_warning_and_no_cubin(recwarn: pytest.WarningsRecorder) -> None:
    cubins = Cubins(libraries=("libnot-there.so",))
    cubins.expect(SOURCES)
    assert [cubins.get(source) for source in SOURCES] == [None] * len(SOURCES)
    assert "compiled in this process, because another one failed: NVRTC does not load" in str(recwarn.list[0].message)


def test_a_key_depends_on_source_and_architecture() -> None:
    one = CudaSource("a", "sm_90")
    assert one.key == CudaSource("a", "sm_90").key
    assert len({one.key, CudaSource("a", "sm_90a").key, CudaSource("b", "sm_90").key}) == 3
    assert source_of(launch("a", ""), 80).architecture == "sm_80"
    assert source_of(launch("a", "", "sm_90"), 100).architecture == "sm_100"
    assert source_of(launch("a", "", "sm_90a"), 90).architecture == "sm_90a"


def test_a_cubin_belongs_to_one_key() -> None:
    one, other = (source.key for source in SOURCES[:2])
    assert cubin_in(one, entry_of(one, b"code\n more")) == b"code\n more"
    assert cubin_in(other, entry_of(one, b"code")) is None
    assert cubin_in(one, None) is None


@needs_nvrtc
def test_kernels_are_compiled_with_the_variants_that_the_target_runs() -> None:
    first, second = launch("first", ""), launch("second", "", "sm_90a")
    wrong, newer = launch("wrong", "no C"), launch("newer", "", "sm_100")
    others = tuple(Kernel("other", (each,)) for each in (second, wrong, newer))
    counts: list[tuple[int, int]] = []
    kernels = [Kernel("k", (first,), others=others)]
    found = compile_all(kernels, 90, nvrtc_libraries(), lambda done, total: counts.append((done, total)))
    assert found.keys() == {source_of(first, 90).key, source_of(second, 90).key}
    assert counts == [(1, 3), (2, 3), (3, 3)]
    assert compile_all(kernels, 80, nvrtc_libraries(), lambda *_: None).keys() == {source_of(first, 80).key}


def test_what_is_compiled_ahead_is_taken_over_and_the_rest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, asked = threading.Event(), list[str]()

    class Child:
        """A child process that compiles when it is let."""

        def __init__(self, libraries: list[str]) -> None:
            pass

        def cubin(self, code: str, options: Sequence[str]) -> bytes:
            assert goes_on.wait(10)
            asked.append(code.rpartition("// ")[2][0])
            return code.encode()

        def close(self) -> None:
            pass

    monkeypatch.setattr(module.nvrtc_process, "NvrtcChild", Child)
    monkeypatch.setattr(module, "most_compilers", lambda: 1)
    wanted = [launch(name, f"// {name}") for name in "abc"]
    others = [launch(name, f"// {name}") for name in "de"]
    newer = launch("f", "// f", "sm_100")
    compile_ahead([Kernel("k", (each,)) for each in (*wanted[:2], *wanted[:1], *others, newer)], 90, ())
    cubins = Cubins()
    cubins.expect(source_of(each, 90) for each in wanted)
    forget_ahead()
    goes_on.set()
    assert all(cubins.get(source_of(each, 90)) == source_of(each, 90).code.encode() for each in wanted)
    assert sorted(asked) == ["a", "b", "c"], "each once, and none that nothing needs"
    assert not module._AHEAD


def test_the_cores_that_this_process_may_use_bound_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert module.most_compilers() == 3


class Quick:
    """A child process that compiles immediately."""

    made: ClassVar[list[Quick]] = []

    def __init__(self, libraries: list[str]) -> None:
        self.libraries, self.closed = libraries, threading.Event()
        Quick.made.append(self)

    def cubin(self, code: str, options: Sequence[str]) -> bytes:
        return code.encode()

    def close(self) -> None:
        self.closed.set()


def test_a_process_that_has_nothing_to_do_compiles_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.nvrtc_process, "NvrtcChild", Quick)
    monkeypatch.setattr(module, "most_compilers", lambda: 1)
    monkeypatch.setattr(module, "_IDLE", module._IdleProcesses())
    monkeypatch.setattr(Quick, "made", [])
    for libraries, processes in ((["a"], 1), (["a"], 1), (["b"], 2)):
        for each in module.compiled(SOURCES, libraries).values():
            assert each.result(10)
        wait_until(lambda expected=processes: len(module._IDLE._held) == expected)
        assert len(Quick.made) == processes
    forget_ahead()
    assert all(each.closed.wait(10) for each in Quick.made)


def test_where_other_processes_compile_one_child_process_compiles_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    monkeypatch.setattr(module.nvrtc_process, "NvrtcChild", Quick)
    monkeypatch.setattr(module, "most_compilers", lambda: 2)
    monkeypatch.setattr(Quick, "made", [])
    monkeypatch.setattr(Quick, "cubin", lambda self, code, options: time.sleep(0.05) or b"")
    with ExitStack() as others:
        locks = MachineLocks(tmp_path, 2 * module.CALLS, "compiler")
        for _ in range(2 * module.CALLS):
            others.enter_context(locks.slot(lambda: None))
        for busy, processes in ((True, 1), (False, 2)):
            monkeypatch.setattr(module, "_IDLE", module._IdleProcesses())
            Quick.made.clear()
            for each in module.compiled(SOURCES, ["a"]).values():
                assert each.result(10) == b""
            wait_until(lambda expected=processes: len(module._IDLE._held) == expected)
            assert len(Quick.made) == processes
            if busy:
                others.close()
    forget_ahead()


def test_long_sources_are_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Quick, "cubin", lambda self, code, options: asked.append(code) or b"")
    monkeypatch.setattr(module.nvrtc_process, "NvrtcChild", Quick)
    monkeypatch.setattr(module, "most_compilers", lambda: 1)
    monkeypatch.setattr(module, "_IDLE", module._IdleProcesses())
    sources = [CudaSource("x" * length, "sm_90") for length in (2, 5, 3)]
    for each in module.compiled(sources, ["a"]).values():
        each.result(10)
    assert [len(code) for code in asked] == [5, 3, 2]
    forget_ahead()


def test_an_idle_process_ends_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.2)
    idle = module._IdleProcesses()
    child: Any = Quick(["a"])
    idle.give(child, ["a"])
    assert idle.take(["a"]) is child
    assert not child.closed.wait(0.4), "it is in use"
    idle.give(child, ["a"])
    assert child.closed.wait(10)


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError

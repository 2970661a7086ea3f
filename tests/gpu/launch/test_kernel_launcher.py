"""Test which variant of a kernel runs where some do not fit on the GPU."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from fusec.gpu.kernels import Kernel
from fusec.gpu.kernels.codegen.kernel import Arguments, Launch
from fusec.gpu.launch.cubins import source_of


def kernel(name: str) -> Kernel:
    return Kernel(name, (Arguments().launch(name, [f"// {name}"], 1),))


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a launcher on a GPU that has room for some kernels only, by name."""
    pytest.importorskip("cupy")
    from fusec.gpu.launch import kernel_launcher

    def fitting(names: Collection[str]) -> Any:
        monkeypatch.setattr(
            kernel_launcher, "_compiled", lambda launch, _: object() if launch.entry[0] in names else None
        )
        return kernel_launcher.Launcher()

    return fitting


def test_the_first_variant_that_fits_runs_before_any_is_timed(launcher: Any) -> None:
    whole = replace(kernel("a"), others=(kernel("b"), kernel("c")))
    for fits, runs in (("abc", "a"), ("bc", "b"), ("c", "c")):
        some = launcher(fits)
        assert some.runs(whole)
        assert some.fastest(whole).name == runs
        assert not some.is_measured(whole)
    assert not launcher("").runs(whole)


def test_a_fastest_variant_that_no_longer_fits_is_replaced_with_a_warning(launcher: Any) -> None:
    whole = replace(kernel("a"), others=(kernel("b"), kernel("c")))
    some = launcher("b")
    assert some.take(whole, whole.others[1].key)
    with pytest.warns(UserWarning, match="that was fastest does not run on this GPU"):
        assert some.runs(whole)
    assert some.fastest(whole).name == "b"


def test_kernels_that_are_needed_soon_are_compiled_once_and_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    from fusec.gpu.launch import kernel_launcher

    goes_on, compiled = threading.Event(), list[str]()

    def slowly(launch: Launch, cubins: None) -> object:
        assert goes_on.wait(10)
        compiled.append(launch.entry[0])
        return object()

    monkeypatch.setattr(kernel_launcher, "_compiled", slowly)
    some = kernel_launcher.Launcher()
    some.compile_soon([kernel("a"), kernel("b")])
    some.compile_soon([kernel("b")])
    assert not compiled
    goes_on.set()
    some.compile([kernel("a"), kernel("b"), kernel("c")])
    assert sorted(compiled) == ["a", "b", "c"]


@pytest.mark.parametrize("loads", [True, False])
def test_kernels_that_were_loaded_ahead_are_taken_over(monkeypatch: pytest.MonkeyPatch, loads: bool) -> None:
    """Those that did not load are compiled as others, and the rest is dropped."""
    pytest.importorskip("cupy")
    from fusec.gpu.launch import kernel_launcher

    compiled, loaded, function = list[str](), list[str](), object()

    def load(launch: Launch, coming: Future[bytes | None]) -> object:
        assert coming.result(10) == b"cubin"
        if not loads:
            raise LookupError
        loaded.append(launch.entry[0])
        return function

    monkeypatch.setattr(kernel_launcher, "compute_capability", lambda: 90)
    monkeypatch.setattr(kernel_launcher, "_loaded_ahead", load)
    monkeypatch.setattr(kernel_launcher, "_compiled", lambda launch, _: compiled.append(launch.entry[0]) or function)
    kernels = [kernel("a"), kernel("b"), kernel("c")]
    coming = {source_of(each.launches[0], 90).key: Future[bytes | None]() for each in kernels[:2]}
    kernel_launcher.load_ahead(kernels, coming)
    for each in coming.values():
        each.set_result(b"cubin")
    kernel_launcher.Launcher().compile([kernels[0], kernels[2]])
    assert sorted(compiled) == (["c"] if loads else ["a", "c"])
    assert list(kernel_launcher._LOADED_AHEAD) == [kernels[1].launches[0].entry]
    kernel_launcher.forget_loaded()
    assert not kernel_launcher._LOADED_AHEAD

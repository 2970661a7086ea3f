"""Test which variant of a kernel runs where some do not fit on the GPU."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from fusec.gpu.kernels import Kernel
from fusec.gpu.kernels.codegen.kernel import Arguments, Launch


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

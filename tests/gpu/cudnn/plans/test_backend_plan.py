"""Test that serialized plans are read by cuDNN's own functions."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
from gpu.cudnn_graphs import conv

from fusec.gpu.cudnn.legality.oracle import PROBE
from fusec.gpu.cudnn.plans.backend_plan import backend_json, read_plan
from fusec.gpu.cudnn.plans.plan_serialization import serialize
from fusec.gpu.cudnn.without_driver.deviceless import bring_up, cudnn_library
from fusec.gpu.device import detect, device_name
from fusec.targets.target import load

H200 = load("h200")
CONVOLUTION = """graph "g" (%x: f16[1,64,16,16], %w: f16[64,64,3,3]) {
  %y = conv(%x, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1], groups=1} : f16[1,64,16,16]
  return %y as "y"
}"""
# Lengths of a string, as UBJSON writes them.
LENGTHS = {90: b"i\x5a", 100: b"U\x64", 300: b"I\x01\x2c", 70_000: b"l\x00\x01\x11\x70"}


class Library:
    """Functions of cuDNN that record what they are told, and fail from the call numbered `fails` on."""

    def __init__(self, fails: int = 99) -> None:
        self.calls: list[Any] = []
        self.fails = fails

    def _did(self, *call: Any) -> int:
        self.calls.append(call)
        return 3000 if len(self.calls) > self.fails else 0

    def cudnnBackendCreateDescriptor(self, kind: int, place: Any) -> int:  # noqa: N802  # as cuDNN has it
        place._obj.value = 100 + kind
        return self._did("create", kind)

    def cudnnBackendSetAttribute(self, descriptor: Any, name: int, kind: int, count: Any, values: Any) -> int:  # noqa: N802
        value = values[: count.value] if isinstance(values, bytes) else values._obj.value
        return self._did("set", descriptor.value, name, kind, value)

    def cudnnBackendFinalize(self, descriptor: Any) -> int:  # noqa: N802
        return self._did("finalize", descriptor.value)


def blob_of(text: bytes, form: bytes) -> bytes:
    return b"{i\x12cudnn_backend_dataS" + form + text + b"i\x05otherSi\x01x}"


@pytest.mark.parametrize("length", LENGTHS)
def test_a_plan_is_described_to_cudnn_and_finalized(length: int) -> None:
    text = b"{" + b" " * (length - 2) + b"}"
    library = Library()
    assert read_plan(library, blob_of(text, LENGTHS[length])) == 0  # type: ignore[arg-type]
    assert library.calls == [
        ("create", 38),
        ("set", 138, 2700, 23, 0),
        ("finalize", 138),
        ("create", 5),
        ("set", 105, 407, 15, 138),
        ("set", 105, 405, 24, text),
        ("finalize", 105),
    ]


@pytest.mark.parametrize("fails", range(7))
def test_the_first_failure_ends_it(fails: int) -> None:
    library = Library(fails)
    assert read_plan(library, blob_of(b"{}", b"i\x02")) == 3000  # type: ignore[arg-type]
    assert len(library.calls) == fails + 1


@pytest.mark.parametrize("blob", [b"", b"\x7fELF", b"{i\x12cudnn_backend_dataS", b"cudnn_backend_dataSZ12"])
def test_other_bytes_are_no_plan(blob: bytes) -> None:
    with pytest.raises(ValueError, match="no plan of cuDNN"):
        backend_json(blob)


@pytest.mark.cudnn
def test_the_frontend_serializes_the_plan_as_it_is_read() -> None:
    for graph in (PROBE, conv("bias", "relu")):
        (entry,) = serialize([graph], H200, count=1, workers=1)[graph.key]
        assert entry.blob is not None
        assert "cudnnVersion" in json.loads(backend_json(entry.blob))


@pytest.mark.cudnn
def test_without_a_gpu_cudnn_refuses_the_plan() -> None:
    if detect() is not None:
        pytest.skip("this machine has a GPU")
    (entry,) = serialize([PROBE], H200, count=1, workers=1)[PROBE.key]
    assert entry.blob is not None
    bring_up(H200.sm)
    assert read_plan(ctypes.CDLL(str(cudnn_library() or "libcudnn.so.9")), entry.blob) != 0


@pytest.mark.gpu
def test_engines_load_before_the_frontend_reads_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fusec
    from fusec.gpu.cudnn.load_engines import load_engines, recorded
    from fusec.plans.plan_cache import PlanStore

    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    here, name = detect(), device_name()
    assert here is not None and name is not None
    assert load_engines(PlanStore()) == []
    net = fusec.compile(fusec.parse(CONVOLUTION), tune="none")
    engines = {choice.engine for choice in net.backend.choices().values()}  # type: ignore[union-attr]
    plans = recorded(PlanStore(), here.name, name)
    assert engines and set(plans) == engines
    assert load_engines(PlanStore()) == [0] * len(plans)

"""The GPU backend on stand-ins."""

from __future__ import annotations

import sys

import pytest
from gpu.stand_in_blaslt import Bindings
from gpu.stand_in_gpu import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    from fusec.gpu import backend, calls, capture, cublaslt, lab, products
    from fusec.gpu.kernels import launch

    machine = Machine()
    cupy, cudnn = machine.cupy(), machine.cudnn()
    for module in (calls, capture, launch, products):
        monkeypatch.setattr(module, "cupy", cupy)
    for module in (backend, lab):
        monkeypatch.setattr(module, "cupy", cupy)
        monkeypatch.setattr(module, "cudnn", cudnn)
    monkeypatch.setattr(lab, "emit", machine.emit)
    monkeypatch.setattr(lab, "revive", machine.revive)
    monkeypatch.setattr(backend.CudnnBackend, "xp", cupy)
    monkeypatch.setattr(cublaslt, "version", lambda: "")
    return machine


@pytest.fixture
def bindings(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Bindings:
    """cuBLASLt beside cuDNN on that machine."""
    from fusec.gpu import cublaslt

    made = Bindings(machine)
    monkeypatch.setitem(sys.modules, cublaslt.MODULE, made)  # type: ignore[arg-type]
    monkeypatch.setattr(cublaslt, "version", lambda: "1.0.0")
    return made

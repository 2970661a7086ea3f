"""The GPU backend on stand-ins."""

from __future__ import annotations

import pytest
from gpu.stand_in_blaslt import Bindings
from gpu.stand_in_gpu import Machine, install


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    install(machine, monkeypatch.setattr)
    return machine


@pytest.fixture
def bindings(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Bindings:
    """cuBLASLt next to cuDNN on that machine."""
    from fusec.gpu.cublaslt import algorithms
    from fusec.gpu.cublaslt import bindings as cublaslt_library

    made = Bindings(machine)
    monkeypatch.setattr(cublaslt_library, "load", lambda: made)
    monkeypatch.setattr(algorithms, "version", lambda: "1.0.0")
    return made

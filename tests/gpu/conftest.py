"""The GPU backend on stand-ins."""

from __future__ import annotations

import pytest
from gpu.stand_in_gpu import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    from fusec.gpu import backend, lab
    from fusec.gpu.kernels import launch

    machine = Machine()
    cupy, cudnn = machine.cupy(), machine.cudnn()
    monkeypatch.setattr(launch, "cupy", cupy)
    for module in (backend, lab):
        monkeypatch.setattr(module, "cupy", cupy)
        monkeypatch.setattr(module, "cudnn", cudnn)
    monkeypatch.setattr(lab, "emit", machine.emit)
    monkeypatch.setattr(lab, "revive", machine.revive)
    monkeypatch.setattr(backend.CudnnBackend, "xp", cupy)
    return machine

"""The GPU backend on stand-ins."""

from __future__ import annotations

import pytest
from gpu.stand_in_gpu import Machine, install


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    install(machine, monkeypatch.setattr)
    return machine

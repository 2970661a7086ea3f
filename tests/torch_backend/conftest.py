"""Run in simulation, from a fresh state of dynamo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from fusec.gpu import device

    monkeypatch.setenv("FUSEC_DEVICE", "none")
    device._first_gpu.cache_clear()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()

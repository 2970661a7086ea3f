"""Test that handles are created as cuDNN's frontend creates them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

cudnn = pytest.importorskip("cudnn")

HERE = """
import sys
from fusec.gpu.cudnn.without_driver.deviceless import load_cudnn
load_cudnn()
from fusec.gpu.cudnn.handles import create_handle
import cudnn
handle = create_handle()
graph = cudnn.pygraph(handle=handle)
cudnn.destroy_handle(handle)
print("cuda.bindings.driver" in sys.modules)
"""


@pytest.mark.parametrize("status", [0, 1])
def test_the_handle_is_the_one_that_cudnn_creates_or_the_error_is_of_the_frontend(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    from fusec.gpu.cudnn import handles

    def create(pointer: Any) -> int:
        pointer._obj.value = 64
        return status

    def refuse() -> None:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cudnnCreate=create))
    monkeypatch.setattr(cudnn, "create_handle", refuse)
    if status:
        with pytest.raises(RuntimeError, match="no GPU"):
            handles.create_handle()
    else:
        handle = handles.create_handle()
        assert (handle.backend_handle, cudnn.get_stream(handle)) == (64, 0)


@pytest.mark.gpu
def test_a_handle_of_the_gpu_needs_no_bindings() -> None:
    done = subprocess.run([sys.executable, "-c", HERE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

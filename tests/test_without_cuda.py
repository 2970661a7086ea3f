"""Test in fresh processes what needs no CUDA package: import, reading a model, passes, lowering and simulation."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fusec.errors import TargetError
from fusec.gpu.cudnn.without_driver.deviceless import INSTALL
from fusec.gpu.cudnn.worker_processes.worker_process import WorkerProcess
from fusec.targets.target import load

BLOCK = """
import sys
from importlib.abc import MetaPathFinder

class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cudnn", "cupy", "cupyx", "nvidia", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    script = BLOCK + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_a_graph_is_lowered_and_simulated_without_cuda() -> None:
    done = run(
        """
        import numpy as np
        import fusec
        from fusec.lower_cudnn import lower
        from fusec.passes import PIPELINE
        from fusec.passes.base import run
        from fusec.lowering.simulator import simulate
        graph = run(PIPELINE, fusec.parse('''graph "g" (%x: f32[4,6]) {
          %y = exp(%x)
          %z = mul(%y, %x)
          return %z
        }'''))
        lowered = lower(graph)
        x = np.random.default_rng(0).standard_normal(24).astype(np.float32)
        buffers = {lowered.inputs[0][0]: x, lowered.outputs[0][0]: np.full(24, np.nan, np.float32)}
        simulate(lowered.graph, buffers)
        assert np.allclose(buffers[lowered.outputs[0][0]], np.exp(x) * x)
        print("done")
        """
    )
    assert done.stdout == "done\n", done.stderr


def test_a_model_is_imported_without_cuda() -> None:
    done = run(
        """
        import fusec
        from fusec import frontends
        from onnx import TensorProto, helper
        x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy")
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        print(len(frontends.load(model)))
        """
    )
    assert done.stdout == "1\n", done.stderr


def command(hidden: tuple[str, ...], *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a fresh process where these packages are not found."""
    code = f"import sys; sys.modules |= dict.fromkeys({hidden!r}); from fusec.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)


def test_a_model_runs_in_simulation_without_cuda(tmp_path: Path) -> None:
    model = tmp_path / "net.txt"
    model.write_text('graph "g" (%x: f32[4,6]) {\n  %y = exp(%x)\n  %z = mul(%y, %x)\n  return %z\n}\n')
    done = command(("cudnn", "cupy", "cupyx", "nvidia", "torch"), "run", str(model), "--target", "t4")
    assert done.returncode == 0, done.stderr
    assert "ran in simulation" in done.stdout and "cuDNN was not asked" in done.stdout
    assert done.stderr == ""


@pytest.mark.cudnn
def test_libraries_without_the_frontend_are_an_error_that_names_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where torch brought cuDNN's library and NVRTC."""
    (tmp_path / "cudnn.py").write_text("raise ModuleNotFoundError(\"No module named 'cudnn'\")")
    monkeypatch.syspath_prepend(tmp_path)
    worker = WorkerProcess(load("t4"), False)
    with pytest.raises(TargetError) as caught:
        worker.wait_ready()
    assert str(caught.value) == f"No module named 'cudnn': {INSTALL}; or take --target cpu"


def test_fuzzing_without_hypothesis_is_one_line(tmp_path: Path) -> None:
    done = command(("hypothesis",), "fuzz", "--examples", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "fusec: error: fuzzing needs Hypothesis, which is not installed: pip install 'fusec[fuzz]'\n"
    )
    done = command(("hypothesis",), "fuzz", "replay", str(tmp_path / "none"))
    assert (done.returncode, done.stderr) == (2, f"fusec: error: {tmp_path / 'none'}: no such folder\n")


@pytest.mark.parametrize("module", ["fusec", "fusec.driver", "fusec.cli"])
def test_importing_loads_no_cuda_package(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('cudnn', 'cupy', 'onnx', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_import_is_quick() -> None:
    """The package loads its parts when they are used; 0.3 s is the promise, numpy alone takes 0.1."""
    code = "import time; t = time.perf_counter(); import fusec; print(time.perf_counter() - t)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(runs) < 0.3

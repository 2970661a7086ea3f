"""Time a model under XLA, in a process of its own.

The process of JAX is another one than torch's, because each library brings its own allocator, CUDA streams and choice
of cuDNN, and an error of XLA may end its process. The GPU runs one process at a time: while one is timed, the other
waits. `benchmarks/models/xla_child.py` says what is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.common.result_files import ROOT

# JAX without a GPU is an error, rather than a run on the CPU, and it takes memory only as it needs it.
ENVIRONMENT = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class XlaError(RuntimeError):
    """The process of JAX ended."""


class XlaPeer:
    """A compiled model in a process of its own, until it is closed.

    about: versions, the chosen form and the times of all forms.
    output: the first output.
    """

    def __init__(self, model: bytes, inputs: Sequence[np.ndarray[Any, Any]], precision: str = "fp16"):
        """Start the process and wait until the model is compiled. Raises XlaError.

        model: ONNX.
        inputs: with their logical dims, in the order of the model's.
        """
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "model.onnx").write_bytes(model)
        for i, array in enumerate(inputs):
            np.save(folder / f"{i}.npy", array)
        self._errors = folder / "errors.txt"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.models.xla_child", str(folder), precision],
                cwd=ROOT,
                env=ENVIRONMENT | os.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            self.about: dict[str, Any] = self._answer()
            self.output: np.ndarray[Any, Any] = np.load(folder / "y.npy")
        except BaseException:  # a time limit as well
            self.close()
            raise

    def span(self, runs: int) -> float:
        """Return the ms of a run, from at least `runs` runs."""
        assert self._process.stdin is not None
        print(runs, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            said = self._errors.read_text(errors="replace").strip().splitlines()
            raise XlaError(f"JAX ended with status {status}: {said[-1] if said else 'no message'}")
        return json.loads(line)

    def close(self) -> None:
        """End the process, and give its memory back."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def __enter__(self) -> XlaPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

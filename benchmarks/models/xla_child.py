"""Run a model by XLA in a process of its own, and time it when asked.

Usage: python -m benchmarks.models.xla_child FOLDER PRECISION. The folder holds model.onnx and its inputs, 0.npy and so
on. Weights and inputs are arguments that stay on the device. The process writes the first output as y.npy and one line
of JSON about itself. Then it reads a number of runs from each line, and writes the time of one of them as JSON.

JAX gives no CUDA graph to replay, so a run is timed in two forms. calls: many calls are queued and waited for once.
loop: each call runs the model LOOP times in a `fori_loop`, which keeps Python out. The faster form counts. XLA records
its own CUDA graphs (command buffers) in both, as XLA_FLAGS says. Attention is tried plain and as cuDNN's, too.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax

from benchmarks.models.jax_graph import ATTENTION, Function, function_of, images_first, images_last, prepared, weights
from fusec import frontends
from fusec.ops import Attention

LOOP = 10  # runs of the model in a call of the form `loop`
TRIAL = 20  # runs to choose a form by


def looped(function: Function) -> Function:
    """Return a function that runs `function` LOOP times.

    Each run changes an element of its inputs by 0 times its output, because XLA would compute equal runs only once.
    """

    def touched(x: Any, y: Any) -> Any:
        nothing = (y[(0,) * y.ndim] * 0).astype(x.dtype)
        at = (0,) * x.ndim
        return lax.dynamic_update_slice(x, (x[at] + nothing).reshape((1,) * x.ndim), at)

    def run(constants: Any, inputs: Any) -> tuple[Any, ...]:
        def body(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            inputs, _ = carry
            outputs = function(constants, inputs)
            return tuple(touched(x, outputs[0]) for x in inputs), outputs

        zeros = jax.tree.map(lambda y: jax.numpy.zeros(y.shape, y.dtype), jax.eval_shape(function, constants, inputs))
        return lax.fori_loop(0, LOOP, body, (tuple(inputs), zeros))[1]

    return run


def span(call: Callable[[], Any], per_call: int, runs: int) -> float:
    """Return the ms of a run of the model: calls are queued one after the other, and the last is waited for."""
    count = math.ceil(runs / per_call)
    result = jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)
    return 1e3 * (time.perf_counter() - start) / (count * per_call)


class Contest:
    """The forms of one model, each compiled and timed once, and their fastest.

    times: ms by form. refused: why a form does not run, by form.
    """

    def __init__(self, folder: Path, precision: str):
        self.graph = prepared(frontends.load((folder / "model.onnx").read_bytes(), None), precision)
        arrays = [np.load(folder / f"{i}.npy") for i in range(len(self.graph.inputs))]
        stored = [np.ascontiguousarray(a.transpose(images_last(a.ndim))) for a in arrays]
        self.arguments = jax.device_put(weights(self.graph)), jax.device_put(stored)
        self.calls: dict[str, tuple[Callable[[], Any], int]] = {}
        self.times: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        attends = any(isinstance(node.op, Attention) for node in self.graph.nodes)
        functions = {form: function_of(self.graph, form) for form in (ATTENTION if attends else ATTENTION[:1])}
        for form, function in functions.items():
            self._try(f"{form} attention, calls" if attends else "calls", function, 1)
        form = self.best.split()[0] if attends else ATTENTION[0]
        self._try(f"{form} attention, loop" if attends else "loop", looped(functions[form]), LOOP)

    def _try(self, name: str, function: Function, per_call: int) -> None:
        compiled = jax.jit(function)
        try:
            jax.block_until_ready(compiled(*self.arguments))
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # what JAX raises for XLA's errors
            if not self.times:  # the first form is what every model needs
                raise
            self.refused[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            return
        self.calls[name] = (lambda: compiled(*self.arguments)), per_call
        self.times[name] = min(span(*self.calls[name], TRIAL) for _ in range(2))

    @property
    def best(self) -> str:
        """Return the name of the fastest form."""
        return min(self.times, key=lambda name: self.times[name])

    def output(self) -> np.ndarray[Any, Any]:
        """Return the first output of the fastest form, with its logical dims."""
        y = np.asarray(self.calls[self.best][0]()[0])
        return y.transpose(images_first(y.ndim))


def main(folder: Path, precision: str) -> None:
    """Answer on the first stdout, so that a library that prints disturbs nobody."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start = time.perf_counter()
    contest = Contest(folder, precision)
    seconds = time.perf_counter() - start
    np.save(folder / "y.npy", contest.output())
    about = {"jax": jax.__version__, "flags": os.environ.get("XLA_FLAGS", ""), "device": jax.devices()[0].device_kind}
    about |= {"compile_s": round(seconds, 2), "form": contest.best, "forms_ms": contest.times}
    print(json.dumps(about | {"refused": contest.refused} if contest.refused else about), file=answers)
    for line in sys.stdin:
        print(json.dumps(span(*contest.calls[contest.best], int(line))), file=answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

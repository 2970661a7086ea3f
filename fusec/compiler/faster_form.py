"""Choose the faster form of a quantised model on a GPU: in integers, or in floats without rounding activations."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fusec.errors import ExecutionError
from fusec.execution.compilation import Compiled
from fusec.ir import BYTES
from fusec.ops import PRODUCTS
from fusec.runtime import Executable

RUNS = 9  # timings of a whole model, of which the median counts


def faster_form(
    integers: Executable, in_floats: Callable[[], Executable], whole_us: Callable[[Executable], float | None]
) -> Executable:
    """Return the form whose steps together take less time; the form in integers if a time is unknown.

    Steps compete by themselves, but a step in floats reads and writes the bytes of its neighbours. Only the whole
    form in floats keeps 16 bits between steps, which more engines take.

    in_floats: compiles the form in floats; called only for a model with products of integers.
    whole_us: times all steps of a program in microseconds; None if it cannot.
    """
    if not multiplies_bytes(integers.compiled):
        return integers
    floats = in_floats()
    times_us = [whole_us(each) for each in (integers, floats)]
    if times_us[0] is None or times_us[1] is None:
        return integers
    return floats if times_us[1] < times_us[0] else integers


def multiplies_bytes(compiled: Compiled) -> bool:
    """Tell if a program has a product of 8-bit integers."""
    products = (node for node in compiled.program.graph.nodes if isinstance(node.op, PRODUCTS))
    return any(node.operands[0].type.dtype in BYTES for node in products)


def whole_us(executable: Executable) -> float | None:
    """Time all steps of a program on the GPU over random inputs; None if they fail, or with state, which changes."""
    from fusec.gpu.backend import CudnnBackend

    backend, times_us = executable.backend, list[float]()
    assert isinstance(backend, CudnnBackend), "forms are compared on a GPU"

    def rehearsal(inputs: Any, code: Any, runs: Sequence[Callable[[], None]], bind_step: Any) -> list[int]:
        backend.run_once(inputs, runs)
        times_us.extend(backend.time_us(backend.capture(runs), RUNS))
        return []  # no step changes

    with suppress(ExecutionError):  # the first call names the failing step
        executable.rehearse(rehearsal)
    return statistics.median(times_us) if times_us else None

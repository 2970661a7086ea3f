"""Time the executable that a server runs, without the server.

Two rates bound a server. With images on the device, nothing is copied: no server can be faster. With images on the
host, a call copies them first, as a program does that calls the executable itself. A server copies the next batch while
one runs, so it can be faster than that.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

import fusec
from benchmarks.serving.served_models import Case, images


def alone(case: Case, path: Path, seconds: float) -> dict[str, Any]:
    """Time the executable with its largest batch, and return images a second, and the answer for these images."""
    predictor = fusec.Predictor(path).load()
    executable: Any = predictor.executable
    size = case.batches[-1]
    x = images(case, size)
    program = executable.at({"image": x.shape})
    xp, finish = program.backend.xp, program.backend.finish
    row: dict[str, Any] = {"device": executable.device}
    on_device = x if xp is np else xp.asarray(x)
    for name, array in (("device", on_device), ("host", x)):
        row[f"{name}_images_s"] = size / seconds_of(
            lambda array=array: program.run(None, {"image": array}), finish, seconds
        )
    row["answer"] = predictor({"image": x})[executable.outputs[0].name]
    return row


def seconds_of(run: Any, finish: Any, seconds: float) -> float:
    """Return the seconds of a run, of many in a row."""
    for _ in range(2):
        run()
    finish()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        run()
        count += 1
        if count % 16 == 0:
            finish()
    finish()
    return (time.perf_counter() - start) / count

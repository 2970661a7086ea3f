"""Time a ResNet-50 training step whose convolutions compute the sums for the batch norm after them, where this gains.

Usage, with a GPU, torch and torchvision:
python -m benchmarks.kernels.channel_sums [--batch 64] [--least 3] [--budget 24] [--commit HASH]
For each norm, convolution and norm are timed with the sums in the one and in the other, as autotuning does it
(`fusec.gpu.autotune.steps.step_split`). The whole step is timed with such convolutions and without, in turns.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import fusec
from benchmarks.common.result_files import KEYS, gpu_and_torch, parser, write_row
from examples.training_models import training_step
from fusec.ir import Graph, Node
from fusec.ops import Conv
from fusec.passes.training import split_batchnorm_stats
from fusec.runtime import Executable
from fusec.schedule.program import Partition

ROUNDS, REPLAYS = 8, 10


def compared(steps: Sequence[Partition], times_us: Sequence[float]) -> list[dict[str, Any]]:
    """Return the times of each convolution and norm: with the sums in the convolution, and in the norm.

    steps: those that autotuning compares, with their times. A comparison of four steps is one of such a pair.
    """
    rows: list[dict[str, Any]] = []
    starts = [i for i, step in enumerate(steps) if step.signature.endswith("+channel_sums")]
    for start, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        if end - start == 4:
            us = [round(t, 1) for t in times_us[start:end]]
            result = steps[start].outputs[0].type
            row = {"convolution": describe(steps[start].nodes[0]), "bytes": result.nbytes}
            rows.append({**row, "with_us": us[:2], "apart_us": us[2:]})
    return rows


def describe(node: Node) -> str:
    assert isinstance(node.op, Conv)
    (_, inputs, rows, columns), (outputs, _, *window) = (v.type.shape for v in node.operands)
    stride = f"/{node.op.strides[0]}" if node.op.strides[0] > 1 else ""
    return f"{inputs} to {outputs}, {'x'.join(map(str, window))}{stride} of {rows}x{columns}"


def measure(batch: int, min_bytes: int, budget_s: float) -> dict[str, Any]:
    """Time the training step with and without sums in convolutions.

    min_bytes: images of fewer bytes are not considered.
    """
    import cupy

    from benchmarks.models.torch_training_steps import first_weights
    from fusec.gpu.autotune.steps import step_selection

    weights = {name: value.numpy() for name, value in first_weights("resnet50").items()}
    rows: list[dict[str, Any]] = []
    split_epilogues = step_selection.split_epilogues

    def recorded(program: Any, chosen: Any, apply: Any, times_us: Any) -> Any:
        def record_us(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
            found = list(times_us(graph, steps))
            rows.extend(compared(steps, found))
            return found

        return split_epilogues(program, chosen, apply, record_us)

    def compiled(disable: Sequence[str]) -> Executable:
        return fusec.compile(training_step("resnet50", batch, 224, weights), budget=budget_s, disable=disable)

    with (
        patch.object(step_selection, "split_epilogues", recorded),
        patch.object(split_batchnorm_stats, "resident_bytes", lambda target: min_bytes),
    ):
        with_sums = compiled(())
    whole: Mapping[str, Executable] = {"with": with_sums, "without": compiled(("split_batchnorm_stats",))}
    images, labels = cupy.random.standard_normal((batch, 3, 224, 224)), cupy.random.randint(0, 1000, batch)
    for executable in whole.values():
        for _ in range(2):
            executable.step(images=images.astype(cupy.float16), labels=labels.astype(cupy.int64))
    times_ms: dict[str, list[float]] = {name: [] for name in whole}
    for turn in range(ROUNDS):
        for name in sorted(whole, reverse=bool(turn % 2)):
            whole[name].replay()
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            for _ in range(REPLAYS):
                whole[name].replay()
            cupy.cuda.Device().synchronize()
            times_ms[name].append(1000.0 * (time.perf_counter() - start) / REPLAYS)
    taken = sum(step.signature.endswith("conv+channel_sums") for step in with_sums.compiled.program.steps)
    row: dict[str, Any] = {"batch": batch, "convolutions": rows, "taken": taken}
    for name, times in times_ms.items():
        row[f"{name}_ms"] = [round(t, 3) for t in (statistics.median(times), min(times), max(times))]
    return row


def main() -> None:
    options = parser(__doc__, "channel_sums.json", budget=True)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--least", type=float, default=3.0, help="MiB of the smallest images that are considered")
    given = options.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    row = measure(given.batch, int(given.least * (1 << 20)), given.budget)
    write_row(given.output, gpu_and_torch(), given.commit, row, KEYS["channel_sums.json"])
    print(row)


if __name__ == "__main__":
    main()

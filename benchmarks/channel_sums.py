"""A ResNet-50 training step with statistics by the convolutions in front, where these gain, and without: both steps of
each norm timed both ways (`fusec.gpu.autotune.step_split`), and the whole in turns. Needs a GPU, torch and
torchvision.

    python -m benchmarks.channel_sums [--batch 64] [--least 3] [--budget 24] [--commit HASH]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
warnings.filterwarnings("ignore", category=DeprecationWarning)

from machine import RESULTS, gpu, keep  # noqa: E402  # the repository must be on the path first

import fusec  # noqa: E402
from examples.training_models import training_step  # noqa: E402
from fusec.ir import Graph, Node  # noqa: E402
from fusec.ops import Conv  # noqa: E402
from fusec.passes.training import split_batchnorm_stats  # noqa: E402
from fusec.runtime import Executable  # noqa: E402
from fusec.schedule.program import Partition  # noqa: E402

ROUNDS, CALLS = 8, 10  # replays of a round, one behind the other


def compared(steps: Sequence[Partition], times_us: Sequence[float]) -> list[dict[str, Any]]:
    """Of pairs of steps, each with the sums in the convolution and then apart, those of four steps."""
    rows: list[dict[str, Any]] = []
    starts = [i for i, step in enumerate(steps) if step.signature.endswith("+channel_sums")]
    for start, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        if end - start == 4:
            us = [round(t, 1) for t in times_us[start:end]]
            result = steps[start].outputs[0].type
            rows.append({**named(steps[start].nodes[0]), "bytes": result.nbytes, "with_us": us[:2], "apart_us": us[2:]})
    return rows


def named(node: Node) -> dict[str, str]:
    assert isinstance(node.op, Conv)
    (_, inputs, rows, columns), (outputs, _, *window) = (v.type.shape for v in node.operands)
    stride = f"/{node.op.strides[0]}" if node.op.strides[0] > 1 else ""
    return {"convolution": f"{inputs} to {outputs}, {'x'.join(map(str, window))}{stride} of {rows}x{columns}"}


def measured(batch: int, least: int, budget_s: float) -> dict[str, Any]:
    """least: bytes of the images that are looked at."""
    import cupy
    from torch_steps import first_weights

    from fusec.gpu.autotune import step_selection

    weights = {name: value.numpy() for name, value in first_weights("resnet50").items()}
    rows: list[dict[str, Any]] = []
    split_epilogues = step_selection.split_epilogues

    def told(program: Any, chosen: Any, apply: Any, times_us: Any) -> Any:
        def seen(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
            found = list(times_us(graph, steps))
            rows.extend(compared(steps, found))
            return found

        return split_epilogues(program, chosen, apply, seen)

    def compiled(disable: Sequence[str]) -> Executable:
        return fusec.compile(training_step("resnet50", batch, 224, weights), budget=budget_s, disable=disable)

    with (
        patch.object(step_selection, "split_epilogues", told),
        patch.object(split_batchnorm_stats, "KEPT_BYTES", least),
    ):
        with_sums = compiled(())
    whole: Mapping[str, Executable] = {"with": with_sums, "without": compiled(("sums_in_front",))}
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
            for _ in range(CALLS):
                whole[name].replay()
            cupy.cuda.Device().synchronize()
            times_ms[name].append(1000.0 * (time.perf_counter() - start) / CALLS)
    taken = sum(step.signature.endswith("conv+channel_sums") for step in with_sums.compiled.program.steps)
    row: dict[str, Any] = {"batch": batch, "convolutions": rows, "taken": taken}
    for name, times in times_ms.items():
        row[f"{name}_ms"] = [round(t, 3) for t in (statistics.median(times), min(times), max(times))]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--least", type=float, default=3.0, help="MiB of the images that are looked at")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for the plans of each program")
    parser.add_argument("--commit", default="", help="where there is no history to ask")
    parser.add_argument("--output", type=Path, default=RESULTS / "channel_sums.json")
    given = parser.parse_args()
    row = measured(given.batch, int(given.least * (1 << 20)), given.budget)
    keep(given.output, gpu(), given.commit, row, ("batch",))
    print(row)


if __name__ == "__main__":
    main()

"""Time quantised models against their float form in fp16, compiled by fusec, in one run on one GPU.

Usage, on a machine with a GPU and torch: python -m benchmarks.models.quantized_models [MODEL:BATCH[:FORMAT] ...]
Weights and calibration data are random, so only times are of interest: benchmarks/checks/quantized_accuracy.py measures
accuracy. Both forms take turns, as captured graphs over inputs that stay in place. `--worst N` prints the slowest steps
of the quantised form. Writes benchmarks/results/quantized_models.json.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch

import fusec
from benchmarks.common.model_zoo import channels_last, exported, feeds_of, halved, make
from benchmarks.common.result_files import KEYS, gpu_and_torch, parser, write_row
from benchmarks.common.torch_timing import limits_and_steps, relative_l2, timed
from benchmarks.models.peers import CHANNELS_LAST, first_result
from fusec.diagnostics.step_times import measure

NAME = "quantized_models.json"
CASES = ["resnet50:32", "resnet50:256", "mobilenet_v2:32", "bert_base:32", "vit_b_16:32"]


def compiled_forms(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile a model in fp16 and quantised; return each executable with its result and inputs, and the row so far."""
    model, batch, form = (*case.split(":"), "int8")[:3]
    module, inputs = make(model, int(batch))
    data, last = exported(module, inputs), model in CHANNELS_LAST
    samples = {f"x{i}": x.numpy() for i, x in enumerate(inputs)}
    quantised = fusec.quantize(data, samples, format=form, calibration="max", target="auto")
    module, inputs = module.cuda().half(), tuple(halved(x.cuda()) for x in inputs)
    halves = channels_last(inputs) if last else inputs
    wide = tuple(x.float() if x.is_floating_point() else x for x in halves)
    row: dict[str, Any] = {"model": model, "batch": int(batch), "format": form}
    found: dict[str, Any] = {}
    for name, source, feeds in (
        ("fp16", exported(module, inputs), feeds_of(halves)),
        (form, quantised.model.SerializeToString(), feeds_of(wide)),
    ):
        executable, y, seconds = first_result(source, feeds, "quick", float("inf"), last)
        found[name] = (executable, y, feeds)
        row[f"{name}_cold_s"], row[f"{name}_launches"] = round(seconds, 2), len(executable.compiled.program.steps)
    return found, row


def run(case: str, worst: int) -> dict[str, Any]:
    """Measure a case, and return its row."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FUSEC_CACHE"] = folder
        found, row = compiled_forms(case)
        form = row["format"]
        row["difference"] = float(relative_l2(found[form][1].float(), found["fp16"][1].float()))
        times = timed({name: executable.replay for name, (executable, _, _) in found.items()})
        row["times"] = times
        row["fp16_over_quantised"] = times["fp16"]["median_ms"] / times[form]["median_ms"]
        executable, _, feeds = found[form]
        row |= limits_and_steps(measure(executable, feeds))
        for step in sorted(row["steps"], key=lambda s: -s["us"])[:worst]:
            print(f"      {step['us']:8.1f} {step['limit_us']:7.1f} {step['kind']:7} {step['step'][:100]}")
    return row


def main() -> int:
    options = parser(__doc__, NAME)
    options.add_argument("cases", nargs="*", default=CASES, help="MODEL:BATCH[:FORMAT]")
    options.add_argument("--worst", type=int, default=0, help="print so many of the slowest steps")
    given = options.parse_args()
    torch.backends.cudnn.benchmark = True
    for case in given.cases:
        row = run(case, given.worst)
        write_row(given.output, gpu_and_torch(), given.commit, row, KEYS[NAME])
        told = "  ".join(f"{n} {t['median_ms']:.3f} ms (cold {row[n + '_cold_s']} s)" for n, t in row["times"].items())
        print(f"{case}  {told}  {row['fp16_over_quantised']:.2f}x  {row['difference']:.1e} apart", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Time quantised models against their float form in fp16, compiled by fusec, in one run on one GPU.

Usage, on a machine with a GPU and torch: python -m benchmarks.models.quantized_models [MODEL:BATCH[:FORMAT] ...]
Weights and calibration data are random, so only times are of interest; benchmarks/checks/quantized_accuracy.py measures
accuracy. Each form is timed alone as soon as it runs. Then both forms take turns, as captured graphs over inputs that
stay in place. Last, steps that compute the same operators are compared: those first at which the quantised form loses
most. Writes benchmarks/results/quantized_models.json after each figure. `--seconds` stops the run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import torch

import fusec
from benchmarks.common.attempt import Attempt, TooLongError, add_limit, within
from benchmarks.common.dynamic_quantization import quantized_dynamically
from benchmarks.common.model_zoo import channels_last, exported, feeds_of, halved, make
from benchmarks.common.result_files import parser
from benchmarks.common.step_pairs import named_steps, step_pairs, table
from benchmarks.common.torch_timing import free_memory, limits_and_steps, relative_l2, timed
from benchmarks.models.peers import CHANNELS_LAST, first_result
from fusec.diagnostics.step_times import measure

NAME = "quantized_models.json"
CASES = ["resnet50:32", "bert_base:32", "resnet50:256", "mobilenet_v2:32", "vit_b_16:32"]
FLOAT = "fp16"
DYNAMIC = "dynamic"  # activations are quantised at run time; other formats are those of `fusec.quantize`


class Measurement:
    """The figures of one model, each printed when it is known.

    tune, budget_s, rounding: as `fusec.compile` takes them.
    row: what is known so far.
    """

    def __init__(self, case: str, attempt: Attempt, tune: str, budget_s: float, rounding: str):
        self.attempt, self._options, self._rounding = attempt, (tune, budget_s), rounding
        self.model, batch, self.form = (*case.split(":"), "int8")[:3]
        self.row: dict[str, Any] = {"model": self.model, "batch": int(batch), "format": self.form, "times": {}}
        self._found: dict[str, Any] = {}
        self._last = self.model in CHANNELS_LAST
        module, inputs = make(self.model, int(batch))
        self._samples = {f"x{i}": x.numpy() for i, x in enumerate(inputs)}
        module, inputs = module.cuda(), tuple(x.cuda() for x in inputs)
        self._data = exported(module, inputs)  # on the GPU, because the exporter runs the model
        module, inputs = module.half(), tuple(map(halved, inputs))
        self._halves = channels_last(inputs) if self._last else inputs
        self._exported = exported(module, inputs)
        attempt.say(f"{case}: exported")

    def run(self, worst: int) -> None:
        """Measure both forms alone, then in turns, then step by step.

        worst: the number of steps to print.
        """
        self._compile(FLOAT, self._exported, feeds_of(self._halves))
        started = time.perf_counter()
        quantised = self._quantised()
        self.attempt.say(f"quantised in {time.perf_counter() - started:.1f} s")
        wide = tuple(x.float() if x.is_floating_point() else x for x in self._halves)
        self._compile(self.form, quantised, feeds_of(wide))
        self.row["difference"] = relative_l2(self._found[self.form][1], self._found[FLOAT][1])
        self.row["times"] = timed({name: executable.replay for name, (executable, _, _) in self._found.items()})
        quantised_ms, float_ms = (self.row["times"][name]["median_ms"] for name in (self.form, FLOAT))
        self.row["fp16_over_quantised"] = float_ms / quantised_ms
        self.attempt.keep(self.row)
        both = f"{self.form} {quantised_ms:.3f} ms, fp16 {float_ms:.3f} ms, {float_ms / quantised_ms:.2f}x"
        self.attempt.say(f"in turns: {both}; {self.row['difference']:.1e} apart")
        self._compare_steps(worst)

    def _quantised(self) -> bytes:
        if self.form == DYNAMIC:
            return quantized_dynamically(self._data)
        options: dict[str, Any] = {"format": self.form, "calibration": "max", "target": "auto"}
        return fusec.quantize(self._data, self._samples, **options).model.SerializeToString()

    def _compile(self, form: str, source: bytes, feeds: dict[str, Any]) -> None:
        """Compile a form, and time it alone."""
        executable, y, seconds = first_result(source, feeds, *self._options, self._last, self._rounding)
        self._found[form] = (executable, y, feeds)
        self.row[f"{form}_cold_s"] = round(seconds, 2)
        self.row[f"{form}_launches"] = launches = executable.compiled.program.launches
        self.row["times"] |= timed({form: executable.replay}, rounds=5)
        self.attempt.keep(self.row)
        median_ms = self.row["times"][form]["median_ms"]
        self.attempt.say(f"{form}: {median_ms:.3f} ms, {launches} launches, compiled in {seconds:.1f} s")

    def _compare_steps(self, worst: int) -> None:
        """Time the steps of both forms alone, and print those at which the quantised form loses most."""
        sides = {form: measure(executable, feeds, 10) for form, (executable, _, feeds) in self._found.items()}
        named = [named_steps(self._found[form][0], sides[form]) for form in (self.form, FLOAT)]
        pairs = step_pairs(*named)
        self.row |= limits_and_steps(sides[self.form])
        self.row |= {"fp16_limit_ms": sides[FLOAT].limit_us / 1000, "fp16_sum_ms": sides[FLOAT].sum_us / 1000}
        self.row["pairs"] = [pair.to_json(self.form, FLOAT) for pair in pairs]
        self.attempt.keep(self.row)
        self.attempt.say("steps\n" + table(pairs, self.form, FLOAT, worst))


def main() -> int:
    options = parser(__doc__, NAME, budget=True)
    options.add_argument("cases", nargs="*", default=CASES, help="MODEL:BATCH[:FORMAT]")
    options.add_argument("--tune", default="quick")
    options.add_argument("--rounding", default="fused")
    options.add_argument("--worst", type=int, default=30, help="number of pairs of steps to print")
    add_limit(options)
    given = options.parse_args()
    torch.backends.cudnn.benchmark = True
    attempt = Attempt(given.output, given.commit)
    try:
        with within(given.seconds):
            for case in given.cases:
                with tempfile.TemporaryDirectory() as folder:
                    os.environ["FUSEC_CACHE"] = folder  # an empty cache
                    Measurement(case, attempt, given.tune, given.budget, given.rounding).run(given.worst)
                free_memory()
    except TooLongError as reason:
        attempt.say(f"stopped: {reason}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

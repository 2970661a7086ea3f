"""Capture and time a whole model on the GPU with other plans or kernels, and adopt those that make it faster."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field

from fusec.errors import ExecutionError
from fusec.gpu.autotune.model.coordinate_descent import Contest, contests, descend
from fusec.gpu.autotune.plans.plan_selection import PlanSelector
from fusec.gpu.autotune.steps.step_selection import StepSelector
from fusec.gpu.kernels import Kernel
from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.launch.cuda_graph import in_order
from fusec.gpu.launch.kernel_launcher import Launcher
from fusec.gpu.launch.stream_calls import Streams
from fusec.gpu.measure.runs_in_turn import Run
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.system.dataclass import dataclass


@dataclass
class WholeModelTrial:
    """Steps of a model, bound to memory, that can be bound again with another plan or kernel.

    code: the graph or kernel of each step, None for others
    runs: the steps, which ran before
    bind_step: binds a step again, by number, with the first plan or the fastest variant
    steps_of: the numbers of the steps that run a graph or kernel, by key
    """

    code: Sequence[CudnnGraph | Kernel | None]
    runs: Sequence[Run]
    bind_step: Callable[[int], Run]
    plans: PlanSelector
    steps: StepSelector
    launcher: Launcher
    streams: Streams
    scratch: Callable[[], AbstractContextManager[None]]
    times: Callable[[Run, int], list[float]]
    steps_of: dict[str, list[int]] = field(default_factory=lambda: defaultdict[str, list[int]](list))
    _bound: dict[tuple[str, int, int], Run] = field(default_factory=dict[tuple[str, int, int], Run])

    def __post_init__(self) -> None:
        self._kernels = {each.key: each for each in self.code if isinstance(each, Kernel)}
        for number, each in enumerate(self.code):
            if each is not None:
                self.steps_of[each.key].append(number)

    def contests(self) -> list[Contest]:
        """List the graphs and kernels with several options that are about as fast alone."""
        times_us = {key: self._times_us(key) for key in self.steps_of}
        return contests(times_us, {key: len(numbers) for key, numbers in self.steps_of.items()})

    def descend(self, seconds: float, run_once: Callable[[int], None]) -> dict[str, int] | None:
        """Search the fastest options, by key, for some seconds: see `coordinate_descent`. None if there is no choice.

        run_once: runs the model once; plans may use a workspace of as many bytes
        """
        contests, end = self.contests(), time.monotonic() + seconds
        if not contests:
            return None
        try:
            run_once(self._workspace_bytes(contests))
            return descend(contests, self, lambda: time.monotonic() < end)
        except ExecutionError:  # the first call names the failing step, and uses another plan
            return None

    def captured(self, options: Mapping[str, int]) -> Run | None:
        """Capture the model with these options as one CUDA graph; None if it cannot be captured as one."""
        runs = list(self.runs)
        for key, option in options.items():
            for number in self.steps_of[key]:
                if (key, option, number) not in self._bound:
                    self._bound[key, option, number] = self._bind(key, option, number)
                runs[number] = self._bound[key, option, number]
        replay = in_order(self.streams, runs, self.scratch)
        return replay if replay.at_once else None

    def time_us(self, run: Run) -> float:
        return self.times(run, 1)[0]

    def _workspace_bytes(self, contests: Sequence[Contest]) -> int:
        """Return the largest workspace that a plan of these contests needs."""
        ranked = [self.plans.ranked[each.key] for each in contests if each.key in self.plans.ranked]
        return max((plan.workspace_bytes for result in ranked for _, plan in result.plans), default=0)

    def adopt(self, options: Mapping[str, int]) -> list[int]:
        """Use and store these options where their results are right; return the numbers of the steps to bind again."""
        changed: list[str] = []
        for key, option in options.items():
            variant = self._variant(key, option)
            if self.plans.prefer(key, option) if variant is None else self.steps.prefer_variant(*variant):
                changed.append(key)
        ranked = [self.plans.ranked[key] for key in changed if key in self.plans.ranked]
        self.plans.store([result.graph for result in ranked], self.plans.footprint_bytes)
        return [number for key in changed for number in self.steps_of[key]]

    def _variant(self, key: str, option: int) -> tuple[Kernel, Kernel] | None:
        """Return a kernel and the variant that an option stands for; None for the key of a graph."""
        kernel = self._kernels.get(key)
        return None if kernel is None else (kernel, self._in_order(kernel)[option][1])

    def _times_us(self, key: str) -> list[float]:
        """Return the times alone of the options of a graph or kernel, the one in use first."""
        if key in self._kernels:
            return [time_us for time_us, _ in self._in_order(self._kernels[key])]
        plans = self.plans.ranked[key].plans if key in self.plans.ranked else []
        return [choice.time_us for choice, _ in plans if choice.time_us is not None]

    def _in_order(self, kernel: Kernel) -> list[tuple[float, Kernel]]:
        """Sort the variants of a kernel that were timed: the one in use first, the others by time."""
        chosen = self.launcher.fastest(kernel).key
        times_us = zip(self.launcher.times_us(kernel), variants_of(kernel), strict=False)
        return sorted(times_us, key=lambda item: (item[1].key != chosen, item[0]))

    def _bind(self, key: str, option: int, number: int) -> Run:
        found = self._variant(key, option)
        if found is not None:
            kernel, wanted = found
            before = self.launcher.fastest(kernel).key
            self.launcher.take(kernel, wanted.key)
            try:
                return self.bind_step(number)
            finally:
                self.launcher.take(kernel, before)
        ranked = self.plans.ranked[key]
        plans = ranked.plans
        ranked.plans = [plans[option], *plans]
        try:
            return self.bind_step(number)
        finally:
            ranked.plans = plans

"""A whole model on the GPU with one plan or kernel and with another: where `coordinate_descent` measures, what it may
try."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from fusec.gpu.autotune.coordinate_descent import Contest, Run, contests
from fusec.gpu.autotune.plan_search import RankedPlans
from fusec.gpu.kernels import Kernel
from fusec.gpu.launch.cuda_graph import in_order
from fusec.gpu.launch.kernel_launcher import Launcher, variants_of
from fusec.gpu.launch.stream_calls import Streams
from fusec.lowering.cudnn_graph import CudnnGraph

Work = CudnnGraph | Kernel


@dataclass
class WholeModelTrial:
    """Steps over their memory, `runs`, which have run before. works: by step, the graph or kernel that it runs, if any.
    bound: binds a step to its memory anew, by the plan or kernel that is then the first."""

    works: Sequence[Work | None]
    runs: Sequence[Run]
    bound: Callable[[int], Run]
    tuned: Mapping[str, RankedPlans]
    launcher: Launcher
    streams: Streams
    scratch: Callable[[], AbstractContextManager[None]]
    timed: Callable[[Run, int], list[float]]
    places: dict[str, list[int]] = field(default_factory=lambda: defaultdict[str, list[int]](list))
    _others: dict[tuple[str, int, int], Run] = field(default_factory=dict[tuple[str, int, int], Run])

    def __post_init__(self) -> None:
        self._kernels = {work.key: work for work in self.works if isinstance(work, Kernel)}
        for number, work in enumerate(self.works):
            if work is not None:
                self.places[work.key].append(number)

    def contests(self) -> list[Contest]:
        """The graphs and kernels with several ways to run that were measured to take about as long."""
        times_us = {key: self._times_us(key) for key in self.places}
        return contests(times_us, {key: len(numbers) for key, numbers in self.places.items()})

    def recorded(self, options: Mapping[str, int]) -> Run | None:
        runs = list(self.runs)
        for key, option in options.items():
            for number in self.places[key]:
                if (key, option, number) not in self._others:
                    self._others[key, option, number] = self._bound(key, option, number)
                runs[number] = self._others[key, option, number]
        replay = in_order(self.streams, runs, self.scratch)
        return replay if replay.at_once else None

    def time_us(self, run: Run) -> float:
        return self.timed(run, 1)[0]

    def way(self, key: str, option: int) -> tuple[Kernel, Kernel] | None:
        """A kernel, and that of those which do the same that an option stands for; None if it is of a graph."""
        kernel = self._kernels.get(key)
        return None if kernel is None else (kernel, self._in_order(kernel)[option][1])

    def _times_us(self, key: str) -> list[float]:
        """Of the ways to run a work, the one in use first."""
        if key in self._kernels:
            return [time_us for time_us, _ in self._in_order(self._kernels[key])]
        plans = self.tuned[key].plans if key in self.tuned else []
        return [choice.time_us for choice, _ in plans if choice.time_us is not None]

    def _in_order(self, kernel: Kernel) -> list[tuple[float, Kernel]]:
        """The ways to run a kernel that were measured, the one in use first, then as fast as they are."""
        chosen = self.launcher.fastest(kernel).key
        times_us = zip(self.launcher.times_us(kernel), variants_of(kernel), strict=False)
        return sorted(times_us, key=lambda item: (item[1].key != chosen, item[0]))

    def _bound(self, key: str, option: int, number: int) -> Run:
        way = self.way(key, option)
        if way is not None:
            kernel, wanted = way
            before = self.launcher.fastest(kernel).key
            self.launcher.take(kernel, wanted.key)
            try:
                return self.bound(number)
            finally:
                self.launcher.take(kernel, before)
        tuned = self.tuned[key]
        plans = tuned.plans
        tuned.plans = [plans[option], *plans]
        try:
            return self.bound(number)
        finally:
            tuned.plans = plans

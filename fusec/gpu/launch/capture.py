"""Capture the steps of a program: in order, side by side where that is faster, a first kernel ahead of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fusec.gpu.launch.cuda_graph import StepLaunch, in_order, or_side_by_side
from fusec.gpu.launch.stream_calls import Ahead, Replay, Streams
from fusec.gpu.launch.workspace import Workspace
from fusec.ir import Array
from fusec.schedule.dependencies import Waits
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class StepCapture:
    """Streams and memory of the steps to capture.

    side_by_side: steps may run on several streams
    time_us: times a run; None: take several streams untimed
    """

    streams: Streams
    workspace: Workspace
    side_by_side: bool
    time_us: Callable[[Callable[[], None], int], list[float]] | None

    def capture(
        self,
        runs: Sequence[Callable[[], None]],
        waits: Waits | None = None,
        ahead: tuple[int, Mapping[int, Array]] | None = None,
    ) -> Replay:
        """Capture steps as CUDA graphs, as far as they can be captured.

        waits: the steps that each step waits for; with it the program is also captured on several streams, and the
            faster of the two is used
        ahead: a kernel that is launched before the graphs, and the inputs that it alone reads
        """
        first = runs[ahead[0]] if ahead is not None else None
        if ahead is None or waits is None or not isinstance(first, StepLaunch) or not first.is_kernel:
            return self._captured(runs, waits)
        at = ahead[0]
        rest = [_do_nothing if i == at else run for i, run in enumerate(runs)]
        waits = tuple(None if w is None or i == at else tuple(b for b in w if b != at) for i, w in enumerate(waits))
        replay = self._captured(rest, waits)
        replay.ahead = Ahead(first.run, ahead[1])
        return replay

    def _captured(self, runs: Sequence[Callable[[], None]], waits: Waits | None) -> Replay:
        ordered = in_order(self.streams, runs, self.workspace.allocations)
        if waits is None or not self.side_by_side:
            return ordered
        return or_side_by_side(ordered, self.streams, runs, waits, self.workspace.on_lane, self.time_us)


def _do_nothing() -> None:
    """Stand for a step that is launched before the CUDA graph."""

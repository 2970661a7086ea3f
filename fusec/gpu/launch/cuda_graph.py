"""Capture steps as CUDA graphs, in order on one stream, or on several streams where that is faster."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import cupy

from fusec.errors import ExecutionError
from fusec.gpu.launch.full_edges import with_full_edges
from fusec.gpu.launch.memset_nodes import without_memsets
from fusec.gpu.launch.stream_calls import Replay, Streams
from fusec.schedule.dependencies import Waits, lanes
from fusec.system.dataclass import dataclass

RELAXED = 2  # cudaStreamCaptureModeRelaxed: libraries may allocate while a stream is captured
ROUNDS = 9  # runs in order and on several streams, to find the faster


@dataclass
class StepLaunch:
    """Function that launches a step over bound memory.

    workspace_bytes: size of cuDNN's workspace, of which each stream has its own
    shares_scratch: it uses the one scratch buffer of fusec's kernels
    blocks_meet: its blocks wait for each other, so that two such steps at the same time could wait for ever
    is_kernel: `run` takes arrays to use in place of bound ones, by address
    """

    run: Callable[..., None]
    workspace_bytes: int = 0
    shares_scratch: bool = False
    blocks_meet: bool = False
    is_kernel: bool = False

    def __call__(self) -> None:
        self.run()


class OnLane(Protocol):
    """Context in which plans run on another stream with another workspace (None: their own)."""

    def __call__(self, stream: Any, workspace: Any | None) -> AbstractContextManager[None]: ...


def in_order(
    streams: Streams, runs: Sequence[Callable[[], None]], scratch: Callable[[], AbstractContextManager[None]]
) -> Replay:
    """Capture steps in order; a step that cannot be captured runs between two CUDA graphs."""
    parts: list[Any] = []
    reasons: list[str] = []
    start = 0
    while start < len(runs):
        graph, end, reason = _captured(streams.own, runs, start, scratch)
        if graph is not None:
            graph = without_memsets(graph)
            graph.upload(streams.own)
            parts.append(graph)
        if end < len(runs):
            parts.append(runs[end])
            reasons.append(f"step {end} cannot be captured: {reason}")
        start = end + 1
    replay = Replay(streams, parts)
    replay.declined = "; ".join(reasons)
    return replay


def _captured(
    stream: Any, runs: Sequence[Callable[[], None]], start: int, scratch: Callable[[], AbstractContextManager[None]]
) -> tuple[Any, int, str]:
    """Capture one CUDA graph from a step on; return it, the first step that is not in it, and the reason."""
    end, reason = len(runs), ""
    while start < end:
        stream.synchronize()
        failed = end
        try:
            stream.begin_capture(mode=RELAXED)
            try:
                with scratch():
                    for index in range(start, end):
                        failed = index
                        runs[index]()
                    failed = end
            finally:
                graph = stream.end_capture()
            return graph, end, reason
        except (cupy.cuda.runtime.CUDARuntimeError, ExecutionError, RuntimeError) as error:
            reason = str(error) or type(error).__name__
            # mostly an error of CuPy: cuBLAS, or a call that waits for the device, cannot be captured
            end = failed if failed < end else start + (end - start) // 2
    return None, end, reason


def one_after_another(launches: Sequence[StepLaunch], waits: Waits) -> Waits:
    """Let steps that share scratch memory, or whose blocks wait for each other, wait for the steps before them."""
    apart = [i for i, run in enumerate(launches) if run.shares_scratch or run.blocks_meet]
    return tuple(
        w if w is None or i not in apart else tuple(sorted({*w, *(s for s in apart if s < i)}))
        for i, w in enumerate(waits)
    )


def or_side_by_side(
    ordered: Replay,
    streams: Streams,
    runs: Sequence[Callable[[], None]],
    waits: Waits,
    on_lane: OnLane,
    time_us: Callable[[Callable[[], None], int], list[float]] | None,
) -> Replay:
    """Capture the steps on several streams, and return the faster of that and `ordered`.

    time_us: times a run; without it several streams are used where they can be
    """
    if not ordered.at_once:
        return ordered
    if any(w is not None and not isinstance(run, StepLaunch) for w, run in zip(waits, runs, strict=True)):
        return ordered
    launches = [run if isinstance(run, StepLaunch) else StepLaunch(run) for run in runs]
    waits = one_after_another(launches, waits)
    placed = lanes(waits)
    if max(placed, default=0) < 1:
        return ordered
    forked = side_by_side(streams, launches, waits, placed, on_lane)
    if isinstance(forked, str):
        ordered.declined = forked
        if time_us is None:
            warnings.warn(f"steps run in order, although the lock says side by side: {forked}", stacklevel=2)
        return ordered
    if time_us is None:
        return forked
    pair = (ordered, forked)
    for each in pair:
        each()
    rounds = [[time_us(each, 1)[0] for each in pair] for _ in range(ROUNDS)]
    ordered_us, forked_us = (statistics.median(times) for times in zip(*rounds, strict=True))
    ordered.times_us, forked.times_us = (ordered_us, forked_us), (forked_us, ordered_us)
    return forked if forked_us < ordered_us else ordered


def side_by_side(
    streams: Streams, runs: Sequence[StepLaunch], waits: Waits, lanes: Sequence[int], on_lane: OnLane
) -> Replay | str:
    """Capture the steps as one CUDA graph, each on its stream (-1: nothing to do) after the steps that it waits for.

    waits: for each step, the earlier ones that it waits for.
    lanes: for each step, the number of its stream.
    on_lane: makes plans run on a stream, with a workspace of its own.
    Returns the reason if that fails.
    """
    count = max(lanes) + 1
    _, *others = lane_streams = streams.lanes(count)
    workspace_bytes = [1] * count  # by lane
    for run, lane in zip(runs, lanes, strict=True):
        workspace_bytes[lane] = max(workspace_bytes[lane], run.workspace_bytes)
    workspaces = [None, *(cupy.empty(nbytes, cupy.uint8) for nbytes in workspace_bytes[1:])]
    waited = [[-1] * count for _ in range(count)]  # by lane: the last run of each lane that it has waited for
    waited_after: dict[int, list[int]] = {}  # by run: what its lane had waited for after it
    events: dict[int, Any] = {}  # by run
    streams.own.synchronize()
    try:
        streams.own.begin_capture(mode=RELAXED)
        try:
            fork = _recorded(streams.own)
            for stream in others:
                stream.wait_event(fork)
            for index, (run, lane) in enumerate(zip(runs, lanes, strict=True)):
                if lane < 0:
                    continue
                for before in sorted(waits[index] or (), reverse=True):
                    if lanes[before] != lane and before > waited[lane][lanes[before]]:
                        lane_streams[lane].wait_event(events[before])
                        waited[lane] = [max(a, b) for a, b in zip(waited[lane], waited_after[before], strict=True)]
                with on_lane(lane_streams[lane], workspaces[lane]):
                    run()
                waited[lane][lane] = index
                waited_after[index], events[index] = list(waited[lane]), _recorded(lane_streams[lane])
            for stream in others:
                streams.own.wait_event(_recorded(stream))
        finally:
            graph = streams.own.end_capture()
    except (cupy.cuda.runtime.CUDARuntimeError, ExecutionError, RuntimeError) as error:
        return str(error) or type(error).__name__
    graph = without_memsets(with_full_edges(graph))
    graph.upload(streams.own)
    return Replay(streams, [graph], count, workspaces)


def _recorded(stream: Any) -> Any:
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event

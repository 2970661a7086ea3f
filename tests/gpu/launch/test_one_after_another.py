"""Test which steps never run at the same time, although they need none of each other's results."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from lowering.bodies import BODIES, load

from fusec.lower_cudnn import lower

pytest.importorskip("cupy")
from fusec.gpu.launch.cuda_graph import StepLaunch, one_after_another, side_by_side


def nothing() -> None:
    pass


def test_steps_whose_blocks_meet_wait_for_each_other() -> None:
    plain, meets = StepLaunch(nothing), StepLaunch(nothing, blocks_meet=True)
    launches = [meets, plain, meets, plain, meets, plain]
    assert one_after_another(launches, ((), (), (1,), (), (3,), None)) == ((), (), (0, 1), (), (0, 2, 3), None)


def test_blocks_of_a_batch_norm_meet() -> None:
    found = {title for title, text in BODIES.items() if lower(load(text)).graph.blocks_meet}
    assert found == {title for title in BODIES if "batch norm" in title} and len(found) == 4


@pytest.mark.gpu
def test_each_stream_has_scratch_memory_and_counters_of_its_own() -> None:
    import cupy

    from fusec.gpu.launch.stream_calls import Streams

    shared, used = cupy.ones(4, cupy.uint32), list[int]()

    def run(instead: Mapping[int, Any] | None = None) -> None:
        memory = (instead or {}).get(shared.data.ptr, shared)
        memory += 1
        used.append(memory.data.ptr)

    @contextmanager
    def on_lane(stream: Any, workspace: Any) -> Generator[None]:
        with stream:
            yield

    launches = [StepLaunch(run, shared=(shared,), is_kernel=True) for _ in range(3)]
    streams = Streams(cupy.cuda.Stream(non_blocking=True))
    replay = side_by_side(streams, launches, ((), (), (1,)), (0, 1, 1), on_lane)
    assert not isinstance(replay, str), replay
    assert used[0] == shared.data.ptr != used[1] == used[2]
    replay()
    streams.own.synchronize()
    assert shared.tolist() == [2] * 4

"""Run the benchmark of calls on a stand-in GPU: each kind of call copies what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.stand_in_gpu import Machine, on_device
from gpu.test_backend import TEXT, build, fresh

from benchmarks.serving import call_overhead
from fusec.gpu.launch import stream_calls
from fusec.gpu.launch.stream_calls import Streams

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


def test_kinds_of_calls_copy_what_they_say(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path, text=TEXT.replace("{0,2,3,1}", ""))
    feeds = {"x": on_device(fresh(0))}
    net.run(None, feeds)
    net.run(None, feeds)
    copies = {
        "replay": [],
        "call": [3, 3, 3],
        "out": [3, 3, 3],
        "buffers": [3, 3],
        "buffers, out": [3, 3],
        "host": [1, 2, 2],
    }
    for name, run in call_overhead.kinds(net, feeds).items():
        machine.copied.clear()
        run()
        assert [kind for kind, _ in machine.copied] == copies[name], name
    row = call_overhead.measured(net, feeds, rounds=2, burst=2, each=1)
    assert set(row["more"]) == {*copies, "queued"}


def test_streams_of_parallel_steps_outlive_a_capture(machine: Machine) -> None:
    streams = Streams(stream_calls.cupy.cuda.Stream(non_blocking=True))
    own, first = streams.lanes(2)
    assert own is streams.own
    assert streams.lanes(3)[1] is first
    assert len({id(stream) for stream in streams.lanes(3)}) == 3

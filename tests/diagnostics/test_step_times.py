"""Test times of the whole, of calls and of steps, in simulation; and what is said of them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from test_runtime import executable

from fusec.diagnostics.step_times import EXCESS, Bench, StepTime, Timing, measure
from fusec.errors import ExecutionError
from fusec.passes.partition.cost_model import limit_us, step_us
from fusec.targets.target import load
from fusec.text import parse

TEXT = """graph "g" (%x: f32[2,8,6,6]{0,2,3,1}) {
  %a = relu(%x)
  %s = softmax(%a) {axis=1}
  %t = transpose(%s) {perm=[0, 2, 3, 1]}
  return %t
}"""


def test_every_step_that_works_is_timed(rng: np.random.Generator) -> None:
    net = executable(TEXT)
    measured = measure(net, {"x": rng.standard_normal((2, 8, 6, 6)).astype(np.float32)}, runs=7)
    working = [step.kind.value for step in net.compiled.program.steps if step.kind.value != "view"]
    named = {"kernel": "reference"}  # which is what runs without a GPU
    assert [step.kind for step in measured.steps] == [named.get(kind, kind) for kind in working]
    for timing in (measured.call, measured.whole, *(step.time for step in measured.steps)):
        assert timing.runs == 7 and 0 < timing.low_us <= timing.median_us <= timing.high_us
    # the least of times, because another process may interrupt most of them
    assert measured.whole.low_us <= measured.call.low_us * 1.5
    assert measured.more.runs == 7 and measured.more.low_us < measured.call.low_us
    assert all(step.limit_us > 0 for step in measured.steps)
    assert measured.memory_bytes == net.memory.nbytes >= measured.live_bytes > 0
    assert json.loads(json.dumps(measured.to_json()))["sum_us"] == pytest.approx(measured.sum_us)


def test_a_simulated_model_is_timed_once(rng: np.random.Generator) -> None:
    """A simulated call of a model takes seconds, and its times are of no use."""
    feeds = {"x": rng.standard_normal((2, 8, 6, 6)).astype(np.float32)}
    measured = measure(executable(TEXT), feeds)
    assert measured.is_simulated
    assert {timing.runs for timing in (measured.call, measured.whole, *(step.time for step in measured.steps))} == {1}


def test_a_limit_knows_no_penalty() -> None:
    text = """graph "g" (%x: f32[2,8,6,6]{0,2,3,1}) {
      %w = constant weight("w") : f32[8,1,3,3]{0,2,3,1}
      %c = conv(%x, %w) {strides=[1, 1], pads=[1, 1, 1, 1], dilations=[1, 1], groups=8} : f32[2,8,6,6]{0,2,3,1}
      %y = relu(%c) : f32[2,8,6,6]{0,2,3,1}
      return %y
    }"""
    graph, target = parse(text, {"w": np.ones((8, 1, 3, 3), np.float32)}), load("h200")
    nodes = [node for node in graph.nodes if node.op.name != "constant"]
    nbytes = (2 * 2 * 8 * 36 + 8 * 9) * 4
    assert limit_us(nodes, target) == pytest.approx(1e6 * nbytes / target.memory_bandwidth)
    assert step_us(nodes, target) > 5 * limit_us(nodes, target)


def test_nothing_is_timed_before_a_call() -> None:
    with pytest.raises(ExecutionError, match="before the first call"):
        executable(TEXT).time_us(3)


def of(whole_us: float) -> Bench:
    def timing(us: float) -> Timing:
        return Timing.of([us, us, us])

    steps = (StepTime(0, "conv+relu", "cudnn", timing(60.0), 50.0), StepTime(2, "softmax", "kernel", timing(40.0), 5.0))
    return Bench("GPU", 0.5, timing(130.0), timing(9.0), timing(whole_us), steps, 2_000_000, 1_900_000)


def test_a_whole_that_takes_longer_than_its_steps_is_reported() -> None:
    assert of(100.0).excess is None and "the sum of the steps" not in str(of(100.0))
    assert of(150.0).excess == pytest.approx(1.5) and "take 1.50 times the sum of the steps" in str(of(150.0))
    assert of(99.0 * EXCESS).excess is None


def test_the_cost_of_a_call_and_both_orders_are_printed() -> None:
    text = str(replace(of(100.0), lanes=3, other_us=140.0, this_us=98.0))
    assert "a call, 9.0 us more than a replay of its steps" in text
    assert "steps run in parallel on 3 streams in 98.0 us; in order they took 140.0 us" in text


@pytest.mark.parametrize("device", ["simulated", "cpu"])
def test_no_time_of_numpy_looks_like_one_of_a_gpu(device: str) -> None:
    measured = replace(of(900.0), device=device)
    told, table = str(measured), measured.table()
    assert "simulated by NumPy, so no time of a GPU was measured; a simulated call takes 0.00013 s" in told
    assert told.count(" us") == 1 and "limit 55.0 us on the target" in told
    assert "us more" not in told and "times the sum" not in told
    assert [line.split()[2:] for line in table.splitlines()[1:]] == [
        ["conv+relu", "50.0", "90.9%"],
        ["softmax", "5.0", "9.1%"],
    ]
    assert "60.0" not in table and measured.excess is None
    assert measured.to_json()["more"] is None and measured.to_json()["simulated"]
    assert measured.trace()["traceEvents"][0]["args"]["name"] == "simulated by NumPy, no times of a GPU"
    assert not of(100.0).to_json()["simulated"] and of(100.0).to_json()["more"] is not None


def test_the_table_is_by_time_and_the_trace_in_order() -> None:
    lines = replace(of(100.0), steps=of(100.0).steps[::-1]).table().splitlines()
    assert "conv+relu" in lines[1] and "60.0%" in lines[1] and "40.0%" in lines[2]
    first, *events = of(100.0).trace()["traceEvents"]
    assert (first["ph"], first["args"]) == ("M", {"name": "GPU"})
    assert [(e["name"], e["ts"], e["dur"]) for e in events] == [("conv+relu", 0.0, 60.0), ("softmax", 60.0, 40.0)]


def test_deciles() -> None:
    timing = Timing.of([float(i) for i in range(1, 22)])
    assert (timing.median_us, timing.low_us, timing.high_us, timing.runs) == (11.0, 3.0, 19.0, 21)

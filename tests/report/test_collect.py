"""Test that a report shows a program as it is."""

from __future__ import annotations

import pytest
from report.programs import INPUT, executable, measured_program, program

from fusec.lockfile import versions
from fusec.passes.partition.cost_model import flops, limit_us
from fusec.plans.plan_record import BLAS, Choice, Entry
from fusec.report import totals_json
from fusec.report.knob_names import KNOBS, knobs_text
from fusec.report.plan_choices import FIRST, plan_choices
from fusec.report.records import ReportedPlan
from fusec.schedule.program import Kind
from fusec.targets.target import load


def test_steps_have_the_work_and_limit_of_the_program() -> None:
    net, found = executable(), program()
    target = load("h200")
    for step, told in zip(net.compiled.program.steps, found.steps, strict=True):
        if step.kind is Kind.VIEW:
            assert (told.flops, told.limit_us) == (0, 0.0)
            continue
        assert told.flops == sum(map(flops, step.nodes))
        assert told.limit_us == pytest.approx(limit_us(step.nodes, target))
        moved = sum(t.nbytes for t in (*told.tensors_read, *told.tensors_written))
        assert moved == told.explained.read_bytes + told.explained.written_bytes
        limits = {"memory": moved / target.memory_bandwidth, "compute": told.flops / target.flops["fp32"]}
        assert told.bound == max(limits, key=lambda kind: limits[kind])
    assert found.limit_us == pytest.approx(
        sum(limit_us(s.nodes, target) for s in net.compiled.program.steps if s.kind is not Kind.VIEW)
    )


def test_tensors_name_their_makers_and_readers() -> None:
    found = program()
    by_name = {t.name: t for step in found.steps for t in step.tensors_written}
    for step in found.steps:
        for tensor in step.tensors_read:
            if tensor.maker is None:
                assert tensor.role in ("input", "weight")
            else:
                assert step.index in by_name[tensor.name].readers
                assert tensor.name in [t.name for t in found.steps[tensor.maker].tensors_written]
    assert found.output_names == ("out", "signs")
    assert [t.name for t in found.inputs] == ["x"] and found.inputs[0].order == "row-major"


def test_layouts_have_their_names() -> None:
    text = """graph "g" (%x: f16[2,8,6,6]{0,2,3,1}, %y: f16[4,6]{1,0}) {
      %a = relu(%x) : f16[2,8,6,6]{0,2,3,1}
      %b = relu(%y) : f16[4,6]{1,0}
      return %a, %b
    }"""
    orders = [tensor.order for tensor in program(text).inputs]
    assert orders == ["NHWC", "dims 1, 0 from outermost to innermost"]


def test_memory_is_that_of_the_plan() -> None:
    net, found = executable(), program()
    memory = found.memory
    assert memory.arena_bytes == net.memory.nbytes
    assert max(memory.by_step) == memory.by_step[memory.peak_step] <= net.memory.live_bytes
    assert sum(v.nbytes for v in memory.alive) == max(memory.by_step)
    assert all(v.first <= memory.peak_step <= v.last for v in memory.alive)
    net(INPUT)
    assert memory.weights == {"f32": net._constants.nbytes} and memory.weight_bytes == net._constants.nbytes


def test_edges_count_values_and_bytes() -> None:
    found = program()
    (row,) = found.edges
    stored = {t.name for step in found.steps if step.explained.kind != "view" for t in step.tensors_written} | {"x"}
    assert (row.dtype, row.stored, row.weights, row.in_fp32) == ("f32", len(stored), 2, 0)
    moved = sum(
        t.nbytes for step in found.working for t in (*step.tensors_read, *step.tensors_written) if t.role != "weight"
    )
    assert row.moved_bytes == moved
    assert row.weight_bytes == 8 * 8 * 3 * 3 * 4 + 8 * 4


def test_plans_say_how_they_were_chosen() -> None:
    found = program()
    plans = [step.plans for step in found.steps if step.explained.kind == "cudnn"]
    assert plans and all(p is not None and p.why == FIRST and p.chosen is not None for p in plans)
    assert all(step.plans is None for step in found.steps if step.explained.kind != "cudnn")
    for step in found.steps:
        if step.plans is not None:
            assert len(step.plans.offered) == step.explained.plans
            assert "conv" in step.plans.graph or "pointwise" in step.plans.graph


def test_a_prepared_plan_is_reported_with_its_time() -> None:
    compiled = executable().compiled
    keys = [lowered.graph.key for lowered in compiled.lowered if lowered is not None]
    timed = Choice(11, ((2, 7),), 4096, time_us=12.5)
    blas = Choice(BLAS, ((3, 1),))
    found = [plan for plan in plan_choices(compiled, {keys[0]: [Entry(timed)], keys[1]: [Entry(blas)]}) if plan]
    assert found[0].why == "prepared; timed on a GPU"
    assert found[0].chosen == ReportedPlan("engine 11", "TILE_SIZE=7", "", 4096, 12.5)
    assert (found[1].why, found[1].chosen) == (
        "prepared; no plan was timed",
        ReportedPlan("cuBLASLt", "knob 3=1", "", 0, None),
    )
    assert found[2].why == FIRST


def test_refusals_belong_to_steps() -> None:
    found = program()
    assert found.refusals
    for number, (kind, place) in enumerate(found.refusals):
        decline = getattr(found.explanation, kind)[place]
        assert decline.steps
        assert [step.index for step in found.steps if number in step.refusals] == list(decline.steps)


def test_times_are_those_of_a_gpu_or_none() -> None:
    simulated, measured = program(), measured_program()
    assert simulated.is_simulated and all(step.time is None for step in simulated.steps)
    assert totals_json(simulated)["time_us"] is None
    assert not measured.is_simulated
    assert measured.bench is not None
    assert [s.time for s in measured.working] == list(measured.bench.steps)
    assert totals_json(measured)["time_us"] == measured.bench.whole.median_us
    assert simulated.versions == versions()


@pytest.mark.cudnn
def test_knobs_have_the_names_of_cudnn() -> None:
    import cudnn

    theirs = {int(value): name for name, value in vars(cudnn.knob_type).items() if name.isupper() and name != "NOT_SET"}
    assert {number: name for number, name in theirs.items() if number in KNOBS} == KNOBS
    assert knobs_text(3, ((2, 7), (99, 1))) == "TILE_SIZE=7, knob 99=1"

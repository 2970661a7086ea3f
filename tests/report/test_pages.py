"""Test that pages hold every step, plan, refusal and figure, need no network, and give strangers' names no power."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli.test_hostile_names import EVIL
from diagnostics.explain.test_explain import Rule, no_gate
from report.page_structure import checked
from report.programs import BLOCK, lenient, measured_program, program

from fusec.diagnostics.explain.data import FloatEdge
from fusec.errors import FusecError
from fusec.report import difference, difference_page, fleet, report_page, write

HOSTILE = (
    "<script>document.title='owned'</script>",
    "</title></style></pre></td><img src=x onerror=alert(1)>",
    "\"'><a href=javascript:alert(1)>x</a>&lt;b&gt;{{ 7 * 7 }}{% raw %}",
    EVIL,
)


def test_a_page_holds_every_step_and_refusal() -> None:
    found = program()
    page = checked(report_page("model.onnx", [found]))
    for step in found.steps:
        text = page.texts[f"step-{step.index}"]
        assert f"Step {step.index}: {step.explained.ops}" in text
        assert f"#step-{step.index}" in page.links
        for node in step.explained.nodes:
            assert node in text
        for tensor in (*step.tensors_read, *step.tensors_written):
            assert tensor.name in text and tensor.shape in text and tensor.order in text
        for line in step.code:
            assert line in text
        if step.plans is not None and step.plans.chosen is not None:
            assert step.plans.chosen.engine in text and step.plans.chosen.knobs in text and step.plans.why in text
        if step.plans is not None and step.plans.first == step.index:
            assert f"{len(step.plans.offered)} plans that cuDNN offers" in text
    for number, (kind, place) in enumerate(found.refusals):
        decline = getattr(found.explanation, kind)[place]
        text = page.texts[f"refusal-{number}"]
        assert decline.ours in text and decline.message in text
        assert all(f"#step-{index}" in page.links for index in decline.steps)
        if decline.cause is not None and decline.cause.accepted is not None:
            assert f"Accepted {decline.cause.accepted.change}" in text and decline.cause.accepted.graph in text
    assert any(d.cause and d.cause.accepted for d in found.explanation.declined)
    assert {"summary", "graph", "time", "memory", "precision", "refusals"} <= set(page.ids)
    assert found.explanation.summary in page.texts["summary"]


def test_a_simulated_page_has_no_time_of_a_gpu() -> None:
    page = checked(report_page("model.onnx", [program()]))
    assert "No GPU ran this program, so this page has no time of a GPU" in page.texts["summary"]
    assert "No step was timed on a GPU" in page.texts["time"]
    assert "easured" not in page.text.replace("never measured", "")


def test_a_measured_page_has_the_time_of_each_step() -> None:
    found = measured_program()
    page = checked(report_page("model.onnx", [found]))
    assert "Measured on NVIDIA H200" in page.texts["summary"] and "Simulated" not in page.text
    for step in found.working:
        assert "measured alone" in page.texts[f"step-{step.index}"]
    times = sum(page.texts["time"].count(unit) for unit in ("µs", " ms"))  # a slow machine takes over 1 ms
    assert times > 2 * len(found.working)


def test_what_stays_in_floats_is_listed() -> None:
    found = program()
    edge = FloatEdge("conv", "c", "its weight is not quantised", ("conv0",))
    page = checked(report_page("model.onnx", [replace(found, explanation=replace(found.explanation, floats=(edge,)))]))
    assert "its weight is not quantised" in page.texts["precision"] and "conv0" in page.texts["precision"]


def test_programs_between_host_steps_have_ids_of_their_own() -> None:
    programs = [replace(program(), anchor=f"segment-{i}-", title=f"segment {i}") for i in (0, 1)]
    page = checked(report_page("model.onnx", programs))
    for each in programs:
        assert {f"{each.anchor}step-{step.index}" for step in each.steps} <= set(page.ids)


@pytest.mark.parametrize("evil", HOSTILE)
def test_names_of_strangers_are_text(evil: str) -> None:
    from fusec.ir import quote_string

    hostile = BLOCK
    for name in ("conv0", "gate0", "sign0", "sum1", "out", "w"):
        hostile = hostile.replace(f'"{name}"', quote_string(f"{name}{evil}"))
    for name in ("x", "m", "n", "e"):
        hostile = hostile.replace(f"%{name}:", f"%{quote_string(name + evil)}:")
        for end in (" ", ",", ")"):
            hostile = hostile.replace(f"%{name}{end}", f"%{quote_string(name + evil)}{end}")
    from report import programs

    weights = dict(programs.WEIGHTS)
    programs.WEIGHTS[f"w{evil}"] = weights["w"]
    try:
        found = replace(program(hostile), title=f"model{evil}")
    finally:
        del programs.WEIGHTS[f"w{evil}"]
    plain = checked(report_page("model", [program()]))
    side = difference(found, replace(found, target="t4"), (f"old{evil}", f"new{evil}"))
    fleet_side = fleet([found, found])
    for source in (report_page(f"model{evil}", [found], fleet_side), difference_page(side)):
        page = checked(source)
        bad = {c for c in source if not c.isprintable() and c != "\n"}
        assert not bad
        assert not [line for line in source.split("\n") if line.startswith("FORGED")]
        assert page.tags.count("script") == 1 and page.tags.count("title") <= plain.tags.count("title")
    page = checked(report_page(f"model{evil}", [found]))
    assert page.tags == plain.tags  # the same elements, whatever the names are
    if evil.isprintable():
        assert f"model{evil}" in page.text and f"gate0{evil}" in page.text


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    found = program()
    write(tmp_path / "page.html", found)
    assert checked((tmp_path / "page.html").read_text(encoding="utf-8")).text.count("block") >= 1


def test_without_jinja_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "jinja2" else find(name, *more)
    )
    with pytest.raises(FusecError, match=r"a report needs Jinja2: pip install 'fusec\[report\]'"):
        report_page("model.onnx", [program()])
    assert "fusec.report" in sys.modules


def test_a_difference_tells_what_fuses_otherwise() -> None:
    old, new = program(judge=lenient()), program(judge=Rule(no_gate))
    side = difference(old, new, ("old", "new"))
    page = checked(difference_page(side))
    assert side.different and side.equal + side.places_different == side.count
    shown = page.texts["steps"]
    for group in side.different:
        for steps in group.sides:
            for step in steps:
                assert step.explained.ops in shown
    assert dict(side.refusals)["Only in old"] == ()
    assert any("sigmoid" in d.ops for d in dict(side.refusals)["Only in new"])
    launches = next(row for row in side.totals if row.label == "launches")
    assert launches.trend == "more" and launches.change in page.texts["totals"]
    assert "No side was timed on a GPU" in page.text


def test_no_difference_is_none() -> None:
    side = difference(program(), program(), ("old", "new"))
    assert not side.different and not side.replanned and side.equal == side.count > 2
    assert all(not declines for _, declines in side.refusals)
    assert all(not row.change for row in side.totals)


def test_versions_with_other_names_are_matched_in_order() -> None:
    renamed = BLOCK
    for name in "cdsmnefg":
        for end in (" ", ",", ")"):
            renamed = renamed.replace(f"%{name}{end}", f"%other_{name}{end}")
    more = renamed.replace("return", "%h = exp(%other_g)\n  return").replace("return %other_g as", "return %h as")
    assert difference(program(), program(renamed), ("old", "new")).different == ()
    (group,) = difference(program(), program(more), ("old", "new")).different
    assert group.sides[0] == () and [step.explained.ops for step in group.sides[1]] == ["exp"]


def test_a_fleet_has_a_column_for_each_gpu() -> None:
    programs = [program(target=name) for name in ("t4", "h200", "b200")]
    side = fleet(programs)
    page = checked(report_page("model.onnx", [programs[1]], side))
    assert side.names == ("t4", "h200", "b200") and side.equal == side.count
    for name in side.names:
        assert name in page.texts["fleet"]
    limits = next(row for row in side.totals if row.label == "limit of all steps")
    assert len(set(limits.cells)) == 3 and all(cell in page.texts["fleet"] for cell in limits.cells)


def test_another_size_of_a_model_is_matched_by_its_nodes() -> None:
    larger = BLOCK.replace("f32[1,8,6,6]", "f32[4,8,6,6]").replace("shape=[1, 288]", "shape=[4, 288]")
    side = difference(program(), program(larger), ("one", "four"))
    assert side.different == () and side.equal == side.count > 2
    read = next(row for row in side.totals if row.label == "read")
    assert read.trend == "more"

"""The lock: read back as written, found by work, required, compared; mistakes named by file and line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from lowers_judge import LowersJudge

from fusec import lockfile
from fusec.compiled import Compiled
from fusec.cudnn_graph import CudnnGraph
from fusec.errors import CheckError, FusecError, ModelError
from fusec.gpu.blobs import DEVICE_ONLY
from fusec.lockfile import Lock, Locked
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.plans import BLAS, Choice, Entry
from fusec.target import load as load_target
from fusec.text import parse
from fusec.verdict import Plan

CONV = "{strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}"
MODEL = f"""
graph "net" (%x: f32[2,8,8,8]) {{
  %w = constant weight("w") : f32[8,8,3,3]
  %p0 = max_pool(%x) {{window=[3,3], strides=[2,2], pads=[1,1,1,1], dilations=[1,1]}}
  %c1 = conv(%p0, %w) {CONV}
  %r1 = relu(%c1)
  %p1 = max_pool(%r1) {{window=[3,3], strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}}
  %c2 = conv(%p1, %w) {CONV}
  %r2 = relu(%c2)
  %p2 = max_pool(%r2) {{window=[3,3], strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}}
  %c3 = conv(%p2, %w) {CONV}
  %r3 = relu(%c3)
  %p3 = max_pool(%r3) {{window=[3,3], strides=[2,2], pads=[1,1,1,1], dilations=[1,1]}}
  %c4 = conv(%p3, %w) {CONV}
  return %c4
}}"""
PLANS = (Plan(7, (), False, 0, False), Plan(1, ((2, 3), (5, 0)), True, 64, True))


def compiled(
    judge: LowersJudge | None = None, target: str = "h200", precision: str = "tf32", text: str = MODEL
) -> Compiled:
    weights = {"w": np.random.default_rng(3).standard_normal((8, 8, 3, 3)).astype(np.float32)}
    judge, options = judge or LowersJudge(PLANS), Options(precision)
    source = parse(text, weights)
    graph = run(PIPELINE, source.clone(), options)
    return Compiled(source, partition(graph, judge, load_target(target)), load_target(target), options, judge)


def never(graph: CudnnGraph, choice: Choice) -> bool:
    return False


def always(graph: CudnnGraph, choice: Choice) -> bool:
    return True


ENTRY = Locked("conv+bias", "ab" * 32, "h200", "f16[8] -> f16[8]", ("zero_bias",), Choice(4, ((2, 1),), 64, 12.5, 1e-5))


def test_a_lock_comes_back_as_written_and_equal_locks_are_equal_text(tmp_path: Path) -> None:
    other = dataclasses.replace(ENTRY, target="a100", spelling=(), choice=Choice(0, ()))
    lock = Lock({"fusec": "1", "cudnn": "9", "frontend": ""}, (other, ENTRY))
    lockfile.write(tmp_path / "fusec.lock", lock)
    assert lockfile.read(tmp_path / "fusec.lock") == lock
    assert lockfile.text_of(Lock(dict(reversed(lock.versions.items())), (ENTRY, other))) == lockfile.text_of(lock)
    precise = dataclasses.replace(ENTRY, choice=dataclasses.replace(ENTRY.choice, time_us=12.500001))
    assert lockfile.text_of(Lock(lock.versions, (other, precise))) == lockfile.text_of(lock)
    assert lockfile.text_of(lock).count("\n") == len(lockfile.text_of(lock).splitlines())
    assert list(tmp_path.iterdir()) == [tmp_path / "fusec.lock"]


def test_equal_work_is_one_entry_with_the_plan_that_was_built() -> None:
    c = compiled()
    lock = lockfile.make([c, compiled(target="l4")])
    steps = lockfile.cudnn_steps(c.program)
    assert len(steps) == 4
    first, second, third, fourth = (lockfile.work_of(step, c.graph) for step in steps)
    assert second == third
    assert len({first, second, fourth}) == 3  # the first reads its input in another memory order
    assert [e.target for e in lock.entries] == ["h200"] * 3 + ["l4"] * 3
    assert lock.choice(first, "h200") == Choice(1, ((2, 3), (5, 0)), 64)
    assert lock.choice(first, "t4") is None
    assert {e.name: e.spelling for e in lock.entries} == {"conv+relu": ("zero_bias",), "conv": ()}
    assert lock.entries[0].shapes == "f32[2,8,2,2]{0,2,3,1} -> f32[2,8,2,2]{0,2,3,1}"


def test_measured_plans_come_before_offered_ones() -> None:
    c = compiled()
    (key, *_) = [lowered.graph.key for lowered in c.lowered if lowered is not None]
    measured = Choice(7, (), 128, 3.25, 1e-4)
    lock = lockfile.make([c], {("h200", key): [Entry(measured), Entry(Choice(1, ()))]})
    assert lock.choices(c)[key] == [measured]


def test_work_depends_on_meaning_alone() -> None:
    def work(c: Compiled) -> str:
        return lockfile.work_of(lockfile.cudnn_steps(c.program)[0], c.graph, c.options.tensor_cores)

    renamed = MODEL.replace("%c1", "%other").replace('"net"', '"another"')
    assert work(compiled()) == work(compiled(text=renamed))
    # not on what it is spelled, only on what is to be computed
    assert work(compiled()) == work(compiled(LowersJudge(PLANS, longest=2)))
    others = [
        compiled(precision="fp32"),
        compiled(precision="fp16"),
        compiled(text=MODEL.replace("2,8,8,8", "4,8,8,8")),
    ]
    assert len({work(c) for c in (compiled(), *others)}) == 4


def test_require_holds_for_its_own_program_and_names_the_first_that_does_not() -> None:
    c = compiled()
    lock = lockfile.make([c])
    lock.require(c.program, c.target, builds=never)
    again = compiled()
    lock.require(again.program, again.target, builds=never)
    with pytest.raises(CheckError, match=r"conv\+relu f32\[2,8,4,4\].* on l4: has no entry"):
        lock.require(c.program, load_target("l4"), builds=never)
    with pytest.raises(CheckError, match="has no entry"):
        lock.require(c.program, c.target, tensor_cores=False, builds=never)


def test_require_refuses_a_plan_that_is_gone_unless_it_builds() -> None:
    lock = lockfile.make([compiled()])
    gone = compiled(LowersJudge((Plan(1, ((2, 4),), True, 0, True),)))
    with pytest.raises(
        CheckError, match="engine 1 with knobs 2=3, 5=0 is no longer offered, the engine with other knobs"
    ):
        lock.require(gone.program, gone.target, builds=never)
    lock.require(gone.program, gone.target, builds=always)


def test_what_cannot_be_known_without_the_device_is_said_and_not_refused() -> None:
    c = compiled()
    lock = lockfile.make([c])
    tuned = dataclasses.replace(lock, entries=tuple(dataclasses.replace(e, choice=Choice(4, ())) for e in lock.entries))
    assert 4 in DEVICE_ONLY
    tuned.require(c.program, c.target, builds=never)
    lines = lockfile.changes(tuned, c, never)
    assert len(lines) == 3
    assert all(
        line.startswith("? conv") and "engine 4: cuDNN tells of it on the device alone" in line for line in lines
    )


def test_plans_of_another_library_are_said_and_not_refused() -> None:
    c = compiled()
    lock = lockfile.make([c])
    choice = Choice(BLAS, ((0, 66),))
    other = dataclasses.replace(lock, entries=tuple(dataclasses.replace(e, choice=choice) for e in lock.entries))
    other.require(c.program, c.target, builds=never)
    lines = lockfile.changes(other, c, never)
    assert len(lines) == 3
    assert all("cuBLASLt with knobs 0=66: cuBLASLt tells of it on the device alone" in line for line in lines)
    (line, *_) = lockfile.differences(lock, other)
    assert "-> cuBLASLt with knobs 0=66" in line
    assert lockfile.parse(lockfile.text_of(other)) == other


def test_require_refuses_another_spelling() -> None:
    lock = lockfile.make([compiled()])
    plain = dataclasses.replace(lock, entries=tuple(dataclasses.replace(e, spelling=()) for e in lock.entries))
    with pytest.raises(CheckError, match="is spelled as it is there, zero_bias now"):
        plain.require(compiled().program, load_target("h200"), builds=never)


def test_changes_say_what_fuses_otherwise() -> None:
    c = compiled()
    lock = lockfile.make([c])
    assert lockfile.changes(lock, c, never) == []
    split = compiled(LowersJudge(PLANS, longest=1))
    lines = lockfile.changes(lock, split, never)
    assert any(line.startswith("- conv+relu") and "fuses so no more" in line for line in lines)
    assert any(line.startswith("+ relu") and "fuses so now" in line for line in lines)
    gone = lockfile.changes(lock, compiled(LowersJudge((Plan(9, (), True, 0, True),))), never)
    assert len(gone) == 3
    assert all("engine 1 with knobs 2=3, 5=0 is no longer offered" in line for line in gone)
    assert "nothing is locked for l4" in lockfile.changes(lock, compiled(target="l4"), never)
    newer = dataclasses.replace(lock, versions={**lock.versions, "cudnn": "8"})
    assert lockfile.changes(newer, c, never) == [f"cudnn: 8 -> {lock.versions['cudnn'] or 'none'}"]


def test_differences_of_two_locks() -> None:
    old = lockfile.make([compiled()])
    assert lockfile.differences(old, old) == []
    third, first, second = old.entries

    def with_first(entry: Locked) -> Lock:
        return dataclasses.replace(old, entries=(third, entry, second), origin="new.lock")

    timed = dataclasses.replace(first, choice=dataclasses.replace(first.choice, time_us=1.0, error=0.0))
    assert lockfile.differences(old, with_first(timed)) == []
    engine = dataclasses.replace(first, choice=Choice(4, ()))
    assert [line.partition(": ")[2] for line in lockfile.differences(old, with_first(engine))] == [
        "engine 1 with knobs 2=3, 5=0 -> engine 4"
    ]
    (spelled,) = lockfile.differences(old, with_first(dataclasses.replace(first, spelling=())))
    assert spelled.endswith("spelled zero_bias -> as it is")
    (workspace,) = lockfile.differences(
        old, with_first(dataclasses.replace(first, choice=dataclasses.replace(first.choice, workspace_bytes=0)))
    )
    assert workspace.endswith("workspace 64 -> 0 bytes")
    one = dataclasses.replace(old, entries=(first,), versions={**old.versions, "cudnn": "10"}, origin="new.lock")
    assert len(lockfile.differences(old, one)) == 3
    (added,) = lockfile.differences(
        dataclasses.replace(old, entries=(first, second)), dataclasses.replace(old, origin="n.lock")
    )
    assert added.startswith("+ ") and added.endswith("is in n.lock alone")


GOOD = lockfile.text_of(Lock({"fusec": "1"}, (ENTRY, dataclasses.replace(ENTRY, target="l4"))))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("format = 1", "format = 2", "format is 2"),
        ("engine = 4", "engine = ", r"Invalid value \(at line"),
        ("engine = 4", "engine = 4.5", "line 6: engine is 4.5, not a whole number"),
        ("engine = 4", "engine = -4", "line 6: engine is -4"),
        ("engine = 4", "engine = true", "line 6: engine is True"),
        ("engine = 4\n", "", "line 6: engine is missing"),
        ("engine = 4", "engine = 4\nplace = 3", "line 6: unknown key 'place'"),
        ("knobs = { 2 = 1 }", 'knobs = { 2 = "1" }', "line 6: knobs are"),
        ("knobs = { 2 = 1 }", "knobs = { a = 1 }", "line 6: knobs are"),
        ('spelling = ["zero_bias"]', "spelling = [3]", "line 6: spelling is"),
        ("time_us = 12.5", "time_us = nan", "line 6: time_us is nan"),
        ("ababab", "ABABAB", "line 6: work is"),
        ('target = "l4"', 'target = "h200"', "line 18: conv\\+bias on h200 is locked twice"),
        ('name = "conv+bias"', "name = 3", "line 6: name is 3"),
        ('fusec = "1"', "fusec = 1", "versions are strings"),
    ],
)
def test_mistakes_are_named_by_file_and_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in GOOD
    path = tmp_path / "fusec.lock"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ModelError, match=words) as caught:
        lockfile.read(path)
    assert "fusec.lock" in str(caught.value)


def test_files_that_are_no_locks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        lockfile.read(tmp_path / "none.lock")
    (tmp_path / "bytes.lock").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="not a text file"):
        lockfile.read(tmp_path / "bytes.lock")
    with pytest.raises(FusecError, match="cannot write"):
        lockfile.write(tmp_path / "no folder" / "fusec.lock", Lock({}, ()))

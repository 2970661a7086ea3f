"""Test locks: read, applied and compared; errors name file and line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from gpu.autotune.squeeze_excite_text import EXCITATION, drawn
from gpu.kernels.cases import FIGURES
from lowering.lowers_judge import LowersJudge

from fusec import lockfile
from fusec.errors import CheckError, FusecError, ModelError
from fusec.execution.compilation import Compiled
from fusec.gpu.autotune import step_choices
from fusec.gpu.autotune.fusion import step_fusion
from fusec.lockfile import Lock, Locked, LockedPart, changes
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.plans.engine_numbers import DEVICE_ONLY
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import BLAS, Choice, Entry, Part
from fusec.plans.verdict import Plan
from fusec.schedule.program import Kind
from fusec.targets.target import load as load_target
from fusec.text import parse

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


def whole(entry: Locked, choice: Choice | None = None, spelling: tuple[str, ...] | None = None) -> Locked:
    """The entry with another plan or spelling of the whole step."""
    (part,) = entry.parts
    spelled = part.part if spelling is None else dataclasses.replace(part.part, spelling=spelling)
    return dataclasses.replace(entry, parts=(LockedPart(spelled, choice or part.choice),))


PLAN = LockedPart(Part(0, "cudnn", ("zero_bias",)), Choice(4, ((2, 1),), 64, 12.5, 1e-5))
ENTRY = Locked("conv+bias", "ab" * 32, "h200", "f16[8] -> f16[8]", (PLAN,))
CUT = dataclasses.replace(
    ENTRY,
    work="cd" * 32,
    parts=(LockedPart(Part(2), Choice(0, (), 0, 3.5)), LockedPart(Part(1, "kernel")), LockedPart(Part(3))),
)
KERNEL = Locked(
    "max_pool", "ef" * 32, "h200", "f16[8] -> f16[8]", (LockedPart(Part(0, "kernel"), None, "max_pool_0a:7"),)
)
OPS = Locked("top_k", "01" * 32, "h200", "f16[8] -> f16[8]", (LockedPart(Part(0, "ops")),))


def test_a_lock_comes_back_as_written_and_equal_locks_are_equal_text(tmp_path: Path) -> None:
    other = whole(dataclasses.replace(ENTRY, target="a100"), Choice(0, ()), ())
    lock = Lock({"fusec": "1", "cudnn": "9", "frontend": ""}, (other, ENTRY))
    every = Lock({}, (CUT, ENTRY, KERNEL, OPS))
    assert lockfile.parse(lockfile.text_of(every)) == dataclasses.replace(
        every, entries=lockfile.in_order(every.entries)
    )
    lockfile.write(tmp_path / "fusec.lock", lock)
    assert lockfile.read(tmp_path / "fusec.lock") == lock
    assert lockfile.text_of(Lock(dict(reversed([*lock.versions.items()])), (ENTRY, other))) == lockfile.text_of(lock)
    assert PLAN.choice is not None
    precise = whole(ENTRY, dataclasses.replace(PLAN.choice, time_us=12.500001))
    assert lockfile.text_of(Lock(lock.versions, (other, precise))) == lockfile.text_of(lock)
    assert lockfile.text_of(lock).count("\n") == len(lockfile.text_of(lock).splitlines())
    assert list(tmp_path.iterdir()) == [tmp_path / "fusec.lock"]


def test_equal_work_is_one_entry_with_the_plan_that_was_built() -> None:
    c = compiled()
    lock = lockfile.make([c, compiled(target="l4")])
    steps = lockfile.cudnn_steps(c.program)
    assert len(steps) == 4
    first, second, third, fourth = (lockfile.work_of(step, c.graph, True) for step in steps)
    assert second == third
    assert len({first, second, fourth}) == 3  # the first reads its input in another memory order
    assert [e.target for e in lock.entries] == ["h200"] * 8 + ["l4"] * 8, "four kernels and the whole, too"
    assert lock.choice(first, "h200") == Choice(1, ((2, 3), (5, 0)), 64)
    assert lock.choice(first, "t4") is None
    spelled = {e.name: e.split[0].spelling for e in lock.entries if e.choice is not None}
    assert spelled == {"conv+relu": ("zero_bias",), "conv": ()}
    assert {e.name for e in lock.entries if e.parts[0].kernel} == {"max_pool", "relayout"}
    assert lock.entries[0].shapes == "f32[2,8,2,2]{0,2,3,1} -> f32[2,8,2,2]{0,2,3,1}"


def test_measured_plans_come_before_offered_ones() -> None:
    c = compiled()
    (key, *_) = [lowered.graph.key for lowered in c.lowered if lowered is not None]
    measured = Choice(7, (), 128, 3.25, 1e-4)
    lock = lockfile.make([c], {("h200", key): [Entry(measured), Entry(Choice(1, ()))]})
    assert lockfile.apply(lock, c, always).choices[key] == measured


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


def test_a_lock_holds_for_its_own_program_and_names_the_first_that_it_does_not() -> None:
    c = compiled()
    lock = lockfile.make([c])
    for each in (c, compiled()):
        kept = lockfile.apply(lock, each, never)
        assert [step.signature for step in kept.compiled.program.steps] == [s.signature for s in c.program.steps]
        assert lockfile.make([kept.compiled]).entries == lock.entries
    with pytest.raises(CheckError, match=r"conv\+relu f32\[2,8,4,4\].* on l4: has no entry"):
        lockfile.apply(lock, compiled(target="l4"), never)
    with pytest.raises(CheckError, match="precision: the lock was written for tf32, the other side is fp32"):
        lockfile.apply(lock, compiled(precision="fp32"), never)
    no_kernels = dataclasses.replace(lock, entries=tuple(e for e in lock.entries if not e.parts[0].kernel))
    with pytest.raises(CheckError, match=r"max_pool .*has no entry"):
        lockfile.apply(no_kernels, c, never)


def test_a_lock_of_another_model_in_one_precision_tells_no_precision() -> None:
    """Casts at the inputs and outputs of a small model are most of its tensors, and read or write fp32."""
    product = """graph "g" (%x: f32[8,16], %w: f32[16,8]) { %y = matmul(%x, %w) %z = relu(%y) return %z }"""
    lock = lockfile.make([compiled(precision="fp16")])
    with pytest.raises(CheckError, match="has no entry"):
        lockfile.apply(lock, compiled(precision="fp16", text=product), never)
    with pytest.raises(CheckError, match="precision: the lock was written for fp16, the other side is tf32"):
        lockfile.apply(lock, compiled(text=product), never)


def test_a_plan_that_is_gone_is_refused_unless_it_builds() -> None:
    lock = lockfile.make([compiled()])
    gone = compiled(LowersJudge((Plan(1, ((2, 4),), True, 0, True),)))
    with pytest.raises(
        CheckError, match="engine 1 with knobs 2=3, 5=0 is no longer offered, the engine with other knobs"
    ):
        lockfile.apply(lock, gone, never)
    assert set(lockfile.apply(lock, gone, always).choices.values()) == {Choice(1, ((2, 3), (5, 0)), 64)}


def test_a_plan_that_the_options_leave_out_is_refused() -> None:
    lock = lockfile.make([compiled()])
    (engine,) = {p.choice.engine for e in lock.entries for p in e.parts if p.choice is not None}
    for plans, words in (
        (PlanFilter.of(engines=f"-{engine}"), f"engine {engine} is left out by the option engines"),
        (PlanFilter.of(workspace_limit=63), "a workspace of 64 bytes exceeds the option workspace_limit, 63"),
    ):
        c = compiled()
        limited = dataclasses.replace(c, options=dataclasses.replace(c.options, plans=plans))
        with pytest.raises(CheckError, match=words):
            lockfile.apply(lock, limited, always)
        assert any(words in line for line in changes.changes(lock, limited, always))
    c = compiled()
    plans = PlanFilter.of("B", (engine,), 64)
    lockfile.apply(lock, dataclasses.replace(c, options=dataclasses.replace(c.options, plans=plans)), never)


def test_what_cannot_be_known_without_the_device_is_said_and_not_refused() -> None:
    c = compiled()
    lock = lockfile.make([c])
    tuned = dataclasses.replace(
        lock, entries=tuple(whole(e, Choice(4, ())) if e.choice is not None else e for e in lock.entries)
    )
    assert 4 in DEVICE_ONLY
    lockfile.apply(tuned, c, never)
    lines = changes.changes(tuned, c, never)
    assert len(lines) == 3
    assert all(
        line.startswith("? conv") and "engine 4: cuDNN tells of it on the device alone" in line for line in lines
    )


def test_plans_of_another_library_are_said_and_not_refused() -> None:
    c, choice = compiled(), Choice(BLAS, ((0, 66),))
    lock = lockfile.make([c])
    entries = tuple(whole(e, choice) if e.choice is not None else e for e in lock.entries)
    other = dataclasses.replace(lock, entries=entries)
    lockfile.apply(other, c, never)
    lines = changes.changes(other, c, never)
    assert len(lines) == 3
    assert all("cuBLASLt with knobs 0=66: cuBLASLt tells of it on the device alone" in line for line in lines)
    assert lockfile.parse(lockfile.text_of(other)) == other


def with_form(lock: Lock, name: str, *parts: LockedPart) -> Lock:
    """The lock with steps of that name in another form."""
    entries = (dataclasses.replace(e, parts=parts) if e.name == name else e for e in lock.entries)
    return dataclasses.replace(lock, entries=tuple(entries))


def test_a_lock_says_in_which_form_a_step_runs() -> None:
    c, choice = compiled(), Choice(6, (), 0, 1.5)
    lock = lockfile.make([c])
    plain = lockfile.apply(with_form(lock, "conv+relu", LockedPart(Part(0), choice)), c, always)
    assert [s.spelling for s in lockfile.cudnn_steps(plain.compiled.program)] == [()] * 4
    assert choice in plain.choices.values()
    cut = with_form(lock, "conv+relu", LockedPart(Part(1), choice), LockedPart(Part(1, "kernel")))
    with pytest.raises(CheckError, match=r"relu f32\[2.*has no entry"):  # nothing says which kernel
        lockfile.apply(cut, c, always)
    made = with_kernels(cut, c)
    kept = lockfile.apply(made, c, always)
    names = [step.signature for step in kept.compiled.program.steps if step.kind is not Kind.VIEW]
    assert names.count("relu") == 3 and names.count("conv") == 4
    assert lockfile.make([kept.compiled]).entries == made.entries
    assert changes.changes(made, c, always) == []
    split = with_form(lock, "conv+relu", LockedPart(Part(1), choice), LockedPart(Part(0, "ops")))
    apart = with_kernels(split, c)
    assert lockfile.apply(apart, c, always).compiled.program.launches == c.program.launches + 3


def with_kernels(lock: Lock, c: Compiled) -> Lock:
    """The lock and what it lacks of kernels, as the program runs in its forms."""
    first = step_fusion.fuse_steps(c.program, FIGURES)
    decided = {}
    for step in lockfile.cudnn_steps(first):
        entry = lock.entry(lockfile.work_of(step, c.graph, True), "h200")
        assert entry is not None
        decided[step_choices.step_key(c.graph, step)] = entry.split
    program = step_choices.apply_choices(c.program, decided, FIGURES)
    ran = dataclasses.replace(c, program=program, tuned=step_choices.TunedChoices(c.program, decided, {}, {}))
    kernels = [e for e in lockfile.make([ran]).entries if e.split[0].runs == "kernel"]
    others = [e for e in lock.entries if e.split[0].runs != "kernel"]
    return dataclasses.replace(lock, entries=lockfile.in_order([*kernels, *others]))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            (LockedPart(Part(1), Choice(4, ())), LockedPart(Part(7), Choice(4, ()))),
            "a choice of 1 \\+ 7 ops does not fit",
        ),
        (
            (LockedPart(Part(1), Choice(4, ())), LockedPart(Part(0, "cudnn", ("as_convolution",)))),
            "does not apply to relu",
        ),
        ((LockedPart(Part(0, "cudnn", ("turned",)), Choice(4, ())),), "spelling turned does not apply"),
        ((LockedPart(Part(0, "kernel")),), "no kernel runs conv relu"),
        ((LockedPart(Part(0)),), "has no plan"),
    ],
)
def test_a_form_that_does_not_fit_is_refused(parts: tuple[LockedPart, ...], words: str) -> None:
    c = compiled()
    with pytest.raises(CheckError, match=words):
        lockfile.apply(with_form(lockfile.make([c]), "conv+relu", *parts), c, always)


def test_a_kernel_that_fusec_makes_no_more_is_refused() -> None:
    c = compiled()
    lock = lockfile.make([c])
    other = with_form(lock, "max_pool", LockedPart(Part(0, "kernel"), None, "max_pool_0123:4"))
    with pytest.raises(CheckError, match=r"kernel max_pool_0123:4 is not what fusec makes now, max_pool_\w+:[\d:]+ is"):
        lockfile.apply(other, c, never)
    assert sum("is not what fusec makes now" in line for line in changes.changes(other, c, never)) == 3
    none = with_form(lock, "max_pool", LockedPart(Part(0, "ops")))
    with pytest.raises(CheckError, match=r"kernel max_pool_\w+:[\d:]+ runs it now, none did"):
        lockfile.apply(none, c, never)


def test_changes_say_what_fuses_otherwise() -> None:
    c = compiled()
    lock = lockfile.make([c])
    assert changes.changes(lock, c, never) == []
    split = compiled(LowersJudge(PLANS, longest=1))
    lines = changes.changes(lock, split, never)
    assert any(line.startswith("- conv+relu") and "fuses so no more" in line for line in lines)
    assert any(line.startswith("+ relu") and "fuses so now" in line for line in lines)
    gone = changes.changes(lock, compiled(LowersJudge((Plan(9, (), True, 0, True),))), never)
    assert len(gone) == 3
    assert all("engine 1 with knobs 2=3, 5=0 is no longer offered" in line for line in gone)
    assert "nothing is locked for l4" in changes.changes(lock, compiled(target="l4"), never)
    newer = dataclasses.replace(lock, versions={**lock.versions, "cudnn": "8"})
    assert changes.changes(newer, c, never) == [f"cudnn: 8 -> {lock.versions['cudnn'] or 'none'}"]


def test_changes_of_a_file_that_has_its_own_lock() -> None:
    c, choice = compiled(), Choice(6, (), 0, 1.5)
    lock = lockfile.make([c])
    tuned = with_kernels(with_form(lock, "conv+relu", LockedPart(Part(1), choice), LockedPart(Part(1, "kernel"))), c)
    file = lockfile.apply(tuned, c, always).compiled
    assert changes.changes(tuned, file, never) == []
    lines = changes.changes(lock, file, never)
    assert sum("-> 1 op spelled as it is, then 1 op a kernel" in line for line in lines) == 2
    assert any(line.startswith("+ relu") for line in lines)
    gone = with_form(tuned, "conv", LockedPart(Part(0), Choice(99, ())))
    assert any("engine 99 is no longer offered" in line for line in changes.changes(gone, file, never))


def test_differences_of_two_locks() -> None:
    old = lockfile.make([compiled()])
    assert changes.differences(old, old) == []
    first = next(e for e in old.entries if e.name == "conv+relu")
    kernel = next(e for e in old.entries if e.name == "max_pool")
    others = tuple(e for e in old.entries if e is not first)

    def with_first(entry: Locked) -> Lock:
        return dataclasses.replace(old, entries=lockfile.in_order([*others, entry]), origin="new.lock")

    assert first.choice is not None
    timed = whole(first, dataclasses.replace(first.choice, time_us=1.0, error=0.0))
    assert changes.differences(old, with_first(timed)) == []
    engine = whole(first, Choice(4, ()))
    assert [line.partition(": ")[2] for line in changes.differences(old, with_first(engine))] == [
        "engine 1 with knobs 2=3, 5=0 -> engine 4"
    ]
    (spelled,) = changes.differences(old, with_first(whole(first, spelling=())))
    assert spelled.endswith("spelled zero_bias -> spelled as it is")
    (cut,) = changes.differences(old, with_first(dataclasses.replace(first, parts=CUT.parts)))
    assert cut.endswith("-> 2 ops spelled as it is, then 1 op a kernel, then 3 ops spelled as it is")
    replaced = dataclasses.replace(kernel, parts=(LockedPart(Part(0, "kernel"), None, "other:1"),))
    (changed,) = changes.differences(dataclasses.replace(old, entries=(kernel,)), Lock(old.versions, (replaced,)))
    assert changed.endswith(f": kernel {kernel.parts[0].kernel} -> kernel other:1")
    (workspace,) = changes.differences(
        old, with_first(whole(first, dataclasses.replace(first.choice, workspace_bytes=0)))
    )
    assert workspace.endswith("workspace 64 -> 0 bytes")
    one = dataclasses.replace(old, entries=(first,), versions={**old.versions, "cudnn": "10"}, origin="new.lock")
    assert len(changes.differences(old, one)) == 8
    (added,) = changes.differences(dataclasses.replace(old, entries=others), dataclasses.replace(old, origin="n.lock"))
    assert added.startswith("+ ") and added.endswith("is in n.lock alone")


GOOD = lockfile.text_of(Lock({"fusec": "1"}, (ENTRY, dataclasses.replace(ENTRY, target="l4"))))
SPELLED = GOOD[GOOD.index("spelling") : GOOD.index("\n\n[[partition]]", GOOD.index("spelling"))]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("format = 3", "format = 4", "format is 4, this fusec reads 1, 2, 3"),
        ('spelling = ["zero_bias"]', 'runs = "kernel"', "line 6: a plan is named where 'kernel' runs"),
        ('spelling = ["zero_bias"]', 'runs = "fast"', "line 6: runs is 'fast', not one of cudnn, kernel, ops"),
        ('spelling = ["zero_bias"]', 'spelling = []\nkernel = "k"', "line 6: a plan is named where 'kernel' runs"),
        ('spelling = ["zero_bias"]', "spelling = []\nnodes = 3", "line 6: nodes belong to the parts"),
        ('spelling = ["zero_bias"]', "spelling = []\n[[partition.part]]\nnodes = 1", "line 6: a step has parts, two"),
        ("engine = 4", "engine = ", r"Invalid value \(at line"),
        ("engine = 4", "engine = 4.5", "line 6: engine is 4.5, not a whole number"),
        ("engine = 4", "engine = -4", "line 6: engine is -4"),
        ("engine = 4", "engine = true", "line 6: engine is True"),
        ("engine = 4\n", "", "line 6: engine is missing"),
        ("engine = 4", "engine = 4\nplace = 3", "line 6: unknown key 'place'"),
        ("knobs = { 2 = 1 }", 'knobs = { 2 = "1" }', "line 6: knobs are"),
        ("knobs = { 2 = 1 }", "knobs = { a = 1 }", "line 6: knobs are"),
        ("knobs = { 2 = 1 }", "knobs = [[2, 1], 3]", "line 6: knobs are"),
        (SPELLED, "part = [1, 2]", "line 6: part is no table"),
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


@pytest.mark.parametrize("number", [1, 2])
def test_a_lock_of_an_older_format_is_read(number: int) -> None:
    old = lockfile.parse(GOOD.replace("format = 3", f"format = {number}"))
    assert old == lockfile.parse(GOOD)
    assert old.format == number


def test_a_lock_says_whether_steps_run_side_by_side() -> None:
    c = compiled()
    lock = lockfile.make([c])
    whole = next(entry for entry in lock.entries if entry.name == "model")
    assert whole.split == (Part(0, "in order"),), "nothing was measured"
    assert 'runs = "in order"' in lockfile.text_of(lock)
    lanes = dataclasses.replace(whole, parts=(LockedPart(Part(0, "side by side")),))
    rest = [entry for entry in lock.entries if entry is not whole]
    forked = lockfile.parse(lockfile.text_of(dataclasses.replace(lock, entries=lockfile.in_order([*rest, lanes]))))
    assert [lockfile.apply(each, c, always).side_by_side for each in (lock, forked)] == [False, True]
    assert lanes in lockfile.make([lockfile.apply(forked, c, always).compiled]).entries
    (line,) = changes.differences(lock, forked)
    assert line.endswith(": in order -> side by side")
    without = dataclasses.replace(lock, entries=tuple(rest))
    with pytest.raises(CheckError, match="nothing says whether its steps run side by side"):
        lockfile.apply(without, c, always)
    older = lockfile.apply(dataclasses.replace(without, format=2), c, always)
    assert not older.side_by_side and whole in older.compiled.tuned.entries  # type: ignore[union-attr]
    assert changes.changes(lock, c, always) == changes.changes(without, c, always) == []


def test_a_lock_of_other_connections_does_not_fit() -> None:
    """All steps are there, and read something else."""
    lock, other = lockfile.make([compiled()]), compiled(text=MODEL.replace("max_pool(%r2)", "max_pool(%r1)"))
    with pytest.raises(CheckError, match="side by side"):
        lockfile.apply(lock, other, always)
    assert changes.changes(lock, other, always) == ["~ model on h200: its steps are others, or connected otherwise"]


def test_files_that_are_no_locks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        lockfile.read(tmp_path / "none.lock")
    (tmp_path / "bytes.lock").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="not a text file"):
        lockfile.read(tmp_path / "bytes.lock")
    with pytest.raises(FusecError, match="cannot write"):
        lockfile.write(tmp_path / "no folder" / "fusec.lock", Lock({}, ()))


def test_a_lock_says_whether_a_kernel_does_the_work_of_several_steps() -> None:
    judge, target = LowersJudge(PLANS), load_target("h200")
    graph = parse(EXCITATION, drawn(EXCITATION))
    c = Compiled(graph, partition(graph, judge, target), target, Options(), judge)
    lock = lockfile.make([c])
    kept = lockfile.apply(lock, c, always)
    (united, _) = kept.compiled.program.steps
    assert united.signature.startswith("conv+bias+swish+reduce+conv")
    assert lockfile.make([kept.compiled]).entries == lock.entries and changes.changes(lock, c, always) == []
    work = step_choices.step_key(c.graph, united)
    decided = {work: (Part(1, "cudnn"), Part(3, "kernel"), Part(4, "kernel"))}
    program = step_choices.apply_choices(c.program, decided, FIGURES)
    ran = dataclasses.replace(c, program=program, tuned=step_choices.TunedChoices(c.program, decided, {}, {}))
    (conv,) = [lower(step.body, c.options.tensor_cores).graph.key for step in program.steps if len(step.nodes) == 1][:1]
    plans = {("h200", conv): [Entry(Choice(6, ()))]}
    apart = lockfile.apply(lockfile.make([ran], plans), c, always)
    names = [step.signature for step in apart.compiled.program.steps]
    assert names == ["conv", "bias+swish+reduce", "conv+relu+conv+sigmoid", "mul"]
    assert any("~" in line for line in changes.differences(lock, lockfile.make([ran])))

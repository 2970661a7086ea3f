"""Test concats in place: which ones, where their operands are stored, and the steps that are judged again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_close
from lowering.lowers_judge import LowersJudge

from fusec.artifacts import fusec_file
from fusec.diagnostics.verify import verify
from fusec.errors import VerifyError
from fusec.execution.compilation import Compiled
from fusec.ir import DType, Graph, TensorType
from fusec.lower_cudnn import lower
from fusec.lowering.known_bugs import deadly
from fusec.passes.base import Options
from fusec.passes.partition import kernels_only, partition
from fusec.passes.partition.concat_in_place import concat_in_place, joined, restore_copies
from fusec.plans.verdict import Legal, Plan, Refused, Verdict
from fusec.reference import evaluate
from fusec.runtime import Executable, SimulatorBackend
from fusec.schedule.memory_plan import located, plan_memory
from fusec.schedule.program import Kind, Program
from fusec.targets.target import load
from fusec.text import parse

LAST = "{0,2,3,1}"
CONV = "{strides=[1,1], pads=[0,0,0,0], dilations=[1,1]}"
POOL = "{window=[2,2], strides=[2,2], pads=[0,0,0,0], dilations=[1,1]}"
# a pool, two layers that each read all before them, and what is after the block
BLOCK = f"""graph "block" (%x: f32[2,16,8,8]{LAST}) {{
  %w1 = constant weight("w1") : f32[16,16,1,1]{LAST}
  %w2 = constant weight("w2") : f32[16,32,1,1]{LAST}
  %w3 = constant weight("w3") : f32[16,48,1,1]{LAST}
  %f0 = max_pool(%x) {POOL} : f32[2,16,4,4]{LAST}
  %r0 = relu(%f0) : f32[2,16,4,4]{LAST}
  %f1 = conv(%r0, %w1) {CONV} : f32[2,16,4,4]{LAST}
  %c1 = concat(%f0, %f1) {{axis=1}} : f32[2,32,4,4]{LAST}
  %r1 = relu(%c1) : f32[2,32,4,4]{LAST}
  %f2 = conv(%r1, %w2) {CONV} : f32[2,16,4,4]{LAST}
  %c2 = concat(%f0, %f1, %f2) {{axis=1}} : f32[2,48,4,4]{LAST}
  %r2 = relu(%c2) : f32[2,48,4,4]{LAST}
  %y = conv(%r2, %w3) {CONV} : f32[2,16,4,4]{LAST}
  return %y
}}"""


def weights(text: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"w1": (16, 16, 1, 1), "w2": (16, 32, 1, 1), "w3": (16, 48, 1, 1)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items() if name in text}


def cut(text: str, judge: LowersJudge | None = None) -> Program:
    return partition(parse(text, weights(text)), judge or LowersJudge(), load("h200"))


def joins(program: Program) -> list[str]:
    """List each concat with the kind of step that runs it."""
    named = [(s.nodes[0].result.name, s.kind.value) for s in program.steps if s.nodes[-1].op.name == "concat"]
    return [f"{name} {kind}" for name, kind in named]


def place(text: str, judge: LowersJudge | None = None, disable: frozenset[str] = frozenset()) -> Program:
    asked = judge or LowersJudge()
    return concat_in_place(cut(text, asked), asked, Options(disable=disable))


def check(program: Program, text: str, rng: np.random.Generator) -> Executable:
    """Check the program against the model, twice, and each step against its ops."""
    source = parse(text, weights(text))
    compiled = Compiled(source, program, load("h200"), Options(), LowersJudge())
    net = Executable(compiled, SimulatorBackend())
    for _ in range(2):
        feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in source.inputs}
        want = evaluate(source, feeds)
        for got, name in zip(net.run(None, feeds), source.output_names, strict=True):
            assert_close(got, want[name], 1e-5)
    report = verify(compiled)
    assert report.ok, str(report)
    return net


def test_a_dense_block_is_one_piece_of_memory(rng: np.random.Generator) -> None:
    program = place(BLOCK)
    assert joins(program) == ["c1 view", "c2 view"]
    net = check(program, BLOCK, rng)
    values = {v.name: v for v in program.graph.values()}
    whole = values["c2"]
    assert {name: located(program)[values[name]] for name in ("f0", "f1", "f2", "c1")} == {
        "f0": (whole, 0),
        "f1": (whole, 64),
        "f2": (whole, 128),
        "c1": (whole, 0),
    }
    assert str(values["f1"].type) == "f32[2,16,4,4]{0,2,3,1} of [2,48,4,4]"
    assert values["c2"].type == TensorType((2, 48, 4, 4), DType.F32, (0, 2, 3, 1))
    assert net.memory.nbytes <= 1.1 * net.memory.live_bytes
    assert whole in {life.value for life in net.memory.lives}
    (life,) = (life for life in net.memory.lives if life.value is whole)
    makers = [i for i, step in enumerate(program.steps) if values["f0"] in step.outputs]
    assert life.first == makers[0], "the whole lives from its first part on"


def test_concat_in_place_can_be_disabled(rng: np.random.Generator) -> None:
    program = place(BLOCK, disable=frozenset({"concat_in_place"}))
    assert joins(program) == ["c1 kernel", "c2 kernel"]
    check(program, BLOCK, rng)


class Picky(LowersJudge):
    """Refuses bodies that write (or read) parts of a larger tensor, or has no fast engines for them."""

    def __init__(self, declines: bool, reads: bool):
        super().__init__((Plan(1, (), True, 0, True),))
        self.declines, self.reads, self.asked = declines, reads, 0

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        self.asked += sum(any(v.type.within for v in (*b.inputs, *b.outputs)) for b in bodies)
        return super().judge(bodies)

    def _verdict(self, body: Graph) -> Verdict:
        found = super()._verdict(body)
        if not isinstance(found, Legal) or not any(
            v.type.within for v in (body.inputs if self.reads else body.outputs)
        ):
            return found
        if self.declines:
            return Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "strides")
        return Legal((Plan(4, (), False, 0, True),))


@pytest.mark.parametrize("declines", [True, False])
@pytest.mark.parametrize("reads", [True, False])
def test_every_step_that_writes_or_reads_a_part_is_judged(
    rng: np.random.Generator, declines: bool, reads: bool
) -> None:
    judge = Picky(declines, reads)
    program = place(BLOCK, judge)
    assert judge.asked > 0
    assert joins(program) == ["c1 kernel", "c2 kernel"]
    assert not any(v.type.within for v in program.graph.values())
    check(program, BLOCK, rng)


TWO = """graph "two" (%x: f32[2,16,4,4]{0,2,3,1}, %z: f32[2,16,4,4]{0,2,3,1}) {
  %a = exp(%x) : f32[2,16,4,4]{0,2,3,1}
  %b = sqrt(%x) : f32[2,16,4,4]{0,2,3,1}
  %c = concat(OPERANDS) {axis=1} : f32[2,32,4,4]{0,2,3,1}
  %y = relu(%c) : f32[2,32,4,4]{0,2,3,1}
  return %yMORE
}"""


@pytest.mark.parametrize(
    ("operands", "more", "kind"),
    [
        ("%a, %b", "", "view"),
        ("%a, %z", "", "kernel"),  # an input is where the caller put it
        ("%a, %a", "", "kernel"),  # one value, two places
        ("%a, %b", ", %a", "kernel"),  # an output is packed
    ],
)
def test_operands_that_cannot_be_written_in_place(
    rng: np.random.Generator, operands: str, more: str, kind: str
) -> None:
    text = TWO.replace("OPERANDS", operands).replace("MORE", more).replace("sqrt", "tanh")
    program = place(text)
    assert joins(program) == [f"c {kind}"]
    check(program, text, rng)


def test_a_part_in_another_memory_order_is_copied(rng: np.random.Generator) -> None:
    text = TWO.replace("OPERANDS", "%a, %b").replace("MORE", "").replace("sqrt", "tanh")
    text = text.replace("%b = tanh(%x) : f32[2,16,4,4]{0,2,3,1}", "%b = tanh(%x) : f32[2,16,4,4]")
    program = place(text)
    assert joins(program) == ["c kernel"]
    check(program, text, rng)


# three concats; a step reads a part of the first and writes one of the second, another of the second and the third
CHAIN = """graph "chain" (%x: f32[2,16,4,4]{0,2,3,1}) {
  %a = exp(%x)
  %b = tanh(%x)
  %c = concat(%a, %b) {axis=1}
  %q = relu(%a)
  %r = sin(%x)
  %d = concat(%q, %r) {axis=1}
  %s = neg(%q)
  %t = cos(%x)
  %e = concat(%s, %t) {axis=1}
  %i = abs(%c)
  %j = abs(%d)
  %k = exp(%e)
  return %i, %j, %k
}"""


def test_restoring_one_concat_restores_those_its_steps_touch() -> None:
    """A step that writes one part and reads another was judged with both, never with one of them packed."""
    program = concat_in_place(kernels_only(parse(CHAIN)), LowersJudge(), Options())
    assert joins(program) == ["c view", "d view", "e view"]
    (first,) = (family for family in joined(program) if "a" in {v.name for v in family.types})
    copied = restore_copies(program, [first])
    assert joins(copied) == ["c kernel", "d kernel", "e kernel"]
    assert not any(v.type.within for v in copied.graph.values())


def test_restoring_one_concat_leaves_independent_ones() -> None:
    text = CHAIN.replace("neg(%q)", "neg(%x)")
    program = concat_in_place(kernels_only(parse(text)), LowersJudge(), Options())
    (first,) = (family for family in joined(program) if "a" in {v.name for v in family.types})
    assert joins(restore_copies(program, [first])) == ["c kernel", "d kernel", "e view"]


@pytest.mark.parametrize(
    ("channels", "order", "axis", "kind"),
    [
        ((16, 20), LAST, 1, "view"),
        ((18, 18), LAST, 1, "kernel"),  # the second begins at 72 bytes
        ((16, 18), LAST, 1, "kernel"),  # rows of 136 bytes
        ((16, 8), LAST, 1, "kernel"),  # rows of 32 bytes
        ((4, 12), "", 1, "view"),  # row-major: blocks
        ((3, 5), LAST, 0, "view"),  # along the outermost dim: one after the other
        ((8, 16), LAST, 3, "view"),
    ],
)
def test_rows_are_aligned_and_long_enough(
    rng: np.random.Generator, channels: tuple[int, int], order: str, axis: int, kind: str
) -> None:
    def shape(size: int) -> str:
        sizes = [2, 8, 4, 4]
        sizes[axis] = size
        return f"f32[{','.join(map(str, sizes))}]{order}"

    a, b = channels
    text = f"""graph "two" (%x: {shape(a)}, %z: {shape(b)}) {{
      %a = exp(%x) : {shape(a)}
      %b = tanh(%z) : {shape(b)}
      %c = concat(%a, %b) {{axis={axis}}} : {shape(a + b)}
      %y = relu(%c) : {shape(a + b)}
      return %y
    }}"""
    program = place(text)
    assert joins(program) == [f"c {kind}"]
    check(program, text, rng)


def test_parts_in_another_order_are_copied_once_more(rng: np.random.Generator) -> None:
    lines = "  %c = concat(%a, %b) {axis=1} : f32[2,32,4,4]{0,2,3,1}"
    turned = "  %d = concat(%b, %a) {axis=1} : f32[2,32,4,4]{0,2,3,1}\n  %z = neg(%d) : f32[2,32,4,4]{0,2,3,1}"
    text = TWO.replace("OPERANDS", "%a, %b").replace("MORE", ", %z").replace("sqrt", "tanh").replace(", %z: ", ", %q: ")
    text = text.replace(lines, f"{lines}\n{turned}")
    program = place(text)
    assert joins(program) == ["c kernel", "d view"], "the other reads the parts where they are"
    check(program, text, rng)


def test_a_type_within_a_larger_one_round_trips() -> None:
    text = str(place(BLOCK).graph)
    again = parse(text, weights(BLOCK))
    assert str(again) == text
    for bad in ("f32[2,16,4,4]{0,2,3,1} of [2,48,4]", "f32[2,16,4,4]{0,2,3,1} of [2,7,4,4]"):
        with pytest.raises(Exception, match="is not within"):
            parse(text.replace("f32[2,16,4,4]{0,2,3,1} of [2,48,4,4]", bad), weights(BLOCK))
    type = TensorType((2, 8, 4, 4), DType.F32, (0, 2, 3, 1), (2, 32, 4, 4))
    assert type.strides == (512, 1, 128, 32)
    assert type.span == 512 + 3 * 128 + 3 * 32 + 8
    assert type.with_order((0, 2, 3, 1)).within == ()


def test_places_that_contradict_each_other_are_an_error() -> None:
    program = place(BLOCK)
    graph = program.graph
    values = {v.name: v for v in graph.values()}
    (c1,) = (step for step in program.steps if step.nodes[0].result is values["c1"])
    node = c1.nodes[0]
    graph.set_input(node, 0, values["f1"])
    graph.set_input(node, 1, values["f0"])
    with pytest.raises(VerifyError, match="cannot be in its part of the result"):
        plan_memory(program)
    lone = place(BLOCK)
    steps = tuple(s if s.kind is not Kind.VIEW else replace(s, kind=Kind.KERNEL) for s in lone.steps)
    with pytest.raises(VerifyError, match="nothing says where it is"):
        plan_memory(replace(lone, steps=steps))


def test_a_body_knows_what_its_values_are_parts_of() -> None:
    program = place(BLOCK)
    graph = program.graph
    (part,) = (v for v in graph.values() if v.name == "f1")
    graph.set_type(part, replace(part.type, within=()))
    with pytest.raises(VerifyError, match=r"%f1 is f32\[2,16,4,4\]\{0,2,3,1\}, not .* of \[2,48,4,4\]"):
        program.verify()


def test_a_convolution_may_read_some_channels_through_other_ops() -> None:
    def reason(strides: tuple[int, ...]) -> str | None:
        text = f"""graph "g" (%x: f16[2,16,4,4]{LAST}) {{
          %w = constant weight("w") : f16[16,16,1,1]{LAST}
          %r = relu(%x) : f16[2,16,4,4]{LAST}
          %y = conv(%r, %w) {CONV} : f16[2,16,4,4]{LAST}
          return %y
        }}"""
        graph = lower(parse(text, {"w": np.ones((16, 16, 1, 1), np.float16)})).graph
        (image,) = (t for t in graph.inputs if t.dims == (2, 16, 4, 4))
        tensors = tuple(replace(t, strides=strides) if t is image else t for t in graph.tensors)
        return deadly(replace(graph, tensors=tensors))

    assert reason((256, 1, 64, 16)) is None
    assert reason((768, 1, 192, 48)) is None, "16 of 48 channels"
    for strides in ((256, 16, 4, 1), (512, 2, 128, 32), (768, 1, 48, 192), (1024, 1, 128, 16)):
        assert "not stored channels last" in str(reason(strides)), strides


def test_a_saved_program_keeps_its_concats_in_place(rng: np.random.Generator, tmp_path: Path) -> None:
    program = place(BLOCK)
    net = check(program, BLOCK, rng)
    net.save(tmp_path / "block.fusec")
    again = fusec_file.load(tmp_path / "block.fusec", "h200").compiled
    assert joins(again.program) == ["c1 view", "c2 view"]
    x = rng.standard_normal((2, 16, 8, 8)).astype(np.float32)
    np.testing.assert_array_equal(Executable(again, SimulatorBackend())(x), net(x))

"""Test multi-tensor steps: which nodes they take, and that updates compute the same."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import one_program

import fusec
from fusec import training
from fusec.builder import Builder
from fusec.driver import build
from fusec.schedule.multi_tensor import equal_members, members, multi_tensor_steps
from fusec.schedule.program import Kind
from fusec.text import parse


def optimised(optimiser: str, scaled: bool = True) -> Builder:
    """Five parameters of four shapes, some in one, and a loss that reads them in fp16."""
    rng = np.random.default_rng(3)
    b = Builder("f16")
    x = b.input("x", (4, 8))
    shapes = {"a": (8, 8), "b": (8,), "c": (8, 6), "d": (6,), "e": (8,)}
    held = {n: b.parameter(n, rng.standard_normal(s).astype(np.float32)) for n, s in shapes.items()}
    p = {name: t.astype("f16") for name, t in held.items()}
    y = ((x @ p["a"] + p["b"]) * p["e"]).tanh() @ p["c"] + p["d"]
    loss = (y * y).astype("f32").mean()
    trained = list(held.values())
    if scaled:
        gradients, keep = training.scaled_backward(loss, trained, growth=2, start=64.0)
    else:
        gradients, keep = fusec.backward(loss, trained), None
    if optimiser == "sgd":
        training.sgd(b, trained, gradients, 0.1, 0.9, weight_decay=0.01, nesterov=True, keep=keep)
    else:
        training.adamw(b, trained, gradients, 0.1, keep=keep)
    b.output(loss=loss)
    return b


def signatures(b: Builder) -> list[str]:
    state = {name: b.updates.get(name, "") for name in b.parameters}
    program = build(b.graph(), target="h200", state=state).program
    return [step.signature for step in program.steps if step.kind is Kind.KERNEL]


def test_parameters_are_cast_together_and_updated_together() -> None:
    for optimiser in ("sgd", "adam"):
        found = signatures(optimised(optimiser))
        assert "5 x cast" in found
        updates = [s for s in found if s.startswith(("4 x", "5 x")) and "where" in s]
        assert len(updates) <= 2 and found.count("all_finite") == 1


def test_whole_steps_do_what_they_do_one_by_one(rng: np.random.Generator) -> None:
    for optimiser in ("sgd", "adam"):
        packed, plain = (one_program(fusec.compile(optimised(optimiser), target=target)) for target in ("h200", "cpu"))
        assert any(step.signature.startswith("5 x") for step in packed.compiled.program.steps)
        for _ in range(3):
            x = rng.standard_normal((4, 8)).astype(np.float16)
            packed.step(x)
            plain.step(x)
        for name in packed.state:
            np.testing.assert_allclose(packed.value(name), plain.value(name), rtol=2e-2, atol=2e-3)


def test_updates_of_given_gradients_are_equal_to_the_last_bit(rng: np.random.Generator) -> None:
    """Nothing but the optimiser: gradients come in, so no product rounds otherwise."""

    def only(target: str) -> fusec.Executable:
        b = Builder("f32")
        held = [b.parameter(f"p{i}", rng0.standard_normal(s).astype(np.float32)) for i, s in enumerate(SHAPES)]
        b.output(total=held[0].sum())
        training.adamw(b, held, [b.input(f"g{i}", s) for i, s in enumerate(SHAPES)], 0.01)
        return one_program(fusec.compile(b, target=target))

    made: list[fusec.Executable] = []
    for target in ("h200", "cpu"):
        rng0 = np.random.default_rng(1)
        made.append(only(target))
    for _ in range(3):
        feeds = {f"g{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(SHAPES)}
        for executable in made:
            executable.step(**feeds)
    for name in made[0].state:
        np.testing.assert_array_equal(made[0].value(name), made[1].value(name))
    # op by op, all; one kernel for numbers of two shapes has blocks that read the count while others replace it
    assert [m.in_place for m in made] == [3 * len(SHAPES), 3 * len(SHAPES) + 1]


SHAPES = ((5, 3), (7,), (2, 3, 4), (1,), ())


def test_a_step_that_is_not_finite_moves_nothing_but_the_scale() -> None:
    executable = one_program(fusec.compile(optimised("sgd"), target="h200"))
    before = {name: executable.value(name) for name in executable.state}
    executable.step(np.full((4, 8), np.inf, np.float16))
    for name, held in before.items():
        now = executable.value(name)
        np.testing.assert_array_equal(now, held * 0.5 if name == "loss.scale" else held)


def test_no_multi_tensor_steps_without_state() -> None:
    graph = parse("""graph "g" (%x: f32[4], %y: f32[4]) {
  %a = cast(%x) {to=f16}
  %b = cast(%y) {to=f16}
  return %a, %b
}""")
    assert multi_tensor_steps(graph, {}) == []
    (step,) = multi_tensor_steps(graph, {"x": "", "y": ""})
    assert len(equal_members(step) or []) == 2


def test_values_that_others_read_are_in_no_multi_tensor_step() -> None:
    graph = parse("""graph "g" (%p: f32[4], %q: f32[4], %g: f32[4], %h: f32[4]) {
  %n = add(%p, %g)
  %m = add(%q, %h)
  %r = exp(%m)
  return %n, %m, %r
}""")
    graph.set_outputs(list(graph.outputs), ["n", "m", "r"])
    assert multi_tensor_steps(graph, {"p": "n", "q": "m"}) == []  # of %n alone there would be no list


def test_members_of_two_sizes_that_read_each_other_are_none() -> None:
    graph = parse("""graph "g" (%p: f32[4], %s: f32[]) {
  %t = exp(%s)
  %n = mul(%p, %t)
  return %n
}""")
    assert members(list(graph.nodes)) is None


def test_members_with_other_constants_that_kernels_load_are_equal() -> None:
    """The unbiased variance of a batch norm has a factor that depends on the size of the image."""

    def keys(first: float, second: float) -> int:
        graph = parse(f"""graph "g" (%p: f32[4], %q: f32[6]) {{
  %a = constant [{first}] : f32[]
  %b = constant [{second}] : f32[]
  %n = mul(%p, %a)
  %m = mul(%q, %b)
  return %n, %m
}}""")
        return len({member.key for member in members([n for n in graph.nodes if n.op.name == "mul"]) or []})

    assert keys(1.000319, 1.0000797) == 1
    assert keys(0.5, 2.0) == 2  # they are in the source
    assert keys(0.5, 1.000319) == 2


def test_a_part_of_a_larger_tensor_is_not_flat() -> None:
    # its rows have gaps between them: a kernel of two casts read the second row at the wrong place
    graph = parse("""graph "g" (%p: f32[2,4] of [2,8], %q: f32[2,4]) {
  %n = cast(%p) {to=f16} : f16[2,4]
  %m = cast(%q) {to=f16} : f16[2,4] of [2,8]
  return %n, %m
}""")
    first, second = graph.nodes
    assert members([first]) is None and members([second]) is None


def test_another_memory_order_is_not_flat() -> None:
    graph = parse("""graph "g" (%p: f32[2,3,4]{0,2,1}, %q: f32[2,3,4]) {
  %n = add(%p, %q) : f32[2,3,4]
  %m = add(%q, %q) : f32[2,3,4]
  return %n, %m
}""")
    first, second = graph.nodes
    assert members([first]) is None and members([second]) is not None


DIFFERENT = {
    "another number": ("mul(%p, %x)", "mul(%q, %y)", ""),
    "another attribute": ("clip(%p) {min=-1.0, max=1.0}", "clip(%q) {min=-1.0, max=2.0}", ""),
    "the operands the other way round": ("sub(%p, %s)", "sub(%s, %q)", ""),
    "one of its operands twice": ("add(%p, %g)", "add(%q, %q)", ""),
    "a result within that is read": ("mul(%p, %s)", "mul(%q, %s)", ", %b"),
    "another type": ("cast(%p) {to=f16}", "cast(%q) {to=bf16}", ""),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_does_something_else_is_no_member(what: str) -> None:
    """One kernel runs all members as it runs the first."""
    first, second, more = DIFFERENT[what]
    text = f"""graph "g" (%p: f32[4], %q: f32[6], %g: f32[4], %h: f32[6], %s: f32[]) {{
  %x = constant [0.5] : f32[]
  %y = constant [0.25] : f32[]
  %a = {first}
  %b = {second}
  %n = neg(%a)
  %m = neg(%b)
  return %n, %m{more}
}}"""
    graph = parse(text)
    nodes = [node for node in graph.nodes if node.op.name != "constant"]
    assert len(members(nodes) or []) == 2
    assert equal_members(nodes) is None
    same = parse(text.replace(f"%b = {second}", f"%b = {first.replace('%p', '%q').replace('%g', '%h')}"))
    both = [node for node in same.nodes if node.op.name != "constant"]
    assert (equal_members(both) is None) == bool(more)


def test_members_take_the_same_operands_from_the_same_places() -> None:
    """As many nodes and values, but the second of what one reads is the first of another's."""
    text = """graph "g" (%p: f32[4], %g: f32[4], %q: f32[6], %h: f32[6]) {
  %a = mul(%p, %g)
  %n = sub(%a, %p)
  %b = mul(%q, %h)
  %m = sub(%b, %h)
  return %n, %m
}"""
    assert equal_members(list(parse(text).nodes)) is None
    assert equal_members(list(parse(text.replace("sub(%b, %h)", "sub(%b, %q)")).nodes)) is not None

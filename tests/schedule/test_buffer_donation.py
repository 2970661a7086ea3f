"""Test which updates of state are written over the old value: those where no other thread still reads it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import one_program

import fusec
from fusec.builder import Builder
from fusec.schedule.buffer_donation import in_place, overwritten_input
from fusec.schedule.program import Kind, Partition, Program, body_of
from fusec.text import parse

FLAT = "%v = reshape(%a) {shape=[8,2]}\n"
ROWS = "%i = constant [3, 5] : i64[2]\n  %u = slice(%x) {starts=[0,0], sizes=[2,2], steps=[1,1]}\n"
ROTATED = "%r = rotary(%x, %b, %b)\n  " + ROWS.replace("%x", "%r")
SCATTER = '%s = scatter(%v, %i, %u) {reduction="none"}\n'

# a graph of state %a and %b, of which %n and %m are the new values; its steps; and what is written in place
CASES: dict[str, tuple[str, str, str]] = {
    "element by element": ("%n = sub(%a, %x)", "n", "a"),
    "read once more before": ("%y = exp(%a)\n  %n = sub(%a, %x)", "y n", "a"),
    "read in an earlier step alone": ("%y = neg(%a)\n  %t = transpose(%y) {perm=[1,0]}\n  %n = exp(%t)", "y t n", "a"),
    "read later": ("%n = sub(%a, %x)\n  %y = exp(%a)", "n y", ""),
    "read later by a view": (
        "%v = slice(%a) {starts=[0,0], sizes=[1,4], steps=[1,1]}\n  %n = sub(%a, %x)\n  %y = exp(%v)",
        "v n y",
        "",
    ),
    "read by a view in the same step": (
        "%v = slice(%a) {starts=[0,0], sizes=[1,4], steps=[1,1]}\n  %n = mul(%v, %x)",
        "v n",
        "",
    ),
    "read itself and by a view": (
        "%v = slice(%a) {starts=[0,0], sizes=[1,4], steps=[1,1]}\n  %s = mul(%v, %x)\n  %n = add(%s, %a)",
        "v s+n",
        "",
    ),
    "turned in the same step": ("%t = transpose(%a) {perm=[1,0]}\n  %n = add(%t, %a)", "t+n", ""),
    "with a result of another shape": (
        "%n = sub(%a, %x)\n  %w = add(%n, %z)",
        "n+w",
        "",
    ),
    "two in one kernel": ("%n = sub(%a, %b)\n  %m = add(%n, %b)", "n+m", "a b"),
    "members of a list": ("%n = sub(%a, %x)\n  %m = sub(%b, %x)", "n+m", "a b"),
    "members of which each reads what the other replaces": ("%n = sub(%a, %b)\n  %m = sub(%b, %a)", "n+m", ""),
    "a member reads what another replaces": ("%n = sub(%a, %x)\n  %m = sub(%b, %a)", "n+m", "b"),
    "rows are written": (f"{FLAT}  {ROWS}  {SCATTER}  %n = reshape(%s) {{shape=[4,4]}}", "v i u s n", "a"),
    "rows are written, and the step reads the result": (
        f"{FLAT}  {ROWS}  {SCATTER}  %n = reshape(%s) {{shape=[4,4]}}\n  %y = exp(%n)",
        "v i u s+n+y",
        "a",
    ),
    "rows are written, and the step reads the old value": (
        f"{FLAT}  {ROWS}  {SCATTER}  %n = reshape(%s) {{shape=[4,4]}}\n  %y = add(%n, %a)",
        "v i u s+n+y",
        "",
    ),
    "rows are added": (
        f"{FLAT}  {ROWS}  {SCATTER.replace('none', 'add')}  %n = reshape(%s) {{shape=[4,4]}}",
        "v i u s n",
        "",
    ),
    "rows are of the old value": (
        f"{FLAT}  {ROWS.replace('%x', '%a')}  {SCATTER}  %n = reshape(%s) {{shape=[4,4]}}",
        "v i u s n",
        "",
    ),
    "rows are computed and written": (
        f"{FLAT}  {ROTATED}  {SCATTER}  %n = reshape(%s) {{shape=[4,4]}}",
        "v i r+u+s n",
        "a",
    ),
    "rows are computed of the old value and written": (
        f"{FLAT}  {ROTATED.replace('%x', '%a')}  {SCATTER}  %n = reshape(%s) {{shape=[4,4]}}",
        "v i r+u+s n",
        "",
    ),
    "rows are written into two values": (
        f"{FLAT}  {FLAT.replace('%v', '%w').replace('%a', '%b')}  {ROWS}  {SCATTER}"
        f"  {SCATTER.replace('%s', '%t').replace('%v', '%w')}"
        "  %n = reshape(%s) {shape=[4,4]}\n  %m = reshape(%t) {shape=[4,4]}",
        "v w i u s+t n m",
        "a b",
    ),
    "the same rows are written twice": (
        f"{FLAT}  {ROWS}  {SCATTER}  {SCATTER.replace('%s', '%t')}"
        "  %n = reshape(%s) {shape=[4,4]}\n  %m = reshape(%t) {shape=[4,4]}",
        "v i u s+t n m",
        "b",  # in which a whole new value is stored
    ),
    "rows are written and the old value is read later": (
        f"{FLAT}  {ROWS}  {SCATTER}  %n = reshape(%s) {{shape=[4,4]}}\n  %y = exp(%v)",
        "v i u s n y",
        "",
    ),
}


def program(text: str, steps: str) -> Program:
    made = [name for line in text.split("\n") for name in [line.strip().split(" ")[0]]]
    outputs = ", ".join(dict.fromkeys(["%n", *(["%m"] if "%m" in made else []), *made[-1:]]))
    graph = parse(
        f'graph "g" (%a: f32[4,4], %b: f32[4,4], %x: f32[4,4], %z: f32[3,4,4]) {{\n  {text}\n  return {outputs}\n}}'
    )
    by_name = {node.result.name: node for node in graph.nodes}
    parts: list[Partition] = []
    for step in steps.split():
        if by_name[step.split("+")[0]].op.name == "constant":
            continue
        nodes = tuple(by_name[name] for name in step.split("+"))
        kind = Kind.VIEW if nodes[-1].op.name in ("slice", "reshape") else Kind.KERNEL
        parts.append(Partition(nodes, kind, body_of(graph, nodes)))
    return Program(graph, tuple(parts))


@pytest.mark.parametrize("what", CASES)
def test_what_is_written_in_place(what: str) -> None:
    text, steps, kept = CASES[what]
    of = program(text, steps)
    values = {v.name: v for v in of.graph.values()}
    updates = {values[old]: values[new] for old, new in (("a", "n"), ("b", "m")) if new in values}
    assert {old.name for old in in_place(of, updates).values()} == set(kept.split())


@pytest.mark.parametrize("two", [False, True])
def test_two_norms_of_one_gradient_hold_it_where_a_result_will_be(two: bool) -> None:
    """So that result is not written over an image, which is read once more after that."""
    image, second = "f16[2,8,4,4]{0,2,3,1}", "\n  %k, %p, %q = batch_norm_backward(%d, %z, %s, %m, %i)" if two else ""
    graph = parse(f"""graph "g" (%d: {image}, %x: {image}, %z: {image}, %s: f32[8], %m: f32[8], %i: f32[8]) {{
  %n, %t, %u = batch_norm_backward(%d, %x, %s, %m, %i){second}
  return %n, %t{", %k" if two else ""}
}}""")
    values = {v.name: v for v in graph.values()}
    of = Program(graph, (Partition(tuple(graph.nodes), Kind.KERNEL, body_of(graph, tuple(graph.nodes))),))
    found = in_place(of, {values["x"]: values["n"], values["s"]: values["t"]})
    assert {old.name for old in found.values()} == ({"s"} if two else {"x", "s"})


@pytest.mark.parametrize(
    ("text", "old"),
    [
        (f"{FLAT}  {ROWS}  {SCATTER}", "v"),
        (f"{FLAT}  {ROWS}  {SCATTER.replace('%s =', '%t =')}\n  %s = reshape(%t) {{shape=[2,2,4]}}", "v"),
        (f"{FLAT}  {ROWS}  {SCATTER.replace('none', 'add')}", None),
        (f"{FLAT.replace('%v', '%w').replace('%a', '%b')}  %v = exp(%w)\n  {ROWS}  {SCATTER}", None),
        ("%s = exp(%a)", None),
    ],
)
def test_rows_of_an_input_are_written_over_it(text: str, old: str | None) -> None:
    """Not where rows are added, or where the operand is computed."""
    inputs = "%a: f32[4,4], %b: f32[4,4], %x: f32[4,4]"
    graph = parse(f'graph "g" ({inputs}) {{\n  {text}\n  return %s\n}}')
    found = overwritten_input(graph.outputs[0])
    assert (found and found.name) == old and overwritten_input(graph.inputs[0]) is None


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_two_that_are_made_of_each_other(target: str, rng: np.random.Generator) -> None:
    b = Builder()
    held = [b.parameter(f"p{i}", rng.standard_normal((8, 3)).astype(np.float32)) for i in range(2)]
    first, second = (b.parameters[f"p{i}"] for i in range(2))
    assert first is not None and second is not None
    b.update(held[0], held[0] - held[1] * 0.5)
    b.update(held[1], held[1] - held[0] * 0.5)
    b.output(y=b.input("x", (3,)) * 2.0)
    net = one_program(fusec.compile(b, target=target))
    for _ in range(3):
        net.step(np.ones(3, np.float32))
        first, second = first - second * np.float32(0.5), second - first * np.float32(0.5)
    np.testing.assert_allclose(net.value("p0"), first, rtol=1e-5)
    np.testing.assert_allclose(net.value("p1"), second, rtol=1e-5)

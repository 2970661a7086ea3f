"""Test that concats stay in place where that is faster, each group by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from passes.partition.test_concat_in_place import BLOCK, LAST, check, joins, place

from fusec.gpu.autotune.steps.concat_choice import keep_faster_concats
from fusec.ir import Graph
from fusec.passes.partition.concat_in_place import joined, restore_copies
from fusec.schedule.memory_plan import plan_memory
from fusec.schedule.program import Partition

# a concat whose result goes into a part of a second one, next to which a third stands alone
LINKED = f"""graph "linked" (%x: f32[2,16,4,4]{LAST}, %z: f32[2,16,4,4]{LAST}) {{
  %a = exp(%x) : f32[2,16,4,4]{LAST}
  %b = tanh(%x) : f32[2,16,4,4]{LAST}
  %c = concat(%a, %b) {{axis=1}} : f32[2,32,4,4]{LAST}
  %d = softmax(%c) {{axis=1, log=false}} : f32[2,32,4,4]{LAST}
  %e = neg(%x) : f32[2,16,4,4]{LAST}
  %f = concat(%d, %e) {{axis=1}} : f32[2,48,4,4]{LAST}
  %g = sin(%z) : f32[2,16,4,4]{LAST}
  %h = cos(%z) : f32[2,16,4,4]{LAST}
  %i = concat(%g, %h) {{axis=1}} : f32[2,32,4,4]{LAST}
  %y = cosh(%f) : f32[2,48,4,4]{LAST}
  %w = softmax(%i) {{axis=1, log=false}} : f32[2,32,4,4]{LAST}
  return %y, %w
}}"""


def prices(gap_us: float, copy_us: float) -> object:
    def of(graph: Graph, steps: Sequence[Partition]) -> list[float]:
        for step in steps:
            assert [v.type for v in step.outputs] == [v.type for v in step.body.outputs]
        copies = [step.nodes[0].op.name == "concat" for step in steps]
        return [
            copy_us if copy else 10.0 + gap_us * any(v.type.within for v in step.outputs)
            for step, copy in zip(steps, copies, strict=True)
        ]

    return of


@pytest.mark.parametrize(("gap_us", "copy_us", "kind"), [(1.0, 4.0, "view"), (3.0, 4.0, "kernel")])
def test_concats_stay_in_place_if_their_steps_lose_less_than_copies_take(
    rng: np.random.Generator, gap_us: float, copy_us: float, kind: str
) -> None:
    """Three parts are written, two copies saved."""
    program = keep_faster_concats(place(BLOCK), prices(gap_us, copy_us))  # type: ignore[arg-type]  # a function
    assert joins(program) == [f"c1 {kind}", f"c2 {kind}"]
    assert any(v.type.within for v in program.graph.values()) == (kind == "view")
    check(program, BLOCK, rng)


def test_concats_with_a_common_step_are_decided_together(rng: np.random.Generator) -> None:
    program = place(LINKED)
    assert joins(program) == ["c view", "f view", "i view"]
    concats_in_place = {sorted(v.name for v in family.types)[0]: family for family in joined(program)}
    assert {name: sorted(v.name for v in f.types) for name, f in concats_in_place.items()} == {
        "a": ["a", "b"],
        "d": ["d", "e"],
        "g": ["g", "h"],
    }
    left = restore_copies(program, [concats_in_place["g"]])
    assert joins(left) == ["c view", "f view", "i kernel"]
    plan_memory(left)
    check(left, LINKED, rng)
    program = place(LINKED)
    (first,) = (f for f in joined(program) if any(v.name == "a" for v in f.types))
    gone = restore_copies(program, [first])
    assert joins(gone)[0] == "c kernel"
    check(gone, LINKED, rng)


def test_without_concats_nothing_is_timed() -> None:
    text = 'graph "g" (%x: f32[4]) {\n  %y = exp(%x)\n  return %y\n}'
    program = place(text)

    def never(graph: Graph, steps: Sequence[Partition]) -> list[float]:
        raise AssertionError("nothing to ask")

    assert keep_faster_concats(program, never) is program

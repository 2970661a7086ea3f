"""Find the step after which a block of gradients is complete, so that it is sent while later steps run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fusec.ir import Value
from fusec.schedule.buffer_donation import in_place, reads
from fusec.schedule.program import Program


def complete_after(program: Program, state: Mapping[str, str], blocks: Sequence[Collection[str]]) -> list[int | None]:
    """Return, for each block of state, the number of the step after which its new values are in place and not read.

    Workers must send blocks in the same order, although each may run its steps in another one. So no block comes before
    the one ahead of it. None: the block is complete after the whole program only, and so are those after it.

    state: the output that replaces each input.
    blocks: names of the state in each block.
    """
    graph = program.graph
    inputs = {v.name: v for v in graph.inputs}
    results = dict(zip(graph.output_names, graph.outputs, strict=True))
    donated = in_place(program, {inputs[name]: results[output] for name, output in state.items() if output})
    made = {v: index for index, step in enumerate(program.steps) for v in step.outputs}
    read = {reads(program, v) for step in program.steps for v in step.inputs}

    def after(name: str) -> int | None:
        new: Value = results[state[name]]
        return made[new] if new in donated and new not in read else None

    found: list[int | None] = []
    before: int | None = 0
    for block in blocks:
        steps = [after(name) for name in block]
        known = [index for index in steps if index is not None]
        before = None if before is None or len(known) < len(steps) else max(before, *known)
        found.append(before)
    return found

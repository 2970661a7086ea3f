"""Test text in, program out: every fusing case has a sibling that must not fuse. `pytest --accept` records anew.

A case is `== title [oracle]`, a graph, `=>`, the program, and a line for each thing declined.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from passes.partition.judges import AcceptAll, Measured, OneConvolution

from fusec.ir import DType, Graph
from fusec.passes.partition import partition
from fusec.plans.verdict import Refused
from fusec.schedule.program import Program
from fusec.targets.target import load
from fusec.text import parse

FILES = sorted(Path(__file__).parent.glob("*.txt"))
ORACLES = {"measured": Measured, "accept": AcceptAll, "one_convolution": OneConvolution}
WEIGHT = re.compile(r'weight\("([^"]*)"\) : (\w+)\[([\d,]*)\]')


def read_graph(text: str) -> Graph:
    """Parse, inventing an array for each large constant."""
    weights = {
        label: np.ones([int(d) for d in shape.split(",") if d], DType(dtype).numpy)
        for label, dtype, shape in WEIGHT.findall(text)
    }
    return parse(text, weights)


def show(program: Program) -> str:
    """One line a step, with its values (a tilde marks virtual ones); one line for each thing declined."""
    lines: list[str] = []
    for step in program.steps:
        spelled = f" spelled {'+'.join(step.spelling)}" if step.spelling else ""
        values = " ".join(("~" if v in step.virtual else "") + v.name for n in step.nodes for v in n.results)
        engine = f" {step.verdict.kind}" if step.verdict else ""
        lines.append(f"{step.kind.value}{engine} {step.signature}{spelled}: {values}")
    for refusal in program.refusals:
        reason = refusal.reason.message if isinstance(refusal.reason, Refused) else refusal.reason
        lines.append(f"declined {'+'.join(n.op.name for n in refusal.nodes)}: {reason}")
    return "\n".join(lines)


def cases(path: Path) -> list[tuple[str, str, str]]:
    parts = re.split(r"^== ", path.read_text(), flags=re.MULTILINE)
    found = [re.match(r"(.*)\n([\s\S]*?)^=>\n?([\s\S]*)", part, re.MULTILINE) for part in parts[1:]]
    assert None not in found
    return [(match[1], match[2], match[3]) for match in found if match is not None]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_cases(path: Path, request: pytest.FixtureRequest) -> None:
    recorded, got = path.read_text(), [path.read_text().partition("== ")[0]]
    for title, text, _ in cases(path):
        oracle = re.search(r"\[(\w+)\]$", title)
        program = partition(read_graph(text), ORACLES[oracle[1] if oracle else "measured"](), load("h200"))
        got.append(f"== {title}\n{text.rstrip()}\n=>\n{show(program)}\n\n")
    if request.config.getoption("--accept", default=False):
        path.write_text("".join(got).rstrip() + "\n")
    else:
        assert "".join(got).rstrip() == recorded.rstrip()

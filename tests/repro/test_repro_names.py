"""Test that names of a model in the script of `fusec repro` stay in string literals and never become code."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowering.bodies import BODIES, load

from fusec import repro
from fusec.ir import Literal
from fusec.lower_cudnn import ConstantBinding, Lowered, lower

LOWERED = lower(load(BODIES["conv with residual first, bias, relu6, image in NCHW"]))
ALLOWED = {t.uid: 1.0 for t in LOWERED.graph.outputs}
HOSTILE = (
    "coding: unicode_escape",
    "-*- coding: utf_7 -*-",
    "x\\nraise SystemExit(99)",
    "x\nraise SystemExit(99)",
    "x\r\nraise SystemExit(99)",
    "x\x0craise SystemExit(99)",
    "x\u2028raise SystemExit(99)",
    "+AAo-raise SystemExit(99)",
    '"""\nraise SystemExit(99)\n"""',
    "'''", "'", '"', "\\", "\\'", "{title}", "{0.__class__}", "%s", "#", "\0", "\x1b[2J", "\x85",
    "\ud800", "\udcff", "\u202eevil\u202c", "\u2066", "\ufeff", "é", "名",
)  # fmt: skip
names = st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=()))
comments = st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=4).map("\n".join)


def named(inputs: list[str], outputs: list[str], labels: list[str]) -> Lowered:
    """The body with the tensors so named."""

    def labelled(buffer: ConstantBinding, label: str) -> ConstantBinding:
        held = buffer.literal
        return replace(buffer, literal=Literal(held.type, lambda: held.array, label))

    return replace(
        LOWERED,
        inputs=tuple((uid, name) for (uid, _), name in zip(LOWERED.inputs, inputs, strict=True)),
        outputs=tuple((uid, name) for (uid, _), name in zip(LOWERED.outputs, outputs, strict=True)),
        constants=tuple(map(labelled, LOWERED.constants, labels)),
    )


def several(values: tuple[object, ...]) -> st.SearchStrategy[list[str]]:
    return st.lists(names, min_size=len(values), max_size=len(values))


def skeleton(script: str) -> list[tuple[int, str]]:
    """All that Python reads but the contents of strings and how the lines of an expression are broken."""
    tokens = tokenize.generate_tokens(io.StringIO(script).readline)
    return [
        (token.type, "" if token.type == tokenize.STRING else token.string)
        for token in tokens
        if token.type != tokenize.NL
    ]


PLAIN = repro.script(LOWERED, ALLOWED)


@given(several(LOWERED.inputs), several(LOWERED.outputs), several(LOWERED.constants), names | comments)
def test_names_stay_in_string_literals(inputs: list[str], outputs: list[str], labels: list[str], title: str) -> None:
    text = repro.script(named(inputs, outputs, labels), ALLOWED, title)
    assert text.splitlines()[:2] == ["# A cuDNN graph, call by call; see README.txt", "import sys"]
    data = text.encode("ascii")
    assert tokenize.detect_encoding(io.BytesIO(data).readline)[0] == "utf-8"
    assert skeleton(text) == skeleton(PLAIN)
    tree = ast.parse(data)
    told = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("TITLE", "NAMES")
    }
    assert told["TITLE"] == title
    assert sorted(told["NAMES"].values()) == sorted([*inputs, *outputs, *labels])


@pytest.mark.parametrize("title", ["coding: unicode_escape", "vim: set fileencoding=utf_7 :"])
def test_a_name_that_sets_an_encoding_runs_nothing(title: str) -> None:
    """Python obeys a coding in a comment on the first two lines, and each of these decodes a newline from a name."""
    inputs = ["x\\nraise SystemExit(99)#+AAo-raise SystemExit(99)"] * len(LOWERED.inputs)
    script = repro.script(named(inputs, ["y"], ["w"] * len(LOWERED.constants)), ALLOWED, title)
    assert not [node for node in ast.walk(ast.parse(script.encode())) if isinstance(node, ast.Raise)]


def test_the_readme_holds_no_control_characters() -> None:
    from fusec.repro import texts
    from fusec.targets.target import load as target

    text = texts.readme("step 1 of a\x1b[2J\u202eb\nc", target("h200"), 0, "no \x07 op")
    assert all(line.isprintable() for line in text.split("\n"))

"""Text cases of the passes: read, run, and compare both text and meaning.

A case is `== title [precision=fp16, disable=name, state=input, target=a100, rounding=fastest]`, a graph, `=>`, and
the graph after the pass, or `unchanged: reason`. The file's name is that of the pass, or `pipeline` for all of them.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from helpers import assert_close

from fusec.ir import DType, Graph
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.reference import evaluate
from fusec.targets.target import DEFAULT, load
from fusec.text import parse

WEIGHT = re.compile(r'weight\("([^"]*)"\) : (\w+)\[([\d,]*)\]')


@dataclass(frozen=True)
class Case:
    title: str
    text: str
    expected: str

    @property
    def options(self) -> Options:
        given = re.search(r"\[([^\]]*=[^\]]*)\]$", self.title)
        values = dict(item.split("=") for item in given[1].split(", ")) if given else {}
        options = Options.from_names(
            values.get("precision", "fp32"),
            values.get("disable", "").split("+"),
            state=tuple((name, "") for name in values.get("state", "").split("+") if name),
            rounding=values.get("rounding", "fused"),
        )
        return replace(options, target=load(values.get("target", DEFAULT)))

    @property
    def half(self) -> bool:
        """Tell if something is stored in 16 bits, so that rounding shows."""
        return bool(re.search(r"\b(f16|bf16)\[", self.text)) or self.options.precision in ("fp16", "bf16")


def read_cases(path: Path) -> tuple[str, list[Case]]:
    """Return the text before the first case, and the cases."""
    preamble, *parts = re.split(r"^== ", path.read_text(), flags=re.MULTILINE)
    cases: list[Case] = []
    for part in parts:
        match = re.fullmatch(r"(.*)\n([\s\S]*?)^=>[ ]*([\s\S]*)", part, re.MULTILINE)
        assert match is not None, f"{path.name}: case without =>: {part.splitlines()[0]}"
        cases.append(Case(match[1], match[2].strip(), match[3].strip()))
    return preamble, cases


def write_cases(path: Path, preamble: str, cases: list[Case]) -> None:
    blocks: list[str] = []
    for case in cases:
        unchanged = case.expected.startswith("unchanged:")
        arrow = f"=> {case.expected}" if unchanged else f"=>\n{case.expected}"
        blocks.append(f"== {case.title}\n{case.text}\n{arrow}\n")
    path.write_text(preamble + "\n".join(blocks))


def weight(label: str, dtype: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the array for a label, always the same one. Labels that begin with `var` get positive numbers."""
    rng = np.random.default_rng(zlib.crc32(label.encode()))
    if dtype in (DType.I8, DType.U8):
        limits = np.iinfo(dtype.numpy)
        return rng.integers(limits.min, limits.max, shape, dtype.numpy, endpoint=True)
    if dtype.is_narrow_int:
        info = ml_dtypes.iinfo(dtype.numpy)
        return rng.integers(int(info.min), int(info.max), shape, endpoint=True).astype(dtype.numpy)
    array = rng.uniform(0.5, 1.5, shape) if label.startswith("var") else rng.standard_normal(shape)
    return array.astype(dtype.numpy)


def read_graph(text: str) -> Graph:
    weights = {
        label: weight(label, DType(dtype), tuple(int(d) for d in shape.split(",") if d))
        for label, dtype, shape in WEIGHT.findall(text)
    }
    return parse(text, weights)


def inputs_of(graph: Graph, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Random inputs: normal with standard deviation 2, small integers, coin flips."""
    feeds: dict[str, np.ndarray[Any, Any]] = {}
    for value in graph.inputs:
        shape, dtype = value.type.shape, value.type.dtype
        if dtype.is_float:
            feeds[value.name] = (2 * rng.standard_normal(shape)).astype(dtype.numpy)
        else:
            low, high = (0, 2) if dtype is DType.BOOL else (1, 20)
            feeds[value.name] = rng.integers(low, high, shape).astype(dtype.numpy)
    return feeds


def apply(pass_name: str, graph: Graph, options: Options) -> Graph:
    """Run one pass in place, or all of them for `pipeline`; return the graph."""
    if pass_name == "pipeline":  # memory orders would hide what these cases show; layout has its own tests
        return run(tuple(p for p in PIPELINE if p.name != "assign_layout"), graph, options)
    return run(tuple(p for p in PIPELINE if p.name == pass_name)[:1], graph, options)


def assert_same_meaning(before: Graph, after: Graph, rng: np.random.Generator, rtol: float) -> None:
    """Check that both give the same outputs, computed in float64."""
    feeds = inputs_of(before, rng)
    want = evaluate(before, feeds, precision=DType.F64)
    got = evaluate(after, feeds, precision=DType.F64)
    assert got.keys() == want.keys()
    for name, array in want.items():
        if DType.of(array.dtype).is_float:
            assert_close(got[name], array, rtol)
        else:
            np.testing.assert_array_equal(got[name], array)

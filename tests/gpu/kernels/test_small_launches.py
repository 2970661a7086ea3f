"""Launches of few blocks begin before earlier ones end, and read nothing that those may write before they wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, each_way

from fusec.gpu.kernels.codegen.kernel import Launch
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Gather, LayerNorm, Reduce, pw

F16 = DType.F16


def norm(g: Graph, x: Value) -> Value:
    scale, bias = (g.constant(np.ones(x.type.shape[-1], np.float16)) for _ in range(2))
    return g.add(LayerNorm(-1, 1e-5), x, scale, bias)


def gather(g: Graph, x: Value) -> Value:
    return g.add(Gather(0), x, g.constant(np.arange(x.type.shape[0])[::-1].copy()))


MAKERS: dict[str, Callable[..., Any]] = {
    "pointwise": lambda g, x: g.add(pw("neg"), x),
    "gather": gather,
    "layer_norm": norm,
    "reduce": lambda g, x: g.add(Reduce("sum", (1,), True), x),
}


def case(name: str, count: int, features: int = 512) -> Case:
    return build(name, [TensorType((count, features), F16)], MAKERS[name])


def launches(of: Case) -> list[Launch]:
    assert of.kernel is not None
    return [launch for way in each_way(of.kernel) for launch in way.launches]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_small_launch_is_dependent_and_waits_first(name: str, count: int) -> None:
    for launch in launches(case(name, count)):
        body = launch.source.partition(f"{launch.entry}(")[2].partition("{\n")[2]
        assert launch.dependent and body.lstrip().startswith("wait_for_launches();")
        for i, (kind, argument) in enumerate(zip(launch.parameters, launch.arguments, strict=True)):
            is_constant = argument.value is not None and argument.value.literal is not None
            letter = "a" if argument.value is not None else "s"
            if kind.startswith("const ") and not is_constant:
                assert f"{letter}{i} = from_here({letter}{i});" in body


@pytest.mark.parametrize("name", MAKERS)
def test_a_launch_of_more_blocks_than_multiprocessors_is_plain(name: str) -> None:
    for launch in launches(case(name, 1 << 14)):
        assert launch.grid > FIGURES.processors
        assert not launch.dependent


def test_a_sum_in_two_launches_reads_the_parts_after_the_first_one() -> None:
    merges = [launch for launch in launches(case("reduce", 1, 1 << 15)) if launch.entry.startswith("reduce_")]
    merged = [launch for launch in merges if any(kind == "const float*" for kind in launch.parameters)]
    assert merged
    for launch in merged:
        assert launch.dependent and "s0 = from_here(s0);" in launch.source

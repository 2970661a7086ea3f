"""onnx's own backend test suite, run through `fusec.onnx_backend`: what each case comes to, and the record of that."""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from onnx.backend.test import BackendTest

from fusec.errors import ModelError
from fusec.onnx_backend import FusecBackend

RECORD = Path(__file__).parent / "record.txt"
FAMILIES = ("Node", "Simple", "PyTorchConverted", "PyTorchOperator")
# Expected values computed in half precision throughout: off by one unit of it. fusec computes in f32 and rounds once.
HALF = {"rtol": 2e-3}
# The expected zeros are the rounding errors of another algorithm, 2e-7 of numbers around one.
NOISE = {"atol": 1e-6}
WIDER = {
    **dict.fromkeys(("test_attention_4d_causal_fp16", "test_attention_4d_causal_fp16_expanded"), HALF),
    **dict.fromkeys(("test_dft_inverse", "test_dft_inverse_opset19"), NOISE),
}
# The suite aligns corners to a fractional length. ONNX's text, torch and onnxruntime align them to whole elements;
# tests/frontends/test_onnx_resize.py compares these with onnxruntime.
CORNERS = "disputed: corners are aligned to the rounded length, as torch and onnxruntime do"
DISPUTED = dict.fromkeys(
    ("test_resize_downsample_scales_linear_align_corners", "test_resize_downsample_scales_cubic_align_corners"), CORNERS
)


@dataclass(frozen=True)
class Outcome:
    """`refused`: the words of the ModelError, empty if the case passed; `failed`: what else went wrong."""

    refused: str = ""
    failed: str = ""


@cache
def suite() -> Mapping[str, type[unittest.TestCase]]:
    """The test cases of each family; onnx makes the data of the node cases on the way, not without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = BackendTest(FusecBackend, __name__, test_kwargs=WIDER).test_cases
    return {family: made[f"OnnxBackend{family}ModelTest"] for family in FAMILIES}


def names(family: str) -> list[str]:
    return [name for name in vars(suite()[family]) if name.startswith("test_") and name.endswith("_cpu")]


def run(family: str, name: str) -> Outcome:
    """One case; any exception but a ModelError is a failure, a wrong value among them."""
    case: Any = suite()[family](name)
    try:
        getattr(case, name)()
    except ModelError as error:
        return Outcome(refused=" ".join(str(error).removeprefix("<model>: ").split()))
    except Exception as error:  # noqa: BLE001  whatever it is, it is what this looks for
        if isinstance(error, AssertionError) and name.removesuffix("_cpu") in DISPUTED:
            return Outcome(refused=DISPUTED[name.removesuffix("_cpu")])
        return Outcome(failed=f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Outcome()


def outcomes() -> dict[tuple[str, str], Outcome]:
    """Every case of every family."""
    return {(family, name): run(family, name) for family in FAMILIES for name in names(family)}


def record(found: Mapping[tuple[str, str], Outcome]) -> str:
    """The page that is committed: how many passed, and each refusal by name."""
    lines = [
        f"# The backend test suite of onnx {onnx.__version__}, run by tests/onnx_suite; pytest --accept rewrites this.",
        "# All cases pass but those listed here, which are refused with the words given, or disputed.",
    ]
    for family in FAMILIES:
        mine = {name: o for (kind, name), o in found.items() if kind == family}
        refused = sorted((name, o.refused) for name, o in mine.items() if o.refused)
        passed = sum(not (o.refused or o.failed) for o in mine.values())
        lines += ["", f"{family}: {passed} of {len(mine)} passed, {len(refused)} refused or disputed"]
        lines += [f"  {name.removesuffix('_cpu')}: {words}" for name, words in refused]
    return "\n".join(lines) + "\n"


def counts(text: str) -> dict[str, tuple[int, int]]:
    """Passed and all cases of each family, as a record tells them."""
    found: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        family, _, rest = line.partition(":")
        if family in FAMILIES:
            words = rest.split()
            found[family] = (int(words[0]), int(words[2]))
    return found


def listed(text: str) -> Sequence[str]:
    """Names of the refused cases."""
    return [line.split(":")[0].strip() for line in text.splitlines() if line.startswith("  ")]


@cache
def models() -> dict[str, Any]:
    """The model of each node case."""
    from onnx.backend.test import loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in loader.load_model_tests(kind="node")}


def passing() -> Iterator[Any]:
    """The node cases that are not listed as refused, with their data."""
    refused = set(listed(RECORD.read_text()))
    yield from (case for name, case in models().items() if name not in refused)


@cache
def suite_ops() -> frozenset[tuple[str, int]]:
    """Ops of the default domain that a passing node case holds, with its opset."""
    return frozenset(
        (node.op_type, case.model.opset_import[0].version)
        for case in passing()
        for node in case.model.graph.node
        if not node.domain
    )

"""onnx's own backend test suite, run through `fusec.onnx_backend`: what each case comes to, and the record of that.

Device `cpu` is simulation, `cuda` the GPU; `reference` evaluates the imported model, which is cheap and judges nothing
of what is compiled.
"""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.backend.test import BackendTest

from fusec.driver import resolve_target
from fusec.errors import ModelError, TargetError
from fusec.gpu import kernels
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.ir import Constant, Node
from fusec.onnx_backend import FusecBackend, FusecBackendRep
from fusec.ops.random import STATE_NAME
from fusec.reference import evaluate
from fusec.schedule.aliasing import is_view
from fusec.targets.target import DEFAULT, load

RECORD = Path(__file__).parent / "record.txt"
FAMILIES = ("Node", "Simple", "PyTorchConverted", "PyTorchOperator")
ON_GPU, SIMULATED_ONLY = "On a GPU", "runs in simulation only"
# Expected values computed in half precision throughout: off by one unit of it. fusec computes in f32 and rounds once.
HALF = {"rtol": 2e-3}
# The expected zeros are the rounding errors of another algorithm, 2e-7 of numbers around one.
NOISE = {"atol": 1e-6}
WIDER = {
    **dict.fromkeys(("test_attention_4d_causal_fp16", "test_attention_4d_causal_fp16_expanded"), HALF),
    **dict.fromkeys(("test_dft_inverse", "test_dft_inverse_opset19"), NOISE),
}
Case = tuple[str, str]  # family and name, without the device
# The suite aligns corners to a fractional length. ONNX's text, torch and onnxruntime align them to whole elements;
# tests/frontends/onnx/test_resize.py compares these with onnxruntime.
CORNERS = "disputed: corners are aligned to the rounded length, as torch and onnxruntime do"
# The suite expects the numbers that NumPy draws; tests/frontends/onnx/test_random.py checks the distributions.
DRAWN = "disputed: the standard lets each implementation draw other random numbers"
DISPUTED = {
    **dict.fromkeys(
        ("test_resize_downsample_scales_linear_align_corners", "test_resize_downsample_scales_cubic_align_corners"),
        CORNERS,
    ),
    **dict.fromkeys(
        (f"test_bernoulli{kind}{form}" for kind in ("", "_double", "_seed") for form in ("", "_expanded")), DRAWN
    ),
    "test_loop16_seq_none": "disputed: onnx's runner cannot compare a sequence that has a tensor of rank 0",
    **dict.fromkeys((f"test_training_dropout{kind}" for kind in ("", "_default", "_default_mask", "_mask")), DRAWN),
}

FIGURES = kernels.GpuFigures.of(load(DEFAULT))


@dataclass(frozen=True)
class Outcome:
    """`refused`: the words of the error, empty if the case passed; `failed`: what else went wrong. `simulated`: no
    kernel takes a node and its types."""

    refused: str = ""
    failed: str = ""
    simulated: bool = False


class Reference(FusecBackend):
    """The imported models, node by node."""

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> FusecBackendRep:
        _prepared.append(ReferenceRep(model))
        return _prepared[-1]


class ReferenceRep(FusecBackendRep):
    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = self.named(inputs)
        self.graph, lengths = self.compiled(given)
        feeds = {STATE_NAME: np.zeros(2, np.uint64), **given}
        return self.outputs(evaluate(self.graph, {v.name: feeds[v.name] for v in self.graph.inputs}), lengths)


class Shared(FusecBackend):
    """fusec's backend with one oracle for all models of this process: else each model starts processes of its own."""

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> FusecBackendRep:
        _prepared.append(super().prepare(model, device, oracle=_oracle(device), **kwargs))
        return _prepared[-1]


_prepared: list[FusecBackendRep] = []  # by the case that runs
_BACKENDS = {"reference": Reference, "cpu": Shared, "cuda": Shared}


@cache
def _oracle(device: str) -> Oracle:
    here = device == "CUDA"
    return Oracle(resolve_target("auto"), device=here, hand_over=here)


@cache
def _suite(backend: type[FusecBackend]) -> Mapping[str, type[unittest.TestCase]]:
    """The test cases of each family; onnx makes the data of the node cases on the way, not without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = BackendTest(backend, __name__, test_kwargs=WIDER).test_cases
    return {family: made[f"OnnxBackend{family}ModelTest"] for family in FAMILIES}


def cases() -> list[Case]:
    """Every case of every family."""
    found = {family: (n for n in vars(tests) if n.endswith("_cpu")) for family, tests in _suite(Shared).items()}
    return [(family, name.removesuffix("_cpu")) for family, names in found.items() for name in names]


def run(case: Case, device: str) -> Outcome:
    """One case on `cpu`, `cuda` or by `reference`; any exception but a refusal is a failure, a wrong value among
    them."""
    family, name = case
    method = f"{name}_{'cpu' if device == 'reference' else device}"
    test: Any = _suite(_BACKENDS[device])[family](method)
    _prepared.clear()
    refused = failed = ""
    try:
        getattr(test, method)()
    except (ModelError, TargetError) as error:
        refused = " ".join(str(error).removeprefix("<model>: ").split())
    except Exception as error:  # noqa: BLE001  whatever it is, it is what this looks for
        if isinstance(error, AssertionError | TypeError) and name in DISPUTED:
            refused = DISPUTED[name]
        else:
            failed = f"{type(error).__name__}: {' '.join(str(error).split())}"
    graphs = [rep.graph for rep in _prepared if rep.graph is not None]
    return Outcome(refused, failed, any(_in_simulation_only(node) for graph in graphs for node in graph.nodes))


def _in_simulation_only(node: Node) -> bool:
    """Tell if a node has a value of 8 bits or fewer, and no kernel."""
    values = (*node.operands, *node.results)
    if not any(v.type.dtype.is_narrow for v in values) or isinstance(node.op, Constant) or is_view(node):
        return False
    return kernels.find((node,), node.results, FIGURES) is None


def outcomes(of: Iterable[Case], device: str) -> dict[Case, Outcome]:
    return {case: run(case, device) for case in of}


def record(found: Mapping[Case, Outcome]) -> str:
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
        lines += [f"  {name}: {words}" for name, words in refused]
    simulated = sorted(name for (_, name), o in found.items() if o.simulated)
    lines += ["", f"{ON_GPU}: {len(simulated)} more refused, whose types run in simulation only"]
    lines += [f"  {name}" for name in simulated]
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


def refusals(text: str, device: str = "cpu") -> dict[str, str]:
    """The cases that a record lists as refused on a device, and the words."""
    everywhere, _, on_gpu = text.partition(f"\n{ON_GPU}: ")
    split = (line.strip().partition(": ") for line in everywhere.splitlines() if line.startswith("  "))
    found = {name: words for name, _, words in split}
    more = (line.strip() for line in on_gpu.splitlines() if line.startswith("  "))
    return found if device != "cuda" else {**found, **dict.fromkeys(more, SIMULATED_ONLY)}


def unlike_the_record(found: Mapping[Case, Outcome], device: str) -> list[str]:
    """List what fails, and what is refused or passes although the record says otherwise, each in a line."""
    listed = refusals(RECORD.read_text(), device)
    lines: list[str] = []
    for (_, name), outcome in found.items():
        if outcome.failed:
            lines.append(f"{name}: {outcome.failed}")
        elif bool(outcome.refused) != (name in listed):
            lines.append(f"{name}: {outcome.refused or 'passes, and the record lists it as refused'}")
        elif outcome.refused and listed[name] not in outcome.refused:
            lines.append(f"{name}: refused with {outcome.refused!r}, not {listed[name]!r}")
    return lines


@cache
def models() -> dict[str, Any]:
    """The model of each node case."""
    from onnx.backend.test import loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in loader.load_model_tests(kind="node")}


def passing() -> Iterator[Any]:
    """The node cases that are not listed as refused, with their data."""
    refused = refusals(RECORD.read_text())
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

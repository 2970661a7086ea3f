"""Test that candidates of a step compute the same, and that a program runs the fastest of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.autotune.squeeze_excite_text import EXCITATION, drawn
from gpu.kernels.cases import FIGURES
from gpu.stand_in_gpu import Machine
from lowering.lowers_judge import LowersJudge

from fusec.execution.compilation import Compiled
from fusec.gpu.autotune.candidates.candidate_times import StepTuning, Timers, choose_steps, runnables
from fusec.gpu.autotune.candidates.step_candidates import Candidate, candidates
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.autotune.step_choices import apply_choices, has_candidates, replace_steps, step_key, steps_of_choice
from fusec.gpu.kernels import Kernel
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.ops import Conv
from fusec.passes.base import Options
from fusec.passes.partition import partition
from fusec.plans.plan_record import Part
from fusec.plans.verdict import Legal, Plan
from fusec.runtime import Executable, SimulatorBackend
from fusec.schedule.program import Kind, Partition, Program, body_of, single_step
from fusec.targets.target import load
from fusec.text import parse

CONV = "{strides=[1, 1], pads=[1, 1, 1, 1], dilations=[1, 1], groups=GROUPS}"
TEXT = """graph "g" (%x: f32[2,4,5,5]{0,2,3,1}, %z: f32[2,4,5,5]{0,2,3,1}) {
  %w = constant weight("w") : f32[4,PER,3,3]{0,2,3,1}
  %b = constant weight("b") : f32[1,4,1,1]
  %c = conv(%x, %w) ATTRIBUTES : f32[2,4,5,5]{0,2,3,1}
  %d = add(%c, %b) : f32[2,4,5,5]{0,2,3,1}
  %e = add(%d, %z) : f32[2,4,5,5]{0,2,3,1}
  %f = relu(%e) : f32[2,4,5,5]{0,2,3,1}
  %s = softmax(%f) {axis=1} : f32[2,4,5,5]{0,2,3,1}
  %c2 = conv(%s, %w) ATTRIBUTES : f32[2,4,5,5]{0,2,3,1}
  %d2 = add(%c2, %b) : f32[2,4,5,5]{0,2,3,1}
  %e2 = add(%d2, %x) : f32[2,4,5,5]{0,2,3,1}
  %y = swish(%e2) : f32[2,4,5,5]{0,2,3,1}
  return %y
}"""


def compiled(groups: int = 1) -> Compiled:
    text = TEXT.replace("ATTRIBUTES", CONV.replace("GROUPS", str(groups))).replace("PER", str(4 // groups))
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((4, 4 // groups, 3, 3)).astype(np.float32),
        "b": rng.standard_normal((1, 4, 1, 1)).astype(np.float32),
    }
    graph, target, judge = parse(text, weights), load("h200"), LowersJudge()
    return Compiled(graph, partition(graph, judge, target), target, Options(), judge)


def rewrite(
    program: Program, tensor_cores: bool, launch_us: float, level: str, time_us: Any, *timers: Any, **more: Any
) -> Program:
    """Replace each step by the candidate that these times choose."""
    tuning = StepTuning(tensor_cores, launch_us, level, FIGURES)
    given = Timers(lambda graphs, rivals_us: time_us(graphs), *timers)
    return replace_steps(program, choose_steps(program, tuning, given, **more), FIGURES)


def signatures(program: Program) -> list[str]:
    return [step.signature for step in program.steps]


def outputs(of: Compiled) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(v.type.dtype.numpy) for v in of.graph.inputs}
    return Executable(of, SimulatorBackend()).run(None, feeds)


def test_candidates_of_a_fused_convolution() -> None:
    of = compiled()
    (step, *_) = of.program.steps
    assert [tuple(p.signature for p in form) for form in candidates(of.graph, step, "none", FIGURES)] == [
        (step.signature,)
    ]
    quick = [tuple(p.spelling for p in form) for form in candidates(of.graph, step, "quick", FIGURES)]
    assert len(quick) == len(set(quick)) >= 2 and all(len(form) == 1 for form in quick)
    full = {tuple(p.signature for p in form) for form in candidates(of.graph, step, "full", FIGURES)}
    assert ("conv", "bias+add+relu") in full and ("conv+bias", "add+relu") in full
    softmax = next(s for s in of.program.steps if s.kind is Kind.KERNEL)
    assert candidates(of.graph, softmax, "full", FIGURES) == [(softmax,)]


@pytest.mark.parametrize("level", ["quick", "full"])
def test_the_fastest_candidate_of_each_step_computes_the_same(level: str) -> None:
    of = compiled()
    want = outputs(of)
    for name in range(4):
        asked: list[str] = []

        def time_us(graphs: Mapping[str, CudnnGraph], name: int = name, asked: list[str] = asked) -> dict[str, float]:
            asked.extend(graphs)
            return {key: 1.0 if i == name else 10.0 for i, key in enumerate(graphs)}

        program = rewrite(of.program, True, 1.0, level, time_us)
        for got, right in zip(
            outputs(Compiled(of.source, program, of.target, of.options, of.judge)), want, strict=True
        ):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)
        assert len(asked) == len(set(asked))


def test_a_split_wins_where_both_parts_are_fast() -> None:
    of = compiled()

    def time_us(graphs: Mapping[str, CudnnGraph]) -> dict[str, float]:
        return {key: 100.0 if "conv" in str(g) and "pointwise" in str(g) else 1.0 for key, g in graphs.items()}

    program = rewrite(of.program, True, 2.0, "full", time_us)
    assert signatures(program) == ["conv", "bias+add+relu", "softmax", "conv", "bias+add+swish"]
    assert all(len(step.virtual) == 0 for step in program.steps if step.signature == "conv")


SWIGLU = """graph "g" (%x: f16[2,8,16]) {
  %a = constant weight("a") : f16[16,24]
  %b = constant weight("b") : f16[16,24]
  %g = matmul(%x, %a)
  %s = swish(%g)
  %u = matmul(%x, %b)
  %y = mul(%s, %u)
  return %y
}"""


@pytest.mark.parametrize("level", ["quick", "full"])
def test_two_products_may_run_as_steps_before_the_op_that_joins_them(level: str) -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((16, 24)).astype(np.float16) for name in "ab"}
    graph, target, judge = parse(SWIGLU, weights), load("h200"), LowersJudge()
    of = Compiled(graph, partition(graph, judge, target), target, Options(), judge)
    (step,) = of.program.steps
    slow = replace(step, verdict=None if step.verdict is None else Legal((Plan(4, (), False, 0, True),)))
    found = {tuple(p.signature for p in form) for form in candidates(graph, slow, level, FIGURES)}
    assert {("matmul", "matmul+swish+mul"), ("matmul", "matmul", "swish+mul")} <= found

    def time_us(graphs: Mapping[str, CudnnGraph]) -> dict[str, float]:
        return {key: 10.0 if "swish" in str(g) or "tanh" in str(g) else 1.0 for key, g in graphs.items()}

    def kernels_us(asked: Mapping[str, Kernel]) -> dict[str, float]:
        return dict.fromkeys(asked, 1.0)

    before = Program(graph, (slow,))
    program = rewrite(before, True, 1.0, level, time_us, kernels_us)
    assert signatures(program) == ["matmul", "matmul", "swish+mul"]
    assert [s.kind for s in program.steps][-1] is Kind.KERNEL
    for got, right in zip(outputs(replace(of, program=program)), outputs(of), strict=True):
        np.testing.assert_allclose(got, right, rtol=2e-2, atol=2e-2)


def test_a_prologue_of_a_product_may_be_split_off() -> None:
    text = """graph "g" (%x: f16[2,8,5,5]{0,2,3,1}) {
      %k = constant [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0] : f16[8,1,1]
      %w = constant weight("w") : f16[8,8,1,1]{0,2,3,1}
      %m = mul(%x, %k) : f16[2,8,5,5]{0,2,3,1}
      %r = relu(%m) : f16[2,8,5,5]{0,2,3,1}
      %c = conv(%r, %w) {strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1], groups=1} : f16[2,8,5,5]{0,2,3,1}
      %y = relu(%c) : f16[2,8,5,5]{0,2,3,1}
      return %y
    }"""
    graph = parse(text, {"w": np.ones((8, 8, 1, 1), np.float16)})
    nodes = [node for node in graph.nodes if node.op.name != "constant"]
    step = Partition(tuple(nodes), Kind.CUDNN, body_of(graph, nodes))
    found = {tuple((p.kind, p.signature) for p in form) for form in candidates(graph, step, "full", FIGURES)}
    assert ((Kind.CUDNN, "mul+relu"), (Kind.CUDNN, "conv+relu")) in found
    assert ((Kind.KERNEL, "mul+relu"), (Kind.CUDNN, "conv+relu")) in found


@pytest.mark.parametrize(("rows", "level", "runs"), [(2048, "quick", False), (2048, "full", True), (64, "quick", True)])
def test_a_large_product_of_integers_is_not_timed_as_a_kernel_without_tensor_cores(
    rows: int, level: str, runs: bool
) -> None:
    text = f"""graph "g" (%x: i8[{rows},1024]) {{
      %w = constant weight("w") : i8[1024,96]
      %m = matmul(%x, %w)
      %f = cast(%m) {{to=f32}}
      return %f
    }}"""
    graph = parse(text, {"w": np.ones((1024, 96), np.int8)})
    nodes = [node for node in graph.nodes if node.op.name != "constant"]
    step = Partition(tuple(nodes), Kind.CUDNN, body_of(graph, nodes))
    assert ((Kind.KERNEL,) in [tuple(p.kind for p in f) for f in candidates(graph, step, level, FIGURES)]) == runs


def test_launch_times_count() -> None:
    of = compiled()

    def time_us(graphs: Mapping[str, CudnnGraph]) -> dict[str, float]:
        return {key: 9.0 if "conv" in str(g) and "pointwise" in str(g) else 4.0 for key, g in graphs.items()}

    assert len(rewrite(of.program, True, 0.5, "full", time_us).steps) == 5
    assert len(rewrite(of.program, True, 2.0, "full", time_us).steps) == 3


def test_depthwise_convolutions_are_split_at_the_quick_level_too() -> None:
    of = compiled(groups=4)
    step = next(s for s in of.program.steps if any(n.op.name == "conv" for n in s.nodes))
    if len(step.nodes) > 1:
        assert any(len(form) == 2 for form in candidates(of.graph, step, "quick", FIGURES))


@pytest.mark.parametrize("level", ["none", "quick"])
def test_where_nothing_runs_ops_run_one_by_one(level: str) -> None:
    of = compiled()
    with pytest.warns(UserWarning, match=r"no plan of conv\+bias\+add\+(relu|swish) runs on this GPU"):
        program = rewrite(of.program, True, 1.0, level, lambda graphs: {})
    assert signatures(program) == ["conv", "bias", "add", "relu", "softmax", "conv", "bias", "add", "swish"]
    assert {step.kind for step in program.steps} == {Kind.KERNEL}
    for got, want in zip(outputs(replace(of, program=program)), outputs(of), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_candidate_whose_step_does_not_lower_has_no_code() -> None:
    of = compiled()
    form = candidates(of.graph, of.program.steps[0], "none", FIGURES)[0]
    assert runnables(form, True, FIGURES) is not None
    softmax = next(s for s in of.program.steps if s.kind is Kind.KERNEL)
    (kernel,) = runnables((softmax,), True, FIGURES) or [None]
    assert isinstance(kernel, Kernel) and kernel.name == "softmax"
    assert runnables((replace(softmax, kind=Kind.CUDNN),), True, FIGURES) is None
    conv = single_step(of.graph, of.program.steps[0].nodes[0])
    assert runnables((conv,), True, FIGURES) is None, "there is no kernel of a dense convolution"


def test_kernels_compete() -> None:
    of = compiled(groups=4)

    def time_us(graphs: Mapping[str, CudnnGraph]) -> dict[str, float]:
        return dict.fromkeys(graphs, 10.0)

    def kernels_us(asked: Mapping[str, Kernel], us: float = 1.0) -> dict[str, float]:
        return {key: us for key, kernel in asked.items() if kernel.name.startswith("depthwise")}

    program = rewrite(of.program, True, 1.0, "quick", time_us, kernels_us)
    assert [step.kind for step in program.steps] == [Kind.KERNEL] * 3
    assert signatures(program) == signatures(of.program)
    for got, want in zip(outputs(replace(of, program=program)), outputs(of), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    slow = rewrite(of.program, True, 1.0, "quick", time_us, lambda asked: kernels_us(asked, 99.0))
    assert [step.kind for step in slow.steps] == [Kind.CUDNN, Kind.KERNEL, Kind.CUDNN]
    rest = rewrite(of.program, True, 1.0, "quick", time_us, lambda asked: dict.fromkeys(asked, 2.0))
    assert {step.kind for step in rest.steps} == {Kind.KERNEL}
    assert rewrite(of.program, True, 1.0, "none", time_us, kernels_us).steps[0].kind is Kind.CUDNN


def test_steps_of_a_candidate_are_timed_as_a_sequence() -> None:
    of = compiled()
    asked: list[tuple[str, ...]] = []

    def time_us(graphs: Mapping[str, CudnnGraph]) -> dict[str, float]:
        return {key: 10.0 if "conv" in str(g) and "pointwise" in str(g) else 6.5 for key, g in graphs.items()}

    def taking(us: float) -> Callable[[Sequence[Candidate]], list[float]]:
        def together_us(found: Sequence[Candidate]) -> list[float]:
            asked.extend(tuple(part.signature for part in form) for form in found)
            return [us] * len(found)

        return together_us

    assert len(rewrite(of.program, True, 1.0, "full", time_us, sequence_us=taking(11.0)).steps) == 3
    assert ("conv", "bias+add+relu") in asked
    assert len(rewrite(of.program, True, 1.0, "full", time_us, sequence_us=taking(9.0)).steps) == 5
    asked.clear()

    def hopeless(graphs: Mapping[str, CudnnGraph]) -> dict[str, float]:
        return {key: 10.0 if "conv" in str(g) and "pointwise" in str(g) else 9.0 for key, g in graphs.items()}

    assert len(rewrite(of.program, True, 1.0, "full", hopeless, sequence_us=taking(1.0)).steps) == 3
    assert asked == []


def test_steps_timed_as_a_sequence_share_the_values_between_them(machine: Machine) -> None:
    from fusec.gpu.autotune.candidates.candidate_runner import bind_candidate, graphs_of
    from fusec.gpu.launch.kernel_launcher import Launcher

    of = compiled()
    form = next(
        f for f in candidates(of.graph, of.program.steps[0], "full", FIGURES) if len(f) == 2 and f[1].kind is Kind.CUDNN
    )
    assert len(graphs_of([form, form], True)) == 2
    seen: list[tuple[CudnnGraph, Mapping[int, Any]]] = []
    ran: list[int] = []

    def bind(graph: CudnnGraph, buffers: Mapping[int, Any]) -> Callable[[], None]:
        seen.append((graph, buffers))
        place = len(seen)
        return lambda: ran.append(place)

    bind_candidate(form, True, bind, Launcher(), FIGURES)()
    (first, made), (second, read) = seen
    outputs = {id(made[t.uid]) for t in first.outputs}
    assert ran == [1, 2] and outputs & {id(read[t.uid]) for t in second.inputs}
    assert {t.uid for t in (*second.inputs, *second.outputs)} == set(read)


def test_a_product_in_another_spelling_is_timed_with_the_ops_after_it(machine: Machine) -> None:
    """The body of such a step calls its results by other names."""
    from fusec.gpu.autotune.candidates.candidate_runner import bind_candidate
    from fusec.gpu.launch.kernel_launcher import Launcher

    text = """graph "g" (%x: f16[16,8]) {
      %w = constant weight("w") : f16[8,8]
      %b = constant [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0] : f16[8]
      %m = matmul(%x, %w)
      %a = add(%m, %b)
      %y = gelu(%a)
      return %y
    }"""
    graph = parse(text, {"w": np.ones((8, 8), np.float16)})
    nodes = tuple(node for node in graph.nodes if node.op.name != "constant")
    found = [
        f
        for f in candidates(graph, Partition(nodes, Kind.CUDNN, body_of(graph, nodes)), "full", FIGURES)
        if len(f) == 2
    ]
    assert {f[0].spelling for f in found} == {("as_convolution",), ()}, "each spelling of the product"
    for form in found:
        ran: list[CudnnGraph] = []
        bind_candidate(form, True, lambda lowered, buffers, ran=ran: lambda: ran.append(lowered), Launcher(), FIGURES)()
        assert len(ran) + sum(part.kind is Kind.KERNEL for part in form) == 2


def test_a_product_in_another_spelling_still_writes_into_its_part_of_a_concat() -> None:
    text = """graph "g" (%x: f16[16,8]) {
      %w = constant weight("w") : f16[8,8]
      %m = matmul(%x, %w) : f16[16,8]
      %y = relu(%m) : f16[16,8]
      return %y
    }"""
    graph = parse(text, {"w": np.ones((8, 8), np.float16)})
    nodes = tuple(node for node in graph.nodes if node.op.name != "constant")
    (y,) = graph.outputs
    graph.set_type(y, replace(y.type, within=(16, 24)))
    step = Partition(nodes, Kind.CUDNN, body_of(graph, nodes))
    spellings = {form[0].spelling: form[0].body for form in candidates(graph, step, "quick", FIGURES) if len(form) == 1}
    assert ("as_convolution",) in {names[:1] for names in spellings}
    for names, timed in spellings.items():
        (made,) = steps_of_choice(graph, step, (Part(2, "cudnn", names),), FIGURES)
        assert str(made.body) == str(timed), "what runs is what was timed"
        assert made.body.outputs[0].type.within == (16, 24)


def excited() -> Compiled:
    graph, target, judge = parse(EXCITATION, drawn(EXCITATION)), load("h200"), LowersJudge()
    return Compiled(graph, partition(graph, judge, target), target, Options(), judge)


BARE = (("cudnn", "conv"), ("kernel", "conv"))  # a convolution without the ops after it


def test_a_kernel_for_several_steps_competes_with_these_steps() -> None:
    of = excited()
    want = outputs(of)
    program = fuse_steps(of.program, FIGURES, products=True)
    (step, _) = program.steps
    assert candidates(program.graph, step, "none", FIGURES) == [(step,)]
    chain = ("kernel", "conv+relu+conv+sigmoid")
    whole = {(("kernel", step.signature),)}
    apart = {
        (("kernel", "conv+bias+swish"), ("kernel", "reduce"), chain),
        *((a_convolution, ("kernel", "bias+swish+reduce"), chain) for a_convolution in BARE),
    }
    for level, names in (("quick", whole), ("full", whole | apart)):
        found = candidates(program.graph, step, level, FIGURES)
        assert {tuple((p.kind.value, p.signature) for p in form) for form in found} == names
    (lone,) = [p for p in next(f for f in found if len(f) == 3) if p.signature == chain[1]]
    cut = {
        tuple((p.kind.value, p.signature) for p in form) for form in candidates(program.graph, lone, "quick", FIGURES)
    }
    assert cut == {
        (chain,),
        (("cudnn", "conv+relu"), ("cudnn", "conv+sigmoid")),
        (("cudnn", "conv+relu"), ("cudnn", "conv"), ("kernel", "sigmoid")),
        (("cudnn", "conv"), ("kernel", "relu"), ("cudnn", "conv+sigmoid")),
        (("cudnn", "conv"), ("kernel", "relu"), ("cudnn", "conv"), ("kernel", "sigmoid")),
    }
    for form in found:
        parts = tuple(Part(len(part.nodes), part.kind.value, part.spelling) for part in form)
        arranged_so = replace_steps(program, {step_key(program.graph, step): parts}, FIGURES)
        assert len(arranged_so.steps) == len(form) + 1
        again = apply_choices(of.program, {step_key(program.graph, step): parts}, FIGURES)
        united = [p.signature for p in form if has_candidates(p) and p.kind is Kind.KERNEL]
        assert [s.signature for s in again.steps if has_candidates(s) and s.kind is Kind.KERNEL] == united
        for got, right in zip(outputs(replace(of, program=arranged_so)), want, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_the_fastest_candidate_of_a_kernel_for_several_steps_is_chosen() -> None:
    of = excited()
    program = fuse_steps(of.program, FIGURES, products=True)

    def taken(kernel_us: float) -> list[str]:
        def kernels_us(asked: Mapping[str, Kernel]) -> dict[str, float]:
            fused = {key for key, kernel in asked.items() if "depthwise" in kernel.name and "reduce" in kernel.name}
            slower = {key for key, kernel in asked.items() if "+reduce" in kernel.name}
            return {key: kernel_us if key in fused else 1.0 + (key in slower) for key in asked}

        timers = Timers(lambda graphs, rivals_us: dict.fromkeys(graphs, 3.0), kernels_us)
        tuned = choose_steps(program, StepTuning(True, 2.0, "full", FIGURES), timers)
        return signatures(replace_steps(program, tuned, FIGURES))

    assert taken(1.0)[0] == "conv+bias+swish+reduce+conv+relu+conv+sigmoid"
    assert taken(100.0)[:2] == ["conv+bias+swish", "reduce"]


@pytest.mark.parametrize("level", ["quick", "full"])
def test_pointwise_parts_run_as_kernels_unless_every_split_is_timed(level: str) -> None:
    of = compiled(groups=4)
    step = of.program.steps[0]
    assert step.kind is Kind.CUDNN
    parts = [part for form in candidates(of.program.graph, step, level, FIGURES) if len(form) > 1 for part in form]
    pointwise = {part.kind for part in parts if not any(isinstance(node.op, Conv) for node in part.nodes)}
    assert pointwise == ({Kind.KERNEL} if level == "quick" else {Kind.KERNEL, Kind.CUDNN})

"""The whole way from a model to something that runs; read this first.

model → Graph → passes → Graph → partition → Program → (lowered) → Executable.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec

from fusec import frontends, lockfile, passes
from fusec.artifacts import fusec_file
from fusec.builder import Builder
from fusec.errors import CheckError, CudnnNotAskedWarning, ExecutionError, FusecError, ModelError, TargetError
from fusec.execution.compilation import NOT_ASKED, Compiled
from fusec.execution.shape_family import Family
from fusec.execution.shared_weights import SharedWeights
from fusec.gpu import device
from fusec.gpu.autotune.plan_search import LEVELS
from fusec.gpu.autotune.step_candidates import arrange, runs_as_kernel
from fusec.gpu.cudnn import deviceless
from fusec.gpu.cudnn.build_pool import Builders
from fusec.gpu.cudnn.legality import Oracle
from fusec.gpu.cudnn.partition_oracles import CudnnJudge, NoJudge, RulesJudge
from fusec.ir import HALVES, Graph, print_node, quote
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.ops import Scatter
from fusec.passes.base import PRECISIONS, ROUNDINGS, UNORDERED, UNROUNDED, Options, names_of, run
from fusec.passes.layout.io_layout import chosen, insert_edge_copies
from fusec.passes.partition import Oracle as Judge
from fusec.passes.partition import kernels_only, partition
from fusec.passes.partition.attention_fallback import expand_refused_attention
from fusec.passes.partition.concat_in_place import concat_in_place
from fusec.passes.partition.strict_rounding import StrictRounding
from fusec.plans.plan_record import Entry
from fusec.runtime import Executable, SimulatorBackend
from fusec.schedule.program import Program
from fusec.system import compile_timer
from fusec.targets.target import CPU, DEFAULT, Target
from fusec.targets.target import load as load_target

if TYPE_CHECKING:
    from onnx import ModelProto

Progress = Callable[[str, int, int], None]  # stage, done, total
P = ParamSpec("P")


def _accounted(function: Callable[P, Executable]) -> Callable[P, Executable]:
    """What it returns knows where the time went."""

    @functools.wraps(function)
    def counted(*args: P.args, **kwargs: P.kwargs) -> Executable:
        with compile_timer.opened("the rest") as spent:
            executable = function(*args, **kwargs)
        executable.spent = spent
        return executable

    return counted


@_accounted
def compile(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source | Builder,
    *,
    target: str = "auto",
    precision: str = "fp32",
    shapes: Mapping[str, Sequence[int]] | None = None,
    state: Mapping[str, str] | None = None,
    tune: str = "quick",
    budget: float = float("inf"),
    disable: Collection[str] = (),
    rounding: str = "fused",
    deterministic: bool = False,
    channels_last: bool | Collection[str] = False,
    lock: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    family: Family | None = None,
    simulate: bool = False,
    oracle: Oracle | None = None,
) -> Executable:
    """Compile a model for a GPU and return it ready to call.

    model: an ONNX path, ONNX bytes, a ModelProto, the text form, a Graph (which is not changed), or a Builder.
    target: `auto` (the GPU of this machine, or else an H200 in simulation) or one of `fusec targets`.
        It runs on the GPU if there is one of that kind, else through the simulator. `cpu`: op by op in NumPy,
        nothing is put to cuDNN; for training on a machine without a GPU. Where nothing of cuDNN is installed, fusec's
        rules alone say what fuses, with a CudnnNotAskedWarning.
    precision: fp32, tf32, fp16 or bf16, all with fp32 accumulation.
    shapes: concrete shapes, by input name, for inputs with symbolic dims.
    state: inputs that stay on the device between calls (`Executable.bind`, `step`), each with the name of the output
        that replaces it after a call, or an empty name; of a Builder these are its parameters.
    tune: `quick` times the likely ones of cuDNN's plans on the GPU and keeps the fastest, `full` times all, `none`
        takes its first; no effect in simulation. What was chosen is kept on disk for the next time.
    budget: seconds for timing plans; what it does not reach is left for the next time.
    disable: names of passes and rewrite rules to leave out.
    rounding: `fused`: inside a step, values of 16 bits stay in fp32 from op to op; `source`: each is rounded to its
        storage type wherever the model does, and fusions and rewrites that would change that are left out.
    deterministic: every call gives the same bits for the same inputs: plans that add in no fixed order are left out,
        and FusecError is raised for what has no other on a GPU.
    channels_last: names of inputs and outputs that lie channels last in the caller's memory (N, spatial dims, C), while
        their shape is N, C, spatial dims as ever; True: all of rank 4 and 5, state left out. An input that lies so is
        taken as it is, one that does not is copied into that order; outputs are given so.
    lock: a `fusec.lock`: its plans are taken, nothing is timed, and CheckError is raised where it decides none or
        cuDNN does not offer the one it names.
    family: shares constants and more with the other programs it was given to.
    simulate: run in simulation, also where the target's GPU is present.
    oracle: asks cuDNN for many models, for the same target, and keeps its processes; None: one for this model alone.
    `Executable.spent` says where the time went. Raises ModelError, TargetError.
    """
    disable = names_of("disable", disable)
    if tune not in LEVELS:
        raise FusecError(f"tune is one of {', '.join(LEVELS)}, not {tune!r}")
    if isinstance(model, Builder):
        first = {name: array for name, array in model.parameters.items() if array is not None}
        state = {**{name: model.updates.get(name, "") for name in model.parameters}, **(state or {})}
        executable = compile(
            model.graph(),
            target=target,
            precision=precision,
            state=state,
            tune=tune,
            budget=budget,
            disable=disable,
            rounding=rounding,
            deterministic=deterministic,
            channels_last=channels_last,
            lock=lock,
            progress=progress,
            simulate=simulate,
            oracle=oracle,
        )
        executable.bind(**first)
        return executable
    if deterministic:
        disable = frozenset(disable) | {UNORDERED}
    if target == CPU:
        compiled = _for_cpu(model, precision, shapes, disable, state or {}, channels_last)
        return Executable(compiled, SimulatorBackend(CPU))
    with nullcontext() if simulate else device.woken(target):
        model = _read(model, shapes)
    goal = resolve_target(target)
    here = not simulate and device.is_present(goal)
    shared_oracle = oracle is not None
    if oracle is not None and oracle.target != goal:
        raise FusecError(f"the oracle asks about {oracle.target.name}, not about {goal.name}")
    if oracle is None and family is None and not deviceless.is_absent():
        oracle = Oracle(goal, device=here, hand_over=here)
    built = partial(
        build,
        model,
        target=target,
        precision=precision,
        shapes=shapes,
        disable=disable,
        rounding=rounding,
        channels_last=channels_last,
        progress=progress,
        family=family,
        state=state,
        oracle=oracle,
    )
    if family is not None and family.carries:
        family.foresee(shapes or {})
    compiled = built()
    locked = None if lock is None else lockfile.read(os.fspath(lock))
    weights = None if family is None else family.weights
    kept = None
    if locked is not None:
        kept = lockfile.apply(locked, compiled, (lambda graph, choice: True) if here else None)
        compiled = kept.compiled
    if here:
        _require_types_of_the_device(compiled.graph)
        same = compiled.options.deterministic
        if same:
            _require_fixed_order(compiled.graph)
        from fusec.gpu.backend import CudnnBackend  # needs cupy and cudnn, which only a GPU machine must have

        if kept is not None and lock is not None:
            named = {key: [Entry(choice)] for key, choice in kept.choices.items()}
            known: dict[str, Any] = {"suggested": named, "ways": kept.ways, "side_by_side": kept.side_by_side}
            if oracle is not None and not shared_oracle:
                oracle.close()  # its processes hold memory of the GPU
            backend = CudnnBackend("none", progress, deterministic=same, **known)
            executable = Executable(compiled, backend, weights)
            for key, choice in backend.choices().items():
                if choice.identity != kept.choices[key].identity:
                    raise CheckError(f"{os.fspath(lock)}: {kept.choices[key].name} does not build on this GPU")
            return executable
        if family is not None and family.carries and not same:
            return _of_another_size(compiled, built, family, tune, budget, progress)
        shared: dict[str, Any] = {} if family is None else {"kernels": family.kernels()}
        if oracle is not None:
            shared["builders"] = Builders(oracle, same, ends=not shared_oracle)
        backend = CudnnBackend(tune, progress, budget, deterministic=same, **shared)
        executable = _improved(compiled, backend, weights)
        if family is None:  # one of many sizes is wanted soon
            executable.rehearse(backend.rehearse)
        if backend.decided is not executable.compiled.decided:
            executable.compiled = replace(executable.compiled, decided=backend.decided)
        return executable
    return Executable(compiled, SimulatorBackend(), weights)


def _improved(compiled: Compiled, backend: Any, weights: SharedWeights | None, own_kernels: bool = False) -> Executable:
    """The program on a GPU, in the forms that its backend finds best."""
    cores, launch_us, as_source = compiled.options.tensor_cores, compiled.target.launch_us, compiled.options.as_source
    program = backend.improve(compiled.program, cores, launch_us, as_source, own_kernels)
    return Executable(replace(compiled, program=program, decided=backend.decided), backend, weights)


def _of_another_size(
    compiled: Compiled,
    built: Callable[[], Compiled],
    family: Family,
    tune: str,
    budget: float,
    progress: Progress | None,
) -> Executable:
    """A program on a GPU that takes over from those of other sizes what it can: plans, and the forms and kernels that
    were measured for a size near it. built: makes it anew, when cuDNN is to be asked, not believed to say the same."""
    from fusec.gpu.backend import CudnnBackend  # as in `compile`

    shared: dict[str, Any] = {"kernels": family.kernels(), "builders": family.builders()}
    follows = True
    while True:
        followed = family.followed(compiled) if follows else None
        if followed is not None:
            compiled = replace(compiled, program=followed.program, decided=followed.decided)
            known: dict[str, Any] = {"ways": followed.ways, "side_by_side": followed.decided.side_by_side}
            backend = CudnnBackend("none", progress, **known, **shared)
        else:
            backend = CudnnBackend(tune, progress, budget, **shared)
        if backend.tune == "none":
            graphs = backend.plans.unkept(_cudnn_graphs(compiled, own_kernels=followed is None))
            refused: list[CudnnGraph] = []
            received = backend.plans.receive(family.plans(graphs, refused))
            if refused:
                compiled = built()
                continue
            backend.plans.suggest(family.named(graph for key, graph in graphs.items() if key not in received))
        try:
            if followed is not None:
                executable = Executable(compiled, backend, family.weights)
            else:
                executable = _improved(compiled, backend, family.weights, own_kernels=tune == "none")
        except ExecutionError:
            if followed is None:
                raise
            compiled, follows = built(), False
            continue
        family.took(executable, backend, _cudnn_graphs(executable.compiled), followed is None)
        return executable


@compile_timer.spent_on("the model is read")
def _read(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source,
    shapes: Mapping[str, Sequence[int]] | None,
) -> Graph:
    return frontends.load(model, shapes)


@compile_timer.spent_on("passes and partitions")
def build(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source,
    *,
    target: str = "auto",
    precision: str = "fp32",
    shapes: Mapping[str, Sequence[int]] | None = None,
    disable: Collection[str] = (),
    rounding: str = "fused",
    channels_last: bool | Collection[str] = False,
    progress: Progress | None = None,
    family: Family | None = None,
    state: Mapping[str, str] | None = None,
    oracle: Oracle | None = None,
) -> Compiled:
    """The same up to the program: nothing is prepared to run. See `compile`. oracle: whom to ask what cuDNN takes."""
    disable = names_of("disable", disable)
    if target == CPU:
        return _for_cpu(model, precision, shapes, disable, state or {}, channels_last)
    _check_options(precision, disable)
    report = progress or (lambda stage, done, total: None)
    if rounding not in ROUNDINGS:
        raise FusecError(f"rounding is one of {', '.join(ROUNDINGS)}, not {rounding!r}")
    goal = resolve_target(target)
    report("import", 0, 1)
    source = frontends.load(model, shapes)
    left_out = frozenset(disable) | ({UNROUNDED} if rounding == "source" else set[str]())
    options = _options(source, precision, left_out, state or {}, channels_last)
    if family is not None:
        family.weights.share(source)
    if options.as_source and (options.storage in HALVES or any(v.type.dtype in HALVES for v in source.values())):
        options = replace(options, disable=options.disable | passes.REROUNDING)
    pipeline = passes.PIPELINE
    done = iter(range(len(pipeline)))
    graph = run(pipeline, source.clone(), options, lambda name: report(f"pass {name}", next(done), len(pipeline)))
    asked = _judge(goal, options, oracle, family)
    judge = StrictRounding(asked) if options.as_source else asked

    def cut(graph: Graph) -> Program:
        insert_edge_copies(graph, options)
        if family is not None:
            family.weights.share(graph)
        return partition(graph, judge, goal, lambda count, total: report("partition", count, total), dict(state or {}))

    program = expand_refused_attention(
        cut(graph), lambda: run(passes.EARLY_PASSES, source.clone(), options), cut, judge, options
    )
    program = concat_in_place(program, judge, options)
    return Compiled(source, program, goal, options, judge)


def _judge(goal: Target, options: Options, oracle: Oracle | None, family: Family | None) -> Judge:
    """Choose who says what fuses: cuDNN, or fusec's rules alone where nothing of it is installed.

    The rules keep the path that a GPU takes, so `run` and `verify` check passes, lowered graphs and all.
    """
    if family is not None and family.judge is not None:
        return family.judge
    if deviceless.is_absent():
        if device.is_present(goal):
            _require_cudnn()
        warnings.warn(NOT_ASKED, CudnnNotAskedWarning, stacklevel=2)
        judge = RulesJudge(options.tensor_cores)
    else:
        if oracle is None:
            oracle = Oracle(goal, device=device.is_present(goal)) if family is None else family.oracle(goal)
        judge = CudnnJudge(oracle, options.tensor_cores)
    if family is not None:
        family.judge = judge
    return judge


def _require_cudnn() -> None:
    """Raise TargetError where the GPU is here, and cuDNN to run on it is not."""
    if deviceless.is_absent():
        raise TargetError(
            f"cuDNN, which runs programs on this machine's {device.device_name()}, is not installed: "
            f"{deviceless.INSTALL}; or take --target cpu (FUSEC_DEVICE=none hides the GPU)"
        )


def _cudnn_graphs(compiled: Compiled, own_kernels: bool = False) -> dict[str, CudnnGraph]:
    """cuDNN's graphs by their keys; own_kernels: without those that a kernel of fusec's can run."""
    pairs = zip(compiled.program.steps, compiled.lowered, strict=True)
    return {
        lowered.graph.key: lowered.graph
        for step, lowered in pairs
        if lowered is not None and not (own_kernels and runs_as_kernel(step))
    }


def _check_options(precision: str, disable: Collection[str]) -> None:
    if precision not in PRECISIONS:
        raise FusecError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
    unknown = sorted(set(disable) - passes.names())
    if unknown:
        raise FusecError(f"no pass or rule is named {', '.join(unknown)}; `python -m fusec.passes` lists them")


def _options(
    source: Graph,
    precision: str,
    disable: Collection[str],
    state: Mapping[str, str],
    channels_last: bool | Collection[str],
) -> Options:
    inputs = {v.name: v.type for v in source.inputs}
    outputs = {name: v.type for name, v in zip(source.output_names, source.outputs, strict=True)}
    for name, output in state.items():
        if name not in inputs:
            raise FusecError(f"state {quote(name)} is no input of the model")
        if output and output not in outputs:
            raise FusecError(f"{quote(output)}, which shall replace {quote(name)}, is no output of the model")
        if output and not outputs[output].same_value_type(inputs[name]):
            raise FusecError(f"{quote(output)} is {outputs[output]}, and cannot replace {quote(name)}: {inputs[name]}")
    return Options(precision, frozenset(disable), tuple(state.items()), chosen(source, channels_last, state))


def _for_cpu(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source,
    precision: str,
    shapes: Mapping[str, Sequence[int]] | None,
    disable: Collection[str],
    state: Mapping[str, str],
    channels_last: bool | Collection[str],
) -> Compiled:
    """A program of kernels, in the caller's memory orders: NumPy gains nothing from others."""
    _check_options(precision, disable)
    source = frontends.load(model, shapes)
    options = _options(source, precision, {*disable, "layout"}, state, channels_last)
    graph = run(passes.PIPELINE, source.clone(), options)
    insert_edge_copies(graph, options)
    return Compiled(source, kernels_only(graph), load_target(CPU), options, NoJudge())


def load(path: str | os.PathLike[str], *, target: str = "auto", tune: str = "quick") -> Executable:
    """A model that was saved as a `.fusec` file, ready to call; nothing is compiled.

    target: one of those it was compiled for; `auto`: this machine's GPU, without one the first it has.
    tune: `quick` takes the plans of the file, and times these alone if they were made without a GPU; `none` takes the
        first of each, `full` chooses anew.
    Raises ModelError if the file is damaged, or does not have the target.
    """
    with device.woken(target):
        found = load_artifact(path, target)
    if device.is_present(found.compiled.target):
        _require_cudnn()
        _require_types_of_the_device(found.compiled.graph)
        from fusec.gpu.backend import CudnnBackend  # as in `compile`

        for note in found.notes:
            warnings.warn(note, stacklevel=2)
        compiled = found.compiled
        program = arrange(compiled.program, {}, compiled.options.as_source)
        ways = lockfile.ways(found.lock, program, compiled.target, compiled.options.tensor_cores)
        same = compiled.options.deterministic
        if same:
            _require_fixed_order(compiled.graph)
        plans = {} if same else found.plans  # those of a file were not chosen for that
        compiled = replace(compiled, program=program)
        beside = tune != "full" and lockfile.side_by_side(found.lock, compiled.target)
        known: dict[str, Any] = {"suggested": plans, "ways": ways, "side_by_side": beside}
        return Executable(compiled, CudnnBackend(tune, settled=tune != "full", deterministic=same, **known))
    return Executable(found.compiled, SimulatorBackend())


def load_artifact(path: str | os.PathLike[str], target: str = "auto") -> fusec_file.Artifact:
    """What a `.fusec` file holds for a target; see `load`."""
    file = os.fspath(path)
    if target == "auto":
        here, known = device.detect(), fusec_file.targets(file)
        if here is not None and here.name not in known:
            raise ModelError(f"{file}: was compiled for {', '.join(known)}; this machine's GPU is {here.name}")
        target = here.name if here is not None else known[0]
    return fusec_file.load(file, target)


def _require_fixed_order(graph: Graph) -> None:
    """What scatters updates into floats adds them by atomics there."""
    for node in graph.nodes:
        if isinstance(node.op, Scatter) and node.op.reduction != "none" and node.result.type.dtype.is_float:
            raise FusecError(
                f"{print_node(node)}: a GPU adds updates of one place in no fixed order, which deterministic rules out"
            )


def _require_types_of_the_device(graph: Graph) -> None:
    """CuPy has no type of fewer than 8 bits, and no float of 8."""
    narrow = next((v for v in graph.values() if v.type.dtype.is_narrow), None)
    if narrow is not None:
        raise TargetError(f"{narrow!r}: {narrow.type.dtype.value} runs in simulation only, not on a GPU")


def resolve_target(name: str) -> Target:
    """The target of that name; `auto` is the GPU of this machine, or an H200 where there is none."""
    if name != "auto":
        return load_target(name)
    return device.detect() or load_target(DEFAULT)

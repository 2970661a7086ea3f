"""Check the results of compilation: spellings, partitions, lowered graphs and the whole program."""

from __future__ import annotations

import networkx as nx
import numpy as np

from fusec.diagnostics.verify import Check, Runner, random_feeds, verify
from fusec.execution.compilation import Compiled
from fusec.ir import Constant, DType, Graph, HostArray, Node, Value, quote
from fusec.lowering.packing import pack, unpack
from fusec.lowering.simulator import simulate
from fusec.passes.partition import canonical_key
from fusec.passes.partition.equivalent_spellings import FOR_ENGINES, spellings
from fusec.plans.verdict import Legal
from fusec.schedule.program import Kind, body_of
from fusec.schedule.row_writes import match_row_writes
from fusec.testing.case import Case, MismatchError, Property, Trust
from fusec.testing.error_bounds.bounds import Allowance, allowed, compare, execution, meaning
from fusec.testing.error_bounds.perturbed import Rounding
from fusec.testing.properties.fixtures import (
    CASE,
    LoweredStep,
    Prepared,
    compile_once,
    in_float64,
    prepared,
    stored_values,
)
from fusec.testing.properties.reproducible import TWIN, decisions, digest


def spellings_keep_meaning(graph: Graph, case: Case = CASE) -> None:
    """Check that every spelling of a partition computes what the partition's own nodes compute.

    Spellings that only approximate the partition are left out.
    """
    shared = prepared(graph, case)
    for index, step in enumerate(shared.compiled.program.steps):
        if step.kind is not Kind.CUDNN:
            continue
        body = body_of(shared.compiled.graph, step.nodes)
        spelled = {f"spelling {name}": changed for name, f in FOR_ENGINES.items() if (changed := f(body)) is not None}
        spelled |= {f"spelling {'+'.join(names)}": changed for names, changed in spellings(body) if names}
        if not spelled:
            continue
        feeds = shared.operands(step)
        right = allowed(body, feeds, meaning(_narrowest(body)))
        for name, changed in spelled.items():
            what = f"step {index} {step.signature}, {name}"
            changed.verify()
            if [(v.name, v.type) for v in changed.inputs] != [(v.name, v.type) for v in body.inputs]:
                raise MismatchError(f"{what}: reads {list(changed.inputs)} instead of {list(body.inputs)}")
            _same_outputs(changed, body, what)
            compare(in_float64(changed, feeds), [right], what)


def _same_outputs(got: Graph, want: Graph, what: str) -> None:
    """Raise MismatchError unless both graphs return the same names and types.

    Memory orders count, too: the program decides the order of results, not the spelling.
    """
    types, wanted = ([str(v.type) for v in g.outputs] for g in (got, want))
    if got.output_names != want.output_names or types != wanted:
        raise MismatchError(f"{what}: returns {types} instead of {wanted}")


def _narrowest(graph: Graph) -> DType:
    """Find the smallest floating type in a graph: a spelling may narrow a constant to it."""
    floats = [v.type.dtype for v in graph.values() if v.type.dtype.is_float]
    return max(floats, key=lambda d: d.epsilon, default=DType.F64)


def partition_is_sound(graph: Graph, case: Case = CASE) -> None:
    """Check that steps cover every node once, in order, and compute the graph.

    Each step must also be convex and accepted by the judge.
    """
    shared = prepared(graph, case)
    compiled = shared.compiled
    _covers(compiled)
    _is_convex(compiled)
    _virtual_stay_inside(compiled)
    bodies = [step.body for step in compiled.program.steps if step.kind is Kind.CUDNN]
    assert compiled.judge is not None, "a case names its judge"
    for body, verdict in zip(bodies, compiled.judge.judge(bodies), strict=True):
        if not isinstance(verdict, Legal):
            raise MismatchError(f"a step that the judge refuses ({verdict}):\n{body}")
    _keys_tell_apart(compiled)
    _compute_in_sequence(shared)


def _covers(compiled: Compiled) -> None:
    """Check that each node is in one step, and that operands are computed before they are read."""
    made: set[Value] = set(compiled.graph.inputs)
    made.update(n.result for n in compiled.graph.nodes if isinstance(n.op, Constant))
    places: dict[Node, int] = {}
    for index, step in enumerate(compiled.program.steps):
        for node in step.nodes:
            if node in places:
                raise MismatchError(f"{node!r} is in steps {places[node]} and {index}")
            places[node] = index
            for value in node.operands:
                if value not in made:
                    raise MismatchError(f"step {index} {step.signature}: {quote(value.name)} is read before it is made")
            made.update(node.results)
    missing = [n for n in compiled.graph.nodes if n not in places and not isinstance(n.op, Constant)]
    if missing:
        raise MismatchError(f"{missing[0]!r} is in no step")


def _is_convex(compiled: Compiled) -> None:
    """Check that no path leaves a step and enters it again: the graph of the steps has no cycle."""
    wires: nx.DiGraph[Node] = nx.DiGraph()
    step_of = compiled.program.step_of
    wires.add_nodes_from(step_of)
    for node in step_of:
        wires.add_edges_from((v.node, node) for v in node.operands if v.node is not None and v.literal is None)
    for index, step in enumerate(compiled.program.steps):
        if len(step.nodes) == 1:
            continue
        inside = set(step.nodes)
        after = {d for n in inside for d in nx.descendants(wires, n)}
        before = {a for n in inside for a in nx.ancestors(wires, n)}
        between = (after & before) - inside
        if between:
            raise MismatchError(
                f"step {index} {step.signature} is not convex: {next(iter(between))!r} is between its nodes"
            )
    steps = {step: i for i, step in enumerate(compiled.program.steps)}
    dependencies = {(steps[step_of[a]], steps[step_of[b]]) for a, b in wires.edges}
    condensed = nx.DiGraph((a, b) for a, b in dependencies if a != b)
    if not nx.is_directed_acyclic_graph(condensed):
        raise MismatchError(f"steps depend on each other in a cycle: {nx.find_cycle(condensed)}")
    if any(a > b for a, b in dependencies):
        raise MismatchError("a step comes before a step whose output it reads")


def _virtual_stay_inside(compiled: Compiled) -> None:
    returned = set(compiled.graph.outputs)
    for step in compiled.program.steps:
        for value in step.virtual:
            if value in returned or any(compiled.program.step_of.get(user) is not step for user in value.users):
                raise MismatchError(f"step {step.signature}: {quote(value.name)} is virtual but used outside")
            if step.kind is not Kind.CUDNN and match_row_writes(step.nodes) is None:
                raise MismatchError(f"step {step.signature}: {quote(value.name)} is virtual in a {step.kind.value}")


def _keys_tell_apart(compiled: Compiled) -> None:
    """Check that bodies with the same canonical key lower to equal graphs."""
    known: dict[str, tuple[str, Graph]] = {}
    for step, lowered in zip(compiled.program.steps, compiled.lowered, strict=True):
        if lowered is None:
            continue
        key, first = lowered.graph.key, known.setdefault(canonical_key(step.body), (lowered.graph.key, step.body))
        if first[0] != key:
            raise MismatchError(f"two bodies have one canonical key but lower differently:\n{first[1]}\n{step.body}")


def _compute_in_sequence(shared: Prepared) -> None:
    """Check that the bodies, run in sequence in float64, compute the outputs of the graph."""
    graph = shared.compiled.graph
    values = {v.name: np.asarray(shared.feeds[v.name]) for v in graph.inputs}
    for step in shared.compiled.program.steps:
        values.update(in_float64(step.body, {v.name: values[v.name] for v in step.inputs}))
    got: dict[str, HostArray] = {}
    for name, value in zip(graph.output_names, graph.outputs, strict=True):
        literal = value.literal
        got[name] = literal.array if literal is not None else values[value.name]
    compare(got, [shared.optimised_meaning], "the bodies in a row")


def lowered_as_simulated(graph: Graph, case: Case = CASE) -> None:
    """Check that each lowered graph, simulated, computes what its body means.

    It must write all of its outputs and nothing else.
    """
    for step in prepared(graph, case).lowered_steps:
        lowered_agrees(step, execution(case.options.tensor_cores), simulate)


def lowered_agrees(made: LoweredStep, rounding: Rounding, run: Runner) -> None:
    """Raise MismatchError unless `run` computes from the lowered graph what the step's body means."""
    step, lowered, what = made.step, made.lowered, made.what
    runs = [_poisoned(made, real, whole) for real, whole in POISONS]
    before = {uid: buffer.copy() for uid, buffer in runs[0].items()}
    with np.errstate(all="ignore"):
        for buffers in runs:
            run(lowered.graph, buffers)
    written = {*(uid for uid, _ in lowered.outputs), *lowered.spare}
    for uid, buffer in runs[0].items():
        if uid not in written and buffer.tobytes() != before[uid].tobytes():
            raise MismatchError(f"{what}: tensor {uid}, an input, was written")
    by_name = {v.name: v.type for v in step.outputs}
    got: dict[str, HostArray] = {}
    for uid, name in lowered.outputs:
        first, second = (unpack(buffers[uid], by_name[name]) for buffers in runs)
        require_same_bits(what, by_name[name].dtype, name, (first, second))
        got[name] = first
    compare({n: got[n] for n in step.body.output_names}, [allowed(step.body, made.operands, rounding)], what)


POISONS = ((np.nan, 77), (-3e4, -2))


def require_same_bits(what: str, dtype: DType, name: str, runs: tuple[HostArray, HostArray]) -> None:
    """Raise MismatchError if two runs over buffers with different poison have different results.

    A sum in no fixed order does that too, so it is a doubt, unless an element still has the poison of both runs.
    """
    first, second = runs
    if first.tobytes() == second.tobytes():
        return
    bits = np.dtype((np.void, first.itemsize))
    unwritten = [
        np.frombuffer(run.tobytes(), bits) == np.frombuffer(poisoned(1, dtype, *poison).tobytes(), bits)
        for run, poison in zip(runs, POISONS, strict=True)
    ]
    trust = Trust.REFERENCE if (unwritten[0] & unwritten[1]).any() else Trust.SIMULATOR
    message = f"{what}: {quote(name)} depends on what its memory held before"
    raise MismatchError(message, {name: first}, {name: second}, trust)


def _poisoned(made: LoweredStep, real: float, whole: int) -> dict[int, HostArray]:
    """Make flat buffers by uid: operands and constants packed, outputs filled with poison."""
    lowered, types = made.lowered, {v.name: v.type for v in (*made.step.inputs, *made.step.outputs)}
    packed = ((uid, pack(np, made.operands[name], types[name])) for uid, name in lowered.inputs)
    buffers = {uid: lowered.part(uid, buffer.copy()) for uid, buffer in packed}
    buffers |= {b.uid: pack(np, b.literal.array, b.type).copy() for b in lowered.constants}
    for uid, name in lowered.outputs:
        buffers[uid] = poisoned(types[name].span, types[name].dtype, real, whole)
    return buffers | lowered.spare_buffers(np)


def poisoned(count: int, dtype: DType, real: float, whole: int) -> HostArray:
    """Make a flat buffer filled with one number, which depends on the kind of dtype.

    real, whole: the numbers for floats and for other types.
    """
    poison = real if dtype.is_float else whole % 2 if dtype is DType.BOOL else whole
    return np.full(count, poison).astype(dtype.numpy)


def compile_is_deterministic(graph: Graph, case: Case = CASE) -> None:
    """Check that a graph compiled again, here and in another process, gives the same program.

    The other process uses another seed for string hashes.
    """
    compiled = prepared(graph, case).compiled
    if decisions(compile_once(graph, case)) != decisions(compiled):
        raise MismatchError("compiled twice in one process, the graph gives two programs")
    if TWIN.ask(graph, case) != digest(compiled):
        raise MismatchError("compiled in another process, the graph gives another program")


def verification_agrees(graph: Graph, case: Case = CASE) -> None:
    """Check that `fusec verify` reports no error, except those that inputs and conditioning explain."""
    shared = prepared(graph, case)
    with np.errstate(all="ignore"):
        report = verify(shared.compiled, case.seed)
    for check in report.checks:
        if not check.ok and not _explained(shared, check):
            what = f"{check.level} {check.what} is off by {check.error:.2g}, {check.allowed:.2g} allowed"
            raise MismatchError(f"verify: {what}", oracle=Trust.SIMULATOR)


def _explained(shared: Prepared, check: Check) -> bool:
    """Tell if rounding explains an error that the simpler bounds of `verify` do not.

    The check is run on the inputs that `verify` drew.
    """
    rng = np.random.default_rng(shared.case.seed)
    feeds = random_feeds(rng, shared.graph)
    if check.level == "passes":
        bounds = allowed(shared.graph, feeds, meaning(shared.case.options.storage))
        bounds.refine()
        return _allows(bounds[check.what], check.error)
    step = shared.compiled.program.steps[int(check.what.split()[0])]
    values = stored_values(shared.compiled.graph, feeds)
    feeds = {v.name: values[v] for v in step.inputs}
    bounds = allowed(step.body, feeds, execution(shared.case.options.tensor_cores))
    bounds.refine()
    return any(_allows(bounds[name], check.error / 4) for name in step.body.output_names)


def _allows(right: Allowance, error: float) -> bool:
    """Tell if bounds allow a relative L2 error; they allow NaN if some element is not checked."""
    room = _relative(right.want, right.bound)
    return room >= error or (np.isnan(error) and np.isinf(room)) or not np.isfinite(right.want).all()


def _relative(want: HostArray, bound: HostArray) -> float:
    """Return the largest relative L2 error that bounds by element allow."""
    want = want.astype(np.float64)
    most = float(np.abs(want).max(initial=0.0))
    if most == 0.0:
        return float(np.linalg.norm(bound))
    return float(np.linalg.norm(bound / most) / np.linalg.norm(want / most))  # squares may overflow


PROPERTIES_COMPILING: tuple[Property, ...] = (
    Property("spellings_keep_meaning", spellings_keep_meaning),
    Property("partition_is_sound", partition_is_sound),
    Property("lowered_as_simulated", lowered_as_simulated),
    Property("verification_agrees", verification_agrees),
    Property("compile_is_deterministic", compile_is_deterministic),
)

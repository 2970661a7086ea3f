"""A compiled model as one `.fusec` file: graphs, weights, programs and serialized plans, for one or more targets.

Loading asks nobody: no pass, no partitioning, no cuDNN. Nothing of a file is executed: a serialized plan is
handed on only if this machine trusts it (`PlanStore.trusts`); else engine and knobs remain, to build it anew.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from fusec import __version__, lockfile
from fusec.artifacts import container
from fusec.artifacts.container import Reader, written
from fusec.artifacts.safetensors import header_bytes, read, write
from fusec.errors import FusecError, ModelError, VerifyError
from fusec.execution.compilation import Compiled
from fusec.gpu import device
from fusec.gpu.cudnn import deviceless
from fusec.gpu.cudnn.legality import Oracle
from fusec.gpu.cudnn.legality_worker import decode, encode
from fusec.gpu.cudnn.partition_oracles import CudnnJudge
from fusec.ir import Constant, Graph, Literal, Node, print_graph
from fusec.passes.base import PRECISIONS, Options
from fusec.passes.partition.equivalent_spellings import REWRITES
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry
from fusec.plans.verdict import Legal, Refused, Verdict
from fusec.schedule.program import Kind, Partition, Program, Refusal, body_of
from fusec.targets.target import Target
from fusec.targets.target import load as load_target
from fusec.text import parse

FORMAT = 1
SUFFIX = ".fusec"
WEIGHTS, SOURCE, SOURCE_WEIGHTS = "weights.safetensors", "source.txt", "source.safetensors"

Plans = Mapping[tuple[str, str], Sequence[Entry]]  # by target and key of the cuDNN graph, best first


@dataclass(frozen=True)
class Artifact:
    """Contents of a file for one target.

    plans: by key of the cuDNN graph, best first.
    lock: the choice of each step, for all targets.
    notes: what the user should know, such as plans that are built again.
    """

    compiled: Compiled
    plans: Mapping[str, tuple[Entry, ...]]
    lock: lockfile.Lock
    notes: tuple[str, ...] = ()


def versions() -> dict[str, str]:
    """Return the versions that plans depend on: cuDNN and its frontend, empty if not installed."""
    return {name: version for name, version in lockfile.versions().items() if name != "fusec"}


# writing -------------------------------------------------------------------------------------------


def save(path: str | Path, compiled: Sequence[Compiled], plans: Plans | None = None) -> None:
    """Write one model, compiled for one or more targets, into a file; it is there whole or not at all.

    Raises FusecError if these are not one model in one precision, or the file cannot be written.
    """
    first = compiled[0]
    for each in compiled:
        each.require_answers(f"{path}: a compiled model")
    source = _text(first.source)
    for other in compiled[1:]:
        if other.options != first.options or _text(other.source) != source:
            raise FusecError(f"{path}: {other.target.name} was compiled from another model or with other options")
    names = [c.target.name for c in compiled]
    if len(set(names)) != len(names):
        raise FusecError(f"{path}: compiled twice for {max(names, key=names.count)}")
    weights = {x.digest: x for c in compiled for graph in _graphs(c) for x in _literals(graph)}
    rest = {x.digest: x for x in _literals(first.source) if x.digest not in weights}
    with written(Path(path)) as file:
        # the large members last but one: what is read first lies together
        file.add(SOURCE, source.encode())
        for c in compiled:
            _save_program(file, c, plans or {})
        file.add(lockfile.NAME, lockfile.text_of(lockfile.make(compiled, plans)).encode())
        file.stream(WEIGHTS, lambda member: write(member, weights.values()))
        file.stream(SOURCE_WEIGHTS, lambda member: write(member, rest.values()))
        options = {"precision": first.options.precision, "disable": first.options.disabled_names}
        options |= {"state": [list(pair) for pair in first.options.state]} if first.options.state else {}
        options |= {"orders": [list(pair) for pair in first.options.orders]} if first.options.orders else {}
        targets = {c.target.name: c.target.digest for c in compiled}
        file.finish({"format": FORMAT, "fusec": __version__, **versions(), "options": options, "targets": targets})


def _graphs(compiled: Compiled) -> list[Graph]:
    return [compiled.graph, *(step.body for step in compiled.program.steps if step.spelling)]


def _literals(graph: Graph) -> Iterator[Literal]:
    return (node.op.literal for node in graph.nodes if isinstance(node.op, Constant))


def _text(graph: Graph) -> str:
    return print_graph(graph, locations=True, label=lambda literal: literal.digest) + "\n"


def _save_program(file: container.Writer, compiled: Compiled, plans: Plans) -> None:
    name, program = compiled.target.name, compiled.program
    number = {node: i for i, node in enumerate(program.graph.nodes)}
    keys = [None if lowered is None else lowered.graph.key for lowered in compiled.lowered]
    steps = [
        {
            "nodes": [number[node] for node in step.nodes],
            "kind": step.kind.value,
            "spelling": list(step.spelling),
            "body": _text(step.body) if step.spelling else None,
            "verdict": None if step.verdict is None else encode(step.verdict),
            "cudnn": key,
        }
        for step, key in zip(program.steps, keys, strict=True)
    ]
    refusals = [
        {
            "nodes": [number[node] for node in refusal.nodes],
            "reason": refusal.reason if isinstance(refusal.reason, str) else encode(refusal.reason),
        }
        for refusal in program.refusals
    ]
    listed: dict[str, list[dict[str, Any]]] = {}
    for key in dict.fromkeys(key for key in keys if key is not None):
        for place, entry in enumerate(plans.get((name, key), ())):
            blob = f"{name}/plans/{key}/{place}" if entry.blob else None
            if blob is not None and entry.blob is not None:
                file.add(blob, entry.blob)
            listed.setdefault(key, []).append({"choice": entry.choice.to_json(), "blob": blob})
    file.add(f"{name}/graph.txt", _text(program.graph).encode())
    data = {"steps": steps, "refusals": refusals, "plans": listed}
    file.add(f"{name}/program.json", json.dumps(data, separators=(",", ":")).encode())


# reading -------------------------------------------------------------------------------------------


class _LateJudge:
    """Whom to ask again, for reports: brought up when first asked."""

    def __init__(self, target: Target, tensor_cores: bool):
        self._target = target
        self._tensor_cores = tensor_cores

    @cached_property
    def _judge(self) -> CudnnJudge:
        return CudnnJudge(Oracle(self._target, device=device.is_present(self._target)), self._tensor_cores)

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        return self._judge.judge(bodies)


def targets(path: str | Path) -> tuple[str, ...]:
    """The targets a file was compiled for."""
    return tuple(_open(Path(path)).manifest["targets"])


def load(path: str | Path, target: str, store: PlanStore | None = None) -> Artifact:
    """Read what a file holds for a target; weights of the model as imported are read at first use.

    store: says which serialized plans are trusted (default: this machine's).
    Raises ModelError naming the member if anything in the file is damaged, TargetError for an unknown target.
    """
    file = _open(Path(path))
    manifest = file.manifest
    if target not in manifest["targets"]:
        raise ModelError(f"{path}: was compiled for {', '.join(manifest['targets'])}, not for {target}")
    goal = load_target(target)
    told = manifest["options"]
    state = tuple((str(name), str(output)) for name, output in told.get("state", ()))
    orders = tuple((str(name), tuple(map(int, order))) for name, order in told.get("orders", ()))
    options = Options.from_names(told["precision"], told["disable"], state=state, orders=orders)
    weights = _weights(file, WEIGHTS, file.check(WEIGHTS))
    graph = _graph(file, f"{target}/graph.txt", weights)
    source = _graph(file, SOURCE, {**_late_weights(file), **weights})
    member = f"{target}/program.json"
    data = file.json(member)
    try:
        program = _program(graph, data, weights)
        judge = None if deviceless.is_absent() else _LateJudge(goal, options.tensor_cores)
        compiled = Compiled(source, program, goal, options, judge)
        keys = {lowered.graph.key for lowered in compiled.lowered if lowered is not None}
        return _with_plans(file, compiled, data["plans"], keys, store)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError, VerifyError) as error:
        raise ModelError(f"{path}: {member}: not a program of this graph: {error}") from error


def _open(path: Path) -> Reader:
    file = Reader(path)
    manifest = file.manifest
    if manifest.get("format") != FORMAT:
        raise ModelError(
            f"{path}: is of format {manifest.get('format')!r}, this fusec ({__version__}) reads {FORMAT}: "
            "compile the model again"
        )
    options, named = manifest.get("options"), manifest.get("targets")
    if not (isinstance(named, dict) and named and isinstance(options, dict)) or not (
        options.get("precision") in PRECISIONS
        and isinstance(options.get("disable"), list)
        and all(isinstance(name, str) for name in (*named, *named.values(), *options["disable"]))
        and isinstance(options.get("state", []), list)
        and all(isinstance(pair, list) and len(cast("list[Any]", pair)) == 2 for pair in options.get("state", []))
        and _are_orders(options.get("orders", []))
        and all(isinstance(manifest.get(name), str) for name in ("fusec", "cudnn", "frontend"))
    ):
        raise ModelError(f"{path}: {container.MANIFEST}: is not as fusec writes it")
    return file


def _are_orders(told: Any) -> bool:
    """Tell if memory orders by name are as fusec writes them."""
    pairs: list[Any] = cast("list[Any]", told) if isinstance(told, list) else [None]
    for pair in pairs:
        match pair:
            case [str(), [*dims]] if sorted(map(repr, dims)) == sorted(map(repr, range(len(dims)))):
                continue
            case _:
                return False
    return True


def _weights(file: Reader, member: str, data: memoryview) -> dict[str, Literal]:
    try:
        return read(data)
    except ModelError as error:
        raise ModelError(f"{file.path}: {member}: {error}") from error


def _late_weights(file: Reader) -> dict[str, Literal]:
    """Those only the model as imported has; nothing needs them to run, so they are checked when first read."""
    room, lock, checked = file.room(SOURCE_WEIGHTS), threading.Lock(), list[bool]()
    file.fill(SOURCE_WEIGHTS, room[:8])
    file.fill(SOURCE_WEIGHTS, room[: header_bytes(room)])

    def late(literal: Literal) -> Literal:
        def load() -> Any:
            with lock:
                if not checked:
                    file.check(SOURCE_WEIGHTS, room)
                    checked.append(True)
            return literal.array

        return Literal(literal.type, load, literal.label)

    return {name: late(literal) for name, literal in _weights(file, SOURCE_WEIGHTS, room.toreadonly()).items()}


def _graph(file: Reader, member: str, weights: Mapping[str, Literal]) -> Graph:
    try:
        return parse(file.text(member), weights)
    except ModelError as error:
        where = f"{file.path}: "
        raise error if str(error).startswith(where) else ModelError(f"{where}{member}: {error}") from error


def _program(graph: Graph, data: Mapping[str, Any], weights: Mapping[str, Literal]) -> Program:
    nodes = list(graph.nodes)
    steps: list[Partition] = []
    for item in data["steps"]:
        taken = _nodes(nodes, item["nodes"])
        body = body_of(graph, taken) if item["body"] is None else parse(item["body"], weights)
        if unknown := [name for name in item["spelling"] if name not in REWRITES]:
            raise ValueError(f"no rewrite is named {unknown[0]!r}")
        verdict = None if item["verdict"] is None else decode(item["verdict"])
        if verdict is not None and not isinstance(verdict, Legal):
            raise ValueError("a step that cuDNN refused")
        steps.append(Partition(taken, Kind(item["kind"]), body, tuple(map(str, item["spelling"])), verdict))
    refusals: list[Refusal] = []
    for item in data["refusals"]:
        taken, reason = _nodes(nodes, item["nodes"]), item["reason"]
        if not taken:
            raise ValueError("a refusal of no nodes")
        why = reason if isinstance(reason, str) else decode(reason)
        if isinstance(why, Legal):
            raise ValueError("a refusal that cuDNN accepted")
        assert isinstance(why, str | Refused)
        refusals.append(Refusal(taken, body_of(graph, taken), why))
    program = Program(graph, tuple(steps), tuple(refusals))
    program.verify()
    return program


def _nodes(nodes: Sequence[Node], numbers: Sequence[int]) -> tuple[Node, ...]:
    if any(type(i) is not int or i < 0 for i in numbers) or sorted(set(numbers)) != list(numbers):
        raise ValueError(f"nodes {numbers}")
    return tuple(nodes[i] for i in numbers)


def _with_plans(
    file: Reader, compiled: Compiled, data: Mapping[str, Any], keys: set[str], store: PlanStore | None
) -> Artifact:
    """The plans of the graphs the program has. Of other versions, or not trusted: without their blobs."""
    here, manifest = versions(), file.manifest
    made = {name: manifest[name] for name in here}
    stale = [f"{name} {made[name] or 'none'}, here {here[name]}" for name in here if here[name] not in ("", made[name])]
    if manifest["targets"][compiled.target.name] != compiled.target.digest:
        stale.append(f"another description of {compiled.target.name}")
    plans: dict[str, tuple[Entry, ...]] = {}
    strange = 0
    for key, items in data.items():
        entries: list[Entry] = []
        for item in items:
            blob = None if item["blob"] is None or stale else bytes(file.check(item["blob"]))
            if blob is not None:
                store = store or PlanStore()  # not before there is a plan: the cache folder may be read-only
                if not store.trusts(blob):
                    strange += 1
                    blob = None
            entries.append(Entry(Choice.from_json(item["choice"]), blob))
        if key in keys:
            plans[key] = tuple(entries)
    notes: list[str] = []
    if stale and data:
        notes.append(f"{file.path}: made with {'; '.join(stale)}: its plans are built anew")
    if strange:
        notes.append(f"{file.path}: {strange} of its plans were not built here and are built anew")
    if data.keys() - keys:
        notes.append(f"{file.path}: {len(data.keys() - keys)} of its plans are of graphs fusec now writes otherwise")
    lock = lockfile.parse(file.text(lockfile.NAME), f"{file.path}: {lockfile.NAME}")
    return Artifact(replace(compiled, tuned=lock), plans, lock, tuple(notes))


def trust(path: str | Path, store: PlanStore | None = None) -> int:
    """Trust every serialized plan of a file from now on, for its maker is known; returns how many there are."""
    file, keeper = _open(Path(path)), store or PlanStore()
    try:
        blobs = [
            bytes(file.check(item["blob"]))
            for target in file.manifest["targets"]
            for items in file.json(f"{target}/program.json")["plans"].values()
            for item in items
            if item["blob"] is not None
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: its lists of plans are not as fusec writes them: {error!r}") from error
    keeper.trust(*blobs)
    return len(blobs)

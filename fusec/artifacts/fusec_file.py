"""Save a compiled model as one `.fusec` file, and load it: graphs, weights, programs and plans, for some targets.

A file may hold programs for several sets of input shapes. The members of all but the first are in `shapes/N/`.

Loading runs no pass and no partitioning, and asks cuDNN nothing.
A serialized plan holds machine code. It is used only if this machine trusts it (`PlanStore.trusts`); for other plans,
engine and knobs are used to build them again.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from fusec import __version__, lockfile
from fusec.artifacts import container
from fusec.artifacts.container import Reader, written
from fusec.artifacts.safetensors import header_bytes, read, write
from fusec.artifacts.shape_table import ShapeTable
from fusec.errors import FusecError, ModelError, VerifyError
from fusec.execution.compilation import Compiled
from fusec.gpu import device
from fusec.gpu.cudnn import deviceless
from fusec.gpu.cudnn.judges import CudnnJudge
from fusec.gpu.cudnn.legality import Oracle
from fusec.gpu.cudnn.verdict_json import decode, encode
from fusec.ir import Constant, Graph, Literal, Node, digest_all, print_graph
from fusec.passes.base import PRECISIONS, Options
from fusec.passes.partition.equivalent_spellings import REWRITES, respell
from fusec.passes.rewriting.derived_constants import EAGER_BYTES
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice, Entry
from fusec.plans.verdict import Legal, Verdict
from fusec.schedule.program import Kind, Partition, Program, Refusal, body_of
from fusec.targets.target import Target
from fusec.targets.target import load as load_target
from fusec.text import parse

_log = logging.getLogger(__name__)

FORMAT = 1
FORMAT_OF_SHAPES = 2  # with programs for several sets of input shapes
SUFFIX = ".fusec"
WEIGHTS, SOURCE, SOURCE_WEIGHTS = "weights.safetensors", "source.txt", "source.safetensors"


@dataclass(frozen=True)
class Artifact:
    """Contents of a file for one target.

    plans: by key of the cuDNN graph, best first.
    lock: the choices for all steps and targets.
    notes: messages for the user, such as plans that must be built again.
    """

    compiled: Compiled
    plans: Mapping[str, tuple[Entry, ...]]
    lock: lockfile.Lock
    notes: tuple[str, ...] = ()


def versions() -> dict[str, str]:
    """Return the versions that plans depend on: cuDNN and its frontend, empty if not installed."""
    return {name: version for name, version in lockfile.versions().items() if name != "fusec"}


# writing -------------------------------------------------------------------------------------------


def save(
    path: str | Path,
    compiled: Sequence[Compiled],
    plans: lockfile.Plans | None = None,
    table: ShapeTable | None = None,
) -> None:
    """Write a model that is compiled for one or more targets into a file, which is complete or not written at all.

    table: what the file says about shapes, if `compiled` has programs for several sets of input shapes; the first
        program's shapes are the default.
    Raises FusecError if models or options differ, a target occurs twice, or the file cannot be written.
    """
    first = compiled[0]
    for each in compiled:
        each.require_answers(f"{path}: a compiled model")
    shapes = _by_shapes(path, compiled, several=table is not None)
    sources = [members[0].source for members in shapes.values()]
    digest_all(x for graph in (*(g for c in compiled for g in _graphs(c)), *sources) for x in _literals(graph))
    weights = {x.digest: x for c in compiled for graph in _graphs(c) for x in _literals(graph)}
    rest = {x.digest: x for source in sources for x in _literals(source) if x.digest not in weights}
    with written(Path(path)) as file:
        # the large members come last, before the manifest, so that the members that are read first are together
        stored: set[str] = set()
        for number, (source, members) in enumerate(shapes.items()):
            file.add(_folder(number) + SOURCE, source.encode())
            for c in members:
                _save_program(file, c, plans or {}, _folder(number), stored)
            lock = lockfile.make(members, plans)
            file.add(_folder(number) + lockfile.NAME, lockfile.text_of(lock).encode())
        file.stream(WEIGHTS, lambda member: write(member, weights.values()))
        file.stream(SOURCE_WEIGHTS, lambda member: write(member, rest.values()))
        options = {"precision": first.options.precision, "disable": first.options.disabled_names}
        options |= {"state": [list(pair) for pair in first.options.state]} if first.options.state else {}
        options |= {"orders": [list(pair) for pair in first.options.orders]} if first.options.orders else {}
        options |= {"plans": first.options.plans.to_json()} if not first.options.plans.is_default else {}
        targets = {c.target.name: c.target.digest for c in compiled}
        manifest = {"format": FORMAT, "fusec": __version__, **versions(), "options": options, "targets": targets}
        if table is not None:
            manifest |= {"format": FORMAT_OF_SHAPES, "programs": len(shapes), "shapes": table.to_json()}
        file.finish(manifest)
    _log.info("%s: written for %s, %d sets of input shapes", path, ", ".join(targets), len(shapes))


def _by_shapes(path: str | Path, compiled: Sequence[Compiled], several: bool) -> dict[str, list[Compiled]]:
    """Group programs by the text of their source, which differs between sets of input shapes."""
    first, found = compiled[0], dict[str, list[Compiled]]()
    for each in compiled:
        if each.options != first.options:
            raise FusecError(f"{path}: {each.target.name} was compiled with other options")
        found.setdefault(_text(each.source), []).append(each)
    if len(found) > 1 and not several:
        other = list(found.values())[1][0]
        raise FusecError(f"{path}: {other.target.name} was compiled from another model or with other options")
    for members in found.values():
        names = [c.target.name for c in members]
        if len(set(names)) != len(names):
            raise FusecError(f"{path}: compiled twice for {max(names, key=names.count)}")
        if set(names) != {c.target.name for c in compiled}:
            raise FusecError(f"{path}: not all input shapes were compiled for all targets")
    return found


def _folder(number: int) -> str:
    """Return the start of the names of the members for one set of input shapes."""
    return f"shapes/{number}/" if number else ""


def _graphs(compiled: Compiled) -> list[Graph]:
    return [compiled.graph, *(s.body for s in compiled.program.steps if not _follows(compiled.graph, s))]


def _follows(graph: Graph, step: Partition) -> bool:
    """Tell if the graph and the names of the spelling say what the body of a step is.

    Then the file does not hold the body, whose weights are often those of the graph in another order.
    """
    numbers: dict[Hashable, int] = {}

    def label(literal: Literal) -> str:
        large = literal.type.nbytes > EAGER_BYTES
        return f"={numbers.setdefault(literal.key, len(numbers))}" if large else literal.digest

    if not step.spelling:
        return True
    again = respell(body_of(graph, step.nodes), step.spelling)
    return print_graph(again, label=label) == print_graph(step.body, label=label)


def _literals(graph: Graph) -> Iterator[Literal]:
    return (node.op.literal for node in graph.nodes if isinstance(node.op, Constant))


def _text(graph: Graph) -> str:
    return print_graph(graph, locations=True, label=lambda literal: literal.digest) + "\n"


def _save_program(
    file: container.Writer, compiled: Compiled, plans: lockfile.Plans, folder: str, stored: set[str]
) -> None:
    """Write a program and its plans; `stored` has the names of plans that the file has already."""
    name, program = compiled.target.name, compiled.program
    number = {node: i for i, node in enumerate(program.graph.nodes)}
    keys = [None if lowered is None else lowered.graph.key for lowered in compiled.lowered]
    steps = [
        {
            "nodes": [number[node] for node in step.nodes],
            "kind": step.kind.value,
            "spelling": list(step.spelling),
            "body": None if _follows(program.graph, step) else _text(step.body),
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
            if blob is not None and entry.blob is not None and blob not in stored:
                file.add(blob, entry.blob)
                stored.add(blob)
            listed.setdefault(key, []).append({"choice": entry.choice.to_json(), "blob": blob})
    file.add(f"{folder}{name}/graph.txt", _text(program.graph).encode())
    data = {"steps": steps, "refusals": refusals, "plans": listed}
    file.add(f"{folder}{name}/program.json", json.dumps(data, separators=(",", ":")).encode())


# reading -------------------------------------------------------------------------------------------


class _LateJudge:
    """A judge that starts its worker processes when it is first asked, because only reports ask it."""

    def __init__(self, target: Target, options: Options):
        self._target, self._options = target, options

    @cached_property
    def _judge(self) -> CudnnJudge:
        plan_filter, here = self._options.plan_filter, device.is_present(self._target)
        return CudnnJudge(Oracle(self._target, device=here, plan_filter=plan_filter), self._options.tensor_cores)

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        return self._judge.judge(bodies)


def targets(path: str | Path) -> tuple[str, ...]:
    """List the targets that a file was compiled for."""
    return tuple(_open(Path(path)).manifest["targets"])


def table(path: str | Path) -> ShapeTable | None:
    """Return what a file says about shapes; None if it has programs for one set of input shapes only."""
    manifest = _open(Path(path)).manifest
    return ShapeTable.from_json(manifest["shapes"], str(path)) if "shapes" in manifest else None


def load(path: str | Path, target: str, store: PlanStore | None = None) -> Artifact:
    """Read the contents of a file for a target. Weights that only the imported model has are read at first use.

    Of a file with several sets of input shapes, these are the contents for the first one.
    store: tells which serialized plans are trusted; default: the plan cache of this machine.
    Raises ModelError that names a damaged member, TargetError for an unknown target.
    """
    return _load(_open(Path(path)), target, store, 1)[0]


def load_all(path: str | Path, target: str, store: PlanStore | None = None) -> list[Artifact]:
    """Read the contents of a file for a target, for each set of input shapes; see `load`. They share the weights."""
    file = _open(Path(path))
    return _load(file, target, store, file.manifest.get("programs", 1))


def _load(file: Reader, target: str, store: PlanStore | None, count: int) -> list[Artifact]:
    manifest, path = file.manifest, file.path
    if target not in manifest["targets"]:
        raise ModelError(f"{path}: was compiled for {', '.join(manifest['targets'])}, not for {target}")
    gpu, saved = load_target(target), manifest["options"]
    state = tuple((str(name), str(output)) for name, output in saved.get("state", ()))
    orders = tuple((str(name), tuple(map(int, order))) for name, order in saved.get("orders", ()))
    try:
        plans = PlanFilter.from_json(saved.get("plans", {}))
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: {container.MANIFEST}: plans: {error}") from error
    options = Options.from_names(saved["precision"], saved["disable"], state=state, orders=orders, plans=plans)
    options = replace(options, target=gpu)
    weights = _weights(file, WEIGHTS, file.check(WEIGHTS))
    late = {**_late_weights(file), **weights}
    _log.info("%s: read for %s, made with cuDNN %s", path, target, manifest["cudnn"] or "none")
    found: list[Artifact] = []
    derived: dict[Hashable, Literal] = {}
    for number in range(count):
        folder = _folder(number)
        graph = _graph(file, f"{folder}{target}/graph.txt", weights)
        source = _graph(file, folder + SOURCE, late)
        member = f"{folder}{target}/program.json"
        data = file.json(member)
        try:
            program = _program(graph, data, weights, derived)
            judge = None if deviceless.is_absent() else _LateJudge(gpu, options)
            compiled = Compiled(source, program, gpu, options, judge)
            lock = lockfile.parse(file.text(folder + lockfile.NAME), f"{path}: {folder}{lockfile.NAME}")
            found.append(_with_plans(file, replace(compiled, tuned=lock), data["plans"], lock, store))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError, VerifyError) as error:
            raise ModelError(f"{path}: {member}: not a program of this graph: {error}") from error
    return found


def _open(path: Path) -> Reader:
    file = Reader(path)
    manifest = file.manifest
    if manifest.get("format") not in (FORMAT, FORMAT_OF_SHAPES):
        raise ModelError(
            f"{path}: is of format {manifest.get('format')!r}, this fusec ({__version__}) reads {FORMAT} and "
            f"{FORMAT_OF_SHAPES}: compile the model again"
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
        and type(manifest.get("programs", 1)) is int
        and manifest.get("programs", 1) >= 1
    ):
        raise ModelError(f"{path}: {container.MANIFEST}: has other fields than fusec writes")
    return file


def _are_orders(saved: Any) -> bool:
    """Tell if data is a list of pairs of a name and a memory order."""
    return isinstance(saved, list) and all(map(_is_order, cast("list[Any]", saved)))


def _is_order(pair: Any) -> bool:
    match pair:
        case [str(), [*dims]]:
            return sorted(map(repr, dims)) == sorted(map(repr, range(len(dims))))
        case _:
            return False


def _weights(file: Reader, member: str, data: memoryview) -> dict[str, Literal]:
    try:
        return read(data)
    except ModelError as error:
        raise ModelError(f"{file.path}: {member}: {error}") from error


def _late_weights(file: Reader) -> dict[str, Literal]:
    """Return the weights that only the imported model has. They are checked at first use, as no step reads them."""
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


def _program(
    graph: Graph, data: Mapping[str, Any], weights: Mapping[str, Literal], derived: dict[Hashable, Literal]
) -> Program:
    nodes = list(graph.nodes)
    steps: list[Partition] = []
    for item in data["steps"]:
        members = _nodes(nodes, item["nodes"])
        if unknown := [name for name in item["spelling"] if name not in REWRITES]:
            raise ValueError(f"no rewrite is named {unknown[0]!r}")
        if item["body"] is None:
            body = respell(body_of(graph, members), tuple(item["spelling"]))
            _share(body, derived)
        else:
            body = parse(item["body"], weights)
        verdict = None if item["verdict"] is None else decode(item["verdict"])
        if verdict is not None and not isinstance(verdict, Legal):
            raise ValueError("a step that cuDNN refused")
        steps.append(Partition(members, Kind(item["kind"]), body, tuple(map(str, item["spelling"])), verdict))
    refusals: list[Refusal] = []
    for item in data["refusals"]:
        members = _nodes(nodes, item["nodes"])
        if not members:
            raise ValueError("a refusal of no nodes")
        reason = item["reason"] if isinstance(item["reason"], str) else decode(item["reason"])
        if isinstance(reason, Legal):
            raise ValueError("a refusal that cuDNN accepted")
        refusals.append(Refusal(members, body_of(graph, members), reason))
    program = Program(graph, tuple(steps), tuple(refusals))
    program.verify()
    return program


def _share(body: Graph, derived: dict[Hashable, Literal]) -> None:
    """Replace the constants of a body by equal ones of the bodies before, so that programs share their memory."""
    for node in body.nodes:
        if isinstance(node.op, Constant):
            literal = node.op.literal
            key = literal.key if literal.type.nbytes > EAGER_BYTES else literal.digest
            held = derived.setdefault((key, literal.label), literal)
            if held is not literal:
                body.set_op(node, Constant(held))


def _nodes(nodes: Sequence[Node], numbers: Sequence[int]) -> tuple[Node, ...]:
    if any(type(i) is not int or i < 0 for i in numbers) or sorted(set(numbers)) != list(numbers):
        raise ValueError(f"nodes {numbers}")
    return tuple(nodes[i] for i in numbers)


def _with_plans(
    file: Reader, compiled: Compiled, data: Mapping[str, Any], lock: lockfile.Lock, store: PlanStore | None
) -> Artifact:
    """Read the plans of the program's graphs. Blobs of other versions, or that are not trusted, are left out."""
    keys = {lowered.graph.key for lowered in compiled.lowered if lowered is not None}
    here, manifest = versions(), file.manifest
    made = {name: manifest[name] for name in here}
    stale = [f"{name} {made[name] or 'none'}, here {here[name]}" for name in here if here[name] not in ("", made[name])]
    if manifest["targets"][compiled.target.name] != compiled.target.digest:
        stale.append(f"another description of {compiled.target.name}")
    plans: dict[str, tuple[Entry, ...]] = {}
    untrusted = 0
    for key, items in data.items():
        entries: list[Entry] = []
        for item in items:
            blob = None if item["blob"] is None or stale else bytes(file.check(item["blob"]))
            if blob is not None:
                store = store or PlanStore()  # opened only for a plan, because the cache folder may be read-only
                if not store.trusts(blob):
                    untrusted += 1
                    blob = None
            entries.append(Entry(Choice.from_json(item["choice"]), blob))
        if key in keys:
            plans[key] = tuple(entries)
    notes: list[str] = []
    if stale and data:
        notes.append(f"{file.path}: made with {'; '.join(stale)}: its plans are built anew")
    if untrusted:
        notes.append(f"{file.path}: {untrusted} of its plans were not built here and are built anew")
    if data.keys() - keys:
        notes.append(
            f"{file.path}: {len(data.keys() - keys)} of its plans are of graphs that fusec now lowers otherwise"
        )
    return Artifact(compiled, plans, lock, tuple(notes))


def trust(path: str | Path, store: PlanStore | None = None) -> int:
    """Trust the serialized plans of a file, whose maker the user knows, and return their number."""
    file, keeper = _open(Path(path)), store or PlanStore()
    try:
        named = {
            item["blob"]: None
            for number in range(file.manifest.get("programs", 1))
            for target in file.manifest["targets"]
            for items in file.json(f"{_folder(number)}{target}/program.json")["plans"].values()
            for item in items
            if item["blob"] is not None
        }
        blobs = [bytes(file.check(name)) for name in named]
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: its lists of plans have another form than fusec writes: {error!r}") from error
    keeper.trust(*blobs)
    return len(blobs)

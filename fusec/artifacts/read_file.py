"""Read a `.fusec` file: graphs, weights, programs and plans. No pass runs, and cuDNN is asked nothing.

A serialized plan holds machine code. It is used only if this machine trusts it (`PlanStore.trusts`); for other plans,
engine and knobs are used to build them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, cast

from fusec import __version__, lockfile
from fusec.artifacts import container
from fusec.artifacts.container import Reader
from fusec.artifacts.members import (
    FORMAT,
    FORMAT_OF_SHAPES,
    FORMAT_WITHOUT_SOURCES,
    LEFT_OUT,
    REMARKS,
    SOURCE,
    SOURCE_WEIGHTS,
    WEIGHTS,
    folder_of,
    kernel_keys,
    versions,
)
from fusec.artifacts.read_program import read_program
from fusec.artifacts.safetensors import type_of
from fusec.artifacts.saved_options import read_options
from fusec.artifacts.shape_table import ShapeTable
from fusec.artifacts.weights_member import WeightsMember
from fusec.errors import ModelError, VerifyError
from fusec.execution.compilation import Compiled
from fusec.gpu import device
from fusec.gpu.cudnn.legality.judges import CudnnJudge
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.without_driver import deviceless
from fusec.gpu.launch.cubins import NO_CHOICE
from fusec.ir import Graph, Literal, MissingLiteral
from fusec.passes.base import PRECISIONS, Options
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry
from fusec.plans.verdict import Verdict
from fusec.system.dataclass import dataclass
from fusec.targets.target import Target
from fusec.targets.target import load as load_target
from fusec.text import parse

_log = logging.getLogger("fusec.artifacts.fusec_file")  # one name for reading and writing, see docs/environment.md


@dataclass(frozen=True)
class Artifact:
    """Contents of a file for one target.

    plans: by key of the cuDNN graph, best first.
    kernels: the compiled kernels that are trusted, by key of the source (`cubins.CudaSource`).
    lock: the choices for all steps and targets.
    open_choices: nothing was chosen, so the candidates of each step compete on a GPU.
    notes: messages for the user, such as plans that must be built again.
    """

    compiled: Compiled
    plans: Mapping[str, tuple[Entry, ...]]
    lock: lockfile.Lock
    notes: tuple[str, ...] = ()
    open_choices: bool = False
    kernels: Mapping[str, Entry] = field(default_factory=dict[str, Entry])


class _LazyJudge:
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
    """Read the contents of a file for a target.

    The text of the imported model is checked, but parsed at first use. Weights that only it has are read at first use.

    Of a file with several sets of input shapes, these are the contents for the first one.
    store: tells which serialized plans are trusted; default: the plan cache of this machine.
    Raises ModelError that names a damaged member, TargetError for an unknown target.
    """
    return _load(_open(Path(path)), target, store, 1)[0]


def load_all(path: str | Path, target: str) -> list[Artifact]:
    """Read the contents of a file for a target, for each set of input shapes; see `load`. They share the weights."""
    file = _open(Path(path))
    return _load(file, target, None, file.manifest.get("programs", 1))


def _load(file: Reader, target: str, store: PlanStore | None, count: int) -> list[Artifact]:
    manifest, path = file.manifest, file.path
    if target not in manifest["targets"]:
        raise ModelError(f"{path}: was compiled for {', '.join(manifest['targets'])}, not for {target}")
    gpu, saved = load_target(target), manifest["options"]
    try:
        options = read_options(saved, gpu)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: {container.MANIFEST}: plans: {error}") from error
    _log.info("%s: read for %s, made with cuDNN %s", path, target, manifest["cudnn"] or "none")
    kernels, untrusted = _kernels(file, target, store or PlanStore())
    notes = (f"{path}: {untrusted} of its kernels were not compiled here and are compiled anew",) if untrusted else ()
    weights, source_weights = WeightsMember(file, WEIGHTS), WeightsMember(file, SOURCE_WEIGHTS)
    found: list[Artifact] = []
    derived: dict[Hashable, Literal] = {}
    with weights.read_in_thread():
        own = weights.literals()
        late = {**source_weights.literals(), **_left_out(file), **own}
        for number in range(count):
            folder = folder_of(number)
            member = f"{folder}{target}/graph.txt"
            graph = _graph(path, member, file.text(member), own)
            read_source = partial(_graph, path, folder + SOURCE, file.text(folder + SOURCE), late)
            source = cache(partial(_remarked, read_source, _remarks(file, folder + REMARKS)))
            member = f"{folder}{target}/program.json"
            data = file.json(member)
            try:
                program = read_program(graph, data, own, derived)
                judge = None if deviceless.is_absent() else _LazyJudge(gpu, options)
                compiled = Compiled(source, program, gpu, options, judge)
                lock = lockfile.parse(file.text(folder + lockfile.NAME), f"{path}: {folder}{lockfile.NAME}")
                lock = replace(lock, timed=target in manifest.get("timed", [target]))
                read = _with_plans(file, replace(compiled, tuned=lock), data, lock, store)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError, VerifyError) as error:
                raise ModelError(f"{path}: {member}: not a program of this graph: {error}") from error
            found.append(replace(read, kernels=kernels, notes=(*read.notes, *notes)))
    return found


def _kernels(file: Reader, target: str, store: PlanStore) -> tuple[dict[str, Entry], int]:
    """Read the compiled kernels that this machine trusts, by key of the source, and count the others."""
    members = kernel_keys(target, file)
    blobs = {key: bytes(file.check(name)) for key, name in members.items()}
    trusted = {key: Entry(NO_CHOICE, blob) for key, blob in blobs.items() if store.trusts(blob)}
    return trusted, len(members) - len(trusted)


def _open(path: Path) -> Reader:
    file = Reader(path)
    manifest = file.manifest
    if manifest.get("format") not in (FORMAT, FORMAT_OF_SHAPES, FORMAT_WITHOUT_SOURCES):
        raise ModelError(
            f"{path}: is of format {manifest.get('format')!r}, this fusec ({__version__}) reads {FORMAT} to "
            f"{FORMAT_WITHOUT_SOURCES}: compile the model again"
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
        and isinstance(manifest.get("timed", []), list)
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


def _left_out(file: Reader) -> dict[str, Literal]:
    """Return the weights of the imported model that the file was written without."""
    if LEFT_OUT not in file:
        return {}
    error = ModelError(
        f"{file.path}: was written without the weights of the imported model, which this needs: give the model itself, "
        "or write the file with them: sources=True, or `fusec compile --sources`"
    )
    try:
        given = file.json(LEFT_OUT)
        return {d: MissingLiteral(type_of(text), str(label), d, error) for d, (text, label) in given.items()}
    except (AttributeError, TypeError, ValueError, VerifyError) as wrong:
        raise ModelError(f"{file.path}: {LEFT_OUT}: has another form than fusec writes: {wrong}") from wrong


def _graph(path: Path, member: str, text: str, weights: Mapping[str, Literal]) -> Graph:
    try:
        return parse(text, weights)
    except ModelError as error:
        raise ModelError(f"{path}: {member}: {error}") from error


def _remarks(file: Reader, member: str) -> dict[str, str]:
    """Return the remarks on the imported model, by node. Raises ModelError for another form."""
    found: Any = file.json(member) if member in file else {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in cast("dict[str, Any]", found).values()):
        raise ModelError(f"{file.path}: {member}: has another form than fusec writes")
    return cast("dict[str, str]", found)


def _remarked(read: Callable[[], Graph], remarks: Mapping[str, str]) -> Graph:
    graph = read()
    graph.remarks.update(remarks)
    return graph


def _with_plans(
    file: Reader, compiled: Compiled, data: Mapping[str, Any], lock: lockfile.Lock, store: PlanStore | None
) -> Artifact:
    """Read the plans of the program's graphs. Blobs of other versions, or that are not trusted, are left out.

    data: the member with the program.
    """
    keys = {lowered.graph.key for lowered in compiled.lowered if lowered is not None}
    own, candidates = data["plans"], data.get("candidates", {})
    here, manifest = versions(), file.manifest
    made = {name: manifest[name] for name in here}
    stale = [f"{name} {made[name] or 'none'}, here {here[name]}" for name in here if here[name] not in ("", made[name])]
    if manifest["targets"][compiled.target.name] != compiled.target.digest:
        stale.append(f"another description of {compiled.target.name}")
    plans: dict[str, tuple[Entry, ...]] = {}
    untrusted = 0
    for key, items in (*own.items(), *candidates.items()):
        entries: list[Entry] = []
        for item in items:
            blob = None if item["blob"] is None or stale else bytes(file.check(item["blob"]))
            if blob is not None:
                store = store or PlanStore()  # opened only for a plan, because the cache folder may be read-only
                if not store.trusts(blob):
                    untrusted += 1
                    blob = None
            entries.append(Entry(Choice.from_json(item["choice"]), blob))
        if key in keys or key in candidates:
            plans[key] = tuple(entries)
    notes: list[str] = []
    if stale and own:
        notes.append(f"{file.path}: made with {'; '.join(stale)}: its plans are built anew")
    if untrusted:
        notes.append(f"{file.path}: {untrusted} of its plans were not built here and are built anew")
    if own.keys() - keys:
        notes.append(
            f"{file.path}: {len(own.keys() - keys)} of its plans are of graphs that fusec now lowers otherwise"
        )
    return Artifact(compiled, plans, lock, tuple(notes), "candidates" in data)


def _plans_of(program: Mapping[str, Any]) -> list[Any]:
    """Return the lists of plans of a program, also of the candidates of its steps."""
    return [*program["plans"].values(), *program.get("candidates", {}).values()]


def trust(path: str | Path, store: PlanStore | None = None) -> int:
    """Trust the serialized plans of a file, whose maker the user knows, and return their number."""
    file, keeper = _open(Path(path)), store or PlanStore()
    try:
        named = {
            item["blob"]: None
            for number in range(file.manifest.get("programs", 1))
            for target in file.manifest["targets"]
            for items in _plans_of(file.json(f"{folder_of(number)}{target}/program.json"))
            for item in items
            if item["blob"] is not None
        }
        named |= {name: None for target in file.manifest["targets"] for name in kernel_keys(target, file).values()}
        blobs = [bytes(file.check(name)) for name in named]
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: its lists of plans have another form than fusec writes: {error!r}") from error
    keeper.trust(*blobs)
    return len(blobs)

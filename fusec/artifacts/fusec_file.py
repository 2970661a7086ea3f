"""Write a compiled model as one `.fusec` file: graphs, weights, programs and plans, for some targets.

A file may hold programs for several sets of input shapes. The members of all but the first are in `shapes/N/`.
`read_file` reads such files. Other packages call its functions through this module.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from fusec import __version__, lockfile
from fusec.artifacts import container
from fusec.artifacts.container import written
from fusec.artifacts.members import (
    FORMAT,
    FORMAT_OF_SHAPES,
    FORMAT_WITHOUT_SOURCES,
    LEFT_OUT,
    REMARKS,
    SOURCE,
    SOURCE_WEIGHTS,
    SUFFIX,
    WEIGHTS,
    folder_of,
    kernel_member,
    versions,
)
from fusec.artifacts.read_file import Artifact, load, load_all, table, targets, trust
from fusec.artifacts.safetensors import write
from fusec.artifacts.saved_options import options_data
from fusec.artifacts.shape_table import ShapeTable
from fusec.artifacts.write_program import graphs_of, literals_of, program_data
from fusec.errors import FusecError
from fusec.execution.compilation import Compiled
from fusec.gpu.launch.cubins import CompiledKernels
from fusec.ir import Graph, digest_all, print_graph
from fusec.passes.rewriting.derived_constants import EAGER_BYTES
from fusec.plans.lock_record import Lock

__all__ = ["SUFFIX", "WEIGHTS", "Artifact", "load", "load_all", "save", "table", "targets", "trust", "versions"]

_log = logging.getLogger(__name__)


def save(
    path: str | Path,
    compiled: Sequence[Compiled],
    plans: lockfile.Plans | None = None,
    table: ShapeTable | None = None,
    *,
    kernels: CompiledKernels | None = None,
    sources: bool = False,
) -> None:
    """Write a model that is compiled for one or more targets into a file, which is complete or not written at all.

    table: what the file says about shapes, if `compiled` has programs for several sets of input shapes; the first
        program's shapes are the default.
    kernels: compiled kernels; those of other targets are left out.
    sources: also store large weights that only the imported model has, such as fp32 weights of a program in fp16. No
        step reads them. Without them `verify` does not check the passes, and `fusec run --compare` is refused.
    Raises FusecError if models or options differ, a target occurs twice, or the file cannot be written.
    """
    first = compiled[0]
    for each in compiled:
        each.require_answers(f"{path}: a compiled model")
    shapes = _by_shapes(path, compiled, several=table is not None)
    imported = [members[0].source for members in shapes.values()]
    digest_all(x for graph in (*(g for c in compiled for g in graphs_of(c)), *imported) for x in literals_of(graph))
    weights = {x.digest: x for c in compiled for graph in graphs_of(c) for x in literals_of(graph)}
    rest = {x.digest: x for each in imported for x in literals_of(each) if x.digest not in weights}
    left_out = {} if sources else {d: x for d, x in rest.items() if x.type.nbytes > EAGER_BYTES}
    with written(Path(path)) as file:
        # the large members come last, before the manifest, so that the members that are read first are together
        stored: set[str] = set()
        for number, (source, members) in enumerate(shapes.items()):
            file.add(folder_of(number) + SOURCE, source.encode())
            if remarks := members[0].source.remarks:
                file.add(folder_of(number) + REMARKS, json.dumps(remarks).encode())
            for c in members:
                _save_program(file, c, plans or {}, folder_of(number), stored)
            lock = lockfile.make(members, plans)
            file.add(folder_of(number) + lockfile.NAME, lockfile.text_of(lock).encode())
        _save_kernels(file, {c.target.name for c in compiled}, kernels or {})
        file.stream(WEIGHTS, lambda member: write(member, weights.values()))
        file.stream(SOURCE_WEIGHTS, lambda member: write(member, [rest[d] for d in rest if d not in left_out]))
        if left_out:
            file.add(LEFT_OUT, json.dumps({d: [str(x.type), x.label] for d, x in left_out.items()}).encode())
        options = options_data(first.options)
        targets = {c.target.name: c.target.digest for c in compiled}
        manifest = {"format": FORMAT, "fusec": __version__, **versions(), "options": options, "targets": targets}
        manifest |= {"timed": sorted({c.target.name for c in compiled if _is_timed(c)})}
        if table is not None:
            manifest |= {"format": FORMAT_OF_SHAPES, "programs": len(shapes), "shapes": table.to_json()}
        file.finish(manifest | ({"format": FORMAT_WITHOUT_SOURCES} if left_out else {}))
    _log.info("%s: written for %s, %d sets of input shapes", path, ", ".join(targets), len(shapes))


def _save_kernels(file: container.Writer, targets: Container[str], kernels: CompiledKernels) -> None:
    """Write compiled kernels, each once for all programs of a target."""
    for (target, key), entry in kernels.items():
        if target in targets and entry.blob is not None:
            file.add(kernel_member(target, key), entry.blob)


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


def _is_timed(compiled: Compiled) -> bool:
    """Tell if variants of kernels were timed on a GPU, or a lock names them."""
    tuned = compiled.tuned
    return tuned.timed if isinstance(tuned, Lock) else tuned is not None and bool(tuned.variants)


def _text(graph: Graph) -> str:
    return print_graph(graph, locations=True, label=lambda literal: literal.digest) + "\n"


def _save_program(
    file: container.Writer, compiled: Compiled, plans: lockfile.Plans, folder: str, stored: set[str]
) -> None:
    """Write a program and its plans; `stored` has the names of plans that the file has already."""
    name, program = compiled.target.name, compiled.program
    keys = [None if lowered is None else lowered.graph.key for lowered in compiled.lowered]

    def listed(graphs: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for key in graphs:
            for place, entry in enumerate(plans.get((name, key), ())):
                blob = f"{name}/plans/{key}/{place}" if entry.blob else None
                if blob is not None and entry.blob is not None and blob not in stored:
                    file.add(blob, entry.blob)
                    stored.add(blob)
                found.setdefault(key, []).append({"choice": entry.choice.to_json(), "blob": blob})
        return found

    own = dict.fromkeys(key for key in keys if key is not None)
    data: dict[str, Any] = {**program_data(program, _text), "plans": listed(own)}
    for step, key in zip(data["steps"], keys, strict=True):
        step["cudnn"] = key
    given = [entry for key in own for entry in plans.get((name, key), ())]
    if compiled.tuned is None and given and all(entry.choice.time_us is None for entry in given):
        # a GPU chooses what runs each step when it first loads the file
        data["candidates"] = listed(key for key in compiled.candidate_graphs if key not in own)
    file.add(f"{folder}{name}/graph.txt", _text(program.graph).encode())
    file.add(f"{folder}{name}/program.json", json.dumps(data, separators=(",", ":")).encode())

"""Load `.fusec` files, whose programs are for one set of input shapes or for several."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import cast

from fusec import frontends
from fusec.artifacts import fusec_file
from fusec.artifacts.shape_table import ShapeTable
from fusec.compiler import load_file
from fusec.dynamic_shapes.executable import DynamicExecutable
from fusec.dynamic_shapes.padding import Padding
from fusec.dynamic_shapes.size_ranges import GivenShapes, with_sizes
from fusec.dynamic_shapes.sizing import Key, Shapes, SizeRange, Sizing
from fusec.errors import ExecutionError, ModelError
from fusec.execution.shared_weights import SharedWeights
from fusec.frontends.padding_proof import Crop
from fusec.gpu import device
from fusec.gpu.cudnn.load_engines import load_engines_once
from fusec.runtime import Executable, SimulatorBackend


def load(
    path: str | os.PathLike[str], *, target: str = "auto", tune: str = "quick", simulate: bool = False
) -> Executable:
    """Load a model that was saved as a `.fusec` file, and return it ready to call.

    A file with programs for several sets of input shapes is a DynamicExecutable, which takes these shapes only.
    target: one of those it was compiled for; `auto`: this machine's GPU, or the file's first target without one.
    tune: `quick` takes the plans of the file, and times only these and kernels if they were built without a GPU;
        `none` takes the first plan of each step; `full` chooses again.
    simulate: run in simulation, also if the target's GPU is present.
    Raises ModelError if the file is damaged, or does not have the target.
    """
    table = fusec_file.table(os.fspath(path))
    if table is None:
        return load_file.load(path, target=target, tune=tune, simulate=simulate)
    # a cast, because most files are for one set of shapes; a DynamicExecutable has the same methods for callers
    return cast("Executable", _with_shapes(path, table, target, tune, simulate))


def load_dynamic(
    path: str | os.PathLike[str], target: str = "auto", tune: str = "quick", simulate: bool = False
) -> DynamicExecutable:
    """Load a `.fusec` file as a DynamicExecutable, also if it is for one set of input shapes."""
    table = fusec_file.table(os.fspath(path))
    if table is not None:
        return _with_shapes(path, table, target, tune, simulate)
    program = load_file.load(path, target=target, tune=tune, simulate=simulate)
    source = frontends.Source(program.compiled.source, file=os.fspath(path))
    return DynamicExecutable(source, lambda shapes: program, program.device, max_shapes=1)


def load_program(path: str | os.PathLike[str], target: str, tune: str, given: GivenShapes | None) -> Executable:
    """Load one program of a file: that for the shapes given, else the first one."""
    with device.woken(target, load_engines_once):
        artifact = read_artifact(path, target, given)
    return load_file.executable_of(artifact, tune, simulate=False)


def read_artifact(path: str | os.PathLike[str], target: str, given: GivenShapes | None) -> fusec_file.Artifact:
    """Read one program of a file, without preparing it: that for the shapes given, else the first one.

    Raises ModelError if shapes are given for a file that has one program, or they have no program.
    """
    table = fusec_file.table(os.fspath(path))
    if not given:
        return load_file.load_artifact(path, target)
    if table is None:
        raise ModelError(f"{os.fspath(path)}: is compiled already for one set of shapes, so none can be given")
    programs = _programs(path, load_file.target_of(path, target))
    return programs[_key(path, table, chosen_shapes(path, table, given), programs)]


def chosen_shapes(path: str | os.PathLike[str], table: ShapeTable, given: GivenShapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs for the sizes given; a dim that is not given has its likely size."""
    sizing = with_sizes(os.fspath(path), _sizing(table), given)
    if sizing.likely is None:
        raise ModelError(f"{os.fspath(path)}: the shapes given leave the size of a dim open")
    return sizing.likely


def _programs(path: str | os.PathLike[str], target: str) -> dict[Key, fusec_file.Artifact]:
    artifacts = fusec_file.load_all(os.fspath(path), target)
    return {tuple(v.type.shape for v in each.compiled.graph.inputs): each for each in artifacts}


def _sizing(table: ShapeTable) -> Sizing:
    return Sizing(table.inputs, table.outputs, {name: SizeRange(*sizes) for name, sizes in table.ranges.items()})


def _key(path: str | os.PathLike[str], table: ShapeTable, shapes: Shapes, programs: Collection[Key]) -> Key:
    """Return the shapes as a key. Raises ModelError if the file has no such program."""
    names = [spec.name for spec in table.inputs]
    key = tuple(tuple(shapes[name]) for name in names)
    if key not in programs:
        known = "; ".join(", ".join(f"{n} {list(s)}" for n, s in zip(names, k, strict=True)) for k in programs)
        raise ModelError(f"{os.fspath(path)}: has no program for {dict(shapes)}, only for {known}")
    return key


def _check_table(
    path: str | os.PathLike[str],
    table: ShapeTable,
    programs: Mapping[Key, fusec_file.Artifact],
    proved: Mapping[Key, tuple[Crop, ...]],
) -> None:
    """Check that the table of shapes is about the programs. Raises ModelError if it is not."""
    sizing, names = _sizing(table), [spec.name for spec in table.inputs]
    wrong = f"{os.fspath(path)}: its table of shapes does not fit its programs"
    graphs = [each.compiled.graph for each in programs.values()]
    if any([v.name for v in g.inputs] != names or len(g.outputs) != len(table.outputs) for g in graphs):
        raise ModelError(wrong)
    first = next(iter(programs.values())).compiled.source
    try:
        for key in (*programs, *proved):
            sizing.dims(dict(zip(names, key, strict=True)))
        padding = Padding(frontends.Source(first), sizing, table.buckets, cached=0, proved=proved)
        for key, crops in proved.items():
            shapes = dict(zip(names, key, strict=True))
            large = padding.padded(shapes, padding.changed(sizing.dims(shapes)))
            results = programs[tuple(large[name] for name in names)].compiled.graph.outputs
            if not all(crop.fits(v.type.shape) for crop, v in zip(crops, results, strict=True)):
                raise ModelError(wrong)
    except (ExecutionError, ValueError, KeyError) as error:
        raise ModelError(f"{wrong}: {error}") from error


def _with_shapes(
    path: str | os.PathLike[str], table: ShapeTable, target: str, tune: str, simulate: bool
) -> DynamicExecutable:
    """Load a file with several programs. Each is prepared when it is first used, and they share their weights."""
    with nullcontext() if simulate else device.woken(target, load_engines_once):
        programs = _programs(path, load_file.target_of(path, target, simulate))
    weights = SharedWeights()

    def prepared(shapes: Shapes) -> Executable:
        return load_file.executable_of(programs[_key(path, table, shapes, programs)], tune, simulate, weights)

    proved: dict[Key, tuple[Crop, ...]] = {key: tuple(map(Crop, crops)) for key, crops in table.padded}
    _check_table(path, table, programs, proved)
    first = next(iter(programs.values())).compiled
    on_gpu = not simulate and device.is_present(first.target)
    return DynamicExecutable(
        frontends.Source(first.source, file=os.fspath(path)),
        prepared,
        (device.device_name() or "") if on_gpu else SimulatorBackend.name,
        max_shapes=len(programs),
        buckets=table.buckets,
        sizing=_sizing(table),
        proved=proved,
        available=tuple(programs),
    )

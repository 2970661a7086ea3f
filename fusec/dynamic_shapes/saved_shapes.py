"""Load `.fusec` files, whose programs are for one set of input shapes or for several."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import cast

from fusec import frontends
from fusec.artifacts import fusec_file
from fusec.artifacts.shape_table import ShapeTable
from fusec.compiler import load_file
from fusec.dynamic_shapes.executable import DynamicExecutable
from fusec.dynamic_shapes.padding_proof import Crop
from fusec.dynamic_shapes.sizing import Key, Shapes, SizeRange, Sizing
from fusec.errors import ModelError
from fusec.execution.shared_weights import SharedWeights
from fusec.gpu import device
from fusec.runtime import Executable, SimulatorBackend


def load(
    path: str | os.PathLike[str], *, target: str = "auto", tune: str = "quick", simulate: bool = False
) -> Executable:
    """Load a model that was saved as a `.fusec` file, and return it ready to call.

    A file with programs for several sets of input shapes is a DynamicExecutable, which takes these shapes only.
    target: one of those it was compiled for; `auto`: this machine's GPU, or the file's first target without one.
    tune: `quick` takes the plans of the file, and times only these if they were built without a GPU; `none` takes
        the first plan of each step; `full` chooses again.
    simulate: run in simulation, also if the target's GPU is present.
    Raises ModelError when the file is damaged, or does not have the target.
    """
    table = fusec_file.table(os.fspath(path))
    if table is None:
        return load_file.load(path, target=target, tune=tune, simulate=simulate)
    # a cast, because most files are for one set of shapes; a DynamicExecutable has the same methods for callers
    return cast("Executable", _with_shapes(path, table, target, tune, simulate))


def loaded(
    path: str | os.PathLike[str], target: str = "auto", tune: str = "quick", simulate: bool = False
) -> DynamicExecutable:
    """Load a `.fusec` file as a DynamicExecutable, also if it is for one set of input shapes."""
    table = fusec_file.table(os.fspath(path))
    if table is not None:
        return _with_shapes(path, table, target, tune, simulate)
    program = load_file.load(path, target=target, tune=tune, simulate=simulate)
    source = frontends.Source(program.compiled.source, file=os.fspath(path))
    return DynamicExecutable(source, lambda shapes: program, program.device, max_shapes=1)


def _with_shapes(
    path: str | os.PathLike[str], table: ShapeTable, target: str, tune: str, simulate: bool
) -> DynamicExecutable:
    """Load a file with several programs. Each is prepared when it is first used, and they share their weights."""
    with nullcontext() if simulate else device.woken(target):
        artifacts = fusec_file.load_all(os.fspath(path), load_file.target_of(path, target, simulate))
    programs = {tuple(v.type.shape for v in each.compiled.source.inputs): each for each in artifacts}
    names = [spec.name for spec in table.inputs]
    weights = SharedWeights()

    def prepared(shapes: Shapes) -> Executable:
        key = tuple(tuple(shapes[name]) for name in names)
        if key not in programs:
            known = "; ".join(", ".join(f"{n} {list(s)}" for n, s in zip(names, k, strict=True)) for k in programs)
            raise ModelError(f"{os.fspath(path)}: has no program for {dict(shapes)}, only for {known}")
        return load_file.executable_of(programs[key], tune, simulate, weights)

    sizing = Sizing(table.inputs, table.outputs, {name: SizeRange(*sizes) for name, sizes in table.ranges.items()})
    proved: dict[Key, tuple[Crop, ...]] = {key: tuple(map(Crop, crops)) for key, crops in table.padded}
    first = artifacts[0].compiled
    on_gpu = not simulate and device.is_present(first.target)
    return DynamicExecutable(
        frontends.Source(first.source, file=os.fspath(path)),
        prepared,
        (device.device_name() or "") if on_gpu else SimulatorBackend.name,
        max_shapes=len(programs),
        buckets=table.buckets,
        sizing=sizing,
        proved=proved,
    )

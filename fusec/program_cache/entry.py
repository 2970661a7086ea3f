"""Write a program as an entry of the cache, a file of named members, and read it again."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from fusec.artifacts.container import MANIFEST, Reader, written
from fusec.artifacts.read_program import read_program
from fusec.artifacts.safetensors import read as read_values
from fusec.artifacts.safetensors import write as write_values
from fusec.artifacts.saved_options import options_data, read_options
from fusec.artifacts.write_program import graphs_of, literals_of, program_data
from fusec.errors import ModelError, VerifyError
from fusec.execution.compilation import Compiled
from fusec.ir import Graph, Literal, print_graph
from fusec.passes.base import Options
from fusec.program_cache.constants import ConstantsWriter, read_constants
from fusec.program_cache.model_files import ModelFiles
from fusec.schedule.program import Program
from fusec.system.dataclass import dataclass
from fusec.targets.target import DEFAULT
from fusec.targets.target import load as load_target
from fusec.text import parse

GRAPH, PROGRAM, CONSTANTS, VALUES = "graph.txt", "program.json", "constants.json", "values.safetensors"


@dataclass(frozen=True)
class CachedProgram:
    """A program from the cache.

    options: what the passes read, with the default target in place of its own.
    environment: digest of the GPU and the libraries that it was built for.
    """

    program: Program
    options: Options
    environment: str


def write_entry(
    path: Path, key: Mapping[str, str], compiled: Compiled, model: ModelFiles, read: Collection[Literal]
) -> None:
    """Write a program, which is in the file completely or not at all.

    key: what the program depends on: `key` and `environment`.
    model: the files of its model.
    read: the constants whose numbers it may depend on, too; those that are read to write the entry may come later.
    Raises UnrecordedError if nothing says how one of its constants is computed, FusecError if the file cannot be
    written.
    """
    constants = ConstantsWriter()
    numbers = {x: constants.number(x) for graph in graphs_of(compiled) for x in literals_of(graph)}

    def text(graph: Graph) -> str:
        return print_graph(graph, locations=True, label=lambda literal: str(numbers[literal]))

    with written(path, durable=False) as file:
        file.add(GRAPH, text(compiled.graph).encode())
        file.add(PROGRAM, json.dumps(program_data(compiled.program, text), separators=(",", ":")).encode())
        file.add(CONSTANTS, json.dumps(constants.data, separators=(",", ":")).encode())
        file.stream(VALUES, lambda member: write_values(member, constants.values))
        depends = {"sizes": constants.sizes, "weights_read": model.weights_read(read)}
        file.finish({**key, **depends, "options": options_data(compiled.options)})


def read_entry(path: Path, key: str, model: ModelFiles) -> CachedProgram | None:
    """Read a program; None if the model's files have other weights than those that it depends on.

    Its large constants are read from these files when they are used.
    Raises ModelError that names a damaged member, or if the entry is of another key.
    """
    file = Reader(path)
    if file.manifest.get("key") != key:
        raise ModelError(f"{path}: {MANIFEST}: is of another program")
    try:
        if not model.has_weights(file.manifest["weights_read"]) or not model.has_sizes(file.manifest["sizes"]):
            return None
        values = read_values(memoryview(file.check(VALUES)))
        literals = read_constants(file.json(CONSTANTS), values, model.file)
        weights = {str(number): literal for number, literal in enumerate(literals)}
        graph = parse(file.text(GRAPH), weights)
        program = read_program(graph, file.json(PROGRAM), weights, {})
        options = read_options(file.manifest["options"], load_target(DEFAULT))
        return CachedProgram(program, options, str(file.manifest["environment"]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError, VerifyError) as error:
        raise ModelError(f"{path}: not a program as fusec writes it: {error}") from error

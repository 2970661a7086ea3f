"""Take the program of a model's file from the cache, or build and cache it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fusec import frontends
from fusec.compiler.build_program import ModelWithHostSteps, load_constants_early, read_model
from fusec.compiler.choose_judge import choose_judge
from fusec.errors import ModelError
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import CompileOptions
from fusec.frontends.load_model import PROTOBUF_LIMIT
from fusec.gpu import device
from fusec.gpu.cudnn.legality.judges import answers_last
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.ir import Graph, Literal, noted_reads
from fusec.passes.base import FASTEST
from fusec.passes.partition.strict_rounding import StrictRounding
from fusec.program_cache.entry import CachedProgram
from fusec.program_cache.key import is_code_as_loaded, program_environment, program_key
from fusec.program_cache.model_files import ModelFiles
from fusec.program_cache.store import ProgramStore
from fusec.system.byte_ranges import FileRanges
from fusec.system.compile_timer import spent_on
from fusec.system.printable import printable
from fusec.targets.target import Target


class FileProgram:
    """The program of a model's file: from the cache, or built from the model's graph, and then cached."""

    def __init__(
        self,
        model: str | os.PathLike[str] | frontends.Source,
        data: FileRanges,
        options: CompileOptions,
        shapes: Mapping[str, Sequence[int]] | None,
    ):
        self._model, self._options, self._shapes = model, options, shapes
        self._path = data.path.absolute()  # because the process may change its folder before a report is made
        self._files = ModelFiles(data, self._path.parent)
        self._store = ProgramStore()
        self._key = program_key(self._files.digest, options, shapes)  # empty: the program is not cached
        self._cached: CachedProgram | None = None
        self._graph: Graph | None = None
        self._read = set[Literal]()  # whose numbers the program may depend on

    @classmethod
    def of(cls, model: Any, options: CompileOptions, shapes: Mapping[str, Sequence[int]] | None) -> FileProgram | None:
        """Return the program of a model that is a file, where a GPU may run it; None if it is not cached."""
        if options.lock is not None or options.budget_s != float("inf") or options.rounding == FASTEST:
            return None  # because the program depends on more than the model and the options
        if os.environ.get("FUSEC_DUMP") or device.cuda_driver() is None or not is_code_as_loaded():
            return None
        with suppress(OSError, ValueError, TypeError, AttributeError):  # reading the model raises errors that say more
            if isinstance(model, frontends.Source):
                return None if model.data is None else cls(model, model.data, options, shapes)
            if isinstance(model, str | os.PathLike) and _may_be_model(Path(model)):
                return cls(model, FileRanges(Path(model)), options, shapes)
        return None

    def read(self) -> FileProgram | ModelWithHostSteps:
        """Look into the cache, and read the model if the program is not there. No GPU is asked."""
        self._look_up()
        source = self._model
        if isinstance(source, frontends.Source) and self._is_changed(source):
            self._cached = None  # an earlier compilation opened other files
        if self._cached is None:
            with noted_reads() as self._read:
                source = source if isinstance(source, frontends.Source) else frontends.Source(source)
                read = read_model(source, self._shapes)
            if source.warned or self._is_changed(source):
                self._key = ""
            if isinstance(read, ModelWithHostSteps):
                return read
            self._graph = read
        return self

    def compiled(self, target: Target, oracle: Oracle | None, build: Callable[[Graph], Compiled]) -> Compiled:
        """Return the program for a target.

        oracle: the workers that ask cuDNN.
        build: builds the program of the model's graph.
        """
        environment, cached = "", self._cached
        if oracle is not None and oracle.device:
            environment = program_environment(target, self._options.plan_filter)
        if cached is not None and cached.environment == environment:
            load_constants_early(cached.program.graph)
            options = replace(cached.options, target=target)
            judge = choose_judge(target, options, oracle, None)
            judge = StrictRounding(judge) if options.as_source else judge
            self._options.report("partition", 1, 1)
            return Compiled(cache(self._unchanged_model), cached.program, target, options, judge)
        with noted_reads() as read:
            compiled = build(self._unchanged_model() if self._graph is None else self._graph)
            read |= self._read
            if environment and self._key and answers_last(compiled.judge):
                self._store.put(self._key, environment, compiled, self._files, read)
        return compiled

    @spent_on("the cached program is read")
    def _look_up(self) -> None:
        with suppress(OSError):  # as in `of`
            self._cached = self._store.get(self._key, self._files)

    def _is_changed(self, source: frontends.Source) -> bool:
        """Tell if a source has other files than those that the key is of, or does not read its weights by places."""
        known = self._files.versions
        now = {"": () if source.data is None else source.data.version}
        now |= {location: data.version for location, data in source.external_files.items()}
        changed = any(known[location] != now[location] for location in known.keys() & now.keys())
        return changed or source.weight_places != self._files.places

    def _unchanged_model(self) -> Graph:
        """Read the model of a cached program. Raises ModelError if its files were changed."""
        source = self._model
        if not isinstance(source, frontends.Source):
            source = frontends.Source(self._path, file=printable(str(source)))
        read = read_model(source, self._shapes)
        if self._is_changed(source) or not isinstance(read, Graph):
            raise ModelError(f"{source.file}: was changed after it was compiled")
        return read


def _may_be_model(path: Path) -> bool:
    """Tell if a path is a file that a model can be read from. Others are refused without being read."""
    status = path.stat()
    return stat.S_ISREG(status.st_mode) and status.st_size < PROTOBUF_LIMIT and path.suffix != ".fusec"

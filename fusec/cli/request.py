"""Compile or load the model that a command names, with the options it was given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusec.cli import files as cli_io
from fusec.errors import FusecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fusec.execution.compilation import Compiled
    from fusec.execution.compile_options import CompileOptions
    from fusec.runtime import Executable

# The driver is imported within functions, because `fusec --help` shall answer at once.


@dataclass(frozen=True)
class Request:
    """A model, `--shape` as it was given, and all other options."""

    model: str
    shape: Sequence[str] | None
    options: CompileOptions

    @property
    def is_compiled(self) -> bool:
        """Tell if the model is a `.fusec` file, which holds programs."""
        return self.model.endswith(".fusec")

    def build(self, target: str, report: cli_io.Report) -> Compiled:
        """Compile the model up to its program, or read it from a `.fusec` file."""
        from fusec import driver

        if self.is_compiled:
            compiled = driver.load_artifact(self.model, target).compiled
            self._require_no_late_option(compiled)
            return compiled
        options = replace(self.options, target=target, progress=report)
        with cli_io.without_cudnn_warning():
            return driver.build_model(self.model, options, cli_io.shapes_of(self.shape or ()))

    def executable(self, target: str, report: cli_io.Report) -> Executable:
        """Compile the model, or load a `.fusec` file, ready to run."""
        from fusec import driver

        if self.is_compiled:
            if self.options.lock is not None:
                raise FusecError("--locked: a compiled model has its plans; compile it with --locked instead")
            executable = driver.load(self.model, target=target, tune=self.options.tune)
            self._require_no_late_option(executable.compiled)
            return executable
        options = replace(self.options, target=target, progress=report)
        with cli_io.without_cudnn_warning():
            return driver.compile_model(self.model, options, cli_io.shapes_of(self.shape or ()))

    def _require_no_late_option(self, compiled: Compiled) -> None:
        """Raise FusecError for an option that a compiled model cannot follow; fp32 is the default, so it passes."""
        precision = compiled.options.precision
        if self.options.precision not in ("fp32", precision):
            raise FusecError(
                f"{self.model}: was compiled in {precision}: compile it again for {self.options.precision}"
            )
        given = {
            "--shape": self.shape,
            "--disable": self.options.disable,
            "--rounding": self.options.rounding != "fused",
            "--deterministic": self.options.deterministic,
            "--channels-last": self.options.channels_last,
        }
        if late := [name for name, value in given.items() if value]:
            raise FusecError(f"{self.model}: is compiled already: {late[0]} comes too late")

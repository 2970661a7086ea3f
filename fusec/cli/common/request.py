"""Give commands the options of a compilation, and compile or load the model that a command names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fusec.cli.common import files, output
from fusec.cli.common import options as cli_options
from fusec.errors import FusecError
from fusec.plans.plan_filter import DEFAULT_MODES
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from fusec.artifacts.fusec_file import Artifact
    from fusec.driver import AnyExecutable
    from fusec.dynamic_shapes.sizing import Sizing
    from fusec.execution.compilation import Compiled
    from fusec.execution.compile_options import CompileOptions
    from fusec.frontends import Source
    from fusec.runtime import Executable

# The driver is imported within functions, because `fusec --help` shall answer immediately.

Command = Callable[..., None]
# Options of a compilation on the command line, with their defaults.
_ALWAYS: Mapping[str, tuple[Any, Any]] = {
    "precision": (cli_options.Precision, "fp32"),
    "shape": (cli_options.Shapes, None),
    "constant": (cli_options.Constants, None),
    "custom_op": (cli_options.CustomOps, None),
    "disable": (cli_options.Disable, None),
    "deterministic": (cli_options.Deterministic, False),
    "heuristics": (cli_options.Heuristics, "A,fallback"),
    "engines": (cli_options.Engines, ""),
    "workspace_limit": (cli_options.WorkspaceLimit, None),
    "channels_last": (cli_options.ChannelsLast, False),
}
_MORE: Mapping[str, tuple[Any, Any]] = {
    "rounding": (cli_options.Rounding, "fused"),
    "tune": (cli_options.Tune, "quick"),
    "budget": (cli_options.Budget, None),
    "locked": (cli_options.Locked, None),
}


@dataclass(frozen=True)
class Request:
    """A model, `--shape`, `--constant` and `--custom-op` as they were given, and all other options.

    models: all models that the command was given; most take one.
    """

    model: str
    shape: Sequence[str] | None
    options: CompileOptions
    constant: Sequence[str] | None = None
    models: tuple[str, ...] = ()
    custom_op: Sequence[str] | None = None

    @property
    def is_compiled(self) -> bool:
        """Tell if the model is a `.fusec` file, which holds programs."""
        return self.model.endswith(".fusec")

    def with_absolute_paths(self) -> Request:
        """Return the request for a process in another working folder. Functions of --custom-op stay as they are."""
        constants = [files.absolute_constant(text) for text in self.constant or ()]
        return replace(self, model=str(Path(self.model).absolute()), constant=constants)

    def build(self, target: str, report: output.Report) -> Compiled:
        """Compile the model up to its program, or read it from a `.fusec` file; with ranges for the likely sizes."""
        from fusec import driver

        if self.is_compiled:
            return self.artifact(target).compiled
        options = replace(self.options, target=target, progress=report)
        with output.without_cudnn_warning():
            model, shapes = self._sized()
            return driver.build_model(model, options, shapes)

    def artifact(self, target: str) -> Artifact:
        """Read the program of a `.fusec` file, with its plans."""
        from fusec.dynamic_shapes import load_shapes

        self._require_several_shapes()
        artifact = load_shapes.read_artifact(self.model, target, cli_options.shapes_of(self.shape or ()))
        self._require_no_late_option(artifact.compiled)
        return artifact

    def executable(self, target: str, report: output.Report, simulate: bool = False) -> AnyExecutable:
        """Compile the model, or load a `.fusec` file, ready to run; with ranges for the likely sizes.

        simulate: also on a machine with the GPU.
        """
        from fusec import driver
        from fusec.dynamic_shapes import load_shapes

        if self.is_compiled:
            if self.options.lock is not None:
                raise FusecError(
                    f"{self.model}: has its plans already, so --locked comes too late: give --locked to the "
                    "`fusec compile` that writes the file"
                )
            self._require_several_shapes()
            given = cli_options.shapes_of(self.shape or ())
            executable = load_shapes.load_program(self.model, target, self.options.tune, given)
            self._require_no_late_option(executable.compiled)
            return executable
        options = replace(self.options, target=target, progress=report, simulate=simulate)
        with output.without_cudnn_warning():
            model, shapes = self._sized()
            return driver.compile_model(model, options, shapes)

    def sizing(self) -> tuple[str | Source, Sizing | None]:
        """Return the model, and the sizes of --shape; None if it gives one shape for each input."""
        from fusec.dynamic_shapes.size_ranges import read_sizes, symbols_of
        from fusec.frontends import Source

        bound, given = self.bound(), cli_options.shapes_of(self.shape or ())
        if not given:
            return bound, None
        source = Source(bound) if isinstance(bound, str) else bound
        cli_options.require_ranges(given, symbols_of(source) - {spec.name for spec in source.interface[0]})
        return source, read_sizes(source, given)

    def _sized(self) -> tuple[str | Source, Mapping[str, Sequence[int]]]:
        model, sizing = self.sizing()
        if sizing is None:
            return model, cast("Mapping[str, Sequence[int]]", cli_options.shapes_of(self.shape or ()))
        return model, sizing.likely or sizing.known_shapes

    def _require_several_shapes(self) -> None:
        """Raise FusecError if a shape is given for a file that has one program, or a list for a dim."""
        from fusec.artifacts import fusec_file

        if not self.shape:
            return
        table = fusec_file.table(self.model)
        if table is None:
            raise self._too_late("--shape")
        inputs = {each.name for each in table.inputs}
        cli_options.require_ranges(cli_options.shapes_of(self.shape), table.ranges.keys() - inputs)

    def program(self, target: str, report: output.Report) -> Executable:
        """Compile or load the model as `executable`. Raises FusecError for a model with host steps."""
        from fusec.runtime import Executable

        executable = self.executable(target, report)
        if not isinstance(executable, Executable):
            executable.refuse("is more than one program")
        return executable

    def bound(self) -> str | Source:
        """Return the model with --constant and --custom-op; the name of its file if neither is given."""
        from fusec.frontends import Source

        if not (self.constant or self.custom_op):
            return self.model
        source = Source(self.model, custom_ops=files.functions_of(self.custom_op or ()))
        return source.with_constants(files.constants_of(self.constant or ()))

    def constants(self) -> dict[str, Any]:
        """Return the arrays of --constant, by name."""
        bound = self.bound()
        return {} if isinstance(bound, str) else {name: value.array for name, value in bound.constants.items()}

    def _require_no_late_option(self, compiled: Compiled) -> None:
        """Raise FusecError for an option that a compiled model cannot follow; fp32 is the default, so it passes."""
        precision = compiled.options.precision
        if self.options.precision not in ("fp32", precision):
            raise FusecError(
                f"{self.model}: was compiled in {precision}: compile it again for {self.options.precision}"
            )
        given = {
            "--constant": self.constant,
            "--custom-op": self.custom_op,
            "--disable": self.options.disable,
            "--rounding": self.options.rounding != "fused",
            "--deterministic": self.options.deterministic,
            "--heuristics": self.options.plan_filter.heuristics != DEFAULT_MODES,
            "--engines": self.options.engines,
            "--workspace-limit": self.options.workspace_limit is not None,
            "--channels-last": self.options.channels_last,
        }
        if late := [name for name, value in given.items() if value]:
            raise self._too_late(late[0])

    def _too_late(self, option: str) -> FusecError:
        return FusecError(
            f"{self.model}: is compiled already: {option} comes too late: give it to the `fusec compile` "
            "that writes the file"
        )


def compiles(*more: str, model: Any = cli_options.Model) -> Callable[[Command], Command]:
    """Give a command a model and the options of a compilation, which it gets as one Request named `request`.

    more: names of options that only some commands have: rounding, tune, budget, locked.
    model: type of the argument that names the model.
    """
    options = {**_ALWAYS, **{name: _MORE[name] for name in more}}

    def with_request(command: Command) -> Command:
        @functools.wraps(command)
        def run(model: str | Sequence[str], **given: Any) -> None:
            from fusec.execution.compile_options import CompileOptions

            value = {name: given.pop(name) for name in options}
            compile_options = CompileOptions(
                precision=value["precision"],
                disable=value["disable"] or (),
                deterministic=value["deterministic"],
                heuristics=value["heuristics"],
                engines=value["engines"] or (),
                workspace_limit=cli_options.workspace_limit_of(value["workspace_limit"]),
                channels_last=value["channels_last"],
                rounding=value.get("rounding", "fused"),
                tune=value.get("tune", "quick"),
                budget_s=cli_options.budget_of(value.get("budget")),
                lock=value.get("locked"),
            )
            models = (model,) if isinstance(model, str) else tuple(model)
            request = Request(models[0], value["shape"], compile_options, value["constant"], models, value["custom_op"])
            command(request=request, **given)

        # typer makes the options of a command from the signature and the annotations of its function
        parameters: dict[str, tuple[Any, Any]] = {}
        for name, own in inspect.signature(command, eval_str=True).parameters.items():
            if name == "request":
                parameters |= {"model": (model, inspect.Parameter.empty), **options}
            else:
                parameters[name] = (own.annotation, own.default)
        run.__annotations__ = {name: type for name, (type, _) in parameters.items()}
        run.__dict__["__signature__"] = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=type)
                for name, (type, default) in parameters.items()
            ]
        )
        return run

    return with_request

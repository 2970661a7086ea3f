"""Define the options of a compilation, which are checked in one place for all entry points."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace

from fusec import passes
from fusec.errors import FusecError
from fusec.gpu.autotune.plans.plan_search import LEVELS
from fusec.ir import Graph, quote
from fusec.passes.base import PRECISIONS, ROUNDINGS, UNORDERED, Options, names_of
from fusec.passes.layout.io_layout import chosen
from fusec.passes.pass_names import current_names
from fusec.plans.plan_filter import DEFAULT_MODES, Engines, Names, PlanFilter
from fusec.system.dataclass import dataclass

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class CompileOptions:
    """Options of a compilation; `fusec.compile` documents each field.

    Input shapes are no option, because one set of options serves all input shapes of a model.
    Raises FusecError if a field cannot have its value.
    """

    target: str = "auto"
    precision: str = "fp32"
    state: Mapping[str, str] = field(default_factory=dict[str, str])
    tune: str = "quick"
    budget_s: float = float("inf")
    disable: Collection[str] = ()
    rounding: str = "fused"
    deterministic: bool = False
    heuristics: Names = DEFAULT_MODES
    engines: Engines = ()
    workspace_limit: int | None = None
    channels_last: bool | Collection[str] = False
    lock: str | os.PathLike[str] | None = None
    simulate: bool = False
    progress: Progress | None = None

    def __post_init__(self) -> None:
        names = current_names(names_of("disable", self.disable))
        object.__setattr__(self, "disable", names)  # because callers may give one name, or a list
        PlanFilter.of(self.heuristics, self.engines, self.workspace_limit)
        if not self.budget_s >= 0:  # NaN
            raise FusecError(f"budget is a number of seconds, 0 or more, not {self.budget_s}")
        _require("tune", self.tune, LEVELS)
        _require("precision", self.precision, PRECISIONS, "; a model that `fusec quantize` wrote runs in 8 or 4 bits")
        _require("rounding", self.rounding, ROUNDINGS)
        if unknown := sorted(names - passes.names()):
            raise FusecError(f"no pass or rule is named {', '.join(unknown)}; `python -m fusec.passes` lists them")

    @property
    def plan_filter(self) -> PlanFilter:
        """Return the filter of the plans that the program may use."""
        deterministic = self.deterministic or UNORDERED in self.disable
        return PlanFilter.of(self.heuristics, self.engines, self.workspace_limit, deterministic)

    def report(self, stage: str, done: int, total: int) -> None:
        """Call the progress function, if there is one."""
        if self.progress is not None:
            self.progress(stage, done, total)

    def for_passes(self, source: Graph) -> Options:
        """Return the options that the passes read, for a model as imported.

        Raises FusecError if `state` or `channels_last` names an input or output that the model does not have.
        """
        inputs = {v.name: v.type for v in source.inputs}
        outputs = {name: v.type for name, v in zip(source.output_names, source.outputs, strict=True)}
        for name, output in self.state.items():
            if name not in inputs:
                raise FusecError(f"state {quote(name)} is no input of the model")
            if output and output not in outputs:
                raise FusecError(f"{quote(output)}, the update of state {quote(name)}, is no output of the model")
            if output and not outputs[output].same_value_type(inputs[name]):
                raise FusecError(
                    f"{quote(output)} is {outputs[output]}, and cannot replace {quote(name)}: {inputs[name]}"
                )
        return Options.from_names(
            self.precision,
            self.disable,
            state=tuple(self.state.items()),
            orders=chosen(source, self.channels_last, self.state),
            rounding=self.rounding,
            deterministic=self.deterministic,
            plans=replace(self.plan_filter, deterministic=False),
        )


def _require(option: str, given: str, known: Collection[str], remedy: str = "") -> None:
    if given not in known:
        raise FusecError(f"{option} is one of {', '.join(known)}, not {given!r}{remedy}")

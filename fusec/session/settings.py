"""Read the options of a session, which are fusec's or onnxruntime's own object."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any, cast

from fusec import passes
from fusec.errors import ExecutionError, FusecError
from fusec.session.session_options import GraphOptimizationLevel
from fusec.system.dataclass import dataclass

# Options that fusec follows, and what each does.
HONOURED: Mapping[str, str] = {
    "graph_optimization_level": "passes to leave out",
    "use_deterministic_compute": "`deterministic=True`",
    "intra_op_num_threads": "the threads on which `run_async` runs",
    "log_severity_level": "0 and 1: print the stages of a compilation; 3 and 4: no warnings",
    "logid": "begins each line that is printed",
    "enable_profiling": "each run is recorded, and its steps are timed; `end_profiling` writes the file",
    "profile_file_prefix": "start of the name of that file",
    "optimized_model_filepath": "the graph after the passes is written there as ONNX, for the first input shapes",
    "add_free_dimension_override_by_name": "gives a symbolic dim a size",
    "add_free_dimension_override_by_denotation": "gives symbolic dims a size",
    "add_initializer": "replaces an initializer; only on fusec's object, as onnxruntime's does not give the list",
    "add_external_initializers": "as `add_initializer`",
    "add_provider": "as `providers`; only on fusec's own object",
    "has_providers": "returns True if `add_provider` was called",
    "add_session_config_entry": "`session.load_model_format` must be ONNX; other entries are only stored",
    "get_session_config_entry": "returns a stored entry",
    "register_custom_ops_library": "raises FusecError",
}

# Options that are accepted and change nothing, with the reason.
IGNORED: Mapping[str, str] = {
    "enable_cpu_mem_arena": "fusec plans one arena for each program",
    "enable_mem_pattern": "fusec plans one arena for each program",
    "enable_mem_reuse": "values that are not alive together always share memory",
    "execution_mode": "fusec measures whether steps run faster side by side",
    "execution_order": "fusec's scheduler orders the steps",
    "inter_op_num_threads": "steps do not run on threads of the host",
    "use_per_session_threads": "steps do not run on threads of the host",
    "log_verbosity_level": "there is one level of detail",
}

# Folders of `fusec.passes` that each level of optimisation leaves out.
_LEFT_OUT: Mapping[GraphOptimizationLevel, frozenset[str]] = {
    GraphOptimizationLevel.ORT_DISABLE_ALL: frozenset(
        {"cleanup", "rules", "attention", "folding", "training", "layout"}
    ),
    GraphOptimizationLevel.ORT_ENABLE_BASIC: frozenset({"rules", "attention", "folding", "training", "layout"}),
    GraphOptimizationLevel.ORT_ENABLE_EXTENDED: frozenset({"layout"}),
}
# Passes that follow an option of the caller, so that no level leaves them out.
_REQUIRED = frozenset({"precision", "deterministic_attention"})


@dataclass(frozen=True)
class Settings:
    """Hold what fusec follows of the options of a session."""

    disable: frozenset[str] = frozenset()
    deterministic: bool = False
    threads: int = 1
    severity: int = 2
    logid: str = ""
    profiling: bool = False
    profile_prefix: str = ""
    optimized_path: str = ""
    sizes_by_name: Mapping[str, int] = field(default_factory=dict[str, int])
    sizes_by_denotation: Mapping[str, int] = field(default_factory=dict[str, int])
    initializers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    providers: tuple[tuple[str, Mapping[str, str]], ...] = ()

    @classmethod
    def of(cls, options: Any) -> Settings:
        """Read fusec's or onnxruntime's object. Raises FusecError if it is neither, or asks for the ORT format."""
        if not hasattr(options, "graph_optimization_level"):
            raise FusecError(f"sess_options is a SessionOptions of fusec or onnxruntime, not {type(options).__name__}")
        try:
            model_format = options.get_session_config_entry("session.load_model_format")
        except (FusecError, RuntimeError):
            model_format = ""  # not set
        if model_format.upper() not in ("", "ONNX"):
            raise FusecError(f"session.load_model_format is {model_format}: fusec reads ONNX")
        return cls(
            disable=disabled(GraphOptimizationLevel[options.graph_optimization_level.name]),
            deterministic=options.use_deterministic_compute,
            threads=max(1, options.intra_op_num_threads),
            severity=severity(options.log_severity_level),
            logid=options.logid,
            profiling=options.enable_profiling,
            profile_prefix=options.profile_file_prefix,
            optimized_path=str(options.optimized_model_filepath),
            sizes_by_name=getattr(options, "sizes_by_name", {}),
            sizes_by_denotation=getattr(options, "sizes_by_denotation", {}),
            initializers=getattr(options, "initializers", {}),
            providers=tuple(getattr(options, "providers", ())),
        )

    def report(self, stage: str, done: int, total: int) -> None:
        """Print that a stage of a compilation begins, if the caller asked for information."""
        if self.severity <= 1 and not done:
            sys.stderr.write(f"[I:fusec:{self.logid}] {stage}\n")


def disabled(level: GraphOptimizationLevel) -> frozenset[str]:
    """Return the passes that a level of optimisation leaves out."""
    folders = _LEFT_OUT.get(level, frozenset())
    named = {step.name for step in passes.PIPELINE if type(step).__module__.split(".")[2] in folders}
    return frozenset(named - _REQUIRED)


_default_severity = 2


def set_default_logger_severity(severity: int) -> None:
    """Set the level of messages for sessions that set none: 0 verbose, 1 information, 2 warning, 3 error, 4 fatal."""
    global _default_severity
    if severity not in range(5):
        raise FusecError(f"a severity is 0 to 4, not {severity}")
    _default_severity = severity


def severity(level: int) -> int:
    """Return the level of messages; -1 is the default."""
    return _default_severity if level < 0 else level


@contextmanager
def quiet(level: int) -> Generator[None]:
    """Hide warnings from severity 3 on, which asks for errors only."""
    if level < 3:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_run(options: Any) -> None:
    """Raise ExecutionError if the options of a run terminate it."""
    if options is None:
        return
    if not hasattr(options, "terminate"):
        raise FusecError(f"run_options is a RunOptions of fusec or onnxruntime, not {type(options).__name__}")
    if cast("bool", options.terminate):
        raise ExecutionError("the run did not begin, because `terminate` of its RunOptions is set")

"""Offer onnxruntime's `SessionOptions` and `RunOptions`, which name the options of a session and of one run.

Attributes and methods are onnxruntime's. `fusec.session.settings` says what each of them does here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from fusec.errors import FusecError
from fusec.session.missing_names import MissingNames


class GraphOptimizationLevel(IntEnum):
    """Name how many graph optimisations a session makes."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Name whether steps may run in parallel; fusec measures which order is faster."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(IntEnum):
    """Name the order of nodes; fusec's scheduler chooses it."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


class _Entries(MissingNames):
    """Holds pairs of strings, as onnxruntime's configuration entries."""

    _owner = ""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def _entry(self, key: str) -> str:
        if key not in self._entries:
            raise FusecError(f"{self._owner} has no configuration entry {key!r}")
        return self._entries[key]


class SessionOptions(_Entries):
    """Options of a session. Only those listed in `settings.HONOURED` change what fusec does."""

    _owner = "SessionOptions"

    def __init__(self) -> None:
        super().__init__()
        self.enable_cpu_mem_arena = True
        self.enable_mem_pattern = True
        self.enable_mem_reuse = True
        self.enable_profiling = False
        self.execution_mode = ExecutionMode.ORT_SEQUENTIAL
        self.execution_order = ExecutionOrder.DEFAULT
        self.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_ALL
        self.inter_op_num_threads = 0
        self.intra_op_num_threads = 0
        self.log_severity_level = -1
        self.log_verbosity_level = 0
        self.logid = ""
        self.optimized_model_filepath = ""
        self.profile_file_prefix = "onnxruntime_profile_"
        self.use_deterministic_compute = False
        self.use_per_session_threads = True
        self.sizes_by_name: dict[str, int] = {}
        self.sizes_by_denotation: dict[str, int] = {}
        self.initializers: dict[str, Any] = {}
        self.providers: list[tuple[str, Mapping[str, str]]] = []

    def add_free_dimension_override_by_name(self, dim_name: str, dim_value: int) -> None:
        """Give the symbolic dim of this name a size."""
        self.sizes_by_name[dim_name] = _size(dim_name, dim_value)

    def add_free_dimension_override_by_denotation(self, denotation: str, dim_value: int) -> None:
        """Give each symbolic dim of this denotation, such as `DATA_BATCH`, a size."""
        self.sizes_by_denotation[denotation] = _size(denotation, dim_value)

    def add_session_config_entry(self, key: str, value: str) -> None:
        self._entries[key] = value

    def get_session_config_entry(self, key: str) -> str:
        return self._entry(key)

    def add_initializer(self, name: str, value: Any) -> None:
        """Use the value of an OrtValue or array for an initializer of the model."""
        self.initializers[name] = value

    def add_external_initializers(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Use these values for initializers whose data the model keeps in other files."""
        if len(names) != len(values):
            raise FusecError(f"{len(names)} names of initializers, but {len(values)} values")
        self.initializers |= dict(zip(names, values, strict=True))

    def add_provider(self, provider_name: str, provider_options: Mapping[str, str]) -> None:
        """Add a provider; those given to the session come first."""
        self.providers.append((provider_name, dict(provider_options)))

    def has_providers(self) -> bool:
        return bool(self.providers)

    def register_custom_ops_library(self, library_path: str) -> None:
        """Refuse a library of operators, because it runs in onnxruntime only."""
        raise FusecError(f"{library_path}: a library of onnxruntime's custom operators does not run in fusec")


class RunOptions(_Entries):
    """Options of one run. `terminate` makes a run that has not begun raise ExecutionError."""

    _owner = "RunOptions"

    def __init__(self) -> None:
        super().__init__()
        self.log_severity_level = -1
        self.log_verbosity_level = 0
        self.logid = ""
        self.only_execute_path_to_fetches = False
        self.terminate = False

    def add_run_config_entry(self, key: str, value: str) -> None:
        self._entries[key] = value

    def get_run_config_entry(self, key: str) -> str:
        return self._entry(key)


def _size(name: str, size: int) -> int:
    if size < 1:
        raise FusecError(f"the size of dim {name!r} is {size}, but must be 1 or more")
    return int(size)

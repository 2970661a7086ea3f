"""Offer onnxruntime's `InferenceSession` on top of fusec, so that programs written for it need no change.

Methods have onnxruntime's names and parameters. `fusec.session.missing_names` lists what is missing, with the reasons.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fusec import convert, frontends
from fusec.driver import compile_dynamic
from fusec.dynamic_shapes.executable import MAX_SHAPES, DynamicExecutable
from fusec.dynamic_shapes.load_shapes import load_dynamic
from fusec.dynamic_shapes.size_ranges import GivenShapes
from fusec.errors import writing
from fusec.execution.signature import array_of, require_by_name
from fusec.frontends.custom_ops import CustomOp
from fusec.ir import Array
from fusec.plans.plan_filter import DEFAULT_MODES, Engines, Names
from fusec.runtime import Executable
from fusec.segments.executable import AnyExecutable
from fusec.session import providers as session_providers
from fusec.session.async_runs import AsyncRuns, Callback
from fusec.session.device_memory import on_stream
from fusec.session.io_binding import IOBinding
from fusec.session.missing_names import MissingNames
from fusec.session.model_edits import edited, overridable, with_inputs
from fusec.session.model_interface import ModelMeta, NodeArg
from fusec.session.ort_value import OrtValue, array_of_value
from fusec.session.providers import CPU, GPU, Provider
from fusec.session.run_profile import RunProfile
from fusec.session.session_options import SessionOptions
from fusec.session.settings import Settings, check_run, quiet
from fusec.system import atomic_write
from fusec.system.unpicklable import Unpicklable

if TYPE_CHECKING:
    from onnx import ModelProto

# Undocumented keywords of onnxruntime. They choose between its own providers, files and optimisers.
_ONNXRUNTIME_ONLY = frozenset({"enable_fallback", "read_config_from_model", "disabled_optimizers"})


class InferenceSession(MissingNames, Unpicklable):
    """A model, ready to run. It is compiled now if no dim is symbolic, else at the first run with each input shape.

    sess_options: a SessionOptions of fusec or onnxruntime; `settings.HONOURED` lists what each option does.
    providers: as in onnxruntime, first choice first; None: the GPU if there is one, else the simulator.
        `CUDAExecutionProvider` (or TensorRT's) is the GPU through fusec, `CPUExecutionProvider` the simulator.
    provider_options: options of each provider: `device_id`, which must be 0, `user_compute_stream`, and the precision
        (`use_tf32`, `trt_fp16_enable`, `trt_bf16_enable`) if `precision` is not given. TensorRT's profiles of shapes
        (`trt_profile_min_shapes`, …) are ranges, if `shapes` is not given. Others have no effect.
    target, precision, shapes, tune, budget, disable, rounding, deterministic, heuristics, engines, workspace_limit,
        channels_last, max_shapes, buckets, tune_each, custom_ops: see `fusec.compile` and `fusec.compile_dynamic`.
        A `.fusec` file is compiled already: it takes only target and tune.
        If all dims have sizes or ranges, the program of the likely sizes is compiled now.

    Raises ModelError if the model cannot be read or compiled.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes | ModelProto,
        sess_options: Any = None,
        providers: Sequence[Provider] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        *,
        target: str = "auto",
        precision: str = "fp32",
        shapes: GivenShapes | None = None,
        tune: str = "quick",
        budget: float = float("inf"),
        disable: Collection[str] = (),
        rounding: str = "fused",
        deterministic: bool = False,
        heuristics: Names = DEFAULT_MODES,
        engines: Engines = (),
        workspace_limit: int | None = None,
        channels_last: bool | Collection[str] = False,
        max_shapes: int = MAX_SHAPES,
        buckets: Mapping[str, Sequence[int]] | None = None,
        tune_each: bool = False,
        custom_ops: Mapping[str, Callable[..., Any] | CustomOp] | None = None,
        **onnxruntime_only: Any,
    ):
        if unknown := sorted(onnxruntime_only.keys() - _ONNXRUNTIME_ONLY):
            raise TypeError(f"InferenceSession has no parameter {unknown[0]!r}")
        self._options = SessionOptions() if sess_options is None else sess_options
        self._settings = settings = Settings.of(self._options)
        self._profile = RunProfile(settings.profile_prefix) if settings.profiling else None
        self._target = target
        self._async = AsyncRuns(settings.threads)
        is_compiled = isinstance(path_or_bytes, str | os.PathLike) and os.fspath(path_or_bytes).endswith(".fusec")
        if is_compiled:
            path = cast("str", path_or_bytes)
            self._source = None
            self._make = lambda source, choice: load_dynamic(path, target, tune, choice.simulate)
        else:
            with self._event("model_loading"), quiet(settings.severity):
                self._source = edited(frontends.Source(path_or_bytes, custom_ops=custom_ops), settings, self._options)
            left_out = {disable} if isinstance(disable, str) else set(disable)
            self._make = lambda source, choice: compile_dynamic(
                source,
                target=target,
                precision=(choice.precision or precision) if precision == "fp32" else precision,
                shapes=shapes if shapes is not None else choice.shapes,
                tune=tune,
                budget=budget,
                disable=left_out | settings.disable,
                rounding=rounding,
                deterministic=deterministic or settings.deterministic,
                heuristics=heuristics,
                engines=engines,
                workspace_limit=workspace_limit,
                channels_last=channels_last,
                progress=settings.report,
                max_shapes=max_shapes,
                buckets=buckets,
                tune_each=tune_each,
                simulate=choice.simulate,
            )
        self.set_providers(providers if providers is not None else settings.providers or None, provider_options)

    def set_providers(
        self,
        providers: Sequence[Provider] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Choose the device anew. The model is compiled again, from the caches."""
        self._choice = session_providers.choose(providers, provider_options, self._target)
        self._overriding: dict[frozenset[str], DynamicExecutable] = {}
        self._optimized_path = self._settings.optimized_path
        # most sessions; a run of theirs needs no context, which would cost some microseconds
        self._is_plain = not (
            self._settings.severity >= 3 or self._choice.stream or self._profile or self._settings.optimized_path
        )
        with self._event("session_initialization"), quiet(self._settings.severity):
            self.executable = self._make(self._source, self._choice)
            self._describe()

    def _describe(self) -> None:
        """Read inputs and outputs, and compile the model if all its shapes are fixed."""
        executable = self.executable
        self._inputs = [NodeArg.of(spec.name, spec.shape, spec.dtype) for spec in executable.inputs]
        self._outputs = [NodeArg.of(spec.name, spec.shape, spec.dtype) for spec in executable.outputs]
        self._overridable = [] if self._source is None else overridable(self._source)
        if all(isinstance(d, int) for spec in executable.inputs for d in spec.shape or ("",)):
            program = executable.at({spec.name: cast("tuple[int, ...]", spec.shape) for spec in executable.inputs})
            if isinstance(program, Executable):  # with host steps, shapes of outputs are known after a call
                self._outputs = [NodeArg.of(spec.name, spec.shape, spec.dtype) for spec in program.outputs]
            self._write_optimized(program)
        elif self._source is not None and executable.sizing.likely is not None:
            self._write_optimized(executable.program())

    # what the model is

    def get_inputs(self) -> list[NodeArg]:
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        return list(self._outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return the inputs that have a default value in the model. A run may give them another value."""
        return list(self._overridable)

    @property
    def takes(self) -> list[NodeArg]:
        """Return what a run takes: the inputs, and the initializers that it may override."""
        return [*self._inputs, *self._overridable]

    def get_modelmeta(self) -> ModelMeta:
        return ModelMeta(**self.executable.source.metadata)

    # how it runs

    def get_session_options(self) -> Any:
        """Return the options that the session was made with."""
        return self._options

    def get_providers(self) -> list[str]:
        """Return the providers that run the model."""
        return [CPU] if self.executable.device == "simulated" else [GPU, CPU]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return the options of each provider that runs the model."""
        return {name: dict(self._choice.options.get(name, {})) for name in self.get_providers()}

    def enable_fallback(self) -> None:
        """Do nothing, because fusec never changes the device after an error."""

    def disable_fallback(self) -> None:
        """Do nothing, because fusec never changes the device after an error."""

    def release_captured_graph(self, graph_annotation_id: int = 0) -> None:
        """Do nothing, because a CUDA graph of fusec does not depend on the caller's memory."""

    # running

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Array]:
        """Run the model on inputs by name, and return outputs by name (None or no names: all).

        If all inputs are on the host, results are NumPy arrays. If one is on the device, shared by DLPack or
        `__cuda_array_interface__`, results are arrays on the device.
        """
        check_run(run_options)
        require_by_name(input_feed, "inputs")
        feeds = {name: array_of_value(value) for name, value in input_feed.items()}
        if any(isinstance(value, list) for value in feeds.values()):
            feeds = self._with_arrays(feeds)
        return self.run_arrays(output_names, feeds)

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any], run_options: Any = None
    ) -> list[OrtValue]:
        """Run as `run`, with OrtValues of fusec or onnxruntime as inputs, and fusec's as outputs."""
        return [OrtValue(array) for array in self.run(output_names, input_dict_ort_values, run_options)]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callback,
        user_data: Any,
        run_options: Any = None,
    ) -> None:
        """Run on another thread, which then calls `callback(results, user_data, error)`.

        error: empty, or the message if the run failed; results are then empty.
        """
        self._async.submit(lambda: self.run(output_names, input_feed, run_options), callback, user_data)

    def io_binding(self) -> IOBinding:
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Run on the bound inputs and outputs."""
        check_run(run_options)
        iobinding.run()

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str, device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """Make an OrtValue without setting its elements."""
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id, vendor_id)

    def run_arrays(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None
    ) -> list[Array]:
        """Run on arrays by name, and write results into the arrays of `out`."""
        executable = self._executable(feeds)
        if self._is_plain:
            return executable.run(output_names or None, feeds, out)
        with quiet(self._settings.severity), on_stream(self._choice.stream), self._event("model_run"):
            results = executable.run(output_names or None, feeds, out)
        if self._profile is not None:
            program = executable.at(executable.shapes[-1])
            for part in [program] if isinstance(program, Executable) else program.programs:
                self._profile.steps(part, self.get_providers()[0])
        if self._optimized_path:
            self._write_optimized(executable.at(executable.shapes[-1]))
        return results

    def _with_arrays(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Convert lists to arrays of the inputs' types, as onnxruntime does. Floats do not become integers."""
        dtypes = {spec.name: spec.dtype for spec in self.executable.inputs if spec.dtype is not None}
        arrays = {name: array_of(name, value) if isinstance(value, list) else value for name, value in feeds.items()}
        for name in [name for name, value in feeds.items() if isinstance(value, list) and name in dtypes]:
            if np.can_cast(arrays[name].dtype, dtypes[name], "same_kind"):
                arrays[name] = arrays[name].astype(dtypes[name])
        return arrays

    def _executable(self, feeds: Mapping[str, Any]) -> DynamicExecutable:
        """Return the executable that takes these inputs; it is another one if they override initializers."""
        if not self._overridable:
            return self.executable
        names = frozenset(arg.name for arg in self._overridable).intersection(feeds)
        if not names or self._source is None:
            return self.executable
        if names not in self._overriding:
            with quiet(self._settings.severity):
                self._overriding[names] = self._make(with_inputs(self._source, names), self._choice)
        return self._overriding[names]

    # profiling and files

    def get_profiling_start_time_ns(self) -> int:
        """Return the time at which profiling began, in nanoseconds of `time.time_ns`; 0 if it is off."""
        return 0 if self._profile is None else self._profile.started_ns

    def end_profiling(self) -> str:
        """Write the trace of the runs, and return the name of its file; empty if profiling is off."""
        profile, self._profile = self._profile, None
        return "" if profile is None else profile.write()

    def _event(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._profile is None else self._profile.event(name)

    def _write_optimized(self, program: AnyExecutable) -> None:
        """Write the graph after the passes as ONNX once, if the options name a file.

        Raises FusecError if the file cannot be written, or the model has host steps.
        """
        path, self._optimized_path = self._optimized_path, ""
        if path:
            if not isinstance(program, Executable):
                program.refuse(f"cannot be written to {path} as one optimised model")
            data = convert.to_bytes(program.compiled)
            with writing(path), atomic_write.written(Path(path).resolve(), durable=True) as file:
                file.write(data)

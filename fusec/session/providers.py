"""Choose the device of a session by the names of onnxruntime's providers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from fusec import driver
from fusec.errors import FusecError
from fusec.gpu import device
from fusec.session.device_memory import require_first
from fusec.system.dataclass import dataclass

GPU, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
# providers of onnxruntime that mean the GPU
_GPU_PROVIDERS = (GPU, "NvTensorRTRTXExecutionProvider", "TensorrtExecutionProvider")
# Providers for other hardware. One is skipped with a warning if another provider follows, as onnxruntime does.
_FOREIGN = frozenset(
    f"{name}ExecutionProvider"
    for name in (
        *("ACL", "ArmNN", "Azure", "CANN", "CoreML", "Dml", "Dnnl", "Js", "MIGraphX", "Nnapi", "OpenVINO", "QNN"),
        *("ROCM", "Rknpu", "Tvm", "VSINPU", "VitisAI", "WebGpu", "WebNN", "Xnnpack"),
    )
)
# options of the GPU's providers that ask for a precision
_PRECISIONS = {"use_tf32": "tf32", "trt_fp16_enable": "fp16", "trt_bf16_enable": "bf16"}

Provider = str | tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class DeviceChoice:
    """The device of a session.

    simulate: run in simulation, also on a machine with a GPU.
    options: options of each provider, as text.
    """

    simulate: bool = False
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])

    @property
    def precision(self) -> str | None:
        """Return the precision that an option of a provider asks for."""
        gpu = {key: value for name in _GPU_PROVIDERS for key, value in self.options.get(name, {}).items()}
        asked = [name for key, name in _PRECISIONS.items() if gpu.get(key, "").lower() in ("1", "true")]
        return asked[-1] if asked else None

    @property
    def shapes(self) -> dict[str, tuple[str, ...]] | None:
        """Return the ranges of TensorRT's profiles, least to likely to largest, by input; None if there are none.

        Raises FusecError if one of the three is missing, or they are not written as `x:1x3x224x224,y:1x8`.
        """
        given = {key: value for options in self.options.values() for key, value in options.items()}
        for prefix in ("trt", "nv"):
            names = [f"{prefix}_profile_{kind}_shapes" for kind in ("min", "opt", "max")]
            if any(given.get(name) for name in names):
                profiles = [_profile(name, given.get(name, "")) for name in names]
                if not profiles[0].keys() == profiles[1].keys() == profiles[2].keys():
                    raise FusecError(f"{', '.join(names)} do not have the same inputs")
                return {name: _joined(name, [each[name] for each in profiles]) for name in profiles[0]}
        return None

    @property
    def stream(self) -> int | None:
        """Return the address of the CUDA stream that the caller chose."""
        given = [
            options["user_compute_stream"] for options in self.options.values() if "user_compute_stream" in options
        ]
        return int(given[0]) if given else None


def choose(
    providers: Sequence[Provider] | None, provider_options: Sequence[Mapping[str, Any]] | None, target: str
) -> DeviceChoice:
    """Choose the device by names of providers, first choice first; None: the GPU if there is one.

    Raises FusecError if a provider is unknown, all are for other hardware, or an option asks for a second device.
    """
    if providers is None:
        return DeviceChoice()
    if isinstance(providers, str) or not isinstance(providers, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise FusecError(f"providers are a list of names, such as [{CPU!r}], not {providers!r}")
    if provider_options is not None and len(provider_options) != len(providers):
        raise FusecError(f"{len(providers)} providers, but options of {len(provider_options)}")
    named: dict[str, Mapping[str, str]] = {}
    for place, entry in enumerate(providers):
        name, options = (entry, {}) if isinstance(entry, str) else entry
        given = dict(options) | dict(provider_options[place] if provider_options is not None else {})
        named.setdefault(name, {str(key): str(value) for key, value in given.items()})
    known = [name for name in named if _is_known(name)]
    if named and not known:
        raise _unknown(next(iter(named)))
    for name in named.keys() - set(known):
        warnings.warn(f"{name} is for other hardware, so fusec uses {known[0]}", stacklevel=4)
    for name in known:
        require_first(int(named[name].get("device_id", "0")))
    if not known or known[0] == CPU:
        return DeviceChoice(bool(known), {name: named[name] for name in known})
    if not device.is_present(driver.resolve_target(target)):
        warnings.warn(f"{known[0]}: this machine has no such GPU; the model runs in simulation", stacklevel=4)
    return DeviceChoice(False, {name: named[name] for name in known})


def get_available_providers() -> list[str]:
    """Return the providers of this machine, first choice first."""
    return [CPU] if device.device_name() is None else [GPU, CPU]


def get_all_providers() -> list[str]:
    """Return the providers that a session takes."""
    return [*_GPU_PROVIDERS, CPU]


def get_device() -> str:
    """Return `GPU` if this machine has one that fusec can use, else `CPU`."""
    return "CPU" if device.device_name() is None else "GPU"


def _profile(option: str, text: str) -> dict[str, list[str]]:
    """Read `x:1x3x224x224,y:1x8` as sizes by input."""
    found: dict[str, list[str]] = {}
    for part in text.split(","):
        name, sign, sizes = part.rpartition(":")  # names of tensors may contain a colon
        if not sign or not all(size.isdigit() for size in sizes.split("x")):
            raise FusecError(f"{option} is {text!r}, but is written like x:1x3x224x224,y:1x8")
        found[name] = sizes.split("x")
    return found


def _joined(name: str, shapes: Sequence[Sequence[str]]) -> tuple[str, ...]:
    if len({len(shape) for shape in shapes}) > 1:
        raise FusecError(f"the profiles of input {name!r} have different numbers of dims")
    return tuple("..".join(sizes) for sizes in zip(*shapes, strict=True))


def _is_known(name: str) -> bool:
    if name in _FOREIGN:
        return False
    if name not in (CPU, *_GPU_PROVIDERS):
        raise _unknown(name)
    return True


def _unknown(name: str) -> FusecError:
    return FusecError(f"fusec has no provider {name!r}; its providers are {', '.join([CPU, *sorted(_GPU_PROVIDERS)])}")

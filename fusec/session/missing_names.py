"""Name what of onnxruntime's interface fusec does not have, with the reason.

A program that uses such a name gets an AttributeError that says why, and `hasattr` is False.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

_PLUGINS = "fusec has no plug-in providers of onnxruntime"
_SPARSE = "fusec has no sparse tensors: give a dense array"
_CONTEXT = "fusec stores compiled models in `.fusec` files, not in EPContext nodes"
_LORA = "fusec has no LoRA adapters of onnxruntime"
_MEMORY = "fusec plans the memory of a program: name devices as `cuda` or `cpu`"

WITHOUT: Mapping[str, Mapping[str, str]] = {
    "InferenceSession": {
        "get_input_epdevices": _PLUGINS,
        "get_input_memory_infos": _PLUGINS,
        "get_output_memory_infos": _PLUGINS,
        "get_provider_graph_assignment_info": "all nodes run in fusec: see `session.executable.explain()`",
        "get_tuning_results": "fusec stores choices in its cache and in `fusec.lock`",
        "set_tuning_results": "fusec stores choices in its cache and in `fusec.lock`",
        "set_ep_dynamic_options": "no option of a provider changes after the session is made: call set_providers",
        "run_with_ortvaluevector": "fusec has no C++ vectors of onnxruntime: call run_with_ort_values",
    },
    "OrtValue": {"as_sparse_tensor": _SPARSE, "ort_value_from_sparse_tensor": _SPARSE},
    "SessionOptions": {
        "add_external_initializers_from_files_in_memory": "give values with add_external_initializers",
        "add_provider_for_devices": _PLUGINS,
        "set_provider_selection_policy": _PLUGINS,
        "set_provider_selection_policy_delegate": _PLUGINS,
        "set_load_cancellation_flag": "loading cannot be cancelled",
        "set_ep_context_data_read_func": _CONTEXT,
        "clear_ep_context_data_read_func": _CONTEXT,
    },
    "RunOptions": {"add_active_adapter": _LORA},
}

# What the module of onnxruntime has, and fusec.session has not.
MODULE: Mapping[str, str] = {
    "AdapterFormat": _LORA,
    "LoraAdapter": _LORA,
    "ModelCompiler": _CONTEXT,
    "OrtAllocatorType": _MEMORY,
    "OrtArenaCfg": _MEMORY,
    "OrtCompileApiFlags": _CONTEXT,
    "OrtDevice": _MEMORY,
    "OrtDeviceMemoryType": _MEMORY,
    "OrtDeviceVendorId": _MEMORY,
    "OrtEpAssignedNode": _PLUGINS,
    "OrtEpAssignedSubgraph": _PLUGINS,
    "OrtEpContextData": _CONTEXT,
    "OrtEpContextDataBuffer": _CONTEXT,
    "OrtEpDevice": _PLUGINS,
    "OrtExecutionProviderDevicePolicy": _PLUGINS,
    "OrtExternalInitializerInfo": "give values with SessionOptions.add_external_initializers",
    "OrtHardwareDevice": _PLUGINS,
    "OrtHardwareDeviceType": _PLUGINS,
    "OrtMemType": _MEMORY,
    "OrtMemoryInfo": _MEMORY,
    "OrtMemoryInfoDeviceType": _MEMORY,
    "OrtSparseFormat": _SPARSE,
    "OrtSyncStream": "give a stream as the provider's option `user_compute_stream`",
    "SessionIOBinding": "call io_binding() of a session",
    "SparseTensor": _SPARSE,
    "capi": "errors are those of fusec.errors, and all are FusecErrors",
    "copy_tensors": "call update_inplace of an OrtValue",
    "create_and_register_allocator": _MEMORY,
    "create_and_register_allocator_v2": _MEMORY,
    "get_ep_devices": _PLUGINS,
    "has_collective_ops": "fusec runs a model on one GPU",
    "print_debug_info": "run `fusec doctor`",
    "register_execution_provider_library": _PLUGINS,
    "set_seed": "random numbers follow the input `fusec.random_state` of a run, or the attribute `seed` of their node",
    "unregister_execution_provider_library": _PLUGINS,
}


class MissingNames:
    """Base of classes whose missing methods, which onnxruntime has, raise an error with the reason."""

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self).__name__
        reason: Any = WITHOUT.get(kind, {}).get(name)
        raise AttributeError(f"{kind} has no attribute {name!r}{f': {reason}' if reason else ''}")

"""Read a serialized plan with cuDNN's own functions, by ctypes, so that Python's lock is free meanwhile.

cuDNN loads the code of an engine when it first reads a plan of that engine. The frontend reads plans, too, but it holds
Python's lock, so no other thread computes meanwhile. The numbers below are those of cuDNN's header cudnn_graph.h.
"""

from __future__ import annotations

import ctypes

READS_WITHOUT_HANDLE = 91100  # the first version of cuDNN whose frontend's tests read serialized plans without a handle
_EXECUTION_PLAN, _DEVICE_PROPERTIES = 5, 38  # cudnnBackendDescriptorType_t
_PLAN_JSON, _PLAN_DEVICE, _DEVICE_ID = 405, 407, 2700  # cudnnBackendAttributeName_t
_DESCRIPTOR, _INT32, _CHAR = 15, 23, 24  # cudnnBackendAttributeType_t
_FIELD = b"cudnn_backend_dataS"  # of the frontend's serialized form, which is UBJSON; S: a string follows
_LENGTH_BYTES = {b"i": 1, b"U": 1, b"I": 2, b"l": 4, b"L": 8}  # of the string's length, by its type


def backend_json(blob: bytes) -> bytes:
    """Return cuDNN's description of a plan, which is JSON, from what the frontend serialized.

    Raises ValueError if it has none.
    """
    _, found, rest = blob.partition(_FIELD)
    if not found or rest[:1] not in _LENGTH_BYTES:
        raise ValueError("the frontend serialized no plan of cuDNN here")
    start = 1 + _LENGTH_BYTES[rest[:1]]
    length = int.from_bytes(rest[1:start], "big")
    return rest[start : start + length]


def read_plan(library: ctypes.CDLL, blob: bytes) -> int:
    """Read a plan for GPU 0, and return cuDNN's status, which is 0 if it read the plan.

    Only for a blob that is trusted, because it holds machine code. The plan, and what it loaded, stays until the
    process ends.
    """
    text, number = backend_json(blob), ctypes.c_int32(0)
    properties, plan = ctypes.c_void_p(), ctypes.c_void_p()
    return (
        library.cudnnBackendCreateDescriptor(_DEVICE_PROPERTIES, ctypes.byref(properties))
        or _set(library, properties, _DEVICE_ID, _INT32, 1, ctypes.byref(number))
        or library.cudnnBackendFinalize(properties)
        or library.cudnnBackendCreateDescriptor(_EXECUTION_PLAN, ctypes.byref(plan))
        or _set(library, plan, _PLAN_DEVICE, _DESCRIPTOR, 1, ctypes.byref(properties))
        or _set(library, plan, _PLAN_JSON, _CHAR, len(text), text)
        or library.cudnnBackendFinalize(plan)
    )


def _set(library: ctypes.CDLL, descriptor: ctypes.c_void_p, name: int, kind: int, count: int, values: object) -> int:
    """Set an attribute of a descriptor, and return cuDNN's status."""
    return library.cudnnBackendSetAttribute(descriptor, name, kind, ctypes.c_int64(count), values)

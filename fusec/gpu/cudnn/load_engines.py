"""Load the code of cuDNN's engines in a thread, while a process that starts reads its model.

The plan cache records one plan of each engine that programs of this machine run. A process that starts reads these
plans, because cuDNN loads an engine's code with its first plan. Plans are recorded where they are chosen, and read only
if driver and cuDNN are the same, as plans of the cache are.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fusec.errors import FusecError
from fusec.gpu import device
from fusec.gpu.cudnn.plans.backend_plan import READS_WITHOUT_HANDLE, read_plan
from fusec.gpu.cudnn.without_driver.deviceless import cudnn_library
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import PlanKey

MOST_ENGINES = 4  # of the record, because a program that starts may not need them
_SUBJECT = "a plan of each engine"
_ONCE = threading.Lock()  # is acquired once in a process


def recorded(store: PlanStore, target: str, device_name: str) -> dict[int, PlanKey]:
    """Return the keys of the recorded plans, by engine, the newest first."""
    found = store.choice(_key(target, device_name)) or {}
    try:
        return {int(engine): PlanKey(**key) for engine, key in found["plans"]}
    except (KeyError, TypeError, ValueError):
        return {}  # another version of fusec wrote it


def record(store: PlanStore, plans: Mapping[int, Sequence[PlanKey]]) -> None:
    """Record plans of engines: for each the first key that the cache has a serialized plan of.

    The record has MOST_ENGINES at most. It drops the plans of another driver or cuDNN first, then the oldest ones.
    """
    if not plans:
        return
    like = next(iter(plans.values()))[0]
    before = {e: k for e, k in recorded(store, like.target, like.device).items() if _libraries(k) == _libraries(like)}
    added: dict[int, PlanKey] = {}
    for engine in plans.keys() - before.keys():
        stored = (key for key in plans[engine] if (entry := store.get(key)) is not None and entry.blob)
        if (key := next(stored, None)) is not None:
            added[engine] = key
    if added:
        newest = list({**added, **before}.items())[:MOST_ENGINES]
        data: dict[str, Any] = {"plans": [[engine, key.to_json()] for engine, key in newest]}
        store.put_choice(_key(like.target, like.device), data)


def load_engines(store: PlanStore) -> list[int]:
    """Read the recorded plans for this machine's GPU, small ones first, and return cuDNN's status of each.

    A plan compiled at run time is larger, because it holds its kernel, and its engine loads faster.
    """
    here, name, driver = device.detect(), device.device_name(), device.cuda_driver()
    if here is None or name is None or driver is None:
        return []
    keys = recorded(store, here.name, name)
    if not keys:
        return []
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    library = ctypes.CDLL(str(cudnn_library() or "libcudnn.so.9"))
    cudnn = int(library.cudnnGetVersion())
    if cudnn < READS_WITHOUT_HANDLE:
        return []
    usable = [key for key in keys.values() if _libraries(key) == (str(version.value), str(cudnn))]
    blobs = [entry.blob for key in usable if (entry := store.get(key)) is not None and entry.blob]
    return [read_plan(library, blob) for blob in sorted(blobs, key=len)]


def load_engines_once() -> None:
    """Load the engines of this machine, in the first call of a process.

    No failure is an error, because whoever needs a plan reads it again and reports what is wrong.
    """
    if _ONCE.acquire(blocking=False):
        with suppress(FusecError, OSError, ValueError):
            load_engines(PlanStore())


def _libraries(key: PlanKey) -> tuple[str, str]:
    return key.driver, key.cudnn


def _key(target: str, device_name: str) -> PlanKey:
    """Return the key of the record, which names no version, because a process that starts does not know them yet."""
    return PlanKey(_SUBJECT, target, device_name, "", "", "", "")

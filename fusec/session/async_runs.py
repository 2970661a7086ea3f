"""Run a session on threads of its own, for `run_async`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fusec.ir import Array

Callback = Callable[[Sequence[Any], Any, str], object]


class AsyncRuns:
    """Threads that run a session and then call back. They start with the first run."""

    def __init__(self, threads: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fusec-run-async")

    def submit(self, run: Callable[[], list[Array]], callback: Callback, user_data: Any) -> None:
        """Run, and call `callback(results, user_data, error)`; results are empty if there is an error."""

        def work() -> None:
            try:
                results, error = run(), ""
            except Exception as failure:  # noqa: BLE001  # the callback is the only one that hears of it
                results, error = list[Array](), str(failure) or type(failure).__name__
            try:
                callback(results, user_data, error)
            except Exception:  # noqa: BLE001  # a pool would hide it, and a thread of its own would print it
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

        self._pool.submit(work)

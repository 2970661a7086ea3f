"""Start the child processes of the fuzzer: workers, and the twin that compiles each graph once more."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from fusec.plans.cache_folder import cache_folder
from fusec.system.json_child import Inbox, JsonChild
from fusec.testing.failure import DIED, HUNG, Failure

HUNG_STATUS = 86  # exit status of a child that found out itself that it hung
# one thread per library, because each core already has one process
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def fuzz_folder() -> Path:
    """Return the fuzzer's folder inside fusec's cache folder."""
    return cache_folder() / "fuzz"


class Child(JsonChild):
    """One process that runs `main` of a module, with a seed for the order of its sets."""

    def __init__(self, module: str, inbox: Inbox | None = None, hash_seed: int = 0):
        env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), **{k: os.environ.get(k, "1") for k in _ONE_THREAD}}
        env.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(fuzz_folder() / "hypothesis"))  # else the current folder
        self._hung = ""  # stack at which it hung, if it reported that
        super().__init__(module, env, inbox=inbox)

    def _handled(self, message: dict[str, Any]) -> bool:
        if "hung" not in message:
            return False
        self._hung = message["hung"] or "unknown stack"
        return True

    def death(self) -> Failure:
        """Describe the end of the process. One that has not ended was silent for too long, and is killed."""
        if not self.ended:
            self._process.kill()
            return Failure(HUNG, "Hang", f"the process was silent for {time.monotonic() - self.heard:.0f} s")
        signal, words = self.end()
        if self._process.returncode == HUNG_STATUS or self._hung:
            return Failure(HUNG, "Hang", "the property did not return in time", traceback=self._hung)
        return Failure(DIED, signal or "exit", words)

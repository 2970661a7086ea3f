"""Worker of a pool whose batches can kill it, delay it, or make it wait for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusec.scale.device_pool import pool_worker

KILLS, KILLS_ONCE, HANGS, SLOW = 1e6, 2e6, 3e6, 4e6
start = pool_worker.BatchRunner.start


def faulty(self: pool_worker.BatchRunner, job: Mapping[str, Any], feeds: Mapping[str, Any]) -> Any:
    first = float(next(iter(feeds.values())).flat[0])
    once = Path(os.environ["FAIL_ONCE_FILE"]) if "FAIL_ONCE_FILE" in os.environ else None
    if first == KILLS or (first == KILLS_ONCE and once is not None and not once.exists()):
        if once is not None:
            once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if first == HANGS:
        time.sleep(100)
    if first == SLOW:
        time.sleep(0.3)
    return start(self, job, feeds)


def main() -> None:
    pool_worker.BatchRunner.start = faulty  # the fault under test
    pool_worker.main()

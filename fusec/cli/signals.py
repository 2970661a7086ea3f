"""Let Ctrl-C end a command in time, also where Python cannot raise KeyboardInterrupt.

Python raises it in the main thread, between two of its own instructions. So it waits for a long call of a library, and
is lost while an object is finalized. SIGTERM needs no such help: it ends the process immediately, and the kernel ends
the workers (`fusec.system.parent_death`).
"""

from __future__ import annotations

import os
import signal
import threading
import time

GRACE_S = 1.5
EXIT_INTERRUPTED = 130


def watch() -> None:
    """End this process `GRACE_S` after Ctrl-C, if it has not ended by itself until then."""
    if threading.current_thread() is not threading.main_thread():
        return  # signals are not this thread's
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # written by the signal handler itself, in C
    threading.Thread(target=_end_late, args=(read,), name="fusec-interrupts", daemon=True).start()


def _end_late(read: int) -> None:
    while os.read(read, 1) != bytes([signal.SIGINT]):
        pass
    time.sleep(GRACE_S)
    os.write(2, b"fusec: interrupted\n")
    os._exit(EXIT_INTERRUPTED)

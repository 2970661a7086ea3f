"""Let Ctrl-C end a command soon, even where Python cannot raise KeyboardInterrupt.

Python raises it in the main thread, between two of its own instructions. So the exception waits for a long call into a
library, and is lost while an object is finalized. SIGTERM needs no help: it ends the process immediately, and the
kernel ends the workers (`fusec.system.parent_death`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import NoReturn

GRACE_S = 1.5
EXIT_INTERRUPTED = 130


def watch() -> None:
    """End this process `GRACE_S` after Ctrl-C, unless it ended by itself. A second Ctrl-C has no effect."""
    if threading.current_thread() is not threading.main_thread():
        return  # because only the main thread may set the wakeup descriptor
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored in the background of a script
        signal.signal(signal.SIGINT, _interrupt_once)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # the signal handler in C writes to it
    threading.Thread(target=_end_late, args=(read,), name="fusec-interrupts", daemon=True).start()


def _interrupt_once(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, and ignore further signals, which would interrupt the cleanup with a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_late(read: int) -> None:
    while os.read(read, 1) != bytes([signal.SIGINT]):
        pass
    time.sleep(GRACE_S)
    os.write(2, b"fusec: interrupted\n")
    os._exit(EXIT_INTERRUPTED)

"""End child processes when their parent ends, even by `kill -9`.

Only the parent holds the write end of a pipe. Each child asks the kernel for SIGKILL when that end closes.
The kernel's parent-death signal is no alternative, because it comes when the thread that started the child ends. A
thread of the child that reads the pipe is none either, because cuDNN holds Python's lock for seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading

_ends: list[int] = []  # of the pipe: the read end, the write end
_lock = threading.Lock()


def handle() -> int:
    """Return the descriptor to pass to a child (`pass_fds`), which then calls `hold`."""
    with _lock:
        if not _ends:
            _ends.extend(os.pipe())
        return _ends[0]


def hold(handle: int) -> None:
    """Let the kernel kill this child process when its parent ends. Exit now if the parent has ended already."""
    # opened again, because the signal belongs to an open file and all children got the same one
    own = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.close(handle)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):  # nothing to read and not closed: the parent is alive
        os.read(own, 1)
        os._exit(1)


def _forked() -> None:
    """Close the pipe of the parent in a forked process, so that it keeps no children of the parent alive."""
    global _lock
    _lock = threading.Lock()
    for end in _ends:
        os.close(end)
    _ends.clear()


os.register_at_fork(after_in_child=_forked)

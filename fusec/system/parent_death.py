"""End child processes as soon as their parent is gone, however it ended: also by `kill -9`.

The parent holds the write end of a pipe, and nobody else does. Each child asks the kernel for SIGKILL when that end
closes. The kernel's own parent-death signal would not do: it comes when the thread ends that started the child. A
thread of the child that reads the pipe would not do either: cuDNN holds Python's lock for seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading

_ends: list[int] = []  # of the pipe: read, write
_lock = threading.Lock()


def handle() -> int:
    """The descriptor to hand to a child (`pass_fds`), which then calls `hold`."""
    with _lock:
        if not _ends:
            _ends.extend(os.pipe())
        return _ends[0]


def hold(handle: int) -> None:
    """Let this process, a child, be killed when its parent ends, or now if that has ended already."""
    # opened anew: the signal belongs to an open file, and all children were handed the same one
    own = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.close(handle)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):  # nothing is ever written: it lives
        os.read(own, 1)
        os._exit(1)


def _forked() -> None:
    """A process forked from this one keeps nobody's children alive, and has a pipe of its own."""
    global _lock
    _lock = threading.Lock()
    for end in _ends:
        os.close(end)
    _ends.clear()


os.register_at_fork(after_in_child=_forked)

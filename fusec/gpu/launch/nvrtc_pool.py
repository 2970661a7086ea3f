"""Hold processes that compile kernels and have nothing to compile, and start them before they are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from fusec.gpu.launch.nvrtc_process import NvrtcChild

MAX_AHEAD = 12  # processes while cuDNN's workers start, when most cores have nothing else to do
IDLE_S = 60.0  # after which a process without work ends


def compilers() -> int:
    """Return how many sources are compiled at the same time, at most: three for four cores; others ask cuDNN."""
    return max(1, len(os.sched_getaffinity(0)) * 3 // 4)


class IdleProcesses:
    """Processes that have nothing to compile. They end after some seconds, because each holds NVRTC in memory.

    The first source of a process takes up to a second longer than the next ones.
    """

    def __init__(self) -> None:
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._held: list[tuple[NvrtcChild, list[str], object]] = []

    def start(self, count: int, libraries: list[str]) -> None:
        """Start processes until so many wait for a source."""
        with self._starting:
            for _ in range(count - len(self._held)):
                try:
                    self.give(NvrtcChild(libraries), libraries)
                except OSError:  # reported where a source needs a process
                    return

    def take(self, libraries: list[str]) -> NvrtcChild:
        """Return a process that loaded these libraries, or start one. Raises OSError if it does not start."""
        with self._lock:
            for place, (child, loaded, _) in enumerate(self._held):
                if loaded == libraries:
                    del self._held[place]
                    return child
        return NvrtcChild(libraries)

    def give(self, child: NvrtcChild, libraries: list[str]) -> None:
        """Hold a process for the next source."""
        turn = object()
        with self._lock:
            self._held.append((child, libraries, turn))
        timer = threading.Timer(IDLE_S, self._end, [turn])
        timer.daemon = True
        timer.start()

    def _end(self, turn: object) -> None:
        """End the process that was given at a turn, if nobody took it since."""
        with self._lock:
            ended = [child for child, _, given in self._held if given is turn]
            self._held = [item for item in self._held if item[2] is not turn]
        for child in ended:
            child.close()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            ended, self._held = self._held, []
        for child, *_ in ended:
            child.close()


IDLE = IdleProcesses()


def start_compilers(libraries: Sequence[str]) -> None:
    """Start processes that compile, and let them load NVRTC, before it is known what they compile.

    To start one and to load NVRTC takes as long as to compile several kernels.
    """
    count = min(MAX_AHEAD, compilers())
    threading.Thread(target=IDLE.start, args=(count, list(libraries)), name="fusec-nvrtc-start", daemon=True).start()

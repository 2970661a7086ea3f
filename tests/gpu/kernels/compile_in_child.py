"""Compile CUDA sources by NVRTC in a process of its own, as fusec does, and return what NVRTC says.

cuDNN compiles plans with options that stay set in the process: after it, ptxas serializes products of warpgroups.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def logs_of(sources: Sequence[str], options: Sequence[str]) -> list[tuple[bool, str]]:
    """Compile sources; tell for each if it compiles, and return the log of the compiler."""
    question = json.dumps({"sources": list(sources), "options": list(options)})
    done = subprocess.run([sys.executable, __file__], input=question, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [(good, log) for good, log in json.loads(done.stdout)]


def main() -> None:
    from cupy import cuda

    nvrtc: Any = cuda.nvrtc
    question = json.load(sys.stdin)
    answers: list[tuple[bool, str]] = []
    for source in question["sources"]:
        program = nvrtc.createProgram(source, "kernels.cu", (), ())
        try:
            nvrtc.compileProgram(program, tuple(question["options"]))
            good = True
        except nvrtc.NVRTCError:
            good = False
        answers.append((good, nvrtc.getProgramLog(program)))
        nvrtc.destroyProgram(program)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

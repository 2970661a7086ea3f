"""Record cuDNN's answers for the tests: `python benchmarks/checks/cudnn_answers.py [PYTEST ARGUMENTS]`.

The tests, slow ones too, run with an empty cache and ask cuDNN everything. What they asked is written to
tests/gpu/cudnn/recorded_answers.json.gz, also where a test failed. Record anew after a change of the code that asks,
because a test fails until then. Record anew also after a change of fusec/lowering/known_bugs or fusec/targets, of the
lowering of many graphs, or of the pinned cuDNN. Without that the tests give the same results, and take longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from gpu.cudnn.recorded_answers import FILE, asked, write  # noqa: E402 - found through the line above


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        own = {"FUSEC_CACHE": f"{scratch}/cache", "FUSEC_REQUIRE_CUDNN": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-n", "2", "-m", "not manual and not gpu", "--ask-cudnn"]
        status = subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, env=os.environ | own, check=False).returncode
        answers = asked(Path(scratch) / "cache")
    write(answers)
    print(f"{len(answers)} answers of cuDNN are in {FILE.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())

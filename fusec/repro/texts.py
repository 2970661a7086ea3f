"""Hold the texts of a repro folder that do not depend on the graph: the README, and the script as a pytest file."""

from __future__ import annotations

import textwrap

from fusec.system.printable import printable
from fusec.targets.target import Target

TEST = '''\
"""repro.py as a test; skipped, with the reason, where there is no GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

try:
    import cupy

    missing = "" if cupy.cuda.runtime.getDeviceCount() else "no GPU"
except (ImportError, RuntimeError) as error:
    missing = f"no usable GPU: {error}"


@pytest.mark.skipif(bool(missing), reason=missing)
def test_every_plan_computes_what_the_graph_says():
    script = Path(__file__).with_name("repro.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
'''

_README = """\
{title}

Run, on a machine with an NVIDIA GPU:

  pip install nvidia-cudnn-frontend nvidia-cudnn-cu13 cupy-cuda13x    (CUDA 12: -cu12, -cuda12x)
  python repro.py        each plan that cuDNN offers; python repro.py 3: plan 3 alone
  pytest test_repro.py   the same as a test

The status is 1 if the output of a plan is farther from what is expected than the script allows, or if
no plan can be built. Attach what it prints, and what nvidia-smi says, to a report.

  repro.py        the cuDNN graph, call by call; needs cudnn and cupy only
  inputs.npz      what memory holds before the run, by uid: {inputs}, constants, and
                  outputs filled with NaN (77 in integers, and where NaN is right); bfloat16 as its bits
  expected.npz    outputs as computed in NumPy: fp32 arithmetic with exact sums, rounded where stored
  graph.json      the cuDNN graph as data
  graph.txt       the subgraph of the model it stands for, in fusec's text form
  partition.onnx  {onnx}
  versions.json   what this folder was made with, and for: {target}
"""


def readme(title: str, target: Target, seed: int | None, missing: str) -> str:
    """Return the README. `seed`: of the inputs, None if they were given; `missing`: why there is no ONNX file."""
    return _README.format(
        title=textwrap.fill(printable(title), 100),
        inputs="given inputs" if seed is None else f"random inputs of seed {seed}",
        onnx=f"is missing: {printable(missing)}" if missing else "the same subgraph",
        target=target.device_name,
    )

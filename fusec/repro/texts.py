"""Write the texts of a repro folder that do not depend on the graph: the README, and the script as a pytest file."""

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

The exit status is 1 if an output of a plan differs more from the expected one than the script allows, or
if no plan can be built. Attach the output of the script and of nvidia-smi to a report.

  repro.py        the cuDNN graph, call by call; needs cudnn and cupy only
  inputs.npz      memory before the run, by uid: {inputs}, constants, and outputs
                  filled with NaN (77 in integers, and where NaN is right); bfloat16 and fp8 as bits
  expected.npz    outputs as computed in NumPy: fp32 arithmetic with exact sums, rounded where stored
  graph.json      the cuDNN graph as data
  graph.txt       the same subgraph of the model, in fusec's text form
  partition.onnx  {onnx}
  versions.json   versions of all that made this folder for {target}
"""


def readme(title: str, target: Target, seed: int | None, missing: str) -> str:
    """Return the README.

    seed: seed of the inputs; None if the inputs were given.
    missing: the reason why there is no ONNX file; "" if there is one.
    """
    return _README.format(
        title=textwrap.fill(printable(title), 100),
        inputs="given inputs" if seed is None else f"random inputs of seed {seed}",
        onnx=f"is missing: {printable(missing)}" if missing else "the same subgraph",
        target=target.device_name,
    )

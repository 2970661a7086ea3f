"""What a result file says of where and of what it was measured."""

from __future__ import annotations

import datetime as dt
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def made(commit: str = "") -> dict[str, str]:
    """Today, and the commit; it is asked of git where it is not given, as on a machine without the history."""
    if not commit:
        git = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(git, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return {"date": dt.datetime.now(dt.UTC).date().isoformat(), "commit": commit}


def gpu() -> dict[str, Any]:
    """The GPU at hand and the libraries that drive it."""
    import cudnn
    import cupy
    import torch

    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cudnn": cudnn.backend_version(),
        "torch": torch.__version__,
    }

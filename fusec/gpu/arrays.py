"""CuPy, for those above this folder that hold arrays on the device but launch nothing."""

from __future__ import annotations

from typing import Any

import cupy as _cupy

cupy: Any = _cupy

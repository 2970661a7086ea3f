"""Import a package of an extra, or tell which extra brings it."""

from __future__ import annotations

import importlib
from typing import Any

from fusec.errors import FusecError


def extra_module(name: str, extra: str) -> Any:
    """Import a module. Raises FusecError if it is not installed.

    extra: the extra of fusec that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FusecError(f"{name} is not installed ({error}): pip install 'fusec[{extra}]'") from None

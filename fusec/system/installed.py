"""Return the versions of installed packages, without importing them."""

from __future__ import annotations

import importlib.metadata
from functools import cache


@cache
def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed. Its metadata is read once."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

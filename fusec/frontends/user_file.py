"""Import a function that a user names on the command line as `FILE.py:NAME` or `MODULE:NAME`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from fusec.errors import FusecError


def user_object(name: str) -> object:
    """Return what a file or module has under a name. The file is run once."""
    place, _, attribute = name.rpartition(":")
    if not place:
        raise FusecError(f"{name}: write FILE.py:NAME or MODULE:NAME")
    module = user_module(place)
    if not hasattr(module, attribute):
        raise FusecError(f"{name}: {place} has no {attribute!r}")
    return getattr(module, attribute)


def user_module(place: str) -> ModuleType:
    """Import a module by name, or from a file. Raises FusecError if it cannot be imported."""
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ImportError as error:
            raise FusecError(f"{place}: cannot be imported ({error})") from error
    path = Path(place).absolute()
    name = f"fusec_user_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FusecError(f"{place}: No such file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # because dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise FusecError(f"{place}: cannot be imported ({type(error).__name__}: {error})") from error
    return module

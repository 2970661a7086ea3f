"""Resolve names of properties and strategies: fusec's own, or a user's `file.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from fusec.errors import FusecError
from fusec.ir import Graph
from fusec.testing.case import Case, Property

GRAPHS = "fusec.testing.strategies:graphs"
CASES = "fusec.testing.strategies:cases"


def known_properties() -> dict[str, Property]:
    """Return fusec's own properties by name."""
    # Imported here because they need the whole compiler, and a user's own property may not.
    return dict(importlib.import_module("fusec.testing.properties.table").PROPERTIES)


def property_of(name: str) -> Property:
    """Return the property of that name, or a user's `file.py:function`: `f(graph)` or `f(graph, case)`."""
    if ":" not in name:
        known = known_properties()
        if name not in known:
            raise FusecError(f"no property is named {name!r}: {', '.join(known)}; or say path/to/file.py:function")
        return known[name]
    found = _find(name)
    if isinstance(found, Property):
        return Property(name, found.check, found.needs)
    if not callable(found):
        raise FusecError(f"{name} is not a function")
    function = cast("Any", found)
    try:
        takes = len([p for p in inspect.signature(function).parameters.values() if p.default is p.empty])
    except (TypeError, ValueError) as error:
        raise FusecError(f"{name}: {error}") from error
    if takes not in (1, 2):
        raise FusecError(f"{name}: a property takes a graph, or a graph and a case, not {takes} arguments")

    def check(graph: Graph, case: Case) -> None:
        if takes == 2:
            function(graph, case)
        else:
            function(graph)

    check.__doc__ = function.__doc__
    return Property(name, check)


def strategy_of(name: str) -> Any:
    """Return the Hypothesis strategy `module:name` or `file.py:name`; a function or class is called for it."""
    found = _find(name)
    return found() if inspect.isroutine(found) or inspect.isclass(found) else found


def absolute(name: str) -> str:
    """Make the file in a name absolute, so that the name is valid in every working folder."""
    place, sign, function = name.rpartition(":")
    return f"{Path(place).absolute()}:{function}" if sign and place.endswith(".py") else name


def version_of(names: Sequence[str]) -> str:
    """Hash the source files that define these strategies.

    A changed strategy gives other examples for the same seed, so results of the old one must not be reused.
    """
    sha = hashlib.sha256()
    for name in names:
        module = _module(name.rpartition(":")[0])
        own = inspect.getsourcefile(module)
        files = [Path(own)] if own else []
        if own and module.__name__.startswith("fusec."):
            # fusec's own strategies also use the modules of generators/
            files += sorted((Path(own).parent / "generators").rglob("*.py"))
        for path in files:
            sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


def _find(name: str) -> object:
    place, _, attribute = name.rpartition(":")
    module = _module(place)
    if not hasattr(module, attribute):
        raise FusecError(f"{name}: {place} has no {attribute!r}")
    return getattr(module, attribute)


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ImportError as error:
            raise FusecError(f"{place}: cannot be imported ({error})") from error
    path = Path(place).absolute()
    name = f"fusec_fuzz_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
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

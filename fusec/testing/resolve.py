"""Resolve names of properties and strategies: fusec's own, or a user's `file.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from fusec.errors import FusecError
from fusec.frontends.user_file import user_module, user_object
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
            raise FusecError(f"no property is named {name!r}: {', '.join(known)}; or give path/to/file.py:function")
        return known[name]
    found = user_object(name)
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
    from hypothesis.strategies import SearchStrategy  # optional

    found = user_object(name)
    try:
        strategy = found() if inspect.isroutine(found) or inspect.isclass(found) else found
    except Exception as error:
        raise FusecError(f"{name}: calling it for a strategy raised {type(error).__name__}: {error}") from error
    if not isinstance(strategy, SearchStrategy):
        raise FusecError(f"{name} is no Hypothesis strategy, and no function that returns one")
    return strategy


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
        module = user_module(name.rpartition(":")[0])
        own = inspect.getsourcefile(module)
        files = [Path(own)] if own else []
        if own and module.__name__.startswith("fusec."):
            # fusec's own strategies also use the modules of generators/
            files += sorted((Path(own).parent / "generators").rglob("*.py"))
        for path in files:
            sha.update(path.read_bytes())
    return sha.hexdigest()[:16]

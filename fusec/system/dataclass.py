"""Make dataclasses as the standard library does, but compile no code before the first object of a class is made.

The standard decorator compiles up to six methods of each class from text. A process imports hundreds of fusec's
classes, and makes objects of few.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

Values = Callable[[Any], tuple[Any, ...]]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True):
        """Return the class with the fields and methods of a dataclass; the options are the standard decorator's.

        A standard dataclass cannot extend a frozen one of these. A field without a default after one with a default
        is a TypeError, as in the standard library, but not before the first object is made.
        """
        return _dataclass(cls, frozen, eq) if cls is not None else lambda made: _dataclass(made, frozen, eq)


def _dataclass(cls: type, frozen: bool, eq: bool) -> type:
    own = set(vars(cls))
    has_hash = "__hash__" in own and not (cls.__hash__ is None and "__eq__" in own)  # `__eq__` alone sets it to None
    if not cls.__doc__:
        cls.__doc__ = cls.__name__  # else the standard library writes a signature here, and parses it
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)  # the fields; not one method
    fields = dataclasses.fields(made)
    compared = _values([field.name for field in fields if field.compare])
    methods: dict[str, Any] = {"__init__": _FirstInit(made, frozen), "__repr__": _represent}
    if eq:
        methods["__eq__"] = _equal(compared)
    if frozen:
        methods["__setattr__"], methods["__delattr__"] = _refusals(made, frozenset(field.name for field in fields))
    for name, method in methods.items():
        if name not in own:
            setattr(made, name, method)
    if eq and not has_hash:
        made.__hash__ = (lambda self: hash(compared(self))) if frozen else None
    return made


class _FirstInit:
    """Stand for `__init__` of a class until it is looked up; then the standard library compiles it."""

    def __init__(self, cls: Any, frozen: bool):
        self._cls = cls
        self._frozen = frozen

    def __get__(self, instance: Any, owner: type) -> Any:
        cls = self._cls
        fields = [(field.name, field.type, field) for field in dataclasses.fields(cls)]
        members = {"__doc__": cls.__doc__}
        if hasattr(cls, "__post_init__"):
            members["__post_init__"] = cls.__post_init__
        made = dataclasses.make_dataclass(
            cls.__name__, fields, namespace=members, repr=False, eq=False, match_args=False, frozen=self._frozen
        )
        init: Any = made.__init__
        init.__qualname__ = f"{cls.__qualname__}.__init__"  # errors of calls name it
        cls.__init__ = init  # two threads may both come here: they store equal functions
        return init.__get__(instance, owner)


@reprlib.recursive_repr()
def _represent(self: Any) -> str:
    values = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(values)})"


def _values(names: list[str]) -> Values:
    """Return a function that reads these attributes as a tuple."""
    if not names:
        return lambda value: ()
    read = attrgetter(*names)
    return read if len(names) > 1 else lambda value: (read(value),)


def _equal(compared: Values) -> Callable[[Any, object], bool]:
    def equal(self: Any, other: object) -> bool:
        return compared(self) == compared(other) if type(other) is type(self) else NotImplemented

    return equal


def _refusals(cls: type, names: frozenset[str]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return `__setattr__` and `__delattr__` of a frozen class. Classes that extend it may have other attributes."""

    def assign(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return assign, delete

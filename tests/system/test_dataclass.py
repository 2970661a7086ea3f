"""Test that fusec's dataclasses behave as the standard library's, and compile nothing before their first object."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, field
from typing import Any, ClassVar

import pytest

from fusec.system.dataclass import dataclass

Decorator = Callable[..., Any]
BOTH = pytest.mark.parametrize("make", [dataclass, dataclasses.dataclass], ids=["fusec", "standard"])


def point(make: Decorator, **options: bool) -> Any:
    """Return a class with all that fields of fusec's classes have."""

    @make(**options)
    class Point:
        kind: ClassVar[str] = "point"
        x: int
        y: float = 0.5
        tags: list[str] = field(default_factory=list[str], compare=False)
        secret: str = field(default="s", repr=False)

    return Point


def names(made: type) -> list[str]:
    return [each.name for each in dataclasses.fields(made)]


@BOTH
def test_fields_have_defaults_and_the_order_of_their_declaration(make: Decorator) -> None:
    made = point(make)
    assert names(made) == list(made.__match_args__) == ["x", "y", "tags", "secret"]
    first, second = made(1), made(1, tags=["a"], y=0.5)
    assert vars(first) == {"x": 1, "y": 0.5, "tags": [], "secret": "s"}
    assert first.tags is not made(1).tags
    assert first == second and second.tags == ["a"], "tags are not compared"
    assert first != made(2) and first != made(1, secret="t") and first != 1
    assert repr(second).endswith("point.<locals>.Point(x=1, y=0.5, tags=['a'])")
    assert dataclasses.replace(second, x=3).tags == ["a"]
    assert dataclasses.asdict(second) == {"x": 1, "y": 0.5, "tags": ["a"], "secret": "s"}
    assert copy.deepcopy(second) == second
    assert made.kind == "point"


@BOTH
def test_a_call_with_wrong_arguments_names_the_class(make: Decorator) -> None:
    made = point(make)
    with pytest.raises(TypeError, match=r"Point\.__init__\(\) missing 1 required positional argument: 'x'"):
        made()
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        made(1, z=2)


@BOTH
def test_a_class_shows_the_signature_of_its_init(make: Decorator) -> None:
    assert list(inspect.signature(point(make)).parameters) == ["x", "y", "tags", "secret"]


@BOTH
def test_hashes_are_those_of_the_compared_fields(make: Decorator) -> None:
    frozen, changing, by_identity = (point(make, **o) for o in ({"frozen": True}, {}, {"frozen": True, "eq": False}))
    assert hash(frozen(1)) == hash(frozen(1, tags=["a"])) != hash(frozen(2))
    with pytest.raises(TypeError, match="unhashable"):
        hash(changing(1))
    assert by_identity(1) != by_identity(1)
    assert len({by_identity(1), by_identity(1)}) == 2


@BOTH
def test_an_equal_nan_is_the_same_object(make: Decorator) -> None:
    @make(frozen=True)
    class One:
        x: float

    nan = float("nan")
    assert One(nan) == One(nan)
    assert One(nan) != One(float("nan"))


@BOTH
def test_frozen_objects_refuse_changes(make: Decorator) -> None:
    made = point(make, frozen=True)
    one = made(1)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        one.x = 2
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'other'"):
        one.other = 2
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del one.x

    class Wider(made):
        pass

    wider = Wider(1)
    wider.other = 2
    del wider.other
    with pytest.raises(FrozenInstanceError, match="'x'"):
        wider.x = 2


@BOTH
def test_methods_of_the_class_stay(make: Decorator) -> None:
    @make(frozen=True)
    class Own:
        x: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    @make()
    class Made:
        x: int

        def __init__(self) -> None:
            self.x = 3

    one, two = Own(1), Own(2)
    assert (repr(one), one == two, hash(two), Made().x) == ("own", True, 7, 3)


@BOTH
def test_a_class_extends_the_fields_of_its_base(make: Decorator) -> None:
    @make(frozen=True)
    class Base:
        x: int = 1
        doubled: list[int] = field(default_factory=list[int])

        def __post_init__(self) -> None:
            self.doubled.append(self.x * 2)

    @make(frozen=True)
    class Derived(Base):
        y: int = 2
        x: int = 5

        def __post_init__(self) -> None:
            super().__post_init__()
            self.doubled.append(self.y * 2)

    assert names(Derived) == ["x", "doubled", "y"]
    assert Derived().doubled == [10, 4], "the hook of the base runs, too"
    assert Base().doubled == [2]
    assert Derived() != Base()


@BOTH
def test_an_object_that_holds_itself_has_a_repr(make: Decorator) -> None:
    @make()
    class Node:
        parts: list[Any] = field(default_factory=list[Any])

    node = Node()
    node.parts.append(node)
    assert repr(node).endswith("Node(parts=[...])")


def test_threads_may_make_the_first_object_together() -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in range(50):
            made = point(dataclass, frozen=True)
            objects = list(threads.map(made, [1] * 8))
            assert all(each == objects[0] for each in objects)


PROGRAM = """
import sys
import dataclasses, {module} as module

compiled = []
sys.addaudithook(lambda event, arguments: compiled.append(event) if event == "compile" else None)

@module.dataclass(frozen=True)
class Pair:
    x: int
    y: int = 2

classes = len(compiled)
Pair(1) == Pair(1), hash(Pair(1)), repr(Pair(1))
first = len(compiled)
Pair(2)
print(classes > 0, first > classes, len(compiled) == first)
"""


@pytest.mark.parametrize(("module", "compiles"), [("fusec.system.dataclass", False), ("dataclasses", True)])
def test_a_class_without_objects_compiles_nothing(module: str, compiles: bool) -> None:
    program = PROGRAM.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(compiles), str(not compiles), "True"]

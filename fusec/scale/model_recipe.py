"""Describe a model by its file and options, so that another process can load it.

A recipe is plain data. It travels as JSON, or inside the messages of Dask and Ray.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from fusec.errors import ExecutionError, FusecError, ModelError
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from fusec.dynamic_shapes.executable import DynamicExecutable
    from fusec.segments.executable import AnyExecutable

    Runnable: TypeAlias = AnyExecutable | DynamicExecutable

T = TypeVar("T")
COMPILED = ".fusec"
_loading = threading.Lock()


@dataclass(frozen=True)
class ModelRecipe:
    """A model file with the options to compile or load it.

    path: an ONNX file, a text form, or a `.fusec` file. All workers must see it under this path.
    options: options of `fusec.compile`, or of `fusec.load` for a `.fusec` file, as JSON.
    """

    path: str
    options: str = "{}"

    @classmethod
    def of(cls, model: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> ModelRecipe:
        """Make a recipe. Raises ModelError if there is no such file, FusecError for an option that is no plain data."""
        if not isinstance(model, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]  # users need not check types
            raise ModelError(
                f"workers load the model from a file: give its path, not {type(model).__name__}; "
                "`save` of an executable writes one"
            )
        path = Path(os.fspath(model)).absolute()
        if not path.is_file():
            raise ModelError(f"{path}: there is no such file")
        try:
            return cls(str(path), json.dumps(dict(options or {}), sort_keys=True))
        except TypeError as error:
            raise FusecError(f"options for workers are numbers, strings, lists and dicts: {error}") from None

    @property
    def is_compiled(self) -> bool:
        """Tell if the file holds programs, so that loading it compiles nothing."""
        return self.path.endswith(COMPILED)

    def on(self, device: str) -> ModelRecipe:
        """Return the recipe for a device: `cpu` and `simulated` never use a GPU."""
        given: dict[str, Any] = json.loads(self.options)
        if device == "cpu" and not self.is_compiled and given.get("target", "auto") == "auto":
            given["target"] = "cpu"
        elif device in ("cpu", "simulated"):
            given["simulate"] = True
        return ModelRecipe(self.path, json.dumps(given, sort_keys=True))

    def executable(self) -> Runnable:
        """Compile or load the model. Raises ExecutionError if it has state, because each worker would have its own."""
        from fusec import driver  # takes a second

        options: dict[str, Any] = json.loads(self.options)
        load: Any = driver.load if self.is_compiled else driver.compile
        known = inspect.signature(load).parameters
        if unknown := sorted(options.keys() - known.keys()):
            raise FusecError(f"{self.path}: {', '.join(unknown)}: no option of fusec.{load.__name__}")
        made = cast("Runnable", load(self.path, **options))
        if state := getattr(made, "state", None):
            raise ExecutionError(f"{self.path}: has state ({', '.join(state)}), which workers cannot share")
        return made


@functools.lru_cache(maxsize=4)
def _loaded(recipe: ModelRecipe) -> Runnable:
    return recipe.executable()


def loaded(recipe: ModelRecipe) -> Runnable:
    """Return the executable of a recipe, which is made once in each process."""
    with _loading:
        return _loaded(recipe)


def call_with(function: Callable[..., T], batch: Any) -> T:
    """Call a model, or what queues its calls, with a batch: an array, a tuple in order, or a dict by name."""
    if isinstance(batch, Mapping):
        return function(**{str(name): array for name, array in batch.items()})
    return function(*batch) if isinstance(batch, tuple) else function(batch)

"""Export a captured graph as a module that takes only tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked

from fusec.errors import ModelError
from fusec.frontends.torch_export import EXPORT_ERRORS, reason
from fusec.system.dataclass import dataclass
from fusec.torch_backend.tensors import is_tensor

_T = TypeVar("_T")


@dataclass(frozen=True)
class Item:
    """A number with the method `item`, for a graph that takes the item of a tensor."""

    value: float

    def item(self) -> float:
        return self.value


class Bound(torch.nn.Module):  # pyright: ignore[reportUntypedBaseClass] - torch is absent where the code is checked
    """A graph as a module that takes only tensors. It has parameters and numbers, and takes sizes from the tensors."""

    def __init__(
        self,
        inner: Any,
        args: Sequence[Any],
        parameters: Sequence[int],
        tensors: Sequence[int],
        sizes: Mapping[int, tuple[int, int]],
    ):
        super().__init__()
        self.inner = inner
        self.places, self.sizes = tuple(tensors), dict(sizes)
        known = {*parameters, *tensors}
        self.fixed = [None if i in known else Item(a.item()) if is_tensor(a) else a for i, a in enumerate(args)]
        self.held = {i: f"p{i}" for i in parameters}
        for i, name in self.held.items():
            if isinstance(args[i], torch.nn.Parameter):
                self.register_parameter(name, args[i])
            else:
                self.register_buffer(name, args[i])

    def forward(self, *inputs: Any) -> Any:
        full: list[Any] = list(self.fixed)
        for i, name in self.held.items():
            full[i] = getattr(self, name)
        for i, tensor in zip(self.places, inputs, strict=True):
            full[i] = tensor
        for i, (tensor, dim) in self.sizes.items():
            full[i] = full[tensor].shape[dim]
        return self.inner(*full)


def outside_dispatch(make: Callable[[], _T]) -> _T:
    """Call a function in a thread of its own, where torch's dispatch is in its first state.

    torch cannot export inside the forward or backward pass of a function of autograd.
    """

    def without_gradients() -> _T:
        with torch.no_grad():
            return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(without_gradients).result()


def exported(module: Any, tensors: Sequence[Any], dims: Sequence[Any] | None) -> Any:
    """Export a module. Raises ModelError if torch cannot."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # because torch warns about its own deprecations
            return torch.export.export(module, tuple(tensors), dynamic_shapes=None if dims is None else (tuple(dims),))
    except EXPORT_ERRORS as error:
        raise ModelError(f"torch cannot export it: {reason(error)}") from error

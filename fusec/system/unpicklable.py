"""Say of an object that lives in one process what to give to other processes instead."""

from __future__ import annotations

from typing import NoReturn


class Unpicklable:
    """Base of classes that hold plans and memory of this process."""

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, for pickle and copy, whose own messages name a part of the object."""
        raise TypeError(
            f"{type(self).__name__} holds plans and memory of this process, so it cannot be pickled or copied: give "
            "other processes the path of the model, or of the .fusec file that `save` writes (docs/scale.md)"
        )

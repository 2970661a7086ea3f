"""Define the errors that fusec raises.

Each message says what is wrong, where (file, node, tensor) and, if there is one, the remedy.
The command line prints the message without a traceback, and exits with status 2.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from fusec.system.printable import printable_lines


class FusecError(Exception):
    """Base of all errors that fusec raises; any other exception is a defect of fusec.

    Its text has no control characters, because it may quote names of a model, and a terminal would obey them.
    """

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ModelError(FusecError):
    """The model (file, bytes, graph or text) is malformed, or uses a feature that fusec does not support."""


class NotOneProgramError(ModelError):
    """A model is split at host steps, and the call needs one program."""


class VerifyError(FusecError):
    """A graph breaks a rule of the IR: types, order, use lists, names."""


class SizeError(VerifyError):
    """A tensor is larger than the limit. Nothing has been allocated for it."""

    def __init__(self, type: object, nbytes: int, limit: int, what: str = "a tensor"):
        super().__init__(f"{what} {type} takes {nbytes / 2**30:.4g} GiB; the limit is {limit >> 30} GiB")


class TargetError(FusecError):
    """A target is unknown, or the driver, cuDNN or a library that it needs is missing."""


class LoweringError(FusecError):
    """A partition cannot be expressed as a cuDNN graph."""


class ExecutionError(FusecError):
    """The arguments of a call do not fit, or a compiled program failed while it ran."""


class DeviceLostError(FusecError):
    """The GPU failed and runs nothing more for this process, as after an illegal access; a new process can go on."""


class CudnnNotAskedWarning(UserWarning):
    """cuDNN is not installed, so fusec's rules alone decided which ops fuse."""


class ManyLaunchesWarning(UserWarning):
    """A model became many times as many launches as it has nodes, so it will be slow."""


class CheckError(FusecError):
    """A check that the user asked for (verify, must-fuse) failed."""


@contextmanager
def writing(path: object) -> Generator[None]:
    """Turn an OSError of the block into a FusecError that names the file or folder to write."""
    try:
        yield
    except OSError as error:
        raise FusecError(f"{path}: cannot write: {error.strerror or error}") from error

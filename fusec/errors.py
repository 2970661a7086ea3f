"""Define every error that a user of fusec can meet, in one small tree.

Each message says what is wrong, where (file, node, tensor) and, if one is known, the remedy.
The command line prints only the message and exits with status 2.
"""

from __future__ import annotations

from fusec.system.printable import printable_lines


class FusecError(Exception):
    """Base of all errors raised on purpose; anything else is a defect of fusec.

    Its text holds no control characters: a message may quote a name from a model, and is read on a terminal.
    """

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ModelError(FusecError):
    """The model (file, bytes, graph or text) is malformed or uses what fusec does not take."""


class VerifyError(FusecError):
    """A graph breaks a rule of the IR: types, order, use lists, names."""


class SizeError(VerifyError):
    """A tensor is larger than the limit: refused before anything is allocated for it."""

    def __init__(self, type: object, nbytes: int, limit: int, what: str = "a tensor"):
        super().__init__(f"{what} {type} takes {nbytes / 2**30:.4g} GiB; the limit is {limit >> 30} GiB")


class TargetError(FusecError):
    """A target, a driver, cuDNN or a library it needs is unknown or missing."""


class LoweringError(FusecError):
    """A partition cannot be expressed as a cuDNN graph."""


class ExecutionError(FusecError):
    """Bad arguments of a call, or a failure while a compiled program runs."""


class CudnnNotAskedWarning(UserWarning):
    """cuDNN is not installed, so fusec's rules alone decided what fuses."""


class CheckError(FusecError):
    """A check the user asked for (verify, must-fuse) did not hold."""

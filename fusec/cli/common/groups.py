"""Let a group of commands be called like one command: `fusec lock MODEL` means `fusec lock write MODEL`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class WriteUnlessNamed(TyperGroup):
    """Commands of which `write` runs if the first argument names none.

    A model whose file has the name of a command is given as ./diff.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["write", *args]
        return super().parse_args(ctx, args)

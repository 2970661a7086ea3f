"""The command `fusec`: one file per command, put together in commands.py."""

from fusec.cli.commands import main

__all__ = ["main"]

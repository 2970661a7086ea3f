"""The command `fusec`: one file for each command; commands.py runs them."""

from fusec.cli.commands import main

__all__ = ["main"]

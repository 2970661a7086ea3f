"""Write one step of a compiled model as a folder for a bug report."""

from __future__ import annotations

from fusec.repro.source import script
from fusec.repro.write_folder import check_folder, check_step, versions, write, write_body

__all__ = ["check_folder", "check_step", "script", "versions", "write", "write_body"]

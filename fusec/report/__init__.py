"""Write compiled models as HTML pages that need no network."""

from __future__ import annotations

from fusec.report.collect import Background, explained, host_step_row, of_compiled, of_executable, totals_json
from fusec.report.pages import difference_page, report_page, write
from fusec.report.records import HostStepRow, ReportedProgram
from fusec.report.render import need_jinja
from fusec.report.side_by_side import difference, fleet

__all__ = [
    "Background",
    "HostStepRow",
    "ReportedProgram",
    "difference",
    "difference_page",
    "explained",
    "fleet",
    "host_step_row",
    "need_jinja",
    "of_compiled",
    "of_executable",
    "report_page",
    "totals_json",
    "write",
]

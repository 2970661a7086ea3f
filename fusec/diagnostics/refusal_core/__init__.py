"""Find the smallest part of a body that cuDNN still refuses, and the nearest change that it accepts."""

from __future__ import annotations

from fusec.diagnostics.refusal_core.core_search import Core, CoreSearch

__all__ = ["Core", "CoreSearch"]

"""Load models from files, memory and frameworks as graphs."""

from __future__ import annotations

from fusec.frontends.load_model import Declaration, Source, bind, load

__all__ = ["Declaration", "Source", "bind", "load"]

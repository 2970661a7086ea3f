"""Write the options of a compiled model as plain data, and read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusec.passes.base import Options
from fusec.plans.plan_filter import PlanFilter
from fusec.targets.target import Target


def options_data(options: Options) -> dict[str, Any]:
    """Return options as plain data, without those that have their default. The target is not part of it."""
    data: dict[str, Any] = {"precision": options.precision, "disable": options.disabled_names}
    data |= {"state": [list(pair) for pair in options.state]} if options.state else {}
    data |= {"orders": [list(pair) for pair in options.orders]} if options.orders else {}
    return data | ({"plans": options.plans.to_json()} if not options.plans.is_default else {})


def read_options(data: Mapping[str, Any], target: Target) -> Options:
    """Read what `options_data` wrote. Raises AttributeError, TypeError or ValueError for a malformed plan filter."""
    state = tuple((str(name), str(output)) for name, output in data.get("state", ()))
    orders = tuple((str(name), tuple(map(int, order))) for name, order in data.get("orders", ()))
    plans = PlanFilter.from_json(data.get("plans", {}))
    options = Options.from_names(data["precision"], data["disable"], state=state, orders=orders, plans=plans)
    return replace(options, target=target)

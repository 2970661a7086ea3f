"""Choose the layers that stay in float because they lose most, so that a bound on the whole model holds."""

from __future__ import annotations

from fusec.errors import CheckError
from fusec.quantization.measure import Measurement, fewest_in_float
from fusec.quantization.placement import Placement
from fusec.quantization.quantize_options import QuantizeOptions


def choose_float(
    placement: Placement, measurement: Measurement, options: QuantizeOptions
) -> tuple[dict[str, float], float | None]:
    """Move the most sensitive layers of a placement to float.

    Returns the ratio of the worst output in dB by layer name, if only that layer is quantised; and by how much the
    score falls, if the user gave one. Raises CheckError if a bound holds only with every layer in float.
    """
    total = len(placement.layers)
    ranking = measurement.sensitivities(lambda done: options.report_progress("measure layers", done, total))
    order = list(ranking)
    score = options.score
    exact = 0.0 if score is None else score(lambda feeds: measurement.run((), feeds))

    def loss(quantised: set[str]) -> float:
        assert score is not None
        return exact - score(lambda feeds: measurement.run(quantised, feeds))

    def holds(quantised: set[str]) -> bool:
        quantised = _without_followers(placement, quantised)
        if not quantised:  # additions alone were left, and they follow their convolutions
            return False
        if options.min_sqnr is not None and not measurement.lowest_sqnr(quantised) >= options.min_sqnr:
            return False
        return score is None or options.max_loss is None or loss(quantised) <= options.max_loss

    bounded = options.min_sqnr is not None or score is not None
    count = min(options.keep_float, len(order))
    if bounded:
        found = fewest_in_float(order, count, holds)
        if found is None:
            raise CheckError(f"the bound holds only with all {len(order)} layers in float")
        count = found
    placement.leave_in_float(
        {name: f"loses most: {ranking[name]:.1f} dB if only this layer is quantised" for name in order[:count]}
    )
    names = {layer.name for layer in placement.layers}
    return ranking, None if score is None else loss(names)


def _without_followers(placement: Placement, quantised: set[str]) -> set[str]:
    """Leave out additions whose convolution is not quantised, as `Placement.leave_in_float` does."""
    return {
        layer.name
        for layer in placement.layers
        if layer.name in quantised and (not layer.follows or layer.follows in quantised)
    }

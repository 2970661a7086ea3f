"""Test latency in virtual time: the defaults of the server let few requests wait much longer than others."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.serving.simulated_latency import SIZES, Device, latencies
from fusec.serving.server.server_options import ServerOptions

DELAY_S = ServerOptions(models={}).delay_s


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_the_defaults_keep_latency_even(rows: int) -> None:
    """At 70 % of the device's throughput. Without a delay, requests of 16 images miss that."""
    median, p99 = np.quantile(latencies(Device(), 0.7, rows, DELAY_S, 8000), [0.5, 0.99])
    assert p99 <= 2 * median
    if rows == 16:
        median, p99 = np.quantile(latencies(Device(), 0.7, rows, 0.0, 8000), [0.5, 0.99])
        assert p99 > 2 * median


def test_a_lone_request_waits_for_the_delay_and_its_batch() -> None:
    device = Device()
    times = latencies(device, 1e-4, 1, DELAY_S, 50)
    own_s = device.gather_s(1) + device.run_s(SIZES[0]) + device.answer_s
    np.testing.assert_allclose(times, DELAY_S + own_s, rtol=1e-3)

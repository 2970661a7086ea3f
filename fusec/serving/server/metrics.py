"""Count what a server does, in the form of Prometheus.

Each process of a server writes its counts to files in a private folder (`PROMETHEUS_MULTIPROC_DIR`). Any front end adds
them up when it is asked. Labels are names of served models only, so requests of strangers add no series.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from fusec.errors import FusecError

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

REQUESTS = Counter("fusec_requests", "Inference requests by status of their answer.", ["model", "status"])
REQUEST_SECONDS = Histogram(
    "fusec_request_seconds", "From the header of a request to its answer, if that was 200.", ["model"], buckets=_SECONDS
)
IN_PROGRESS = Gauge("fusec_requests_in_progress", "Requests in progress.", multiprocess_mode="livesum")
ARENA_BYTES = Gauge("fusec_request_bytes", "Memory that request bodies take.", multiprocess_mode="livesum")
WORKERS = Gauge("fusec_workers_ready", "Worker processes that take requests.", multiprocess_mode="livemax")
QUEUE_SECONDS = Histogram(
    "fusec_queue_seconds", "Wait of the oldest request of a batch, in a worker.", ["model"], buckets=_SECONDS
)
RUN_SECONDS = Histogram("fusec_run_seconds", "Run of a batch, with copies of the results.", ["model"], buckets=_SECONDS)
BATCH_ROWS = Histogram("fusec_batch_rows", "Rows of a batch, without padding.", ["model"], buckets=_ROWS)
PADDED_ROWS = Counter("fusec_padded_rows", "Rows that were computed to fill a batch.", ["model"])


def text() -> bytes:
    """Return the counts of all processes of this server as Prometheus reads them."""
    if FOLDER not in os.environ:
        raise FusecError(f"{FOLDER} is not set: the processes of fusec serve have it")
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry)

"""One module per question; ``JOBS`` has them all, in the order in which a report tells them."""

from __future__ import annotations

from typing import Final

from leveret.spark_jobs.jobs import (
    anomalies,
    backlog,
    churn,
    dead_letters,
    fairness,
    forecast,
    hot_keys,
    lifecycle,
    poison,
    quality,
    queue_latency,
    slow_consumers,
    throttling,
    throughput,
    unroutable,
    unused,
    usage,
)
from leveret.spark_jobs.jobs.base import Job

JOBS: Final[dict[str, Job]] = {
    module.JOB.name: module.JOB
    for module in (
        quality,
        throughput,
        queue_latency,
        backlog,
        forecast,
        anomalies,
        slow_consumers,
        fairness,
        poison,
        dead_letters,
        unroutable,
        hot_keys,
        usage,
        churn,
        unused,
        throttling,
        lifecycle,
    )
}

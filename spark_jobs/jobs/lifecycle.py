"""What happened to each message: one row per message and queue.

The last event that changes where a message is decides its outcome, so a message that was requeued,
or came back to its queue through a dead-letter exchange, ends as it ended last. Everything is one
grouping: no joins, whatever the order of the lines.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import COUNT, TEXT, TIME, Job, at, columns, count_of, is_

SCHEMA = columns(
    vhost=TEXT,
    queue=TEXT,
    msg=COUNT,
    size=COUNT,
    published_at=TIME,
    delivered_at=TIME,
    done_at=TIME,
    deliveries=COUNT,
    wait_us=COUNT,
    e2e_us=COUNT,
    outcome=TEXT,
)

# Outcomes after which nothing is expected to happen.
DONE = ("acked", "rejected", "expired", "dead_lettered", "dropped", "returned")


def lifecycle(events: DataFrame) -> DataFrame:
    """One row per message and queue; an unroutable message has one with an empty queue."""
    in_queue = F.col("queue") != ""
    # A publish to several queues is told by the enqueue events that follow it.
    counted = is_("publish") & (in_queue | (F.col("routed") == 0))
    counted |= is_("enqueue", "deliver", "get", "ack", "requeue", "expire", "dead_letter", "drop")
    counted |= is_("return") | (is_("nack", "reject") & (F.col("reason") == "discard"))
    delivered = is_("deliver", "get")
    state = (
        F.when(is_("ack"), "acked")
        .when(delivered & (F.col("reason") == "auto_ack"), "acked")
        .when(delivered, "unacked")
        .when(is_("publish") & ~in_queue, "unroutable")
        .when(is_("publish", "enqueue", "requeue"), "ready")
        .when(is_("nack", "reject"), "rejected")
        .when(is_("expire"), "expired")
        .when(is_("dead_letter"), "dead_lettered")
        .when(is_("drop"), "dropped")
        .when(is_("return"), "returned")
    )
    # Sequence numbers begin anew with every boot, times do not.
    moment = F.struct("ts", "seq")
    lives = (
        events.where(counted & (F.col("msg") != 0))
        .groupBy("vhost", "queue", "msg")
        .agg(
            F.max("size").alias("size"),
            F.min(F.when(is_("publish", "enqueue"), F.col("ts"))).alias("published"),
            F.min(F.when(delivered, F.col("ts"))).alias("delivered"),
            count_of(delivered).alias("deliveries"),
            F.min_by("wait_us", F.when(delivered, moment)).alias("wait_us"),
            F.max_by(state, moment).alias("outcome"),
            F.max("ts").alias("last"),
        )
    )
    is_done = F.col("outcome").isin(*DONE)
    return lives.select(
        "vhost",
        "queue",
        "msg",
        "size",
        at("published").alias("published_at"),
        at("delivered").alias("delivered_at"),
        F.when(is_done, at("last")).alias("done_at"),
        "deliveries",
        "wait_us",
        F.when(F.col("outcome") == "acked", F.col("last") - F.col("published")).alias("e2e_us"),
        "outcome",
    )


JOB = Job(
    "lifecycle",
    "What happened to each message?",
    SCHEMA,
    lambda inputs: lifecycle(inputs.events),
    ("vhost", "queue", "msg"),
    layer="silver",
)

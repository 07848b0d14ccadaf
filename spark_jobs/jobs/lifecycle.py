"""What happened to each message: one row per message and queue.

The last event that changes where a message is decides its outcome, so a message that was requeued,
or came back to its queue through a dead-letter exchange, ends as it ended last. That is one
grouping, of numbers alone, so that Spark need not sort: a state is a few bits beside its moment.

What became of a message that nothing more is told of follows from its queue: it was purged or
deleted, or a restart did not bring it back. Those are few events, given to every task.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.backlog import recovered
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

# What an event makes of a message; its place here is what is counted with.
_STATES: Final = (
    *("ready", "unacked", "unroutable"),
    *("acked", "rejected", "expired", "dead_lettered", "dropped", "returned"),
)
# Outcomes after which nothing is expected to happen.
DONE: Final = (*_STATES[3:], "purged", "lost")

_KEY = ("vhost", "queue", "msg")
# Of a moment's 63 bits: the state, as much of the event's number as there is room for, and
# microseconds, which need 51 of them until 2041.
_STATE_BITS: Final = 4
_NUMBER_BITS: Final = 8


def moment() -> Column:
    """When an event was, as a number; also in order where the clock stood still."""
    return F.shiftleft("ts", _NUMBER_BITS) + F.col("seq") % 2**_NUMBER_BITS


def lives(events: DataFrame) -> DataFrame:
    """vhost, queue, msg and what their events tell; ``last`` is the moment of the last one."""
    in_queue = F.col("queue") != ""
    delivered = is_("deliver", "get")
    state = (
        F.when(is_("ack"), _code("acked"))
        .when(delivered & (F.col("reason") == "auto_ack"), _code("acked"))
        .when(delivered, _code("unacked"))
        .when(is_("publish") & ~in_queue, _code("unroutable"))
        .when(is_("publish", "enqueue", "requeue"), _code("ready"))
        .when(is_("nack", "reject"), _code("rejected"))
        .when(is_("expire"), _code("expired"))
        .when(is_("dead_letter"), _code("dead_lettered"))
        .when(is_("drop"), _code("dropped"))
        .when(is_("return"), _code("returned"))
    )
    came = is_("publish", "enqueue")
    boot = F.hash("boot")
    # Numbers are exact within a boot; they begin anew with the next, and moments do not.
    by_number = F.shiftleft("seq", _STATE_BITS) + state
    by_moment = F.shiftleft(moment(), _STATE_BITS) + state
    grouped = (
        events.where(_tells())
        .groupBy(*_KEY)
        .agg(
            F.max("size").alias("size"),
            # Null where the log begins later.
            F.max(F.when(came, F.col("persistent"))).alias("persistent"),
            F.min(F.when(came, F.col("ts"))).alias("published"),
            F.min(F.when(delivered, F.col("ts"))).alias("delivered"),
            F.min(F.when(delivered, F.col("ts") - F.col("wait_us"))).alias("arrived"),
            count_of(delivered).alias("deliveries"),
            (F.min(boot) == F.max(boot)).alias("one_boot"),
            F.max(by_number).alias("by_number"),
            F.max(by_moment).alias("by_moment"),
        )
    )
    last = F.when(F.col("one_boot"), F.col("by_number")).otherwise(F.col("by_moment"))
    place = last % 2**_STATE_BITS + 1
    states = F.array(*map(F.lit, _STATES))
    return grouped.select(
        *_KEY,
        *("size", "persistent", "published", "delivered", "deliveries"),
        (F.col("delivered") - F.col("arrived")).alias("wait_us"),
        F.element_at(states, place.cast("int")).alias("outcome"),
        F.shiftright("by_moment", _STATE_BITS).alias("last"),
    )


def _code(state: str) -> Column:
    return F.lit(_STATES.index(state))


def _tells() -> Column:
    """Events that change where a message is."""
    # A publish to several queues is told by the enqueue events that follow it.
    counted = is_("publish") & ((F.col("queue") != "") | (F.col("routed") == 0))
    counted |= is_("enqueue", "deliver", "get", "ack", "requeue", "expire", "dead_letter", "drop")
    counted |= is_("return") | (is_("nack", "reject") & (F.col("reason") == "discard"))
    return counted & (F.col("msg") != 0)


def settle(alive: DataFrame, events: DataFrame) -> DataFrame:
    """Lives with what a restart, a purge or a deletion made of them: ``outcome`` and ``last``."""
    start = F.struct(moment().alias("at"), F.col("boot").alias("boot"))
    starts = events.where(is_("broker_start")).agg(
        F.array_sort(F.collect_list(start)).alias("starts")
    )
    back = events.where(recovered()).select(
        *("vhost", F.col("queue").alias("of"), F.col("boot").alias("next")),
        F.lit(True).alias("came_back"),
    )
    next_start = F.get(F.filter("starts", lambda one: one["at"] > F.col("last")), F.lit(0))
    # Null for what is done with, so that nothing is looked up for it.
    of = F.when(F.col("outcome").isin("ready", "unacked"), F.col("queue"))
    # What a consumer had when the broker ended is ready after it.
    ready_at = F.when(F.col("outcome") == "ready", F.col("last")).when(
        F.col("stays"), F.col("start.at")
    )
    restarted = (
        alive.crossJoin(F.broadcast(starts))
        .withColumn("of", of)
        .withColumn("start", F.when(F.col("of").isNotNull(), next_start))
        .withColumn("next", F.col("start.boot"))
        .join(F.broadcast(back.distinct()), ["vhost", "of", "next"], "left")
        # What nothing speaks against is there: it must not be called lost.
        .withColumn("stays", F.coalesce("persistent", F.lit(True)) & F.col("came_back").isNotNull())
        .withColumn("lost_at", F.when(~F.col("stays"), F.col("start.at")))
        .withColumn("ready_at", ready_at)
    )
    ended = _with_end(restarted, events.where(is_("purge")), "purged_at", since="ready_at")
    ended = _with_end(ended, events.where(is_("queue_delete")), "deleted_at", since="last")
    end = F.least("lost_at", "purged_at", "deleted_at")
    outcome = (
        F.when(end == F.col("lost_at"), F.lit("lost"))
        .when(end == F.col("purged_at"), F.lit("purged"))
        .when(end == F.col("deleted_at"), F.lit("dropped"))
        .when(F.col("stays"), F.lit("ready"))
        .otherwise(F.col("outcome"))
    )
    return ended.withColumn("outcome", outcome).withColumn("last", F.coalesce(end, "last"))


def _with_end(alive: DataFrame, ends: DataFrame, name: str, *, since: str) -> DataFrame:
    """A column with the first of the queue's ``ends`` after ``since``."""
    by_queue = Window.partitionBy("vhost", "queue").orderBy("at")
    # Each ends what began after the one before it, so that at most one fits.
    few = (
        ends.select("vhost", "queue", moment().alias("at"))
        .withColumn("after", F.coalesce(F.lag("at").over(by_queue), F.lit(0)))
        .alias("e")
    )
    fits = (
        (F.col("e.vhost") == F.col("m.vhost"))
        & (F.col("e.queue") == F.col("m.of"))
        & (F.col(since) >= F.col("e.after"))
        & (F.col(since) < F.col("e.at"))
    )
    joined = alive.alias("m").join(F.broadcast(few), fits, "left")
    return joined.select("m.*", F.col("e.at").alias(name))


def lifecycle(events: DataFrame) -> DataFrame:
    """One row per message and queue; an unroutable message has one with an empty queue."""
    is_done = F.col("outcome").isin(*DONE)
    last = F.shiftright("last", _NUMBER_BITS)
    return settle(lives(events), events).select(
        *_KEY,
        "size",
        at("published").alias("published_at"),
        at("delivered").alias("delivered_at"),
        F.when(is_done, at(last)).alias("done_at"),
        "deliveries",
        "wait_us",
        F.when(F.col("outcome") == "acked", last - F.col("published")).alias("e2e_us"),
        "outcome",
    )


def acked(events: DataFrame) -> DataFrame:
    """vhost, queue and e2e_us, from publish to ack, of what was acked at ``ts``.

    What ``lifecycle`` has of these, without the rest of it.
    """
    is_acked = is_("ack") | (is_("deliver", "get") & (F.col("reason") == "auto_ack"))
    came = is_("publish", "enqueue")
    return (
        events.where((came | is_acked) & (F.col("msg") != 0) & (F.col("queue") != ""))
        .groupBy(*_KEY)
        .agg(
            F.min(F.when(came, F.col("ts"))).alias("published"),
            F.max(F.when(is_acked, F.col("ts"))).alias("ts"),
        )
        .select("vhost", "queue", "ts", (F.col("ts") - F.col("published")).alias("e2e_us"))
        .where(F.col("e2e_us").isNotNull())
    )


JOB = Job(
    "lifecycle",
    "What happened to each message?",
    SCHEMA,
    lambda inputs: lifecycle(inputs.events),
    ("vhost", "queue", "msg"),
    layer="silver",
)

"""Queues, exchanges and bindings that are there and that nothing passes through.

What is there follows from the last declaration and deletion of each, in the last boot: a start
tells everything that it found on disk, and what it does not tell did not outlive the one before. A
binding ends with its queue or exchange. It is used if its
exchange was given a key that it matches: any for a fanout or headers exchange, the same one for a
direct exchange, the pattern for a topic exchange.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import TEXT, TIME, Job, at, columns, is_

SCHEMA = columns(vhost=TEXT, kind=TEXT, name=TEXT, declared_at=TIME, last_used=TIME)

# What shows that a queue is of use to somebody, even if nothing comes out of it.
_QUEUE_USE = ("publish", "enqueue", "deliver", "get", "consume")


def unused(events: DataFrame) -> DataFrame:
    """Everything that exists, with the last time it was used; null for never in these events."""
    return queues(events).unionByName(exchanges(events)).unionByName(bindings(events))


def queues(events: DataFrame) -> DataFrame:
    there = _alive(events, "queue_declare", "queue_delete", "queue", newest=_newest(events))
    used = _last(events.where(is_(*_QUEUE_USE)), "queue")
    return there.join(used, ["vhost", "queue"], "left").select(
        "vhost", F.lit("queue").alias("kind"), F.col("queue").alias("name"), *_times()
    )


def exchanges(events: DataFrame) -> DataFrame:
    there = _alive(
        events, "exchange_declare", "exchange_delete", "exchange", newest=_newest(events)
    )
    used = _last(events.where(is_("publish", "dead_letter")), "exchange")
    return there.join(used, ["vhost", "exchange"], "left").select(
        "vhost", F.lit("exchange").alias("kind"), F.col("exchange").alias("name"), *_times()
    )


def bindings(events: DataFrame) -> DataFrame:
    destination = F.coalesce(F.col("attrs")["destination"], F.col("queue"))
    of_bindings = events.where(is_("bind", "unbind")).withColumn("destination", destination)
    key = ["vhost", "exchange", "rk", "destination"]
    there = _alive(of_bindings, "bind", "unbind", *key[1:], newest=_newest(events))
    for end, name in (("queue", "destination"), ("exchange", "exchange")):
        gone = (
            events.where(is_(f"{end}_delete"))
            .groupBy("vhost", F.col(end).alias(name))
            .agg(F.max("ts").alias("gone"))
        )
        there = there.join(gone, ["vhost", name], "left")
        there = there.where(F.col("since") > F.coalesce("gone", F.lit(0))).drop("gone")
    types = (
        events.where(is_("exchange_declare"))
        .groupBy("vhost", "exchange")
        .agg(F.max_by(F.col("attrs")["type"], F.struct("ts", "seq")).alias("type"))
    )
    # Every key that was used, once: far fewer than messages.
    used = (
        events.where(is_("publish", "dead_letter"))
        .groupBy("vhost", "exchange", F.col("rk").alias("key"))
        .agg(F.max("ts").alias("used"))
    )
    there = there.join(types, ["vhost", "exchange"], "left")
    return (
        there.join(used, ["vhost", "exchange"], "left")
        .withColumn("used", F.when(_matches(), F.col("used")))
        .groupBy(*key)
        .agg(F.max("declared").alias("declared"), F.max("used").alias("used"))
        .select(
            "vhost",
            F.lit("binding").alias("kind"),
            F.concat("exchange", F.lit(" -> "), "destination", F.lit(" ("), "rk", F.lit(")")).alias(
                "name"
            ),
            *_times(),
        )
    )


def _times() -> tuple[Column, Column]:
    return at("declared").alias("declared_at"), at("used").alias("last_used")


def _newest(events: DataFrame) -> DataFrame:
    """One row with the last boot of all."""
    return events.agg(F.max_by("boot", "ts").alias("boot"))


def _alive(
    events: DataFrame, declared: str, deleted: str, *key: str, newest: DataFrame
) -> DataFrame:
    """What was declared and not deleted since: when that was first (declared) and last (since)."""
    moment = F.struct("ts", "seq")
    declarations = F.when(is_(declared), F.col("ts"))
    return (
        events.where(is_(declared, deleted))
        .groupBy("vhost", *key)
        .agg(
            F.min(declarations).alias("declared"),
            F.max(declarations).alias("since"),
            F.max_by("ev", moment).alias("last"),
            F.max_by("boot", moment).alias("boot"),
        )
        .where(F.col("last") == declared)
        .join(newest, "boot")
        .drop("last", "boot")
    )


def _last(events: DataFrame, key: str) -> DataFrame:
    return events.groupBy("vhost", key).agg(F.max("ts").alias("used"))


def _matches() -> Column:
    """Does the key that was used match the binding key ``rk``, by the type of the exchange?"""
    type_ = F.coalesce("type", F.regexp_extract("exchange", r"^amq\.(fanout|topic|headers)$", 1))
    return (
        F.when(F.col("key").isNull(), F.lit(False))
        .when(type_.isin("fanout", "headers"), F.lit(True))
        .when(type_ == "topic", F.rlike(_words("key"), _topic_pattern("rk")))
        .otherwise(F.col("key") == F.col("rk"))
    )


def _words(key: str) -> Column:
    """A routing key with a dot after each of its words; the empty key has none."""
    return F.when(F.col(key) == "", F.lit("")).otherwise(F.concat(key, F.lit(".")))


def _topic_pattern(binding_key: str) -> Column:
    """A regular expression for ``_words``: * is one word, # is any number of them."""

    def one(word: Column) -> Column:
        return (
            F.when(word == "*", F.lit(r"[^.]*\."))
            .when(word == "#", F.lit(r"(?:[^.]*\.)*"))
            .otherwise(F.concat(F.lit(r"\Q"), word, F.lit(r"\E\.")))
        )

    words = F.array_join(F.transform(F.split(binding_key, r"\."), one), "")
    return F.when(F.col(binding_key) == "", F.lit("^$")).otherwise(
        F.concat(F.lit("^"), words, F.lit("$"))
    )


JOB = Job(
    "unused",
    "What is declared and not used?",
    SCHEMA,
    lambda inputs: unused(inputs.events),
    ("last_used", "vhost", "kind", "name"),
)

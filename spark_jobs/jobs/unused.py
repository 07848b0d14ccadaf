"""Queues, exchanges and bindings that are there and that nothing passes through.

What is there follows from the last declaration and deletion of each, in the last boot: a start
tells everything that it found on disk, and what it does not tell did not outlive the one before. A
binding ends with its queue or exchange. It is used if its exchange was given a key that it matches:
any for a fanout or headers exchange, the same one for a direct exchange, the pattern for a topic
exchange.

An exchange is given what is published or dead-lettered to it, and what others pass on: by a binding
between exchanges, or to their alternate exchange. Everything is taken to be passed on, so that
nothing is called unused that is not.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import FLAG, TEXT, TIME, Inputs, Job, at, columns, is_

SCHEMA = columns(
    vhost=TEXT,
    kind=TEXT,
    name=TEXT,
    declared_at=TIME,
    last_used=TIME,
    # Every message of the time was logged: else one that is not in the log may have passed.
    certain=FLAG,
)

# What shows that a queue is of use to somebody, even if nothing comes out of it.
_QUEUE_USE = ("publish", "enqueue", "deliver", "get", "consume")
# From exchange to exchange to exchange: longer ways are not followed.
_HOPS = 3
_BINDING = ("vhost", "exchange", "rk", "destination")


def unused(events: DataFrame, samples: Mapping[str, float] | None = None) -> DataFrame:
    """Everything that exists, with the last time it was used; null for never in these events."""
    share = F.lit(1.0)
    for boot, logged in (samples or {}).items():
        share = F.when(F.col("boot") == boot, F.lit(logged)).otherwise(share)
    newest = F.broadcast(
        events.agg(F.max_by("boot", "ts").alias("boot"), (F.min(share) >= 1).alias("certain"))
    )
    there = _alive_bindings(events, newest)
    keys = _keys(events)
    return (
        queues(events, newest)
        .unionByName(exchanges(events, newest, keys))
        .unionByName(bindings(there, keys))
    )


def queues(events: DataFrame, newest: DataFrame) -> DataFrame:
    there = _alive(events, "queue_declare", "queue_delete", "queue", newest=newest)
    used = _last(events.where(is_(*_QUEUE_USE)), "queue")
    return there.join(used, ["vhost", "queue"], "left").select(
        "vhost", F.lit("queue").alias("kind"), F.col("queue").alias("name"), *_found()
    )


def exchanges(events: DataFrame, newest: DataFrame, keys: DataFrame) -> DataFrame:
    there = _alive(events, "exchange_declare", "exchange_delete", "exchange", newest=newest)
    used = keys.groupBy("vhost", "exchange").agg(F.max("used").alias("used"))
    return there.join(used, ["vhost", "exchange"], "left").select(
        "vhost", F.lit("exchange").alias("kind"), F.col("exchange").alias("name"), *_found()
    )


def bindings(there: DataFrame, keys: DataFrame) -> DataFrame:
    name = F.concat("exchange", F.lit(" -> "), "destination", F.lit(" ("), "rk", F.lit(")"))
    return (
        there.join(keys, ["vhost", "exchange"], "left")
        .withColumn("used", F.when(_matches(), F.col("used")))
        .groupBy(*_BINDING)
        .agg(
            F.max("declared").alias("declared"),
            F.max("used").alias("used"),
            F.max("certain").alias("certain"),
        )
        .select("vhost", F.lit("binding").alias("kind"), name.alias("name"), *_found())
    )


def _alive_bindings(events: DataFrame, newest: DataFrame) -> DataFrame:
    """Bindings that are there, with the type of their exchange."""
    destination = F.coalesce(F.col("attrs")["destination"], F.col("queue"))
    of_bindings = events.where(is_("bind", "unbind")).withColumn("destination", destination)
    there = _alive(of_bindings, "bind", "unbind", *_BINDING[1:], newest=newest)
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
    return there.join(types, ["vhost", "exchange"], "left")


def _keys(events: DataFrame) -> DataFrame:
    """vhost, exchange, key, used: every key that an exchange was given, and when last."""
    # Each once: far fewer than messages.
    given = (
        events.where(is_("publish", "dead_letter"))
        .groupBy("vhost", "exchange", F.col("rk").alias("key"))
        .agg(F.max("ts").alias("used"))
    )
    ways = F.broadcast(_ways(events))
    passed_on = given.join(ways, ["vhost", "exchange"]).select(
        "vhost", F.col("next").alias("exchange"), "key", "used"
    )
    return given.unionByName(passed_on)


def _ways(events: DataFrame) -> DataFrame:
    """vhost, exchange, next: where an exchange may pass messages on to, over several others."""
    next_ = F.coalesce(F.col("attrs")["destination"], F.col("attrs")["alternate-exchange"])
    steps = (
        events.where(is_("bind", "exchange_declare") & next_.isNotNull())
        .agg(F.collect_set(F.struct("vhost", "exchange", next_.alias("next"))).alias("steps"))
        .select("steps", F.explode("steps").alias("step"))
        .withColumn("reached", F.array("step.next"))
    )

    def goes_on(step: Column) -> Column:
        return (step["vhost"] == F.col("step.vhost")) & F.array_contains(
            F.col("reached"), step["exchange"]
        )

    for _ in range(_HOPS - 1):
        further = F.transform(F.filter("steps", goes_on), lambda step: step["next"])
        steps = steps.withColumn("reached", F.array_union("reached", further))
    return steps.select(
        "step.vhost", "step.exchange", F.explode("reached").alias("next")
    ).distinct()


def _found() -> tuple[Column, Column, Column]:
    return at("declared").alias("declared_at"), at("used").alias("last_used"), F.col("certain")


def _alive(
    events: DataFrame,
    declared: str,
    deleted: str,
    *key: str,
    newest: DataFrame,
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


def _of(inputs: Inputs) -> DataFrame:
    """Use by others counts, too: what was asked for is chosen from the answer."""
    answer = unused(inputs.of_the_vhost, inputs.samples)
    if inputs.queue is None:
        return answer
    # An exchange is nobody's own.
    to_queue = F.lit(f" -> {inputs.queue} (")
    is_queue = (F.col("kind") == "queue") & (F.col("name") == inputs.queue)
    is_binding = (F.col("kind") == "binding") & F.col("name").contains(to_queue)
    return answer.where(is_queue | is_binding)


JOB = Job(
    "unused",
    "What is declared and not used?",
    SCHEMA,
    _of,
    ("last_used", "vhost", "kind", "name"),
)

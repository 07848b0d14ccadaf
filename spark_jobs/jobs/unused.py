"""Queues, exchanges and bindings that are there and that nothing passes through.

What is there follows from the last declaration and deletion of each, in the last boot: a start
tells everything that it found on disk, and what it does not tell did not outlive the one before. A
binding ends with its queue or exchange. It is used if its exchange was given a key that it matches:
the same one for a direct exchange, the pattern for a topic exchange, any for all other types. Keys
of CC and BCC are not in the log, but the queues are that took a message: where no binding to a
queue matches, any of them may have brought it there.

An exchange is given what is published or dead-lettered to it, and what others pass on: by a binding
between exchanges, or to their alternate exchange, by argument or by a policy. Everything is taken
to be passed on, so that nothing is called unused that is not.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import FLAG, TEXT, TIME, Inputs, Job, at, columns, count_of, is_

SCHEMA = columns(
    vhost=TEXT,
    kind=TEXT,
    name=TEXT,
    declared_at=TIME,
    last_used=TIME,
    # Every message of the time is in the log: else one that is not there may have passed.
    certain=FLAG,
)

# What shows that a queue is of use to somebody, even if nothing comes out of it.
_QUEUE_USE = ("publish", "enqueue", "deliver", "get", "consume")
# From exchange to exchange to exchange: longer ways are not followed.
_HOPS = 3
# What a binding is from and to; an exchange may have the name of a queue.
_ENDS = ("vhost", "exchange", "destination", "to_exchange")


def unused(
    events: DataFrame,
    samples: Mapping[str, float] | None = None,
    whole: DataFrame | None = None,
) -> DataFrame:
    """Everything that exists, with the last time it was used; null for never in these events.

    ``whole`` is the log of the time, if ``events`` are those of one virtual host.
    """
    newest = F.broadcast(_newest(events if whole is None else whole, samples or {}))
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
    one = F.struct("rk", "declared", _topic_pattern("rk").alias("pattern"))
    # The bindings of an exchange to a queue together: a key need be looked at once for all.
    together = there.groupBy(*_ENDS, "type", "certain").agg(F.collect_list(one).alias("all"))
    by_another_key = (
        ~F.col("to_exchange")
        & F.array_contains("queues", F.col("destination"))
        & ~F.array_contains("fits", F.lit(True))
    )
    # What a key of CC or BCC brought to an exchange is told nowhere.
    unseen = F.col("to_exchange") & F.col("given").isNotNull() & F.col("used").isNull()
    return (
        together.join(keys, ["vhost", "exchange"], "left")
        .withColumn("fits", F.transform("all", _matches))
        .withColumn("by_another_key", by_another_key)
        .withColumn("one", F.explode(F.arrays_zip("all", "fits")))
        .groupBy(*_ENDS, F.col("one.all.rk").alias("rk"))
        .agg(
            F.max("one.all.declared").alias("declared"),
            F.max("used").alias("given"),
            F.max(F.when(F.col("one.fits") | F.col("by_another_key"), F.col("used"))).alias("used"),
            F.max("certain").alias("certain"),
        )
        .withColumn("certain", F.col("certain") & ~unseen)
        .select("vhost", F.lit("binding").alias("kind"), name.alias("name"), *_found())
    )


def _newest(events: DataFrame, samples: Mapping[str, float]) -> DataFrame:
    """One row: the last boot, and whether every message of the time is in the log."""
    share = F.lit(1.0)
    for boot, logged in samples.items():
        share = F.when(F.col("boot") == boot, F.lit(logged)).otherwise(share)
    lines = F.max("seq") - F.min("seq") + 1
    is_whole = (F.count(F.lit(1)) == lines) & (count_of(is_("log_gap")) == 0)
    boots = events.groupBy("boot").agg(
        F.max("ts").alias("ts"), (is_whole & (F.min(share) >= 1)).alias("certain")
    )
    return boots.agg(F.max_by("boot", "ts").alias("boot"), F.min("certain").alias("certain"))


def _alive_bindings(events: DataFrame, newest: DataFrame) -> DataFrame:
    """Bindings that are there, with the type of their exchange."""
    exchange = F.col("attrs")["destination"]
    of_bindings = (
        events.where(is_("bind", "unbind"))
        .withColumn("destination", F.coalesce(exchange, F.col("queue")))
        .withColumn("to_exchange", exchange.isNotNull())
    )
    there = _alive(of_bindings, "bind", "unbind", *_ENDS[1:], "rk", newest=newest)
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
    """vhost, exchange, key, used, queues: what an exchange was given, and which queues took it.

    Each key once for an exchange, and once more for each that may have passed it on.
    """
    taken_by = F.when(~is_("dead_letter"), F.col("queue")).alias("queue")
    given = (
        events.where(is_("publish", "enqueue", "dead_letter"))
        .groupBy("vhost", "exchange", F.col("rk").alias("key"), taken_by)
        .agg(F.max("ts").alias("used"))
        # Far fewer than messages: sets of names are not made by numbers alone.
        .groupBy("vhost", "exchange", "key")
        .agg(F.max("used").alias("used"), F.collect_set("queue").alias("queues"))
    )
    ways = F.broadcast(_ways(events)).alias("way")
    by = F.explode(F.array("exchange", F.lit(None)))
    passed_on = (
        given.withColumn("by", by)
        .alias("given")
        .join(
            ways,
            (F.col("given.vhost") == F.col("way.vhost"))
            & F.col("given.by").eqNullSafe(F.col("way.exchange")),
        )
        .select("given.vhost", F.col("way.next").alias("exchange"), "key", "used", "queues")
    )
    return given.unionByName(passed_on)


def _ways(events: DataFrame) -> DataFrame:
    """vhost, exchange, next: where an exchange may pass messages on to, over several others.

    Null is any exchange of the virtual host: which ones a policy is for, and in the place of which
    other, is not looked at.
    """
    is_policy = is_("audit") & (F.col("reason") == "policy.set")
    by_policy = F.get_json_object(F.col("attrs")["definition"], "$.alternate-exchange")
    next_ = F.when(is_policy, by_policy).otherwise(
        F.coalesce(F.col("attrs")["destination"], F.col("attrs")["alternate-exchange"])
    )
    from_ = F.when(~is_policy, F.col("exchange")).alias("exchange")
    steps = (
        events.where(is_("bind", "exchange_declare") | is_policy)
        .where(next_.isNotNull())
        .agg(F.collect_set(F.struct("vhost", from_, next_.alias("next"))).alias("steps"))
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


def _matches(binding: Column) -> Column:
    """Does the key that was used match the binding's, by the type of the exchange?"""
    of_name = F.regexp_extract("exchange", r"^amq\.(direct|topic)$", 1)
    type_ = F.coalesce(F.col("type"), of_name)
    return (
        F.when(F.col("key").isNull(), F.lit(False))
        .when(type_ == "topic", F.rlike(_words("key"), binding["pattern"]))
        .when(type_ == "direct", F.col("key") == binding["rk"])
        # Fanout and headers do not look at keys; a plug-in's type may do whatever it likes.
        .otherwise(F.lit(True))
    )


def _words(key: str) -> Column:
    """A routing key with a dot after each of its words; the empty key has none."""
    return F.when(F.col(key) == "", F.lit("")).otherwise(F.concat(key, F.lit(".")))


def _topic_pattern(binding_key: str) -> Column:
    """A regular expression for ``_words``: * is one word, # is any number of them."""

    # A word may have the mark that ends a quotation: it is quoted by itself.
    end = (F.lit(r"\E"), F.lit(r"\E\\E\Q"))

    def one(word: Column) -> Column:
        return (
            F.when(word == "*", F.lit(r"[^.]*\."))
            .when(word == "#", F.lit(r"(?:[^.]*\.)*"))
            .otherwise(F.concat(F.lit(r"\Q"), F.replace(word, *end), F.lit(r"\E\.")))
        )

    words = F.array_join(F.transform(F.split(binding_key, r"\."), one), "")
    return F.when(F.col(binding_key) == "", F.lit("^$")).otherwise(
        F.concat(F.lit("^"), words, F.lit("$"))
    )


def _of(inputs: Inputs) -> DataFrame:
    """Use by others counts, too: what was asked for is chosen from the answer."""
    answer = unused(inputs.of_the_vhost, inputs.samples, inputs.of_the_time)
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

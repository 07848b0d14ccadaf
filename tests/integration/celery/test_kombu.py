"""kombu, the library under Celery, as an application uses it: entities, consumers, routing.

Every wait is a ``drain_events`` or a ``get`` with a deadline, so a lost message fails a test
instead of hanging it.
"""

# mypy: allow-untyped-calls
# (kombu says that it is typed, but few of its functions have signatures.)

import queue
from collections.abc import Callable
from typing import Any

import pytest
from amqp.exceptions import ConsumerCancelled  # type: ignore[import-untyped]
from kombu.common import Broadcast
from kombu.connection import Connection
from kombu.entity import Exchange, Queue, binding
from kombu.message import Message
from kombu.messaging import Consumer, Producer

DEADLINE_S = 10.0

Collect = Callable[[Queue, int], list[Message]]
Drain = Callable[..., None]
Fresh = Callable[[str], str]


def transient_queue(name: str, **options: Any) -> Queue:
    return Queue(name, durable=False, expires=60, **options)


def transient_exchange(name: str, kind: str) -> Exchange:
    return Exchange(name, type=kind, durable=False, auto_delete=True)


# --- messages ---------------------------------------------------------------------------


def test_body_headers_and_properties_survive(
    connection: Connection, jobs: Queue, collect: Collect
) -> None:
    sent_headers = {"attempt": 3, "who": "žofie", "deep": {"list": [1, "two", None, True]}}
    Producer(connection).publish(
        {"answer": 42, "text": "naïve"},
        serializer="json",
        routing_key=jobs.name,
        declare=[jobs],
        headers=sent_headers,
        priority=7,
        correlation_id="c-1",
        reply_to="replies",
        expiration=30,
        message_id="m-1",
        type="greeting",
        app_id="tests",
        timestamp=1_700_000_000,
    )

    [message] = collect(jobs, 1)

    assert message.payload == {"answer": 42, "text": "naïve"}
    assert message.headers == sent_headers
    assert message.content_type == "application/json"
    expected = {
        "priority": 7,
        "correlation_id": "c-1",
        "reply_to": "replies",
        "expiration": "30000",
        "message_id": "m-1",
        "type": "greeting",
        "app_id": "tests",
        "delivery_mode": 2,
    }
    assert {key: message.properties[key] for key in expected} == expected


def test_compressed_body_larger_than_a_frame(
    connection: Connection, jobs: Queue, collect: Collect
) -> None:
    body = "".join(chr(33 + i * 7919 % 90) for i in range(400_000))
    producer = Producer(connection)
    producer.publish(body, routing_key=jobs.name, declare=[jobs], compression="gzip")
    producer.publish(body, routing_key=jobs.name)

    packed, plain = collect(jobs, 2)

    assert packed.headers["compression"] == "application/x-gzip"
    assert packed.payload == plain.payload == body


def test_messages_keep_their_order(connection: Connection, jobs: Queue, collect: Collect) -> None:
    producer = Producer(connection, routing_key=jobs.name)
    producer.maybe_declare(jobs)
    for number in range(500):
        producer.publish(number, serializer="json")

    assert [message.payload for message in collect(jobs, 500)] == list(range(500))


# --- simple interfaces ------------------------------------------------------------------


def test_simple_queue(connection: Connection, fresh: Fresh) -> None:
    jobs = transient_queue(fresh("simple"), routing_key=fresh("simple"))
    with connection.SimpleQueue(jobs) as simple:
        simple.put({"n": 1})
        first = simple.get(timeout=DEADLINE_S)
        first.requeue()
        again = simple.get(timeout=DEADLINE_S)
        again.ack()

        assert (first.payload, again.payload) == ({"n": 1}, {"n": 1})
        assert (first.delivery_info["redelivered"], again.delivery_info["redelivered"]) == (
            False,
            True,
        )


def test_simple_buffer_is_empty_when_all_is_read(connection: Connection, fresh: Fresh) -> None:
    with connection.SimpleBuffer(fresh("buffer")) as buffer:
        buffer.put("only")

        assert buffer.get(timeout=DEADLINE_S).payload == "only"
        with pytest.raises(queue.Empty):
            buffer.get(timeout=0.1)
        with pytest.raises(queue.Empty):
            buffer.get_nowait()


def test_get_purge_and_delete_report_counts(connection: Connection, fresh: Fresh) -> None:
    jobs = transient_queue(fresh("jobs"))(connection.channel())
    jobs.declare()
    for number in range(4):
        connection.Producer().publish(str(number), routing_key=jobs.name)

    counted = jobs.queue_declare(passive=True)
    first = jobs.get(no_ack=True)

    assert counted.message_count == 4
    assert first is not None
    assert first.payload == "0"
    assert jobs.purge() == 3
    assert jobs.get() is None
    assert jobs.delete() == 0


# --- consuming --------------------------------------------------------------------------


def test_drain_events_times_out_and_the_connection_lives_on(
    connection: Connection, jobs: Queue, drain: Drain
) -> None:
    taken: list[object] = []

    def on_message(body: object, message: Message) -> None:
        taken.append(body)
        message.ack()

    with connection.Consumer(jobs, callbacks=[on_message]):
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.1)
        connection.Producer().publish("late", routing_key=jobs.name)
        drain(until=lambda: bool(taken))

    assert taken == ["late"]


def test_prefetch_holds_back_what_is_not_acknowledged(
    connection: Connection, jobs: Queue, drain: Drain
) -> None:
    taken: list[Message] = []
    producer = connection.Producer()
    for number in range(3):
        producer.publish(number, routing_key=jobs.name, declare=[jobs])

    consumer = Consumer(connection.channel(), jobs, on_message=taken.append, prefetch_count=2)
    with consumer:
        drain(until=lambda: len(taken) == 2)
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.2)
        taken[0].ack()
        drain(until=lambda: len(taken) == 3)
        taken[2].ack(multiple=True)

    assert [message.payload for message in taken] == [0, 1, 2]


def test_rejected_message_goes_to_the_dead_letter_queue(
    connection: Connection, fresh: Fresh, collect: Collect
) -> None:
    graves = transient_queue(fresh("graves"))
    jobs = transient_queue(
        fresh("jobs"),
        queue_arguments={
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": graves.name,
        },
    )
    connection.Producer().publish("bad", routing_key=jobs.name, declare=[jobs, graves])
    with Consumer(connection.channel(), jobs, on_message=lambda message: message.reject()):
        [dead] = collect(graves, 1)

    [death] = dead.headers["x-death"]
    assert dead.payload == "bad"
    assert (death["reason"], death["queue"], death["count"]) == ("rejected", jobs.name, 1)


def test_expired_message_is_dead_lettered_without_a_consumer(
    connection: Connection, fresh: Fresh, collect: Collect
) -> None:
    graves = transient_queue(fresh("graves"))
    jobs = transient_queue(
        fresh("jobs"),
        message_ttl=0.05,
        queue_arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": graves.name},
    )
    connection.Producer().publish("stale", routing_key=jobs.name, declare=[jobs, graves])

    [dead] = collect(graves, 1)

    assert dead.headers["x-death"][0]["reason"] == "expired"


def test_priorities_overtake_and_max_length_drops_the_oldest(
    connection: Connection, fresh: Fresh, collect: Collect
) -> None:
    urgent = transient_queue(fresh("urgent"), max_priority=10)
    short = transient_queue(fresh("short"), max_length=2)
    producer = connection.Producer()
    for priority in (0, 5, 9, 5):
        producer.publish(priority, routing_key=urgent.name, priority=priority, declare=[urgent])
    for number in range(4):
        producer.publish(number, routing_key=short.name, declare=[short])

    assert [message.payload for message in collect(urgent, 4)] == [9, 5, 5, 0]
    assert [message.payload for message in collect(short, 2)] == [2, 3]


def test_deleting_a_queue_cancels_its_consumer(
    connection: Connection, amqp_url: str, jobs: Queue
) -> None:
    with Consumer(connection.channel(), jobs):
        with Connection(amqp_url) as other:
            jobs.bind(other.channel()).delete()
        with pytest.raises(ConsumerCancelled):
            connection.drain_events(timeout=DEADLINE_S)


# --- routing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "bindings", "key", "headers", "reached"),
    [
        pytest.param("direct", [("red", {}), ("blue", {})], "red", {}, [0], id="direct"),
        pytest.param("fanout", [("", {}), ("x", {})], "any", {}, [0, 1], id="fanout"),
        pytest.param(
            "topic", [("log.#", {}), ("log.*", {}), ("*.error", {})], "log.web.error", {}, [0],
            id="topic-hash-takes-many-words",
        ),
        pytest.param(
            "topic", [("log.#", {}), ("log.*", {}), ("*.error", {})], "log.error", {}, [0, 1, 2],
            id="topic-star-takes-one-word",
        ),
        pytest.param(
            "headers",
            [
                ("", {"x-match": "all", "os": "linux", "cores": 2}),
                ("", {"x-match": "any", "os": "linux", "cores": 8}),
                ("", {"x-match": "all", "os": "hurd"}),
            ],
            "",
            {"os": "linux", "cores": 2},
            [0, 1],
            id="headers",
        ),
    ],
)  # fmt: skip
def test_exchange_kinds(
    connection: Connection,
    fresh: Fresh,
    kind: str,
    bindings: list[tuple[str, dict[str, object]]],
    key: str,
    headers: dict[str, object],
    reached: list[int],
) -> None:
    exchange = transient_exchange(fresh("exchange"), kind)
    targets = [
        transient_queue(
            fresh(str(number)), exchange=exchange, routing_key=key, binding_arguments=arguments
        )
        for number, (key, arguments) in enumerate(bindings)
    ]
    channel = connection.channel()
    Producer(channel, exchange).publish("hit", routing_key=key, headers=headers, declare=[*targets])
    counts = [target(channel).queue_declare(passive=True).message_count for target in targets]

    assert counts == [1 if number in reached else 0 for number in range(len(targets))]


def test_queue_with_several_bindings_gets_one_copy_of_each(
    connection: Connection, fresh: Fresh, collect: Collect
) -> None:
    topics = transient_exchange(fresh("topics"), "topic")
    jobs = transient_queue(
        fresh("jobs"),
        bindings=[
            binding(topics, routing_key="image.#"),
            binding(topics, routing_key="*.resize"),
            binding(topics, routing_key="mail.send"),
        ],
    )
    producer = Producer(connection.channel(), topics)
    for key in ("image.resize", "mail.send", "mail.delete", "text.resize"):
        producer.publish(key, routing_key=key, declare=[jobs])

    got = [message.payload for message in collect(jobs, 3)]
    jobs.bind(connection.channel()).unbind_from(topics, routing_key="mail.send")
    producer.publish("unbound", routing_key="mail.send")
    producer.publish("last", routing_key="image.crop")

    assert got == ["image.resize", "mail.send", "text.resize"]
    assert [message.payload for message in collect(jobs, 1)] == ["last"]


def test_exchange_bound_to_an_exchange(
    connection: Connection, fresh: Fresh, collect: Collect
) -> None:
    channel = connection.channel()
    outer = transient_exchange(fresh("outer"), "topic")(channel)
    inner = transient_exchange(fresh("inner"), "fanout")(channel)
    outer.declare()
    inner.declare()
    jobs = transient_queue(fresh("jobs"), exchange=inner)
    jobs(channel).declare()
    inner.bind_to(outer, routing_key="deep.#")
    producer = Producer(channel, outer)
    producer.publish("in", routing_key="deep.down")
    producer.publish("out", routing_key="shallow")
    inner.unbind_from(outer, routing_key="deep.#")

    assert [message.payload for message in collect(jobs, 1)] == ["in"]


def test_broadcast_reaches_every_consumer(
    connection: Connection, amqp_url: str, fresh: Fresh, drain: Drain
) -> None:
    heard: list[str] = []
    news = transient_exchange(fresh("news"), "fanout")
    with Connection(amqp_url) as other:
        first = Consumer(
            connection.channel(),
            Broadcast(queue=fresh("first"), exchange=news),
            on_message=lambda message: heard.append("first"),
            no_ack=True,
        )
        second = Consumer(
            other.channel(),
            Broadcast(queue=fresh("second"), exchange=news),
            on_message=lambda message: heard.append("second"),
            no_ack=True,
        )
        with first, second:
            Producer(connection.channel(), news).publish("hello")
            drain(until=lambda: "first" in heard)
            drain(until=lambda: "second" in heard, on=other)

    assert sorted(heard) == ["first", "second"]


def test_unroutable_mandatory_message_is_returned(connection: Connection, fresh: Fresh) -> None:
    returned: list[tuple[object, ...]] = []

    def on_return(*fields: Any) -> None:
        exception, exchange, routing_key, message = fields
        returned.append((exception.reply_code, exchange, routing_key, message.body))

    missing = fresh("missing")
    producer = Producer(connection.channel(), on_return=on_return)
    producer.publish("lost", routing_key=missing, mandatory=True)

    # The return comes before the confirm, so nothing is left to wait for.
    assert returned == [(312, "", missing, "lost")]

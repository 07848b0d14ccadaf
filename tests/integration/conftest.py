"""What every real-client test starts from: a broker's address, a name of its own, a connection.

The broker is a `leveret serve` process, unless LEVERET_TEST_AMQP_URL names another one: the same
tests then run against RabbitMQ, which is how we know that they describe RabbitMQ.
Tests share one broker, in any order and in parallel, so nothing here or in them may depend on a
fixed name, and whatever they declare goes away with their connection or is deleted by them.
"""

import os
import uuid
from collections.abc import AsyncIterator

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractConnection


@pytest.fixture(scope="module")
def amqp_url(request: pytest.FixtureRequest) -> str:
    """The broker under test, with a user that may do everything in the default vhost."""
    given = os.environ.get("LEVERET_TEST_AMQP_URL")
    if given:
        return given
    # Asked for only here, so that no process is started when another broker was named.
    return str(request.getfixturevalue("broker_process").url)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name no other test uses; it tells in a broker's log which test it belongs to."""
    # Not node.name: aio-pika refuses the brackets of a parametrised test in a queue's name.
    return f"{request.node.originalname}-{uuid.uuid4().hex}"


@pytest.fixture
async def connection(amqp_url: str) -> AsyncIterator[AbstractConnection]:
    async with await aio_pika.connect(amqp_url) as connection:
        yield connection


@pytest.fixture
async def channel(connection: AbstractConnection) -> AsyncIterator[AbstractChannel]:
    """A channel in confirm mode: after `await publish(...)` the message is in its queues."""
    async with connection.channel() as channel:
        yield channel

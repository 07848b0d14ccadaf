"""Publish ten confirmed messages and consume them again, with aio-pika.

    pip install aio-pika
    python examples/publish_and_consume_aio_pika.py

The broker is taken from AMQP_URL, else it is the one on this machine.
"""

import asyncio
import os

import aio_pika

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/")
COUNT = 10


async def main() -> None:
    connection = await aio_pika.connect_robust(URL)
    async with connection, connection.channel() as channel:
        await channel.set_qos(prefetch_count=5)
        queue = await channel.declare_queue("greetings", durable=True)

        for number in range(COUNT):
            message = aio_pika.Message(
                f"hello {number}".encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT
            )
            # Returns once the broker has confirmed: the message survives a restart.
            await channel.default_exchange.publish(message, routing_key=queue.name)
        print(f"published {COUNT} messages")

        consumed = 0
        async with queue.iterator() as messages:
            async for incoming in messages:
                # Acknowledged at the end of the block, or given back if it raises.
                async with incoming.process(requeue=True):
                    print("received", incoming.body.decode())
                consumed += 1
                if consumed == COUNT:
                    break


asyncio.run(main())

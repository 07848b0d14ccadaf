"""Call a function in another process, or here in another connection, with aio-pika's RPC.

    pip install aio-pika
    python examples/rpc_aio_pika.py

The broker is taken from AMQP_URL, else it is the one on this machine.
"""

import asyncio
import os

import aio_pika
from aio_pika.patterns import JsonRPC

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/")


async def multiply(*, x: int, y: int) -> int:
    return x * y


async def main() -> None:
    serving = await aio_pika.connect_robust(URL)
    calling = await aio_pika.connect_robust(URL)
    async with serving, calling:
        # The serving side: the function is reached through a queue of the same name.
        server = await JsonRPC.create(await serving.channel())
        await server.register("multiply", multiply, auto_delete=True)

        # The calling side: answers come back to a queue of its own.
        client = await JsonRPC.create(await calling.channel())
        print("6 * 7 =", await client.call("multiply", {"x": 6, "y": 7}))

        # Many calls at once; each gets its own answer.
        squares = await asyncio.gather(
            *(client.call("multiply", {"x": number, "y": number}) for number in range(10))
        )
        print("squares:", squares)


asyncio.run(main())

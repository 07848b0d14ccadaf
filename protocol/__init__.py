"""AMQP 0-9-1 on the wire: bytes in, values out. No asyncio, no sockets."""

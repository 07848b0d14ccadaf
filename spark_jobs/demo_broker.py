"""A broker for the demo, a process of its own: ``python -m leveret.spark_jobs.demo_broker DATA``.

It logs every event, has the tenants of ``demo_script.py``, prints its port as the only line and
stops when its standard input ends: with the process that started it, however that ends.

The one module of the analytics that knows the broker; nothing else imports it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.spark_jobs.demo_script import PASSWORD, TENANTS


async def serve(data: Path) -> None:
    async with Broker(Settings(port=0, data=data, event_log="all")) as broker:
        for vhost in dict.fromkeys(tenant.vhost for tenant in TENANTS):
            await broker.add_vhost(vhost)
        for tenant in TENANTS:
            await broker.users.add(tenant.user, PASSWORD)
        print(broker.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))

"""The store of a virtual host, opened and closed, without a broker around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from leveret.storage.definitions import Definitions
from leveret.storage.vhost_store import StoreSettings, VhostStore


@asynccontextmanager
async def opened_store(vhosts: Path) -> AsyncIterator[tuple[VhostStore, Definitions]]:
    store = VhostStore(
        vhosts,
        "/",
        StoreSettings("off", 4096),
        now=time.monotonic,
        sleep=asyncio.sleep,
        on_trouble=lambda error: None,
    )
    definitions = await store.open()
    try:
        yield store, definitions
    finally:
        # Also when a test fails, or its thread would keep the process from ending.
        await store.close()

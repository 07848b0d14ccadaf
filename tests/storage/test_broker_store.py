"""``broker.db``: what was answered is there after a restart, what failed is not, nor half of it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from leveret.storage.broker_store import BROKER_FILE, BrokerState, BrokerStore, StoredUser
from leveret.storage.vhost_store import StoreError
from tests.support.waiting import wait_until

GUEST = StoredUser("guest", b"salt" + bytes(32), ("administrator",))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[BrokerStore]:
    opened = BrokerStore(tmp_path)
    await opened.open()
    yield opened
    await opened.close()


async def reopened(data: Path) -> BrokerState:
    store = BrokerStore(data)
    state = await store.open()
    await store.close()
    return state


async def test_a_new_file_is_due_its_defaults_until_they_were_made(tmp_path: Path) -> None:
    assert (await reopened(tmp_path)).is_new
    # Ended before they were: they still are.
    assert (await reopened(tmp_path)).is_new
    store = BrokerStore(tmp_path)
    await store.open()
    await store.make_defaults(["/", "other"], GUEST)
    await store.close()
    assert await reopened(tmp_path) == BrokerState(False, ["/", "other"], [], [GUEST], {})


async def test_changes_are_kept(store: BrokerStore, tmp_path: Path) -> None:
    told: list[str] = []
    await store.save_vhost("a")
    await store.save_vhost("b")
    await store.begin_deleting_vhost("b")
    await store.save_user(GUEST, lambda: told.append("saved"))
    await store.save_user(GUEST._replace(tags=("monitoring", "x")), lambda: told.append("changed"))
    await store.save_user(GUEST._replace(name="gone"), lambda: None)
    await store.delete_user("gone", lambda: told.append("deleted"))
    await store.save_parameter("user-limits", "guest", {"max-channels": 3}, lambda: None)
    await store.save_parameter("user-limits", "gone", {}, lambda: None)
    await store.delete_parameter("user-limits", "gone", lambda: None)
    assert told == ["saved", "changed", "deleted"]
    await store.close()
    state = await reopened(tmp_path)
    assert (state.vhosts, state.vhosts_to_delete) == (["a"], ["b"])
    assert state.users == [GUEST._replace(tags=("monitoring", "x"))]
    assert state.parameters == {("user-limits", "guest"): {"max-channels": 3}}


async def test_a_vhost_whose_files_are_gone_is_forgotten(
    store: BrokerStore, tmp_path: Path
) -> None:
    await store.save_vhost("a")
    await store.begin_deleting_vhost("a")
    await store.forget_vhost("a")
    await store.close()
    state = await reopened(tmp_path)
    assert state.vhosts == state.vhosts_to_delete == []


async def test_names_may_be_bytes_that_are_not_utf8(store: BrokerStore, tmp_path: Path) -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    await store.save_vhost(name)
    await store.save_user(GUEST._replace(name=name), lambda: None)
    await store.close()
    state = await reopened(tmp_path)
    assert (state.vhosts, [user.name for user in state.users]) == ([name], [name])


async def test_a_change_that_fails_is_told_and_did_not_happen(
    store: BrokerStore, tmp_path: Path
) -> None:
    """Not tried for ever, as messages are: who adds a user waits for the answer."""
    told: list[str] = []
    with closing(sqlite3.connect(tmp_path / BROKER_FILE, isolation_level=None)) as other:
        await store.database.call_writer(lambda c: c.execute("PRAGMA busy_timeout=1"))
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="cannot be written: database is locked"):
            await store.save_user(GUEST, lambda: told.append("saved"))
        other.execute("ROLLBACK")
    assert told == []
    await store.save_user(GUEST, lambda: told.append("saved"))
    assert told == ["saved"]


async def test_who_is_cancelled_leaves_a_whole_change(store: BrokerStore, tmp_path: Path) -> None:
    told: list[str] = []
    async with store.database.between_commits():
        caller = asyncio.create_task(store.save_user(GUEST, lambda: told.append("saved")))
        await wait_until(lambda: store._changes)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert told == []
    await store.close()
    assert told == ["saved"]
    assert (await reopened(tmp_path)).users == [GUEST]


async def test_damaged_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    await reopened(tmp_path)
    garbage = b"\xaa" * (tmp_path / BROKER_FILE).stat().st_size
    (tmp_path / BROKER_FILE).write_bytes(garbage)
    with pytest.raises(StoreError, match=r"(?s)broker\.db.*users.*cannot be read.*move it aside"):
        await BrokerStore(tmp_path).open()
    assert (tmp_path / BROKER_FILE).read_bytes() == garbage


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(
            "UPDATE meta SET value = 2 WHERE name = 'schema_version'",
            "schema version 2, this Leveret knows 1",
            id="newer",
        ),
        pytest.param("DROP TABLE user", "no such table: user", id="not-ours"),
        pytest.param("INSERT INTO user VALUES ('x', x'00', 'no json')", "Expecting", id="nonsense"),
    ],
)
async def test_what_cannot_be_used_is_refused(tmp_path: Path, change: str, text: str) -> None:
    await reopened(tmp_path)
    with closing(sqlite3.connect(tmp_path / BROKER_FILE, isolation_level=None)) as other:
        other.execute(change)
    with pytest.raises(StoreError, match=text):
        await BrokerStore(tmp_path).open()

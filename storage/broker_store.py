"""What belongs to the broker as a whole: virtual hosts and users, in ``broker.db``.

Upstream: ``broker/vhosts.py`` and ``broker/auth/users.py``, which keep what they have read in
memory and write every change through. Downstream: ``database.py``, for the file and its thread.

A change is one transaction of its own, unlike those of a virtual host's file: they are rare, and
who makes one must be told if it fails, not kept waiting until the disk has room again. A change
is on disk and known to the broker (``then``), or neither, also where the caller is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from leveret.storage.database import Database
from leveret.storage.vhost_store import StoreError

BROKER_FILE = "broker.db"
BROKER_SCHEMA_VERSION = 1

_Statement = tuple[str, tuple[object, ...]]


class StoredUser(NamedTuple):
    name: str
    # RabbitMQ's form: 4 bytes of salt, then SHA-256 of salt and password.
    password_hash: bytes
    tags: tuple[str, ...]


class BrokerState(NamedTuple):
    """What the file holds."""

    # Nothing was ever made: the default user and virtual host are due.
    is_new: bool
    vhosts: list[str]
    # Whose files were to be deleted when the broker ended.
    vhosts_to_delete: list[str]
    users: list[StoredUser]
    # (component, name) -> value
    parameters: dict[tuple[str, str], Any]


class BrokerStore:
    def __init__(self, data: Path) -> None:
        schema = files("leveret.storage").joinpath("broker_schema.sql").read_text()
        schema += f"INSERT INTO meta VALUES ('schema_version', {BROKER_SCHEMA_VERSION})"
        self.database = Database(data / BROKER_FILE, schema=schema, synchronous="FULL")
        # Changes under way: they end well or badly, but not halfway.
        self._changes: set[asyncio.Task[None]] = set()

    async def open(self) -> BrokerState:
        """Open or make the file and read all of it.

        Raises StoreError for a file that is newer than we are, damaged, or not ours.
        """
        path = self.database.path
        try:
            async with self.database.opening(self._look):
                return await self.database.call_writer(read_broker_state)
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise StoreError(
                f"{path}, which holds users and virtual hosts, cannot be read: {error}. Nothing in"
                " it was changed. Restore a backup, or move it aside (leveret check --move-aside):"
                " the next start makes one with the default user and takes over the virtual hosts"
                " whose files are there."
            ) from error

    def _look(self, connection: sqlite3.Connection) -> None:
        found = _read_version(connection)
        if found != BROKER_SCHEMA_VERSION:
            raise StoreError(
                f"{self.database.path} has schema version {found}, this Leveret knows"
                f" {BROKER_SCHEMA_VERSION}: use the version that wrote it, or a newer one."
            )

    async def close(self) -> None:
        if self._changes:
            await asyncio.wait(self._changes)
        await self.database.abandon()

    # --- changes: each returns when it is on disk, or raises StoreError ---------------------------

    async def make_defaults(self, vhosts: Iterable[str], user: StoredUser) -> None:
        """The first start, all or nothing."""
        await self._change(
            [
                *((_SAVE_VHOST, (_sql(vhost), 0)) for vhost in vhosts),
                _save_user(user),
                ("INSERT INTO meta VALUES ('defaults_made', 1)", ()),
            ]
        )

    async def save_vhost(self, name: str) -> None:
        await self._change([(_SAVE_VHOST, (_sql(name), 0))])

    async def begin_deleting_vhost(self, name: str) -> None:
        """From here on it is gone for good; its files go next."""
        await self._change([(_SAVE_VHOST, (_sql(name), 1))])

    async def forget_vhost(self, name: str) -> None:
        """Its files are gone."""
        await self._change([("DELETE FROM vhost WHERE name = ?", (_sql(name),))])

    async def save_user(self, user: StoredUser, then: Callable[[], None]) -> None:
        await self._change([_save_user(user)], then)

    async def delete_user(self, name: str, then: Callable[[], None]) -> None:
        """With what was set for the user."""
        await self._change(
            [
                ("DELETE FROM user WHERE name = ?", (_sql(name),)),
                (
                    "DELETE FROM parameter WHERE component = 'user-limits' AND name = ?",
                    (_sql(name),),
                ),
            ],
            then,
        )

    async def save_parameter(
        self, component: str, name: str, value: object, then: Callable[[], None]
    ) -> None:
        sql = "INSERT OR REPLACE INTO parameter VALUES (?, ?, ?)"
        await self._change([(sql, (component, _sql(name), json.dumps(value)))], then)

    async def delete_parameter(self, component: str, name: str, then: Callable[[], None]) -> None:
        sql = "DELETE FROM parameter WHERE component = ? AND name = ?"
        await self._change([(sql, (component, _sql(name)))], then)

    async def _change(
        self, statements: Sequence[_Statement], then: Callable[[], None] = lambda: None
    ) -> None:
        """Who is cancelled goes away; what was begun is finished all the same."""
        task = asyncio.get_running_loop().create_task(
            self._write(statements, then), name="change of broker.db"
        )
        self._changes.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            # Retrieved: where the caller has gone, nobody else does.
            task.exception()

    async def _write(self, statements: Sequence[_Statement], then: Callable[[], None]) -> None:
        # A backup begins between two changes, not in the middle of one.
        async with self.database.between_commits():
            try:
                await self.database.call_writer(_execute, statements)
            except (sqlite3.Error, OSError) as error:
                raise StoreError(f"{self.database.path} cannot be written: {error}") from error
            then()


_SAVE_VHOST = "INSERT OR REPLACE INTO vhost VALUES (?, ?)"


def _save_user(user: StoredUser) -> _Statement:
    values = (_sql(user.name), user.password_hash, json.dumps(user.tags))
    return "INSERT OR REPLACE INTO user VALUES (?, ?, ?)", values


def _sql(name: str) -> str | bytes:
    """Names may hold bytes that are not UTF-8, which SQLite's text cannot: those go as blobs."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return name.encode("utf-8", "surrogateescape")
    return name


def _name(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")


# --- in the writer's thread --------------------------------------------------------------------


def _execute(connection: sqlite3.Connection, statements: Sequence[_Statement]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for sql, parameters in statements:
            connection.execute(sql, parameters)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise


def _read_version(connection: sqlite3.Connection) -> object:
    return dict(connection.execute("SELECT name, value FROM meta")).get("schema_version")


def read_broker_state(connection: sqlite3.Connection) -> BrokerState:
    """All there is; raises ValueError or TypeError where it makes no sense."""
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    vhosts = connection.execute("SELECT name, is_deleting FROM vhost ORDER BY name").fetchall()
    return BrokerState(
        is_new="defaults_made" not in meta,
        vhosts=[_name(name) for name, is_deleting in vhosts if not is_deleting],
        vhosts_to_delete=[_name(name) for name, is_deleting in vhosts if is_deleting],
        users=[
            StoredUser(_name(name), password_hash, tuple(json.loads(tags)))
            for name, password_hash, tags in connection.execute(
                "SELECT name, password_hash, tags FROM user ORDER BY name"
            )
        ],
        parameters={
            (component, _name(name)): json.loads(value)
            for component, name, value in connection.execute(
                "SELECT component, name, value FROM parameter"
            )
        },
    )

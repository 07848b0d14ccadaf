"""Who may log in: names, salted password hashes, tags [150].

The sole owner of the users in memory. Logins are answered from there; every change is in
``broker.db`` (``storage/broker_store.py``) before it counts, or in memory alone where the broker
writes nothing. Tags are kept for whoever asks; the one the broker itself obeys is ``impersonator``.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from leveret.broker.auth.access import Access, FullAccess
from leveret.broker.events import acting
from leveret.storage.broker_store import StoredUser

if TYPE_CHECKING:
    from leveret.broker.events import Events
    from leveret.storage.broker_store import BrokerStore

_SALT_BYTES = 4
# A user's name travels as a short string (user-id).
_NAME_MAX = 255


class UserError(Exception):
    """What was asked for a user cannot be done; the text tells a person why."""


def hash_password(password: bytes, salt: bytes | None = None) -> bytes:
    """RabbitMQ's form: 4 bytes of salt, then SHA-256 of salt and password."""
    salt = secrets.token_bytes(_SALT_BYTES) if salt is None else salt
    return salt + hashlib.sha256(salt + password).digest()


class Users:
    def __init__(
        self,
        store: BrokerStore | None = None,
        on_deleted: Callable[[str], None] = lambda name: None,
        events: Events | None = None,
    ) -> None:
        """``on_deleted`` is told the name of a user who is gone."""
        self._store = store
        self._on_deleted = on_deleted
        self._events = events
        self._users: dict[str, StoredUser] = {}
        # Held from the question whether there is such a user until the answer is on disk.
        self._changing = asyncio.Lock()

    def load(self, users: Iterable[StoredUser]) -> None:
        """At start: what the file has, or what the first start has put there."""
        self._users = {user.name: user for user in users}

    # --- changes: each returns when it is on disk; raise UserError or StoreError ------------------

    async def add(self, name: str, password: str, tags: Iterable[str] = ()) -> None:
        async with self._changing:
            if name in self._users:
                raise UserError(f"user '{name}' exists already")
            user = make_user(name, password, tags)
            await self._save(user)
        self._tell("user.created", name)
        if user.tags:
            self._tell("user.tags.set", name, tags=list(user.tags))

    async def change_password(self, name: str, password: str) -> None:
        """For logins from now on; connections that are open stay."""
        async with self._changing:
            hashed = hash_password(_encoded(password))
            await self._save(self._get(name)._replace(password_hash=hashed))
        self._tell("user.password.changed", name)

    async def set_tags(self, name: str, tags: Iterable[str]) -> None:
        tags = tuple(tags)
        async with self._changing:
            await self._save(self._get(name)._replace(tags=tags))
        self._tell("user.tags.set", name, tags=list(tags))

    async def delete(self, name: str) -> None:
        """Connections of the user are closed, as RabbitMQ does."""

        def forget() -> None:
            del self._users[name]
            self._on_deleted(name)

        async with self._changing:
            self._get(name)
            if self._store is None:
                forget()
            else:
                await self._store.delete_user(name, forget)
        self._tell("user.deleted", name)

    async def _save(self, user: StoredUser) -> None:
        def remember() -> None:
            self._users[user.name] = user

        if self._store is None:
            remember()
        else:
            await self._store.save_user(user, remember)

    def _tell(self, kind: str, name: str, **what: object) -> None:
        if self._events is not None and self._events.is_heard:
            self._events.notify(kind, {"name": name, **what, **acting()})

    # --- questions --------------------------------------------------------------------------------

    def _get(self, name: str) -> StoredUser:
        user = self._users.get(name)
        if user is None:
            raise UserError(f"user '{name}' does not exist")
        return user

    def __contains__(self, name: str) -> bool:
        return name in self._users

    def list(self) -> Sequence[StoredUser]:
        """By name."""
        return sorted(self._users.values())

    def authenticate(self, name: str, password: bytes) -> Access | None:
        """What the user may do, or None if name and password do not belong together."""
        user = self._users.get(name)
        # Hash in any case: the time it takes must not tell whether the user exists.
        salt = user.password_hash[:_SALT_BYTES] if user is not None else bytes(_SALT_BYTES)
        given = hash_password(password, salt)
        # An empty password opens nothing, as with RabbitMQ, even where one was set.
        if user is None or not password or not hmac.compare_digest(user.password_hash, given):
            return None
        return FullAccess(name, may_impersonate="impersonator" in user.tags)


def make_user(name: str, password: str, tags: Iterable[str]) -> StoredUser:
    """Raises UserError."""
    if not 0 < len(_encoded(name)) <= _NAME_MAX:
        raise UserError(f"the name of a user must have 1 to {_NAME_MAX} bytes")
    return StoredUser(name, hash_password(_encoded(password)), tuple(tags))


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise UserError(f"{text!r} cannot be written as UTF-8") from error

"""Who may log in: names and salted password hashes [150]."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from leveret.broker.auth.access import Access, FullAccess

_SALT_BYTES = 4


def hash_password(password: bytes, salt: bytes | None = None) -> bytes:
    """RabbitMQ's form: 4 bytes of salt, then SHA-256 of salt and password."""
    salt = secrets.token_bytes(_SALT_BYTES) if salt is None else salt
    return salt + hashlib.sha256(salt + password).digest()


class Users:
    def __init__(self) -> None:
        self._hashes: dict[str, bytes] = {}

    def add(self, name: str, password: str) -> None:
        self._hashes[name] = hash_password(password.encode())

    def authenticate(self, name: str, password: bytes) -> Access | None:
        """What the user may do, or None if name and password do not belong together."""
        stored = self._hashes.get(name)
        # Hash in any case: the time it takes must not tell whether the user exists.
        salt = stored[:_SALT_BYTES] if stored is not None else bytes(_SALT_BYTES)
        given = hash_password(password, salt)
        if stored is None or not hmac.compare_digest(stored, given):
            return None
        return FullAccess(name)

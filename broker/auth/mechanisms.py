"""SASL mechanisms: from a client's response to a user name and a password [145].

Installed packages may add more in the group ``leveret.auth_mechanisms``.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

from leveret.protocol.field_table import TableError, decode_table

if TYPE_CHECKING:
    from leveret.broker.auth.access import Access
    from leveret.broker.auth.users import Users


class MalformedResponse(Exception):
    """The response is not in the mechanism's form; the client gets no answer at all."""


class AuthMechanism(Protocol):
    """One instance per login. The response is the one in connection.start-ok."""

    # Who tried to log in, once the response is read; for the event that tells of it.
    user: str = ""

    @abstractmethod
    def handle_response(self, response: bytes, users: Users) -> Access | None:
        """What the user may do, None to refuse. Raises MalformedResponse."""


class Plain(AuthMechanism):
    """``NUL user NUL password``; acting for somebody else is not supported."""

    def handle_response(self, response: bytes, users: Users) -> Access | None:
        parts = response.split(b"\0")
        if len(parts) != 3 or parts[0]:
            raise MalformedResponse
        self.user = parts[1].decode("utf-8", "surrogateescape")
        return users.authenticate(self.user, parts[2])


class AmqPlain(AuthMechanism):
    """A field table with LOGIN and PASSWORD, without its length."""

    def handle_response(self, response: bytes, users: Users) -> Access | None:
        try:
            table, _ = decode_table(struct.pack(">I", len(response)) + response, 0)
        except TableError as error:
            raise MalformedResponse from error
        login, password = table.get("LOGIN"), table.get("PASSWORD")
        if login is None or password is None or {login.tag, password.tag} != {"S"}:
            raise MalformedResponse
        secret = str(password.value).encode("utf-8", "surrogateescape")
        self.user = str(login.value)
        return users.authenticate(self.user, secret)

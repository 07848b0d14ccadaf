"""What there is to tell of a connection, and the events that tell it.

The reader owns one ``ConnectionFacts`` for each connection; the handshake fills in what the client
says of itself. TLS is not spoken yet, so what RabbitMQ tells of it is empty.
"""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leveret.broker.events import WHO
from leveret.broker.node import NODE_NAME, make_pid

if TYPE_CHECKING:
    from leveret.broker.channel.context import ConnectionContext
    from leveret.broker.events import Events
    from leveret.protocol.field_table import Table


@dataclass(slots=True)
class ConnectionFacts:
    # Our end and the client's, as (host, port).
    here: tuple[str, int]
    there: tuple[str, int]
    connected_at_ms: int
    pid: str = field(default_factory=make_pid)
    # The version it is spoken to in, as RabbitMQ prints it.
    protocol: str = "{0,9,1}"
    # None until the client has said anything of itself.
    client_properties: Table | None = None
    auth_mechanism: str = ""
    heartbeat_s: int = 0

    @classmethod
    def of(cls, transport: asyncio.Transport, connected_at_ms: int) -> ConnectionFacts:
        here, there = (_address(transport.get_extra_info(end)) for end in ("sockname", "peername"))
        return cls(here, there, connected_at_ms)

    @property
    def name(self) -> str:
        """``client -> broker``, by which logs and RabbitMQ's tools know it."""
        return " -> ".join(f"{host}:{port}" if host else "?" for host, port in self._ends)

    @property
    def peer(self) -> str:
        """Address and port of the client."""
        host, port = self.there
        return f"{host}:{port}" if host else ""

    @property
    def _ends(self) -> tuple[tuple[str, int], tuple[str, int]]:
        return self.there, self.here

    @property
    def _provided_name(self) -> dict[str, object]:
        """What the client calls itself, if it does."""
        given = (self.client_properties or {}).get("connection_name")
        return {} if given is None else {"user_provided_name": given.value}

    # --- events: who calls looks first whether anybody listens ------------------------------------

    def opened(self, events: Events, context: ConnectionContext, channel_max: int) -> None:
        user = context.access.user
        events.notify(
            "connection.created",
            {
                **self._provided_name,
                "type": "network",
                "pid": self.pid,
                "name": self.name,
                "port": self.here[1],
                "peer_port": self.there[1],
                "host": _tuple(self.here[0]),
                "peer_host": _tuple(self.there[0]),
                "ssl": False,
                "peer_cert_subject": "",
                "peer_cert_issuer": "",
                "peer_cert_validity": "",
                "auth_mechanism": self.auth_mechanism,
                "ssl_protocol": "",
                "ssl_key_exchange": "",
                "ssl_cipher": "",
                "ssl_hash": "",
                "protocol": self.protocol,
                "user": user,
                "vhost": context.vhost.name,
                "timeout": self.heartbeat_s,
                "frame_max": context.frame_max,
                "channel_max": channel_max,
                "client_properties": self.client_properties or {},
                "connected_at": self.connected_at_ms,
                "node": NODE_NAME,
                WHO: user,
            },
        )

    def closed(self, events: Events, reason: str) -> None:
        events.notify(
            "connection.closed",
            {
                **self._provided_name,
                "name": self.name,
                "pid": self.pid,
                "node": NODE_NAME,
                "client_properties": self.client_properties or {},
            },
            reason,
        )

    def authenticated(self, events: Events, user: str, refusal: str | None) -> None:
        """A login that succeeded, or why it did not; the name is empty where none was given."""
        properties: dict[str, object] = {
            "connection_type": "network",
            "name": user,
            "host": _tuple(self.here[0]),
            "connection_name": self.name,
            "peer_host": _tuple(self.there[0]),
            "peer_port": self.there[1],
            "protocol": self.protocol,
            "auth_mechanism": self.auth_mechanism,
            "ssl": False,
        }
        if not user:
            del properties["name"]
        if refusal is None:
            events.notify("user.authentication.success", properties)
        else:
            # RabbitMQ's text is an Erlang string, which is a list of numbers on the wire.
            error = list(refusal.encode("utf-8", "surrogateescape"))
            events.notify("user.authentication.failure", {**properties, "error": error}, refusal)


def _address(address: object) -> tuple[str, int]:
    if isinstance(address, tuple) and len(address) >= 2:
        return str(address[0]), int(address[1])
    return "", 0


def _tuple(host: str) -> str:
    """An address as Erlang prints it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        numbers = list(address.packed)
    else:
        numbers = [int.from_bytes(address.packed[at : at + 2]) for at in range(0, 16, 2)]
    return f"{{{','.join(map(str, numbers))}}}"

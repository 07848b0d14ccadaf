"""The name of an exchange or a queue: virtual host, kind and name, as everywhere in RabbitMQ."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["exchange", "queue"]


class Resource(NamedTuple):
    vhost: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        """As RabbitMQ names it in reply texts."""
        return f"{self.kind} '{self.name}' in vhost '{self.vhost}'"

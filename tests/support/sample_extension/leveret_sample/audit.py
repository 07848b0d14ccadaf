"""An exchange decorator: what passes an audited exchange also goes to the audit queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from leveret.broker.exchanges.decorators import Activity, ExchangeDecorator
from leveret.broker.resource import Resource

if TYPE_CHECKING:
    from leveret.broker.exchanges.base import Exchange, Headers


class Audit(ExchangeDecorator):
    description = "copies what is published to audited.* to the queue audit"

    def active_for(self, exchange: Exchange) -> Activity:
        name = exchange.name.name
        return Activity.ALL if name.startswith("audited.") else Activity.NONE

    def route(
        self, exchange: Exchange, keys: Sequence[str], headers: Headers
    ) -> Iterable[Resource]:
        return (Resource(exchange.name.vhost, "queue", "audit"),)

"""Exchanges and routing: synchronous, no I/O.

``register_builtins`` puts the four types of AMQP through the door that packages use.
"""

from __future__ import annotations

from leveret.broker.exchanges.direct import DirectExchange
from leveret.broker.exchanges.fanout import FanoutExchange
from leveret.broker.exchanges.headers import HeadersExchange
from leveret.broker.exchanges.topic import TopicExchange
from leveret.broker.registry import Registries


def register_builtins(registries: Registries) -> None:
    types = registries.exchange_types
    types.register("direct", DirectExchange)
    types.register("fanout", FanoutExchange)
    types.register("topic", TopicExchange)
    types.register("headers", HeadersExchange)

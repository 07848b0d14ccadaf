"""What a channel has done, updated per run [70, 142]."""

from __future__ import annotations


class ChannelCounters:
    __slots__ = (
        "ack",
        "ack_timeout",
        "confirm",
        "deliver",
        "deliver_no_ack",
        "drop_unroutable",
        "get",
        "get_empty",
        "get_no_ack",
        "publish",
        "redeliver",
        "return_unroutable",
    )

    def __init__(self) -> None:
        self.publish = 0
        self.confirm = 0
        self.return_unroutable = 0
        self.drop_unroutable = 0
        self.deliver = 0
        self.deliver_no_ack = 0
        self.get = 0
        self.get_no_ack = 0
        self.get_empty = 0
        self.redeliver = 0
        self.ack = 0
        # Deliveries that went back to their queues because nobody settled them in time.
        self.ack_timeout = 0

    def statistics(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}

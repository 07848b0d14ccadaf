"""Scenarios the broker does not yet play as RabbitMQ does, and why.

Each is expected to fail: the day one passes the suite says so, and its line goes.
"""

from __future__ import annotations

_DEAD = "dead-lettering is not built yet"
_LENGTH = "length limits are not built yet"
_PRIORITY = "priorities are not built yet"
_QUORUM = "quorum queues are not built yet"
_EXPIRY = "expiry is not built yet"

# "topic/scenario" -> the reason
PENDING: dict[str, str] = {
    "alternate/dead_letter_uses_alternate": _DEAD,
    "confirm/reject_publish_nacks": _LENGTH,
    "confirm/fanout_one_full": _LENGTH,
    "confirm/drop_head_acks": _LENGTH,
    "confirm/expired_at_once": _EXPIRY,
    "deadletter/rejected": _DEAD,
    "deadletter/nacked_multiple": _DEAD,
    "deadletter/expired_queue_ttl": _DEAD,
    "deadletter/expired_message_expiration": _DEAD,
    "deadletter/maxlen": _DEAD,
    "deadletter/keeps_routing_key": _DEAD,
    "deadletter/second_time_same_queue": _DEAD,
    "deadletter/two_queues": _DEAD,
    "deadletter/cycle_of_expiry_is_broken": _DEAD,
    "deadletter/cycle_with_reject_goes_on": _DEAD,
    "deadletter/cc_is_recorded": _DEAD,
    "deadletter/rejected_by_consumer": _DEAD,
    "deadletter/bcc_is_not_recorded": _DEAD,
    "deadletter/rejected_with_expiration": _DEAD,
    "deadletter/first_death_stays": _DEAD,
    "maxlen/drop_head": _LENGTH,
    "maxlen/bytes_limit": _LENGTH,
    "maxlen/zero": _LENGTH,
    "maxlen/unacked_do_not_count": _LENGTH,
    "maxlen/reject_publish_keeps_oldest": _LENGTH,
    "maxlen/drop_head_dlx_order": _LENGTH,
    "priority/order": _PRIORITY,
    "priority/above_maximum": _PRIORITY,
    "priority/none_is_zero": _PRIORITY,
    "priority/requeue_keeps_priority": _PRIORITY,
    "priority/priority_255": _PRIORITY,
    "quorum/declare_and_use": _QUORUM,
    "quorum/delivery_count_header": _QUORUM,
    "quorum/delivery_limit": _QUORUM,
    "quorum/rejected_dead_letter": _QUORUM,
    "ttl/queue_ttl": _EXPIRY,
    "ttl/message_expiration": _EXPIRY,
    "ttl/lower_of_both": _EXPIRY,
    "ttl/expires_only_at_the_head": _EXPIRY,
    "ttl/expiration_zero": _EXPIRY,
    "ttl/requeue_keeps_age": _EXPIRY,
    "ttl/queue_expires": _EXPIRY,
    "ttl/queue_expires_not_with_consumer": _EXPIRY,
    "ttl/expires_publish_does_not_renew": _EXPIRY,
}

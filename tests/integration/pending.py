"""Client tests of what the broker does not do yet, and why. Their lines go when it does."""

from __future__ import annotations

_DEAD = "dead-lettering is not built yet"
_EXPIRY = "expiry is not built yet"
_LENGTH = "length limits are not built yet"
_PRIORITY = "priorities are not built yet"

# name of the test function -> the reason
PENDING = {
    "test_refused_message_is_dead_lettered": _DEAD,
    "test_rejected_message_goes_to_the_dead_letter_queue": _DEAD,
    "test_expired_message_is_dead_lettered": _EXPIRY,
    "test_expired_message_is_dead_lettered_without_a_consumer": _EXPIRY,
    "test_call_nobody_takes_in_time_comes_back_dead_lettered": _EXPIRY,
    "test_full_queue_that_rejects_publishes_nacks": _LENGTH,
    "test_nacks_name_the_messages_that_were_refused": _LENGTH,
    "test_higher_priority_comes_first": _PRIORITY,
    "test_priorities_overtake_and_max_length_drops_the_oldest": _PRIORITY,
}

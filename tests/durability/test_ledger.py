"""The checker itself: what it complains of, and what it lets pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.durability.ledger import Copy, Found, Ledger, Letter, Name, QueueBook

History = Callable[["Story"], None]


class Story:
    """One queue, one publisher, and what happened."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.queue = QueueBook("q")
        self.letters: list[Letter] = []

    def send(self, count: int = 1, *, confirmed: bool = True) -> None:
        for _ in range(count):
            name = Name(1, len(self.letters) + 1)
            self.letters.append(self.ledger.sent(name, 10, [self.queue]))
            if confirmed:
                self.ledger.confirmed(self.letters[-1])

    def deliver(self, number: int, *, redelivered: bool = False) -> Copy:
        copy = self.ledger.delivered(self.queue, found(number, redelivered=redelivered))
        assert copy is not None
        return copy

    def ack(self, number: int) -> None:
        copies = [self.deliver(number)]
        self.ledger.acked(copies)
        self.ledger.settled(copies)

    def restart(self, *there: Found) -> None:
        self.ledger.returned(self.ledger.check(self.queue, there))


def found(number: int, *, redelivered: bool = True, is_whole: bool = True) -> Found:
    return Found(Name(1, number), redelivered, is_whole)


def all_there(story: Story) -> None:
    story.send(2)
    story.restart(found(1), found(2))


def unconfirmed_may_go(story: Story) -> None:
    story.send(2, confirmed=False)
    story.restart(found(2))


def acked_may_return_marked(story: Story) -> None:
    story.send()
    story.ack(1)
    story.restart(found(1))


def acked_is_gone(story: Story) -> None:
    story.send()
    story.ack(1)
    story.send()
    story.restart(found(2))


def never_delivered_may_be_unmarked(story: Story) -> None:
    story.send()
    story.restart(found(1, redelivered=False))


@pytest.mark.parametrize(
    "history",
    [
        all_there,
        unconfirmed_may_go,
        acked_may_return_marked,
        acked_is_gone,
        never_delivered_may_be_unmarked,
    ],
)
def test_kept_promise(history: History) -> None:
    story = Story()
    history(story)
    assert story.ledger.report() == ""


def confirmed_is_gone(story: Story) -> None:
    story.send(2)
    story.restart(found(2))


def unconfirmed_is_gone_at_the_second_restart(story: Story) -> None:
    story.send(confirmed=False)
    story.restart(found(1))
    story.restart()


def delivered_and_not_acked_is_gone(story: Story) -> None:
    story.send()
    story.deliver(1)
    story.restart()


def twice(story: Story) -> None:
    story.send()
    story.restart(found(1), found(1))


def swapped(story: Story) -> None:
    story.send(2)
    story.restart(found(2), found(1))


def swapped_between_publishers(story: Story) -> None:
    story.send()
    other = Name(2, 1)
    story.ledger.sent(other, 10, [story.queue])
    story.deliver(1)
    story.ledger.delivered(story.queue, Found(other, False, True))
    story.restart(Found(other, True, True), found(1))


def unmarked(story: Story) -> None:
    story.send()
    story.deliver(1)
    story.restart(found(1, redelivered=False))


def acked_returns_unmarked(story: Story) -> None:
    story.send()
    story.ack(1)
    story.restart(found(1, redelivered=False))


def acked_returns_though_a_later_publish_was_confirmed(story: Story) -> None:
    story.send()
    story.ack(1)
    story.send()
    story.restart(found(1), found(2))


def acked_returns_while_running(story: Story) -> None:
    story.send()
    story.ack(1)
    story.deliver(1, redelivered=True)


def gone_and_back(story: Story) -> None:
    story.send(confirmed=False)
    story.restart()
    story.restart(found(1))


def never_sent(story: Story) -> None:
    story.restart(found(1))


def other_bytes(story: Story) -> None:
    story.send()
    story.restart(found(1, is_whole=False))


def delivered_twice(story: Story) -> None:
    story.send()
    story.deliver(1)
    story.deliver(1, redelivered=True)


def delivered_in_another_order(story: Story) -> None:
    story.send(2)
    story.deliver(2)
    story.deliver(1)


def marked_at_the_first_delivery(story: Story) -> None:
    story.send()
    story.deliver(1, redelivered=True)


@pytest.mark.parametrize(
    ("history", "kind"),
    [
        (confirmed_is_gone, "lost"),
        (unconfirmed_is_gone_at_the_second_restart, "lost"),
        (delivered_and_not_acked_is_gone, "lost"),
        (twice, "doubled"),
        (delivered_twice, "doubled"),
        (swapped, "out of order"),
        (swapped_between_publishers, "out of order"),
        (delivered_in_another_order, "out of order"),
        (unmarked, "unmarked redelivery"),
        (acked_returns_unmarked, "unmarked redelivery"),
        (acked_returns_though_a_later_publish_was_confirmed, "returned"),
        (acked_returns_while_running, "returned"),
        (gone_and_back, "unknown"),
        (never_sent, "unknown"),
        (other_bytes, "damaged"),
        (marked_at_the_first_delivery, "marked without reason"),
    ],
)
def test_broken_promise(history: History, kind: str) -> None:
    story = Story()
    history(story)
    assert story.ledger.kinds() == {kind}
    assert f"{kind}: 1 in all" in story.ledger.report()

"""Credit: what may be sent, what is owed, and that none of it is lost or made up [25-31]."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from leveret.broker.flow import Bump, CreditFlow
from leveret.broker.mailbox import Mailbox

INITIAL, MORE_AFTER = 400, 200


class Party:
    """A task as credit flow sees it."""

    def __init__(self, name: str, initial: int = INITIAL, more_after: int = MORE_AFTER) -> None:
        self.mailbox = Mailbox(name)
        self.flow = CreditFlow(self.mailbox, initial, more_after)

    def bumps(self) -> list[Bump]:
        """Take what was granted to it."""
        taken = self.mailbox.take_urgent()
        return [item for item in taken if isinstance(item, Bump)]

    def handle_bumps(self) -> None:
        for bump in self.bumps():
            self.flow.handle_bump(bump)


@pytest.fixture
def sender() -> Party:
    return Party("sender")


@pytest.fixture
def receiver() -> Party:
    return Party("receiver")


def test_exactly_the_initial_credit_may_be_outstanding(sender: Party, receiver: Party) -> None:
    """[26] It blocks with the last one that it may send, not with the first that it may not."""
    for _ in range(INITIAL - 1):
        sender.flow.send(receiver.mailbox, 1)
    assert not sender.flow.is_blocked
    assert sender.flow.credit(receiver.mailbox) == 1
    sender.flow.send(receiver.mailbox, 1)
    assert sender.flow.is_blocked
    assert sender.flow.blockers == {receiver.mailbox}
    assert sender.flow.credit(receiver.mailbox) == 0


def test_a_receiver_grants_each_time_it_has_taken_enough(sender: Party, receiver: Party) -> None:
    """[27]"""
    for _ in range(MORE_AFTER - 1):
        receiver.flow.ack(sender.mailbox, 1)
    assert sender.bumps() == []
    receiver.flow.ack(sender.mailbox, 1)
    assert sender.bumps() == [Bump(receiver.mailbox, MORE_AFTER)]
    for _ in range(MORE_AFTER):
        receiver.flow.ack(sender.mailbox, 1)
    assert sender.bumps() == [Bump(receiver.mailbox, MORE_AFTER)]


def test_a_run_that_takes_more_than_a_grant_is_granted_in_full(
    sender: Party, receiver: Party
) -> None:
    receiver.flow.ack(sender.mailbox, 150)
    receiver.flow.ack(sender.mailbox, 700)
    assert sender.bumps() == [Bump(receiver.mailbox, 850)]
    receiver.flow.ack(sender.mailbox, MORE_AFTER - 1)
    assert sender.bumps() == []


def test_a_grant_unblocks(sender: Party, receiver: Party) -> None:
    """[29]"""
    sender.flow.send(receiver.mailbox, INITIAL)
    sender.flow.handle_bump(Bump(receiver.mailbox, MORE_AFTER))
    assert not sender.flow.is_blocked
    assert sender.flow.credit(receiver.mailbox) == MORE_AFTER


def test_credit_below_zero_is_worked_off_before_it_unblocks(sender: Party, receiver: Party) -> None:
    """A single large message may cost more than was left."""
    sender.flow.send(receiver.mailbox, INITIAL + 300)
    sender.flow.handle_bump(Bump(receiver.mailbox, 200))
    assert sender.flow.is_blocked
    sender.flow.handle_bump(Bump(receiver.mailbox, 100))
    assert sender.flow.credit(receiver.mailbox) == 0
    assert sender.flow.is_blocked
    sender.flow.handle_bump(Bump(receiver.mailbox, 1))
    assert not sender.flow.is_blocked


def test_the_slowest_of_many_blocks(sender: Party, receiver: Party) -> None:
    """[31] One link per receiver, each with its own credit."""
    other = Party("other")
    sender.flow.send(receiver.mailbox, INITIAL)
    sender.flow.send(other.mailbox, 10)
    assert sender.flow.blockers == {receiver.mailbox}
    assert sender.flow.lowest_credit() == 0
    sender.flow.send(other.mailbox, INITIAL)
    sender.flow.handle_bump(Bump(receiver.mailbox, INITIAL))
    assert sender.flow.blockers == {other.mailbox}
    assert sender.flow.lowest_credit() == -10


def test_credit_that_is_complete_again_is_not_remembered(sender: Party, receiver: Party) -> None:
    """A channel that has published to many queues must not keep an account for each."""
    sender.flow.send(receiver.mailbox, MORE_AFTER)
    sender.flow.handle_bump(Bump(receiver.mailbox, MORE_AFTER))
    assert sender.flow.lowest_credit() == sender.flow.credit(receiver.mailbox) == INITIAL
    # Whatever it is that comes without having been asked for.
    sender.flow.handle_bump(Bump(receiver.mailbox, MORE_AFTER))
    assert sender.flow.credit(receiver.mailbox) == INITIAL


def test_one_that_is_blocked_grants_nothing(sender: Party, receiver: Party) -> None:
    """[28] This is how pressure travels up to the socket."""
    store, disk = Party("store"), Party("disk")
    receiver.flow.send(store.mailbox, INITIAL)
    receiver.flow.send(disk.mailbox, INITIAL)
    receiver.flow.ack(sender.mailbox, MORE_AFTER)
    receiver.flow.ack(sender.mailbox, MORE_AFTER)
    assert sender.bumps() == []
    receiver.flow.handle_bump(Bump(store.mailbox, MORE_AFTER))
    assert sender.bumps() == [], "something still blocks"
    receiver.flow.handle_bump(Bump(disk.mailbox, MORE_AFTER))
    assert sender.bumps() == [Bump(receiver.mailbox, MORE_AFTER)] * 2


def test_deferred_grants_are_made_once(sender: Party, receiver: Party) -> None:
    store = Party("store")
    receiver.flow.send(store.mailbox, INITIAL)
    receiver.flow.ack(sender.mailbox, MORE_AFTER)
    receiver.flow.handle_bump(Bump(store.mailbox, INITIAL))
    assert len(sender.bumps()) == 1
    receiver.flow.send(store.mailbox, INITIAL)
    receiver.flow.handle_bump(Bump(store.mailbox, INITIAL))
    assert sender.bumps() == []


def test_a_dead_receiver_blocks_nobody(sender: Party, receiver: Party) -> None:
    """[30] And what its blocking held back is granted."""
    source = Party("source")
    sender.flow.send(receiver.mailbox, INITIAL)
    sender.flow.ack(source.mailbox, MORE_AFTER)
    assert source.bumps() == []
    sender.flow.peer_down(receiver.mailbox)
    assert not sender.flow.is_blocked
    assert source.bumps() == [Bump(sender.mailbox, MORE_AFTER)]
    assert sender.flow.lowest_credit() == INITIAL


def test_a_grant_from_the_dead_is_ignored(sender: Party, receiver: Party) -> None:
    sender.flow.send(receiver.mailbox, 10)
    sender.flow.peer_down(receiver.mailbox)
    sender.flow.handle_bump(Bump(receiver.mailbox, MORE_AFTER))
    assert sender.flow.credit(receiver.mailbox) == INITIAL
    assert sender.flow.lowest_credit() == INITIAL


def test_a_dead_sender_is_forgotten(sender: Party, receiver: Party) -> None:
    """Nothing is carried over to whoever comes under that address."""
    receiver.flow.ack(sender.mailbox, MORE_AFTER - 1)
    receiver.flow.peer_down(sender.mailbox)
    receiver.flow.ack(sender.mailbox, 1)
    assert sender.bumps() == []


def test_the_death_of_a_stranger_changes_nothing(sender: Party, receiver: Party) -> None:
    sender.flow.send(receiver.mailbox, INITIAL)
    sender.flow.peer_down(Mailbox("stranger"))
    assert sender.flow.blockers == {receiver.mailbox}


@given(
    costs=st.lists(st.integers(1, 1025), min_size=1, max_size=60),
    initial=st.integers(1, 50),
    data=st.data(),
)
def test_one_link_never_stands_still(costs: list[int], initial: int, data: st.DataObject) -> None:
    """Whatever the sizes: once all is taken and all grants have come, the sender may go on."""
    more_after = data.draw(st.integers(1, initial))
    sender, receiver = Party("s", initial, more_after), Party("r", initial, more_after)
    under_way: deque[int] = deque(costs)
    while under_way:
        sent = []
        while under_way and not sender.flow.is_blocked:
            sent.append(under_way.popleft())
            sender.flow.send(receiver.mailbox, sent[-1])
        assert sent, "blocked for ever"
        for cost in sent:
            receiver.flow.ack(sender.mailbox, cost)
        sender.handle_bumps()


class Link:
    """A sender, a receiver, and what an observer counts between them."""

    def __init__(self, sender: Party, receiver: Party) -> None:
        self.sender, self.receiver = sender, receiver
        self.under_way: deque[int] = deque()
        # Since the sender knows the receiver.
        self.spent = 0
        self.granted = 0
        self.taken = 0


COSTS = st.sampled_from([1, 1, 1, 2, 3, 9, 30])
SMALL_INITIAL, SMALL_MORE_AFTER = 8, 4


class CreditChain(RuleBasedStateMachine):
    """reader -> channels -> queues, with queues and channels that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = self.party("reader")
        self.channels: list[Party] = []
        self.queues: list[Party] = []
        self.links: dict[tuple[Party, Party], Link] = {}
        self.open_channel()
        self.open_channel()
        self.declare()
        self.declare()

    @staticmethod
    def party(name: str) -> Party:
        return Party(name, SMALL_INITIAL, SMALL_MORE_AFTER)

    def link(self, sender: Party, receiver: Party) -> Link:
        return self.links.setdefault((sender, receiver), Link(sender, receiver))

    def send(self, sender: Party, receiver: Party, cost: int) -> None:
        link = self.link(sender, receiver)
        sender.flow.send(receiver.mailbox, cost)
        link.spent += cost
        link.under_way.append(cost)

    def take(self, link: Link) -> int:
        cost = link.under_way.popleft()
        link.receiver.flow.ack(link.sender.mailbox, cost)
        link.taken += cost
        return cost

    def hear(self, party: Party) -> None:
        for bump in party.bumps():
            for link in self.links.values():
                if link.sender is party and link.receiver.mailbox is bump.peer:
                    link.granted += bump.credit
            party.flow.handle_bump(bump)

    def forget(self, gone: Party) -> None:
        for pair in [pair for pair in self.links if gone in pair]:
            link = self.links.pop(pair)
            for peer in pair:
                if peer is not gone:
                    # Grants that are under way are heard of first, or ignored.
                    peer.flow.peer_down(gone.mailbox)
            link.under_way.clear()

    # --- rules -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.channels) < 3)
    @rule()
    def open_channel(self) -> None:
        self.channels.append(self.party("channel"))

    @precondition(lambda self: len(self.queues) < 3)
    @rule()
    def declare(self) -> None:
        self.queues.append(self.party("queue"))

    @precondition(lambda self: not self.reader.flow.is_blocked and self.channels)
    @rule(at=st.integers(0, 2), cost=COSTS)
    def reader_sends(self, at: int, cost: int) -> None:
        """Only a reader looks whether it is blocked."""
        self.send(self.reader, self.channels[at % len(self.channels)], cost)

    @rule(at=st.integers(0, 2), routes=st.sets(st.integers(0, 2)))
    def channel_takes(self, at: int, routes: set[int]) -> None:
        if not self.channels:
            return
        channel = self.channels[at % len(self.channels)]
        link = self.link(self.reader, channel)
        if not link.under_way:
            return
        cost = self.take(link)
        for route in routes:
            if route < len(self.queues):
                self.send(channel, self.queues[route], cost)

    @rule(at=st.integers(0, 2), count=st.integers(1, 9))
    def queue_takes(self, at: int, count: int) -> None:
        if not self.queues:
            return
        queue = self.queues[at % len(self.queues)]
        for link in list(self.links.values()):
            if link.receiver is queue:
                for _ in range(min(count, len(link.under_way))):
                    self.take(link)

    @rule()
    def reader_hears(self) -> None:
        self.hear(self.reader)

    @rule(at=st.integers(0, 2))
    def channel_hears(self, at: int) -> None:
        if at < len(self.channels):
            self.hear(self.channels[at])

    @rule(at=st.integers(0, 2))
    def queue_dies(self, at: int) -> None:
        if at < len(self.queues):
            self.forget(self.queues.pop(at))

    @rule(at=st.integers(0, 2))
    def channel_dies(self, at: int) -> None:
        if at < len(self.channels):
            self.forget(self.channels.pop(at))

    # --- what always holds -----------------------------------------------------------------

    @invariant()
    def credit_is_what_was_given_less_what_was_spent(self) -> None:
        for link in self.links.values():
            credit = link.sender.flow.credit(link.receiver.mailbox)
            assert credit == SMALL_INITIAL - link.spent + link.granted
            assert credit <= SMALL_INITIAL, "made up"
            assert link.granted <= link.taken, "granted before it was taken"

    @invariant()
    def whoever_has_no_credit_left_is_blocked(self) -> None:
        for party in [self.reader, *self.channels]:
            spent = {
                link.receiver.mailbox
                for link in self.links.values()
                if link.sender is party and SMALL_INITIAL - link.spent + link.granted <= 0
            }
            assert party.flow.blockers == spent
            assert party.flow.is_blocked == bool(spent)

    def teardown(self) -> None:
        """When all was taken and heard of, nobody is blocked and hardly anything is owed."""
        for _ in range(2):
            for link in list(self.links.values()):
                while link.under_way:
                    self.take(link)
            for channel in self.channels:
                self.hear(channel)
            self.hear(self.reader)
        for link in self.links.values():
            owed = SMALL_INITIAL - link.sender.flow.credit(link.receiver.mailbox)
            assert 0 <= owed < SMALL_MORE_AFTER, "lost"
            assert not link.sender.flow.is_blocked


TestCreditChain = CreditChain.TestCase
TestCreditChain.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)

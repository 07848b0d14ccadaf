"""The unacked ledger: which tags are outstanding, and what an ack of one of them settles."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from leveret.broker.channel.acks import Entry, Source, UnackedLedger
from leveret.broker.mailbox import Mailbox
from leveret.protocol.errors import ChannelException

QUEUE = Mailbox("queue")
CONSUMER = Source(QUEUE, "tag")
GOT = Source(QUEUE, None)


@pytest.fixture
def ledger() -> UnackedLedger:
    """Tags 1 to 5, for positions 10 to 14 of one queue."""
    ledger = UnackedLedger()
    ledger.add(ledger.take_tags(5), CONSUMER, [10, 11, 12, 13, 14])
    return ledger


def settled(ledger: UnackedLedger, tag: int, *, multiple: bool) -> list[int]:
    return [each for each, _ in ledger.pop(tag, multiple=multiple)]


def test_tags_are_one_sequence_for_all(ledger: UnackedLedger) -> None:
    """Deliveries that want no ack take tags, too."""
    assert ledger.take_tags(3) == 6
    assert len(ledger) == 5
    ledger.add(ledger.take_tags(1), GOT, [99])
    assert ledger.pop(9, multiple=False) == [(9, (GOT, 99))]


def test_one(ledger: UnackedLedger) -> None:
    assert ledger.pop(3, multiple=False) == [(3, (CONSUMER, 12))]
    assert len(ledger) == 4


def test_multiple_settles_everything_up_to_the_tag(ledger: UnackedLedger) -> None:
    assert settled(ledger, 3, multiple=True) == [1, 2, 3]
    assert settled(ledger, 5, multiple=True) == [4, 5]


def test_multiple_skips_what_was_settled_before(ledger: UnackedLedger) -> None:
    ledger.pop(2, multiple=False)
    assert settled(ledger, 4, multiple=True) == [1, 3, 4]


def test_zero_and_multiple_stand_for_everything(ledger: UnackedLedger) -> None:
    assert settled(ledger, 0, multiple=True) == [1, 2, 3, 4, 5]
    assert settled(ledger, 0, multiple=True) == []


@pytest.mark.parametrize(
    ("tag", "multiple"),
    [
        pytest.param(0, False, id="zero-alone-is-no-tag"),
        pytest.param(6, False, id="never-given"),
        pytest.param(6, True, id="never-given-multiple"),
        pytest.param(2, False, id="settled"),
        pytest.param(2, True, id="settled-multiple-though-1-is-outstanding"),
    ],
)
def test_unknown_tags(ledger: UnackedLedger, tag: int, multiple: bool) -> None:
    ledger.pop(2, multiple=False)
    with pytest.raises(ChannelException) as caught:
        ledger.pop(tag, multiple=multiple)
    assert caught.value.code == 406
    assert caught.value.reply_text == f"PRECONDITION_FAILED - unknown delivery tag {tag}"
    assert len(ledger) == 4


def test_what_came_before_an_unknown_tag_is_settled(ledger: UnackedLedger) -> None:
    done: list[Entry] = []
    with pytest.raises(ChannelException):
        ledger.pop_each([1, 2, 77, 3], done)
    assert done == [(CONSUMER, 10), (CONSUMER, 11)]
    assert settled(ledger, 0, multiple=True) == [3, 4, 5]


def test_a_rollback_makes_tags_outstanding_again_in_their_order(ledger: UnackedLedger) -> None:
    """[74] Also below what a later multiple ack has passed."""
    first = ledger.pop(2, multiple=True)
    second = ledger.pop(5, multiple=False)
    ledger.put_back(second)
    ledger.put_back(first)
    assert settled(ledger, 3, multiple=True) == [1, 2, 3]
    assert settled(ledger, 0, multiple=True) == [4, 5]


class LedgerModel(RuleBasedStateMachine):
    """Against a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = UnackedLedger()
        self.entries: dict[int, Entry] = {}
        self.last_tag = 0
        # What a transaction has settled and may have to put back.
        self.aside: list[tuple[int, Entry]] = []

    @rule(count=st.integers(1, 5), is_acked=st.booleans(), source=st.sampled_from([CONSUMER, GOT]))
    def deliver(self, count: int, is_acked: bool, source: Source) -> None:
        first = self.ledger.take_tags(count)
        assert first == self.last_tag + 1
        self.last_tag += count
        if is_acked:
            seq_ids = [tag * 100 for tag in range(first, first + count)]
            self.ledger.add(first, source, seq_ids)
            self.entries |= {tag: (source, tag * 100) for tag in range(first, first + count)}

    @rule(data=st.data(), multiple=st.booleans(), in_transaction=st.booleans())
    def ack(self, data: st.DataObject, multiple: bool, in_transaction: bool) -> None:
        tag = data.draw(st.integers(0, self.last_tag + 1))
        if multiple and tag == 0:
            expected = sorted(self.entries)
        elif tag not in self.entries:
            with pytest.raises(ChannelException):
                self.ledger.pop(tag, multiple=multiple)
            return
        else:
            expected = [each for each in sorted(self.entries) if each <= tag] if multiple else [tag]
        got = self.ledger.pop(tag, multiple=multiple)
        assert got == [(each, self.entries.pop(each)) for each in expected]
        if in_transaction:
            self.aside += got

    @rule()
    def rollback(self) -> None:
        self.ledger.put_back(self.aside)
        self.entries |= dict(self.aside)
        self.aside = []

    @invariant()
    def as_many_are_outstanding(self) -> None:
        assert len(self.ledger) == len(self.entries)

    def teardown(self) -> None:
        assert self.ledger.pop_all() == sorted(self.entries.items())
        assert len(self.ledger) == 0


TestLedgerModel = LedgerModel.TestCase
TestLedgerModel.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)

"""From disk to memory, ahead of need, and never waited for [113].

A layer of ``variable_queue.py``: positions from the delta into q3, messages for those at the front
of q3, and pending messages that are to be dead-lettered. There is one read of the former two at a
time; meanwhile the front of the delta stands still.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter

from leveret.protocol.message import Message
from leveret.storage.backing_queue import (
    LOADING,
    Entry,
    Loading,
)
from leveret.storage.msg_status import (
    MsgStatus,
)
from leveret.storage.queue_paging import PagingQueue
from leveret.storage.queue_state import status_at

log = logging.getLogger(__name__)

READ_MESSAGES = 256
READ_BYTES = 1 << 20
# Positions that are read at once: a whole segment of them would be a pause for everybody.
READ_POSITIONS = 2_048

# Makes an Entry of a plain tuple without entering Python: the constructor costs twice as much.
make_entry: Callable[[tuple[int, Message, bool, int | None]], Entry] = partial(tuple.__new__, Entry)


class ReadingQueue(PagingQueue):
    def _must_read(self) -> Loading:
        self._owes_wake = True
        if self._read is None:
            self._start_read()
        return LOADING

    def _read_ahead(self) -> None:
        """Ask for the next chunk while the last is being delivered."""
        if self._read is not None or not self._len or self._is_terminated:
            return
        # All of q4 and q1 is in memory, nothing of q2: what remains was read, or requeued.
        ahead = self.ram_count - len(self.q4) - len(self.q1)
        if ahead > READ_MESSAGES // 2 or self._ahead_bytes > READ_BYTES // 2:
            return
        if ahead < len(self.q3) or self.delta.count:
            self._start_read()

    def _start_read(self) -> None:
        self._read = asyncio.get_running_loop().create_task(self._read_some())

    async def _read_some(self) -> None:
        """Read a chunk; go on until there is something to fetch, if there is anything."""
        try:
            while not self._is_terminated:
                self._read_is_void = False
                if len(self.q3) < READ_MESSAGES and self.delta.count:
                    await self._deltas_to_betas()
                if not self._read_is_void:
                    await self._read_messages()
                # A purge made this one void, or all that was read is pending: once more.
                if not self._len or self._head() is not None:
                    break
        finally:
            self._read = None
            if self._owes_wake and not self._is_terminated:
                self._owes_wake = False
                self._wake()

    async def _deltas_to_betas(self) -> None:
        """maybe_deltas_to_betas: the next positions, to the rear of q3 [113].

        A segment of them, or a part of one: what follows is read when it is wanted.
        """
        delta = self.delta
        first, end = delta.start, delta.end
        limit = min(self._segment_size, READ_POSITIONS)
        found: list[MsgStatus] = []
        self._is_reading_positions = True
        self._settled_meanwhile = set()
        try:
            for index in (self._index, self._transient):
                if index is not None:
                    positions = await index.read_positions(first, end, limit)
                    found += [status_at(position, index is self._index) for position in positions]
                    self._learn_returns(positions)
        finally:
            self._is_reading_positions = False
            later, self._requeue_later = self._requeue_later, []
        self.disk_reads += 1
        if self._read_is_void:
            # Purged; what was requeued since then belongs to the queue as it is now.
            self._put_back(sorted(later, key=attrgetter("seq_id")))
            return
        found.sort(key=attrgetter("seq_id"))
        del found[limit:]
        # Fewer than asked for: that was all up to ``end``, though more may have come behind it.
        delta.start = found[-1].seq_id + 1 if len(found) == limit else end
        in_ram, on_disk, settled = self.ram_pending, self.disk_pending, self._settled_meanwhile
        loaded = [
            status
            for status in found
            if status.seq_id not in in_ram
            and status.seq_id not in on_disk
            and status.seq_id not in settled
        ]
        self.q3.extend(loaded)
        if self._exact is not None:
            self._exact.add(loaded)
        delta.count -= len(loaded)
        delta.bytes -= sum([status.size for status in loaded])
        delta.transient -= sum([not status.is_persistent for status in loaded])
        if delta.count <= 0 or delta.start >= delta.end:
            self._correct_count()
            delta.clear()
            self.q3.extend(self.q2)
            self.q2.clear()
        self._put_back(sorted(later, key=attrgetter("seq_id")))
        if not self.q3 and not delta.count:
            self._q1_to_q4()

    def _correct_count(self) -> None:
        """What the delta was thought to hold is not what was found: believe the disk."""
        missing = self.delta.count
        if missing:
            log.error("%d messages that were counted are not on disk", missing)
            self.lost += abs(missing)
            self._len -= missing
            self._ready_bytes -= self.delta.bytes

    async def _read_messages(self) -> None:
        """Messages for the betas at the front of q3, a chunk of them."""
        wanted: list[MsgStatus] = []
        for status in self.q3:
            if status.message is None:
                wanted.append(status)
                if len(wanted) == READ_MESSAGES:
                    break
        if not wanted:
            return
        head = wanted[0]
        by_seq = {status.seq_id: status for status in wanted}
        first, last = wanted[0].seq_id, wanted[-1].seq_id
        for index, persistent in ((self._index, True), (self._transient, False)):
            if index is None or not any(s.is_persistent is persistent for s in wanted):
                continue
            found = await index.read_messages(first, last, READ_MESSAGES, READ_BYTES)
            self.disk_reads += 1
            if self._read_is_void:
                return
            out, out_bytes, back, back_bytes = self.paged
            for seq_id, message in found:
                waiting = by_seq.get(seq_id)
                if waiting is not None:
                    waiting.message = message
                    self.ram_count += 1
                    self._ram_bytes += waiting.size
                    self._ahead_bytes += waiting.size
                    back += 1
                    back_bytes += waiting.size
            self.paged = (out, out_bytes, back, back_bytes)
        if head.message is None:
            # Never ask for ever for what is not there.
            log.error("a message that was counted is not on disk (position %d)", head.seq_id)
            self.lost += 1
            self.q3.remove(head)
            self._len -= 1
            self._ready_bytes -= head.size

    def pending(self, seq_ids: Sequence[int]) -> list[Entry] | Loading:
        known: list[Entry] = []
        for place, seq_id in enumerate(seq_ids):
            status = self.ram_pending.get(seq_id)
            if status is not None and status.message is not None:
                known.append(make_entry((seq_id, status.message, True, status.expires_at_ms)))
            elif seq_id in self.disk_pending:
                if known:
                    break
                if self._pending_read is None:
                    absent = [each for each in seq_ids[place:] if each in self.disk_pending]
                    self._pending_read = asyncio.get_running_loop().create_task(
                        self._read_pending([self.disk_pending[each] for each in absent])
                    )
                return LOADING
        return known

    def pending_in_memory(self, seq_ids: Iterable[int]) -> dict[int, Message]:
        known = [self.ram_pending.get(seq_id) for seq_id in seq_ids]
        return {
            status.seq_id: status.message
            for status in known
            if status is not None and status.message is not None
        }

    async def _read_pending(self, absent: list[MsgStatus]) -> None:
        """Back into memory, a chunk of those at the front."""
        is_persistent = absent[0].is_persistent
        index = self._index if is_persistent else self._transient
        assert index is not None
        wanted: dict[int, MsgStatus] = {}
        size = 0
        for status in absent:
            size += status.size
            if len(wanted) == READ_MESSAGES or (wanted and size > READ_BYTES):
                break
            # Those in the other file are for the next time.
            if status.is_persistent is not is_persistent:
                break
            wanted[status.seq_id] = status
        try:
            found = dict(await index.read_chosen(sorted(wanted)))
            for seq_id, status in wanted.items():
                if self.disk_pending.get(seq_id) is not status:
                    continue
                del self.disk_pending[seq_id]
                status.message = found.get(seq_id)
                if status.message is not None:
                    self.ram_pending[seq_id] = status
                else:
                    log.error("a message that was delivered is not on disk (%r)", status)
                    self.lost += 1
                    self._pending_bytes -= status.size
        finally:
            self._pending_read = None
            if not self._is_terminated:
                self._wake()

"""From memory to disk, a bounded step at a time [114-119, 125].

A layer of ``variable_queue.py``: alphas become betas, betas go into the delta, unacked messages
leave memory, when the memory monitor's target says so or the queue is lazy.
"""

from __future__ import annotations

import logging

from leveret.storage.memory_use import INFINITY, permitted_beta_count
from leveret.storage.msg_status import (
    MsgStatus,
    next_segment_boundary,
)
from leveret.storage.queue_state import QueueState

log = logging.getLogger(__name__)

IO_BATCH_SIZE = 4_096
# Paging moves so many messages at most before other work gets its turn.
PAGING_STEP = 2_000


class PagingQueue(QueueState):
    def set_ram_duration_target(self, duration_s: float) -> None:
        """How long the messages in memory are to last; infinity: no limit [124]."""
        if self.memory.set_target(duration_s):
            self.reduce_memory_use()

    def ram_duration(self) -> float:
        return self.memory.ram_duration(self.ram_count, len(self.ram_pending))

    def _maybe_page(self, count: int) -> None:
        if self.memory.is_due(count):
            self.reduce_memory_use()

    def reduce_memory_use(self) -> bool:
        """Page out, a bounded step; True if more is to be done [117]."""
        target = self.memory.target_ram_count
        if target == INFINITY:
            return False
        excess = max(0, self.ram_count + len(self.ram_pending) - int(target))
        quota = min(excess, PAGING_STEP)
        if self.memory.acks_grow_faster():
            left = self.push_alphas_to_betas(self._limit_ram_acks(quota))
        else:
            left = self._limit_ram_acks(self.push_alphas_to_betas(quota))
        permitted = permitted_beta_count(
            self._len, len(self.q1), len(self.q3), len(self.q4), target, self._segment_size
        )
        surplus = len(self.q2) + len(self.q3) - permitted
        is_short = False
        if surplus >= IO_BATCH_SIZE:
            betas = int(min(surplus, 2 * PAGING_STEP))
            is_short = self.push_betas_to_deltas(betas) == 0 and surplus > betas
        # Where nothing moved, nothing will: what was read ahead stays.
        more = (excess > quota and not left) or is_short
        if more:
            self._page_later()
        return more

    def resume(self) -> None:
        """Called after a wake: go on paging, a step at a time between other work."""
        if self._has_to_page:
            self._has_to_page = False
            if self._turns_lazy:
                self._become_lazier()
            self.reduce_memory_use()

    def _page_later(self) -> None:
        """There is more to page than one turn should take."""
        if not self._has_to_page:
            self._has_to_page = True
            self._wake()

    def _limit_ram_acks(self, quota: int) -> int:
        """Unacked messages leave memory, the latest first [119]."""
        if not quota or not self.ram_pending:
            return quota
        chosen = sorted(self.ram_pending, reverse=True)[:quota]
        statuses = [self.ram_pending.pop(seq_id) for seq_id in chosen]
        self._write_transients(statuses)
        for status in statuses:
            status.message = None
            self.disk_pending[status.seq_id] = status
        return quota - len(statuses)

    def push_alphas_to_betas(self, quota: int) -> int:
        """From q1's front to q2 (q3 if nothing is on disk), then from q4's rear to q3 [114]."""
        left = self.push_q1(quota)
        return self.push_q4(left)

    def push_q1(self, quota: int) -> int:
        count = min(quota, len(self.q1))
        moved = [self.q1.popleft() for _ in range(count)]
        self._page_out(moved)
        (self.q2 if self.delta.count else self.q3).extend(moved)
        return quota - count

    def push_q4(self, quota: int) -> int:
        count = min(quota, len(self.q4))
        moved = [self.q4.pop() for _ in range(count)]
        self._page_out(moved)
        self.q3.extendleft(moved)
        return quota - count

    def push_betas_to_deltas(self, quota: int) -> int:
        """From q3's rear, but not its first segment; then from q2's front [115]."""
        moved: list[MsgStatus] = []
        # The front of the delta and q3 stand still while they are read.
        if self._read is None and self.q3:
            limit = next_segment_boundary(self.q3[0].seq_id, self._segment_size)
            while len(moved) < quota and self.q3[-1].seq_id >= limit:
                moved.append(self.q3.pop())
            self._ahead_bytes -= sum([s.size for s in moved if s.message is not None])
        while len(moved) < quota and self.q2:
            moved.append(self.q2.popleft())
        self._page_out(moved)
        self._add_to_delta(moved)
        return quota - len(moved)

    def set_lazy(self, *, is_lazy: bool) -> None:
        """Lazy: all that is published goes to disk alone, and is read when it is wanted [125].

        What is in memory goes to disk step by step, and what is published meanwhile after it; back
        from lazy, it stays there until it is fetched.
        """
        if not is_lazy:
            self.is_lazy = self._turns_lazy = False
        elif not self.is_lazy:
            self._turns_lazy = True
            self._become_lazier()

    def _become_lazier(self) -> None:
        """A bounded step: what stands behind the delta goes into it, what stands before it into q3;
        of that, what is not in the first segment follows."""
        rear: list[MsgStatus] = []
        for queue in (self.q2, self.q1):
            while queue and len(rear) < PAGING_STEP:
                rear.append(queue.popleft())
        self._page_out(rear)
        self._add_to_delta(rear)
        left = self.push_q4(PAGING_STEP - len(rear))
        self.is_lazy = not (self.q1 or self.q2 or self.q4)
        self._turns_lazy = not left or not self.push_betas_to_deltas(left)
        if self._turns_lazy:
            self._page_later()

    def _page_out(self, statuses: list[MsgStatus]) -> None:
        self._write_transients(statuses)
        sizes = []
        for status in statuses:
            if status.message is not None:
                status.message = None
                self.ram_count -= 1
                self._ram_bytes -= status.size
                sizes.append(status.size)
        if sizes:
            out, out_bytes, back, back_bytes = self.paged
            self.paged = (out + len(sizes), out_bytes + sum(sizes), back, back_bytes)

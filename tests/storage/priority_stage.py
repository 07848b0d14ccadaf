"""A queue with priorities on a stage: variable queues that share two files, under one proxy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import cast

from leveret.storage.backing_queue import BackingQueue
from leveret.storage.priority_queue import PriorityQueue
from leveret.storage.variable_queue import VariableQueue
from tests.storage.stage import QUEUE_ID, Driven, Stage

MAX_PRIORITY = 5


class StagedPriorities(PriorityQueue):
    """Shows the stage what it looks at in one variable queue."""

    @property
    def parts(self) -> list[VariableQueue]:
        return [cast(VariableQueue, queue) for queue in self._queues.values()]

    @property
    def _read(self) -> asyncio.Task[None] | None:
        reads = [read for part in self.parts for read in (part._read, part._pending_read)]
        return next((read for read in reads if read is not None and not read.done()), None)

    @property
    def lost(self) -> int:
        return sum(part.lost for part in self.parts)

    @property
    def _is_terminated(self) -> bool:
        return any(part._is_terminated for part in self.parts)

    def check_invariants(self) -> None:
        for part in self.parts:
            part.check_invariants()


class PriorityStage(Stage):
    def make(self, *, is_clean: bool) -> VariableQueue:
        known = [row[0] - QUEUE_ID for row in self.rows("SELECT queue_id FROM counter")]
        made = StagedPriorities(
            MAX_PRIORITY,
            lambda priority: self.make_variable(QUEUE_ID + priority, is_clean=is_clean),
            known,
        )
        return cast(VariableQueue, made)

    @property
    def parts(self) -> list[VariableQueue]:
        return cast(StagedPriorities, self.queue).parts

    def crash(self) -> None:
        for part in self.parts:
            part._is_terminated = True
            if part._read is not None:
                part._read.cancel()
        self.run(self.database.abandon())
        self.run(self.transient.abandon())


class DrivenPriorities(Driven):
    stage: PriorityStage

    def _page(self) -> None:
        assert self._paging is not None
        some = self._paging.randrange
        for part in self.stage.parts:
            part.push_q1(some(4))
            part.push_q4(some(4))
            part.push_betas_to_deltas(some(6))
            part._limit_ram_acks(some(3))


def staged(wake: Callable[[], None], *, is_paging: bool) -> tuple[PriorityStage, BackingQueue]:
    stage = PriorityStage(wake)
    driven = DrivenPriorities(stage, random.Random(3) if is_paging else None)
    return stage, cast(BackingQueue, driven)

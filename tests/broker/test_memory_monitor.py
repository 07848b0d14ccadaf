"""The memory monitor: what it asks queues, what it tells them, and when it raises the alarm."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from leveret.broker.alarms import DISK, MEMORY, Alarms
from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.flow import Bump
from leveret.broker.mailbox import Mailbox
from leveret.broker.memory_monitor import (
    INTERVAL_S,
    MemoryMonitor,
    Probes,
    release_memory,
    total_memory,
    used_memory,
)
from leveret.broker.queues.actor_state import STORE
from leveret.broker.queues.commands import (
    Loaded,
    RamDuration,
    ReportRamDuration,
    SetRamDuration,
)
from leveret.storage.memory_queue import MemoryQueue
from tests.broker.queues.bench import ActorBench

# So large that it cannot be filled in the time between two looks.
LIMIT = 10_000_000_000


class Stage:
    """A monitor whose machine and queues are the test's."""

    def __init__(self, clock: VirtualClock, *, watermark: float = LIMIT) -> None:
        self.clock = clock
        self.used = 0
        # What is given back when memory gets short.
        self.releasable = 0
        self.alarms = Alarms()
        self.queues: list[Mailbox] = []
        probes = Probes(
            used_memory=lambda: self.used,
            total_memory=lambda: 2 * LIMIT,
            release_memory=self._release,
        )
        self.monitor = MemoryMonitor(clock, watermark, probes, lambda: self.queues, self.alarms)

    def _release(self) -> None:
        self.used -= self.releasable
        self.releasable = 0

    def queue(self, name: str = "q") -> Mailbox:
        mailbox = Mailbox(name)
        self.queues.append(mailbox)
        return mailbox

    def look(self, *, ratio: float) -> None:
        """The next look finds so much of the limit used."""
        self.used = round(LIMIT * ratio)
        if self.clock.statistics()["timers"]:
            self.clock.advance(INTERVAL_S)
        else:
            self.monitor.start()

    def report(self, mailbox: Mailbox, duration_s: float) -> None:
        self.monitor.mailbox.put_urgent(RamDuration(mailbox, duration_s))


@pytest.fixture
def stage(clock: VirtualClock) -> Stage:
    return Stage(clock)


def questions(mailbox: Mailbox) -> int:
    """How often it was asked since it was looked at last."""
    asked = [item for item in mailbox.urgent if isinstance(item, ReportRamDuration)]
    mailbox.urgent = [item for item in mailbox.urgent if not isinstance(item, ReportRamDuration)]
    return len(asked)


def targets(mailbox: Mailbox) -> list[float]:
    return [item.duration_s for item in mailbox.take_urgent() if isinstance(item, SetRamDuration)]


# --- the alarm ---------------------------------------------------------------------------------


def test_above_the_watermark_there_is_an_alarm(stage: Stage) -> None:
    stage.look(ratio=1.0)
    assert not stage.alarms.active
    stage.look(ratio=1.01)
    assert stage.alarms.has(MEMORY)
    stage.look(ratio=1.0)
    assert not stage.alarms.active


def test_what_can_be_given_back_raises_no_alarm(stage: Stage) -> None:
    stage.releasable = LIMIT // 2
    stage.look(ratio=1.2)
    assert not stage.alarms.active
    assert stage.monitor.used == round(LIMIT * 0.7)


def test_a_small_limit_is_watched_more_closely(clock: VirtualClock) -> None:
    """It could be passed by far between two looks. The end comes as slowly as ever."""
    stage = Stage(clock, watermark=200_000_000)
    stage.used = 90_000_000
    stage.monitor.start()
    stage.used = 300_000_000
    clock.advance(0.25)
    assert stage.alarms.has(MEMORY)
    stage.used = 90_000_000
    clock.advance(2.2)
    assert stage.alarms.active
    clock.advance(0.1)
    assert not stage.alarms.active


def test_memory_that_is_short_is_given_back_now_and_then(clock: VirtualClock) -> None:
    """Not at each of the many looks: it takes a while, and publishers wait."""
    stage = Stage(clock, watermark=200_000_000)
    stage.used = 150_000_000
    stage.monitor.start()
    stage.releasable = 10_000_000
    clock.advance(INTERVAL_S - 0.1)
    assert stage.used == 150_000_000
    clock.advance(0.1)
    assert stage.used == 140_000_000
    stage.used = 300_000_000
    clock.advance(0.2)
    stage.releasable = 10_000_000
    clock.advance(0.5)
    assert stage.used == 290_000_000


def test_looks_every_two_and_a_half_seconds(stage: Stage) -> None:
    stage.look(ratio=0.0)
    stage.used = 2 * LIMIT
    stage.clock.advance(INTERVAL_S - 0.1)
    assert not stage.alarms.active
    stage.clock.advance(0.1)
    assert stage.alarms.active
    stage.monitor.stop()
    assert stage.clock.statistics()["timers"] == 0


@pytest.mark.parametrize(
    ("watermark", "limit"),
    [
        pytest.param(0.4, 0.8 * LIMIT, id="a-share"),
        pytest.param(1.0, 2 * LIMIT, id="all"),
        pytest.param(3_000_000, 3_000_000, id="a-size"),
    ],
)
def test_watermark(clock: VirtualClock, watermark: float, limit: float) -> None:
    assert Stage(clock, watermark=watermark).monitor.limit == limit


def test_a_watermark_of_nothing_is_always_passed(clock: VirtualClock) -> None:
    """How an operator stops all publishers."""
    stage = Stage(clock, watermark=0)
    queue = stage.queue()
    stage.look(ratio=0.1)
    stage.look(ratio=0.1)
    assert stage.alarms.has(MEMORY)
    assert targets(queue) == [0.0]


# --- targets -----------------------------------------------------------------------------------


def test_queues_are_left_alone_while_memory_is_plentiful(stage: Stage) -> None:
    queue = stage.queue()
    for _ in range(4):
        stage.look(ratio=0.39)
    assert not queue.urgent


def test_queues_are_asked_every_five_seconds(stage: Stage) -> None:
    queue = stage.queue()
    asked = []
    for _ in range(5):
        stage.look(ratio=0.45)
        asked.append(questions(queue))
    assert asked == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("ratio", "target"),
    [
        pytest.param(0.49, None, id="below-half-no-limit"),
        pytest.param(0.5, (6.0 + 1.0) / 2 / 0.5, id="half"),
        pytest.param(0.9, (6.0 + 1.0) / 2 / 0.9, id="grows-a-little"),
        pytest.param(0.96, 6.0 / 2 / 0.96, id="no-longer-grows"),
        pytest.param(2.0, 6.0 / 2 / 2.0, id="far-above"),
    ],
)
def test_target(stage: Stage, ratio: float, target: float | None) -> None:
    """The mean of what queues report; one at rest does not count and is told all the same."""
    quick, slow, resting = stage.queue("quick"), stage.queue("slow"), stage.queue("resting")
    stage.look(ratio=0.45)
    for mailbox, duration_s in ((quick, 1.0), (slow, 5.0), (resting, math.inf)):
        assert questions(mailbox) == 1
        stage.report(mailbox, duration_s)
    stage.look(ratio=ratio)
    expected = [] if target is None else [pytest.approx(target)]
    for mailbox in (quick, slow, resting):
        assert targets(mailbox) == expected


def test_near_a_small_limit_whole_rounds_are_quick(clock: VirtualClock) -> None:
    """A target that came after two seconds would come too late."""
    stage = Stage(clock, watermark=200_000_000)
    queue = stage.queue()
    stage.used = 90_000_000
    stage.monitor.start()
    assert questions(queue) == 1
    stage.report(queue, 1.0)
    stage.used = 160_000_000
    clock.advance(0.14)
    # The round was short, and so is what the target grows in it.
    round_s = 110_000_000 / (2 * 400_000_000)
    target = pytest.approx((1.0 + round_s / INTERVAL_S) / 0.8)
    assert questions(queue) == 1
    assert targets(queue) == [target]


def test_many_queues_are_not_asked_all_the_time(clock: VirtualClock) -> None:
    """Each question costs a turn of a queue."""
    stage = Stage(clock, watermark=200_000_000)
    queues = [stage.queue(str(number)) for number in range(2_000)]
    stage.used = 130_000_000
    stage.monitor.start()
    for _ in range(9):
        stage.used += 2_000_000
        clock.advance(0.1)
    assert questions(queues[0]) == 1
    stage.used += 2_000_000
    clock.advance(0.2)
    assert questions(queues[0]) == 1
    assert questions(queues[-1]) == 2


def test_queues_are_not_asked_all_the_time_while_memory_stands_still(clock: VirtualClock) -> None:
    """A broker at rest in a small container stays at rest."""
    stage = Stage(clock, watermark=100_000_000)
    queue = stage.queue()
    stage.used = 80_000_000
    stage.monitor.start()
    assert questions(queue) == 1
    clock.advance(1.0)
    assert questions(queue) == 0
    stage.used += 2_000_000
    clock.advance(0.1)
    assert questions(queue) == 1


def lower_target(stage: Stage, *mailboxes: Mailbox, to: float) -> None:
    """So that every one of them has been told."""
    stage.look(ratio=1.0)
    for mailbox in mailboxes:
        stage.report(mailbox, to)
    stage.look(ratio=1.0)
    for mailbox in mailboxes:
        assert targets(mailbox) == [pytest.approx(to)]


def test_who_must_page_more_is_told_at_once(stage: Stage) -> None:
    queue, other = stage.queue("queue"), stage.queue("other")
    lower_target(stage, queue, other, to=4.0)
    stage.report(queue, 1.0)  # the mean of both is 2.5 now
    stage.look(ratio=1.0)
    assert targets(queue) == targets(other) == [pytest.approx(2.5)]


def test_who_needs_less_than_the_target_hears_of_it_later(stage: Stage) -> None:
    quick, slow = stage.queue("quick"), stage.queue("slow")
    stage.look(ratio=1.0)
    stage.report(quick, 1.0)
    stage.report(slow, 9.0)
    stage.look(ratio=1.0)
    assert targets(quick) == targets(slow) == [5.0]
    stage.report(slow, 7.0)
    stage.look(ratio=1.0)
    assert targets(slow) == [4.0]
    assert targets(quick) == []
    stage.report(quick, 1.0)
    stage.look(ratio=1.0)
    assert targets(quick) == [4.0]


def test_who_may_page_less_hears_of_it_in_answer_to_a_report(stage: Stage) -> None:
    queue, other = stage.queue("queue"), stage.queue("other")
    lower_target(stage, queue, other, to=4.0)
    stage.look(ratio=0.1)
    assert targets(queue) == targets(other) == []
    stage.report(queue, 4.0)
    stage.look(ratio=0.1)
    assert targets(queue) == [math.inf]
    assert targets(other) == []


def test_a_target_is_taken_back_although_memory_is_plentiful_again(stage: Stage) -> None:
    """Queues are asked until none has a target."""
    queue = stage.queue()
    lower_target(stage, queue, to=4.0)
    told = []
    for _ in range(4):
        stage.look(ratio=0.1)
        if questions(queue):
            stage.report(queue, 4.0)
        told += targets(queue)
    assert told == [math.inf]
    for _ in range(4):
        stage.look(ratio=0.1)
    assert not queue.urgent


def test_under_a_disk_alarm_nothing_is_paged_out(stage: Stage) -> None:
    queue, other = stage.queue("queue"), stage.queue("other")
    lower_target(stage, queue, other, to=4.0)
    stage.alarms.set("full", DISK)
    stage.look(ratio=1.5)
    assert targets(queue) == targets(other) == [math.inf]
    stage.alarms.clear("full")
    stage.look(ratio=1.5)
    assert targets(queue) == targets(other) == [pytest.approx(4.0 / 1.5)]


def test_a_backlog_at_rest_is_paged_out_above_the_watermark(stage: Stage) -> None:
    """Blocked publishers make no rates: nothing else would ever end the alarm."""
    queue = stage.queue()
    stage.look(ratio=0.9)
    stage.report(queue, math.inf)
    stage.look(ratio=0.99)
    assert targets(queue) == []
    stage.look(ratio=1.1)
    assert targets(queue) == [0.0]


def test_queues_that_are_gone_do_not_count(stage: Stage) -> None:
    queue, gone = stage.queue("queue"), stage.queue("gone")
    stage.look(ratio=1.0)
    stage.report(queue, 2.0)
    stage.report(gone, 100.0)
    gone.close()
    stage.queues.remove(gone)
    stage.look(ratio=1.0)
    assert stage.monitor.target == 2.0
    # Its report may also come later than its end.
    stage.report(gone, 100.0)
    stage.look(ratio=1.0)
    assert stage.monitor.target == 2.0


def test_statistics(stage: Stage) -> None:
    queue = stage.queue()
    stage.look(ratio=0.3)
    expected = {"used": LIMIT * 3 // 10, "limit": LIMIT, "ram_duration_target_s": None}
    assert stage.monitor.statistics() == expected
    lower_target(stage, queue, to=4.0)
    assert stage.monitor.statistics()["ram_duration_target_s"] == 4.0


# --- queues ------------------------------------------------------------------------------------


class Steps(MemoryQueue):
    """Counts the steps of work that it is asked for."""

    steps = 0

    def resume(self) -> None:
        self.steps += 1


async def test_paging_waits_for_the_store(clock: VirtualClock) -> None:
    """What the store has not written yet is still in memory."""
    backing: list[Steps] = []

    def make(wake: Callable[[], None]) -> Steps:
        backing.append(Steps(wake))
        return backing[0]

    async with ActorBench(clock, make_backing=make) as bench:
        bench.actor.spend(Settings().store_credit)
        bench.put_urgent(Loaded())
        await bench.settle()
        assert backing[0].steps == 0
        bench.put_urgent(Bump(STORE, Settings().store_credit))
        await bench.settle()
        assert backing[0].steps == 1
        # Only if there was something to go on with.
        bench.put_urgent(Bump(STORE, 1))
        await bench.settle()
        assert backing[0].steps == 1


# --- this machine ------------------------------------------------------------------------------


def test_used_memory_grows_with_what_is_kept() -> None:
    before = used_memory()
    kept = b"x" * (64 << 20)
    assert used_memory() - before > 60 << 20
    del kept
    release_memory()
    assert used_memory() - before < 30 << 20


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


def in_group(path: str, limits: dict[str, str]) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        files = {"proc/self/cgroup": path, **limits}
        for name, text in files.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    return write


@pytest.mark.parametrize(
    ("write", "total"),
    [
        pytest.param(lambda root: None, None, id="no-groups"),
        pytest.param(
            in_group("0::/", {f"{V2}/memory.max": "1000000"}), 1_000_000, id="container-v2"
        ),
        pytest.param(in_group("0::/", {f"{V2}/memory.max": "max"}), None, id="no-limit-v2"),
        pytest.param(
            in_group(
                "0::/a/b",
                {f"{V2}/a/memory.max": "2000000", f"{V2}/a/b/memory.max": "max"},
            ),
            2_000_000,
            id="limit-of-the-group-above",
        ),
        pytest.param(
            in_group(
                "5:devices:/x\n4:cpu,memory:/x\n0::/", {f"{V1}/x/memory.limit_in_bytes": "3000000"}
            ),
            3_000_000,
            id="v1",
        ),
        pytest.param(
            in_group("4:memory:/on/the/host", {f"{V1}/memory.limit_in_bytes": "3000000"}),
            3_000_000,
            id="path-of-the-host",
        ),
        pytest.param(
            in_group("4:memory:/", {f"{V1}/memory.limit_in_bytes": "9223372036854771712"}),
            None,
            id="no-limit-v1",
        ),
    ],
)
def test_total_memory(tmp_path: Path, write: Callable[[Path], None], total: int | None) -> None:
    write(tmp_path)
    assert total_memory(tmp_path) == (total_memory(tmp_path / "none") if total is None else total)

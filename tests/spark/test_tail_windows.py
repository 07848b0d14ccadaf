"""Windows from parts: each read once, in order, with what was known before."""

from __future__ import annotations

import io
import math

import pytest

from leveret.spark_jobs.alert_rules import Alert
from leveret.spark_jobs.tail_screen import Screen
from leveret.spark_jobs.tail_windows import BUCKET_RATIO, Reading, Subject, Summary, Windows

ORDERS = Subject("shop", "orders", "")
MAIL = Subject("shop", "mail", "")
SECOND = 1_000_000


def part(
    second: int,
    subject: Subject = ORDERS,
    *,
    came: float = 0,
    went: float = 0,
    wait_us: int | None = None,
    waits: int = 1,
    depth: int | None = None,
    at: int = 0,
    after: float | None = None,
    is_new: bool = False,
) -> Summary:
    bucket = None if wait_us is None else math.floor(math.log(wait_us) / math.log(BUCKET_RATIO))
    given = 0 if wait_us is None else waits
    return Summary(
        window=second * SECOND,
        subject=subject,
        bucket=bucket,
        waits=given,
        came=came,
        went=went,
        gave=given,
        most_deliveries=1,
        unroutable=0,
        is_new=is_new,
        depth=depth,
        depth_at=(at, 0),
        after=came - went if after is None else after,
    )


def close(windows: Windows) -> list[list[Reading]]:
    return list(windows.close())


def test_a_window_is_read_once_something_later_is_seen() -> None:
    windows = Windows(10, gap=1)
    windows.add([part(0, came=20, went=5)])
    assert close(windows) == []
    # The rest of it comes with the next batch.
    windows.add([part(0, came=10), part(10, came=1)])
    ((first,),) = close(windows)
    assert (first.window, first.came_per_s, first.went_per_s) == (0, 3.0, 0.5)
    assert close(windows) == []


def test_a_percentile_of_parts() -> None:
    windows = Windows(10, gap=1)
    windows.add([part(0, wait_us=1_000, waits=985), part(0, wait_us=50_000, waits=5)])
    windows.add([part(0, wait_us=80_000, waits=10), part(10)])
    ((first,),) = close(windows)
    assert first.wait_p99_ms == pytest.approx(50, rel=0.01)
    assert first.gave == 1000


def test_nothing_delivered_has_no_percentile() -> None:
    windows = Windows(10, gap=1)
    windows.add([part(0, came=1), part(10)])
    assert close(windows)[0][0].wait_p99_ms is None


def test_the_depth_goes_on_between_stamps() -> None:
    windows = Windows(10, gap=1)
    windows.add([part(0, depth=100, at=2), part(0, depth=90, at=1)])
    windows.add([part(10, came=50, went=20), part(20, went=500), part(30)])
    depths = [(first.depth, first.slope) for (first,) in close(windows)]
    assert depths == [(100, 0.0), (130, 3.0), (0, -13.0)]


def test_what_came_after_a_stamp_counts() -> None:
    """A consumer takes the one message there is and dies: nothing is stamped any more."""
    windows = Windows(10, gap=1)
    windows.add([part(0, came=1001, after=1000, depth=0, at=5)])
    windows.add([part(0, went=1, wait_us=10, after=0, depth=0, at=5)])
    # The rest of the window comes in another batch, before and after a stamp of its own.
    windows.add([part(10, came=50), part(10, came=7, after=3, depth=1054, at=15)])
    windows.add([part(10, went=2), part(20)])
    assert [first.depth for (first,) in close(windows)] == [1000, 1055]


def test_a_slope_needs_no_depth() -> None:
    """The log may begin in the middle, and a queue that nobody consumes is never stamped."""
    windows = Windows(10, gap=1)
    windows.add([part(0, came=50, went=20), part(0, MAIL, came=30, is_new=True), part(10)])
    (first,) = close(windows)
    assert {one.queue: (one.depth, one.slope) for one in first} == {
        "orders": (None, 3.0),
        "mail": (30, 3.0),
    }


def test_who_is_silent_is_read_too() -> None:
    windows = Windows(10, gap=1)
    windows.add([part(0, depth=7), part(0, MAIL), part(10, MAIL), part(20, MAIL)])
    second = close(windows)[1]
    assert {one.queue: (one.came_per_s, one.depth, one.slope) for one in second} == {
        "orders": (0.0, 7, 0.0),
        "mail": (0.0, None, 0.0),
    }


def test_a_long_silence_is_cut_short() -> None:
    windows = Windows(10, gap=3)
    windows.add([part(0), part(10), part(86_400)])
    read = [readings[0].window // SECOND for readings in windows.close()]
    assert read == [0, 10, 20, 30, 40]
    windows.add([part(86_410)])
    assert [readings[0].window // SECOND for readings in windows.close()] == [50, 60, 70, 86_400]


def test_what_comes_too_late_is_counted() -> None:
    windows = Windows(10, gap=1)
    windows.add([part(0), part(10)])
    close(windows)
    windows.add([part(0, came=3, went=1), part(20)])
    assert (windows.late, len(close(windows))) == (4, 1)


def test_what_is_empty_and_silent_for_long_is_forgotten() -> None:
    windows = Windows(10, gap=1)
    windows.add([part(0, Subject("v", f"q{number}", ""), depth=0) for number in range(100)])
    windows.add([part(0, ORDERS, depth=1)])
    windows.add([part(10 * number, MAIL) for number in range(1, 400)])
    last = close(windows)[-1]
    assert {one.queue for one in last} == {"orders", "mail"}


def a_reading(queue: str, rate: float) -> Reading:
    return Reading(0, "shop", queue, "", rate, 1.0, 1, 12.345, 7, -0.5, 1, 0.0)


def an_alert() -> Alert:
    return Alert("slow", "latency", True, "shop", "orders", "", 9.0, 5.0, "ms", 0, 0)


def test_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    screen = Screen(out, in_place=False, limit=2)
    screen.show_alert(an_alert())
    lost = Reading(0, "shop", "", "x", 0.0, 0.0, 0, None, None, 0.0, 0, 6.0)
    readings = [a_reading("mail", 1.0), a_reading("orders", 5.0), a_reading("rare", 0.1), lost]
    screen.show(readings, {("shop", "", "x")}, 0)
    assert out.getvalue().splitlines() == [
        "00:00:00 ! slow begins: queue orders in vhost shop: 9 ms (limit 5)",
        "00:00:00 shop x: 6.00 unroutable a minute",
        "00:00:00 shop orders: in 5.00/s, out 1.00/s, p99 wait 12.35 ms, depth 7 (-0.500/s)",
    ]


def test_a_table_is_drawn_over_on_a_terminal() -> None:
    out = io.StringIO()
    screen = Screen(out, in_place=True, limit=2)
    screen.show([a_reading("mail", 1), a_reading("orders", 5), a_reading("rare", 0)], set(), 3)
    first = out.getvalue()
    assert "\x1b" not in first
    assert first.index("orders") < first.index("mail")
    assert "and 1 more queues" in first
    screen.show_alert(an_alert())
    screen.show([a_reading("mail", 1)], {("shop", "mail", "")}, 0)
    second = out.getvalue()[len(first) :]
    assert second.startswith(f"\x1b[{first.count(chr(10))}A\x1b[J")
    assert "slow begins" in second

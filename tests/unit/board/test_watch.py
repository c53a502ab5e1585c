"""What is wrong with a board is reported while it is, and does not flicker."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.waiting import TIMEOUT_S

from edge_server.board.facts import BoardFacts, EventCounter, Heat
from edge_server.board.watch import HOLD_S, STALE_S, BoardWatch, ClockState, ClockWatch
from edge_server.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOUR_NS = 3_600_000_000_000
YEAR_2100_NS = 4_102_444_800_000_000_000
HOT = Heat(throttled=("gpu-throttle-alert",))


class Bench:
    """A board, a clock and the time, which the test sets."""

    def __init__(self, root: Path, *, required: bool = False) -> None:
        self.root = root
        self.now_s = 1000.0
        self.facts = BoardFacts()
        self.wall_ns = YEAR_2100_NS
        self.synchronized: bool | None = True
        clock = ClockWatch(
            root,
            required=required,
            clocks_ns=lambda: (self.wall_ns, round(self.now_s * 1e9)),
            synchronized=lambda: self.synchronized,
        )
        self.watch = BoardWatch(root, clock, read=lambda _: self.facts, now_s=lambda: self.now_s)

    def after(self, seconds: float, **changes: object) -> tuple[Reason, ...]:
        """The reasons, so long after the last sample, of a board with those facts."""
        self.now_s += seconds
        self.wall_ns += round(seconds * 1e9)
        self.facts = replace(self.facts, **changes)
        self.watch.sample()
        self.watch.check()
        return self.watch.report.reasons

    def events(self, **counts: int) -> Heat:
        return Heat(supply_events=tuple(EventCounter(*each) for each in counts.items()))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_throttling_is_a_reason_at_once_and_until_it_was_away_for_a_while(bench: Bench) -> None:
    assert bench.after(1) == ()
    assert bench.after(1, heat=HOT) == (Reason("throttled", "gpu-throttle-alert"),)
    assert bench.after(1, heat=Heat()) == (Reason("throttled", "gpu-throttle-alert"),)
    assert bench.after(HOLD_S - 1.1) == (Reason("throttled", "gpu-throttle-alert"),)
    assert bench.after(0.2) == ()


def test_throttling_that_comes_and_goes_is_one_reason(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    seen = [bench.after(1, heat=HOT if second % 3 == 0 else Heat()) for second in range(60)]
    assert set(seen) == {(Reason("throttled", "gpu-throttle-alert"),)}
    assert caplog.text.count("throttled") == 1


def test_supply_events_before_the_start_are_no_reason_and_new_ones_are(bench: Bench) -> None:
    assert bench.after(1, heat=bench.events(oc1=5, oc2=7, oc3=9)) == ()
    assert bench.after(1, heat=bench.events(oc1=6, oc2=7, oc3=9)) == (
        Reason("undervoltage", "oc1"),
    )
    assert bench.after(1, heat=bench.events(oc1=6, oc2=7, oc3=12)) == (
        Reason("over_current", "oc3"),
        Reason("undervoltage", "oc1"),
    )
    assert bench.after(HOLD_S, heat=bench.events(oc1=6, oc2=7, oc3=12)) == ()


def test_low_voltage_of_a_monitor_is_a_reason(bench: Bench) -> None:
    assert bench.after(1, heat=Heat(low_voltage=("VDD_IN",))) == (Reason("undervoltage", "VDD_IN"),)


def test_a_sample_that_is_too_old_is_none(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.after(1, heat=HOT)
    bench.now_s += STALE_S + 0.1
    bench.watch.check()
    bench.watch.check()
    assert bench.watch.report.facts is None
    assert bench.watch.report.reasons == ()
    assert bench.watch.report.age_s == pytest.approx(STALE_S + 0.1)
    assert caplog.text.count("cannot be read") == 1
    assert bench.after(1) == (Reason("throttled", "gpu-throttle-alert"),)


def test_a_read_that_hangs_delays_no_reader_and_no_end(tmp_path: Path) -> None:
    reads, ends = threading.Event(), threading.Event()

    def hang(_: Path) -> BoardFacts:
        reads.set()
        ends.wait(60)
        return BoardFacts()

    watch = BoardWatch(tmp_path, read=hang)
    watch.start()
    try:
        assert reads.wait(TIMEOUT_S)
        assert watch.report.facts is None
        watch.check()
        watch.stop()  # although the read has not ended
        assert not ends.is_set()
    finally:
        ends.set()


@pytest.mark.parametrize(
    ("required", "synchronized", "state", "believed"),
    [
        (False, True, ClockState.SYNCHRONIZED, True),
        (False, False, ClockState.UNSYNCHRONIZED, True),
        (False, None, ClockState.UNKNOWN, True),
        (True, True, ClockState.SYNCHRONIZED, True),
        (True, False, ClockState.UNSYNCHRONIZED, False),
        (True, None, ClockState.UNKNOWN, False),
    ],
)
def test_an_unsynchronized_clock_is_a_reason_only_where_that_is_required(
    tmp_path: Path, required: bool, synchronized: bool | None, state: ClockState, believed: bool
) -> None:
    bench = Bench(tmp_path, required=required)
    bench.synchronized = synchronized
    reasons = () if believed else (Reason("clock_unsynchronized", state.value),)
    assert bench.after(1) == reasons
    assert bench.watch.report.clock is state


def test_a_clock_in_1970_is_not_believed_until_it_is_set(bench: Bench) -> None:
    bench.wall_ns, bench.synchronized = 0, False
    assert bench.after(1) == (Reason("clock_unsynchronized", "wrong"),)
    bench.synchronized = True  # whatever the kernel says
    assert bench.after(1) == (Reason("clock_unsynchronized", "wrong"),)
    bench.wall_ns = YEAR_2100_NS
    assert bench.after(1) == ()
    assert bench.watch.report.clock is ClockState.SYNCHRONIZED
    assert bench.watch.report.clock_steps == 1


@pytest.mark.parametrize("hours", [-5, -1, 1, 5])
def test_each_step_of_the_clock_is_counted_and_logged(
    bench: Bench, hours: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench.after(1)
    bench.after(3600)  # time that passes is none
    bench.wall_ns += 400_000_000  # nor is a correction by less than half a second
    bench.after(1)
    assert bench.watch.report.clock_steps == 0
    bench.wall_ns += hours * HOUR_NS
    bench.after(1)
    bench.after(1)
    assert bench.watch.report.clock_steps == 1
    assert f"was set by {3600 * hours:+.1f} s" in caplog.text


def test_reading_the_condition_of_every_frame_costs_no_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.after(1, heat=HOT)
    refuse: Callable[..., None] = lambda *_: pytest.fail("a file was read")  # noqa: E731
    monkeypatch.setattr("pathlib.Path.open", refuse)
    monkeypatch.setattr("pathlib.Path.stat", refuse)
    assert bench.watch.report.reasons


def test_where_the_kernel_tells_nothing_the_file_of_timesyncd_does(bench: Bench) -> None:
    """The sandbox of the unit (ProtectClock=) hides the kernel's flag."""
    bench.synchronized = None
    directory = bench.root / "run/systemd/timesync"
    directory.mkdir(parents=True)
    bench.after(1)
    assert bench.watch.report.clock is ClockState.UNSYNCHRONIZED
    (directory / "synchronized").touch()
    bench.after(1)
    assert bench.watch.report.clock is ClockState.SYNCHRONIZED


def test_a_part_that_does_not_work_is_a_reason_while_it_is_so(tmp_path: Path) -> None:
    faults = [Reason("not_recorded", "the disk: No space left on device")]
    watch = BoardWatch(tmp_path, parts=lambda: faults)
    assert watch.report.reasons == (Reason("not_recorded", "the disk: No space left on device"),)
    faults.clear()
    assert watch.report.reasons == ()

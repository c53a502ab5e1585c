"""BoardWatch: samples the board once a second, and knows what is wrong with it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.board.facts import BoardFacts, read_board_facts
from edge_server.board.thermal import UNDERVOLTAGE_COUNTER
from edge_server.board.wall_clock import ClockState, ClockWatch
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

log = logging.getLogger(__name__)

PERIOD_S = 1.0
# A condition that comes and goes with every second is one condition: it ends when it was not seen
# for so long.
HOLD_S = 10.0
# Older facts say nothing of now: a read hangs.
STALE_S = 5.0

THROTTLED = "throttled"
OVER_CURRENT = "over_current"
UNDERVOLTAGE = "undervoltage"
REASONS = (THROTTLED, OVER_CURRENT, UNDERVOLTAGE)
# Of parts of the daemon; lanes go on without them.
NOT_RECORDED = "not_recorded"
HTTP_CLOSED = "http_closed"


@dataclass(frozen=True)
class BoardCondition:
    """What is wrong with the board now, for the messages that leave it.

    Attributes:
        reasons: each a word of `REASONS`, `not_recorded`, `http_closed` or `clock_unsynchronized`,
            a colon, and what else a person wants to know.
        clock: how far the wall clock can be believed.
        clock_steps: how often the wall clock was set since the daemon started.
    """

    reasons: tuple[str, ...] = ()
    clock: ClockState = ClockState.UNKNOWN
    clock_steps: int = 0


@dataclass(frozen=True)
class _Sample:
    at_s: float
    facts: BoardFacts
    reasons: tuple[str, ...]


class BoardWatch:
    """Samples the board's facts on a thread of its own, and follows the wall clock.

    No frame and no request waits for it: readers get the last sample. A file that hangs costs the
    facts and their reasons, which are gone after `STALE_S`, and nothing else: no supervisor watches
    this worker.

    Args:
        root: the root directory of the board's files.
        clock: follows the wall clock.
        read: reads the facts.
        now_s: the monotonic clock.
        parts: returns which parts of the daemon do not work, and why: reasons as those of
            `BoardCondition`.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        clock: ClockWatch | None = None,
        *,
        read: Callable[[Path], BoardFacts] = read_board_facts,
        now_s: Callable[[], float] = time.monotonic,
        parts: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._root = root
        self._clock = ClockWatch(root) if clock is None else clock
        self._read = read
        self._now_s = now_s
        self._parts = parts
        self._worker = Worker("board", self._tick)
        self._sample: _Sample | None = None
        self._seen: dict[str, tuple[float, str]] = {}  # word: when it was seen last, the details
        self._counts: dict[str, int] = {}
        self._hangs = False

    def start(self) -> None:
        """Look at the clock at once, so that the first messages have its state; then sample."""
        self._clock.look()
        self._worker.start()

    def stop(self) -> None:
        # A read that hangs is not waited for.
        self._worker.stop(timeout_s=0.2)

    @property
    def facts(self) -> BoardFacts | None:
        """The facts of the last sample; None where there is none of the last seconds."""
        sample = self._recent
        return None if sample is None else sample.facts

    @property
    def age_s(self) -> float | None:
        """How long ago the last sample was taken; None before the first one."""
        return None if self._sample is None else self._now_s() - self._sample.at_s

    @property
    def condition(self) -> BoardCondition:
        """What is wrong with the board; cheap enough for every frame."""
        sample, clock = self._recent, self._clock
        reasons = () if sample is None else sample.reasons
        return BoardCondition((*reasons, *self._parts(), *clock.reasons), clock.state, clock.steps)

    def check(self) -> None:
        """Look at the clock, and log where a read of the board hangs; for the main loop, which
        reads none of its sensors itself."""
        self._clock.look()
        hangs = self._sample is not None and self._recent is None
        if hangs and not self._hangs:
            log.warning(
                "board: a file of its sensors does not let itself be read; temperatures, power and "
                "throttling are not known"
            )
        self._hangs = hangs

    @property
    def _recent(self) -> _Sample | None:
        sample = self._sample
        return None if sample is None or self._now_s() - sample.at_s > STALE_S else sample

    def _tick(self, now: float) -> None:
        self.sample()
        self._worker.wait(max(0.0, PERIOD_S - (self._now_s() - now)))

    def sample(self) -> None:
        """Read the board once."""
        facts = self._read(self._root)
        now_s = self._now_s()
        for word, details in self._found(facts):
            if word not in self._seen:
                log.warning("board: %s: %s", word, details)
            self._seen[word] = now_s, details
        for word in [word for word, (at_s, _) in self._seen.items() if now_s - at_s >= HOLD_S]:
            del self._seen[word]
            log.info("board: %s: no longer", word)
        reasons = tuple(f"{word}: {self._seen[word][1]}" for word in REASONS if word in self._seen)
        self._sample = _Sample(now_s, facts, reasons)

    def _found(self, facts: BoardFacts) -> Iterator[tuple[str, str]]:
        heat = facts.heat
        if heat.throttled:
            yield THROTTLED, ", ".join(heat.throttled)
        # The counters count since boot: what was before the first sample is over.
        news = [
            event.name
            for event in heat.supply_events
            if event.count > self._counts.get(event.name, event.count)
        ]
        self._counts = {event.name: event.count for event in heat.supply_events}
        low = (*heat.low_voltage, *(name for name in news if name == UNDERVOLTAGE_COUNTER))
        if low:
            yield UNDERVOLTAGE, ", ".join(low)
        currents = [name for name in news if name != UNDERVOLTAGE_COUNTER]
        if currents:
            yield OVER_CURRENT, ", ".join(currents)

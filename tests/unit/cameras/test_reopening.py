"""A lost source is opened after growing delays, or when it is seen again, and no more often."""

from __future__ import annotations

from edge_server.cameras.reopening import Reopening


class Watch:
    """Sees the source whenever `back` is set."""

    def __init__(self) -> None:
        self.due = 0.0
        self.back = False
        self.closed = 0

    def look(self, now: float) -> bool:
        return self.back

    def close(self) -> None:
        self.closed += 1


def waits(reopening: Reopening, *losses: tuple[float, float]) -> list[float]:
    found = []
    for now, ran_s in losses:
        reopening.lose(now, ran_s)
        found.append(reopening.wait_s(now))
    return found


def test_delays_grow_until_the_source_has_run_for_long() -> None:
    reopening = Reopening(0.2, 5.0, lambda: None)
    first, *_, last = waits(reopening, *((float(each), 0.1) for each in range(10)))
    assert first <= 0.2 < last <= 5.0
    assert waits(reopening, (100.0, 5.1))[0] <= 0.2


def test_a_source_that_is_seen_again_is_opened_at_once_but_not_over_and_over() -> None:
    watch = Watch()
    reopening = Reopening(5.0, 5.0, lambda: watch)
    reopening.lose(0.0, 0.0)
    assert not reopening.is_due(0.1)
    watch.back = True
    opened = 0
    for step in range(90):
        opened += reopening.is_due(step / 10)
        reopening.lose(step / 10, 0.0)
    assert opened == 3
    assert reopening.is_due(11.0)


def test_each_watch_is_closed_once() -> None:
    made: list[Watch] = []

    def new() -> Watch:
        made.append(Watch())
        return made[-1]

    reopening = Reopening(0.2, 5.0, new)
    waits(reopening, (0.0, 0.0), (1.0, 0.0))
    reopening.end()
    reopening.end()
    assert [watch.closed for watch in made] == [1, 1]

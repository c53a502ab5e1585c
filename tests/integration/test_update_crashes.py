"""Whatever call a daemon dies at while it follows its repository, the next one serves at once.

    EDGE_CRASH_POINTS=all pytest -s tests/integration/test_update_crashes.py

dies at every call that changes the store, not at some, and prints how long each start took.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from support.adding_models import network
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from support.polling_server import Server

pytestmark = pytest.mark.usefixtures("strace")

TIMEOUT_S = 30.0
# Of each kind, in the ordinary run of the tests.
POINTS = os.environ.get("EDGE_CRASH_POINTS", "1")
CHANGES = "write|fsync|fdatasync|rename.*|mkdir.*|unlink.*|rmdir|chmod|fchmod.*|openat"

_DELIVERIES = 20
# The last call follows the one that shows.
_LAST_S = 0.3
_ALL = ("-e", f"trace=/^({CHANGES})$")

Paths = tuple["Path", ...]


class Call(NamedTuple):
    """The `count`-th call of that name which a thread makes on one of `paths`, or on any."""

    name: str
    count: int
    paths: Paths

    @property
    def dying(self) -> list[str]:
        """Options of strace: who makes it dies instead."""
        inject = f"inject={self.name}:signal=SIGKILL:when={self.count}"
        return [*_only(self.paths), "-e", f"trace={self.name}", "-e", inject]


class Traced:
    """What the threads of a process did that may have changed what is on disk."""

    def __init__(self, log: Path, store: Path) -> None:
        text = log.read_text(errors="replace")
        self._calls: list[tuple[str, str, str]] = re.findall(r"(?m)^(\d+) +(\w+)(\(.*)", text)
        self._store = str(store)

    def of_a_copy(self) -> list[Call]:
        """The calls that change the store, of the thread that copies, up to its rename.

        What follows is done on that thread or on another, as it happens. Left out are those that
        make or fill a file: how many a thread opens depends on how often it looks, and how many it
        writes on how often it wakes another.
        """
        thread = next(t for t, name, text in self._calls if self._changes(name, text))
        counts: Counter[str] = Counter()
        calls = []
        for caller, name, text in self._calls:
            if caller == thread:
                counts[name] += 1
                if self._changes(name, text):
                    calls.append(Call(name, counts[name], ()))
                if name.startswith("rename"):
                    break
        return calls

    def at(self, paths: Paths) -> list[Call]:
        """The calls at `paths` of the thread that makes the first of them.

        The update notes that it loads a model and that it has; that the model is good is noted by
        the update or by the thread that looks at the repository, whichever comes first.
        """
        places = {str(path) for path in paths}
        thread = ""
        counts: Counter[str] = Counter()
        calls = []
        for caller, name, text in self._calls:
            if not places.isdisjoint(re.findall(r'[<"]([^<>"]*)[>"]', text)):
                thread = thread or caller
                if caller == thread:
                    counts[name] += 1
                    calls.append(Call(name, counts[name], paths))
        return calls

    def _changes(self, name: str, text: str) -> bool:
        return name not in {"openat", "write"} and self._store in text


class Bench:
    """A daemon that follows a repository, killed and started again and again.

    Attributes:
        number: what `m` answers that is in the repository; what was there before answers 1 less.
        took_s: from the start of each process till it had answered.
    """

    def __init__(self, folder: Path, serve: Callable[..., Server]) -> None:
        self.repository = folder / "repository"
        self.store = folder / "store"
        self.number = 1
        self.took_s: list[float] = []
        self._log = folder / "trace"
        self._serve = serve
        # A model is the last known good from when it serves.
        self._settings = folder / "settings.toml"
        self._settings.write_text("[repository]\nprobation_requests = 0\n")
        self.repository.mkdir()
        self.put("m", 1)
        self.put("other", 100)
        self.start()
        for _ in range(2):  # so that the next one drops a copy
            self.deliver()
            self.wait_good()

    @property
    def state_paths(self) -> Paths:
        """Where the store's state is written."""
        names = ("state.json", "state.json.tmp", "state.before.json")
        return (self.store, *(self.store / name for name in names))

    @property
    def oldest_copy_paths(self) -> Paths:
        """Where the copy of `m` is that the next update drops, and where that is removed."""
        oldest = self._kept("m")[-1]
        places = (self.store / "copies" / oldest, self.store / "incoming" / oldest)
        below = ("", "m", "m/1", "m/config.pbtxt", "m/1/model.onnx")
        return tuple(place / path for place in places for path in below)

    def put(self, name: str, number: float) -> None:
        """Put a whole model in the place of another, as a delivery does."""
        incoming, old = self.repository.with_name("incoming"), self.repository.with_name("old")
        (incoming / "1").mkdir(parents=True)
        (incoming / "config.pbtxt").write_text('backend: "onnxruntime"')
        (incoming / "1" / "model.onnx").write_bytes(network(number))
        if (self.repository / name).exists():
            (self.repository / name).rename(old)
        incoming.rename(self.repository / name)
        shutil.rmtree(old, ignore_errors=True)

    def deliver(self) -> None:
        self.number += 1
        self.put("m", self.number)

    def start(self) -> float:
        """Start a daemon; what `m` answers."""
        begun = time.monotonic()
        self.server = self._serve("--config", str(self._settings))
        answer = self.server.answer()
        self.took_s.append(time.monotonic() - begun)
        assert answer in {self.number - 1, self.number}
        return answer

    def start_from_copies(self) -> float:
        """As `start`; the repository comes back only then."""
        away = self.repository.with_name("away")
        self.repository.rename(away)
        answer = self.start()
        away.rename(self.repository)
        return answer

    def wait_good(self) -> None:
        """Returns when `m` is what is in the repository, and kept."""
        assert self.server.wait_for(self.number) <= {self.number - 1}
        wait_until(self.is_good)
        assert self.server.index()["m"] == [("READY", "")]

    def is_good(self) -> bool:
        kept = self._kept("m")
        path = self.store / "copies" / kept[0] / "m/1/model.onnx" if kept else self._settings
        return path.read_bytes() == network(self.number) and self._is_tidy()

    def is_gone(self) -> bool:
        return not self._kept("other")

    def kill(self) -> None:
        self.server.process.close()
        self.server.client.close()

    def calls(self, change: Callable[[], None], is_over: Callable[[], bool]) -> Traced:
        """What a daemon does for `change`; it is killed then."""
        self._strace(_ALL, change, is_over)
        return Traced(self._log, self.store)

    def die_in_an_update(self, call: Call, *, drops: bool) -> None:
        """Deliver until a daemon dies at `call`: strace counts the calls of each thread by itself,
        and at times another thread than usual makes that one.

        Args:
            drops: the call is at the copy that an update drops, which is another one each time.
        """
        for _ in range(_DELIVERIES):
            paths = self.oldest_copy_paths if drops else call.paths
            if self.die(call._replace(paths=paths), self.deliver, self.is_good):
                return
            assert self.start() == self.number
            self.wait_good()
        raise AssertionError(call)

    def die(self, call: Call, change: Callable[[], None], is_over: Callable[[], bool]) -> bool:
        """Whether a daemon died at `call` while it did what `change` asks for."""
        return self._strace(call.dying, change, is_over)

    def calls_of_a_start(self) -> Traced:
        """What a daemon does that loads what it has kept."""
        assert not self._start_under_strace(_ALL)
        return Traced(self._log, self.store)

    def die_at_start(self, call: Call) -> bool:
        return self._start_under_strace(call.dying)

    def _strace(
        self, options: Sequence[str], change: Callable[[], None], is_over: Callable[[], bool]
    ) -> bool:
        """Whether the daemon ends before it `is_over`; it is killed then."""
        daemon = self.server.process.popen
        command = ["strace", "-f", "-y", "-o", self._log, *options, "-p", str(daemon.pid)]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert strace.stderr is not None
        assert "attached" in (said := strace.stderr.readline()), said
        change()
        wait_until(lambda: daemon.poll() is not None or is_over())
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(_LAST_S)
        died = daemon.poll() is not None
        self.kill()
        strace.communicate(timeout=TIMEOUT_S)
        return died

    def _start_under_strace(self, options: Sequence[str]) -> bool:
        """Whether a daemon ends before it is ready; it is killed then."""
        # As a child of its own, so that it can be killed.
        command = ["strace", "-D", "-f", "-y", "-o", self._log, *options]
        arguments: Any = self.server.process.popen.args
        daemon = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
        assert daemon.stderr is not None
        is_ready = any(": ready, " in line for line in daemon.stderr)
        daemon.kill()
        daemon.communicate(timeout=TIMEOUT_S)
        ended = re.compile(rf"^{daemon.pid} +\+\+\+ ", re.MULTILINE)
        wait_until(lambda: ended.search(self._log.read_text(errors="replace")) is not None)
        return not is_ready

    def _kept(self, name: str) -> list[str]:
        """The keys of the copies that the store keeps of that model, newest first."""
        for path in ("state.json", "state.before.json"):
            try:
                state = json.loads((self.store / path).read_text())["state"]
            except FileNotFoundError:
                continue  # the two are just changing places
            return [kept["key"] for kept in state["models"].get(name, [])]
        return []

    def _is_tidy(self) -> bool:
        there = {path.name for path in (self.store / "copies").iterdir()}
        return there == {*self._kept("m"), *self._kept("other")} and not any(
            (self.store / "incoming").iterdir()
        )


@pytest.fixture
def bench(tmp_path: Path, serve: Callable[..., Server]) -> Bench:
    return Bench(tmp_path, serve)


def test_a_daemon_that_dies_in_an_update_is_followed_by_one_that_serves(bench: Bench) -> None:
    oldest = bench.oldest_copy_paths
    traced = bench.calls(bench.deliver, bench.is_good)
    bench.start_from_copies()
    bench.wait_good()
    copying, noting, dropping = (
        some(traced.of_a_copy()),
        some(traced.at(bench.state_paths)),
        some(traced.at(oldest)),
    )
    served = []
    for call in (*copying, *noting, *dropping):
        bench.die_in_an_update(call, drops=call in dropping)
        served.append("new" if bench.start_from_copies() == bench.number else "old")
        bench.wait_good()
    assert set(served[: len(copying)]) == {"old"}
    assert set(served[-len(dropping) :]) == {"new"}
    # What is noted is that it is loaded, that it was, and that it is good.
    assert served == sorted(served, reverse=True)
    tell("in an update", bench, len(served))


def test_a_daemon_that_dies_while_it_forgets_a_model_is_followed_by_one_that_serves(
    bench: Bench,
) -> None:
    def take_away() -> None:
        shutil.rmtree(bench.repository / "other")

    def there_again() -> None:
        bench.put("other", 100)
        wait_until(lambda: bench.server.client.is_model_ready("other") and not bench.is_gone())

    calls = some(bench.calls(take_away, bench.is_gone).at(bench.state_paths))
    bench.start_from_copies()
    for call in calls:
        there_again()
        assert bench.die(call, take_away, bench.is_gone)
        assert bench.start_from_copies() == bench.number
        wait_until(bench.is_gone)
        assert not bench.server.client.is_model_ready("other")
    tell("forgetting a model", bench, len(calls))


def test_a_daemon_that_dies_at_its_start_is_followed_by_one_that_serves(bench: Bench) -> None:
    bench.kill()
    calls = some(bench.calls_of_a_start().at(bench.state_paths))
    for call in calls:
        assert bench.die_at_start(call)
        assert bench.start_from_copies() == bench.number
        assert bench.server.answer("other") == 100
        bench.kill()
    tell("at a start", bench, len(calls))


def some(calls: list[Call]) -> list[Call]:
    """As many as shall be tried, evenly."""
    if POINTS == "all":
        return calls
    count = min(int(POINTS), len(calls))
    return [calls[(2 * n + 1) * len(calls) // (2 * count)] for n in range(count)]


def tell(doing: str, bench: Bench, count: int) -> None:
    took_s = bench.took_s
    print(
        f"\n{doing}: died at {count} calls; {len(took_s)} starts, of which the process took "
        f"{statistics.median(took_s):.2f} s in the median, {max(took_s):.2f} s at most to answer"
    )


def _only(paths: Paths) -> list[str]:
    return [flag for path in paths for flag in ("-P", str(path))]

"""Follows a channel: places its model in a repository, whose daemon validates it, watches it and
rolls it back as it does after any push; and says what became of it."""

from __future__ import annotations

import dataclasses
import logging
import random
import shutil
import time
from contextlib import closing, suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from edge_server.errors import EdgeServerError, ModelConfigError, NotFound, Unavailable
from edge_server.process.text import as_utf8
from edge_server.process.threads import Backoff, Worker
from edge_server.repository.channel import Release, decide, index_of, require_newer
from edge_server.repository.content import usable_tree
from edge_server.repository.manifest import PublicKeys
from edge_server.repository.remote import fetch, open_origin
from edge_server.repository.store_state import ChannelMark
from edge_server.repository.transfer import entries_of, receive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Protocol

    from edge_server.repository.channel import Decision, Surroundings
    from edge_server.repository.remote import Origin
    from edge_server.repository.verdicts import Verdict

    class Marks(Protocol):
        """A `ModelStore`."""

        def channel(self, name: str) -> ChannelMark: ...

        def mark_channel(self, name: str, mark: ChannelMark) -> None: ...


log = logging.getLogger(__name__)

_LOOK_S = 1.0
# The first attempt after the start, and after one that failed; later ones up to the interval.
_RETRY_S = 10.0
UNREACHABLE = "unreachable"
REFUSED = "refused"
_ROLLED_BACK = "rolled_back"
_OUTCOMES = ("good", REFUSED, _ROLLED_BACK)


class ChannelReport(msgspec.Struct, frozen=True):
    """What a vehicle says of a channel; its JSON is the message.

    Attributes:
        state: of the release: a state of `Decision`, `replaced` (the repository has other content
            by now), or, once it is placed, the outcome of its verdict: `loading`, `on_trial`,
            `good`, `waits`, `refused`, `rolled_back`; `none` before the first index.
        reason: why it does not serve.
        fault: why the channel itself is `unreachable`, its present index or archive `refused`, or
            a model cannot be placed (`failed`), behind that word; the release before counts until
            then. Empty without a fault.
        serial, model, content, share: of the release.
        serves: the digest of the model that serves, whoever brought it.
        since: when the channel last placed a model; None for never.
    """

    channel: str = ""
    source: str = ""
    state: str = "none"
    reason: str = ""
    fault: str = ""
    serial: int = 0
    model: str = ""
    content: str = ""
    share: float = 0.0
    serves: str = ""
    since: datetime | None = None

    @property
    def trouble(self) -> str:
        """The word for what a person should look at; empty while all is as it should be."""
        fault, is_bad = self.fault.partition(":")[0], self.state in (REFUSED, _ROLLED_BACK)
        return fault or (self.state if is_bad else "")


class ChannelFollower:
    """One vehicle follows one channel; for one thread, beside `report`.

    A registry that cannot be reached, and an index that is refused, change nothing.

    Args:
        source: `oci://REGISTRY/REPOSITORY:TAG`.
        interval_s: between two requests, less up to a half, so that a fleet's requests spread.
        repositories: what is placed goes into the one that has the model, or else the first.
        cache: a directory of its own, for what was fetched in part.
        surroundings: returns what the vehicle knows of itself.
        verdict: returns what the daemon has found of a model.
        on_news: called with a cause and a report: `placed`, `index_refused`, and once for each
            outcome: `good`, `refused`, `rolled_back`.

    Raises: SettingsError: a key cannot be read.
    """

    def __init__(
        self,
        name: str,
        source: str,
        keys: Sequence[Path],
        device: str,
        *,
        interval_s: float,
        ca_file: str | None,
        repositories: Sequence[Path],
        cache: Path,
        marks: Marks,
        surroundings: Callable[[], Surroundings],
        verdict: Callable[[str], Verdict],
        on_news: Callable[[str, ChannelReport], object],
    ) -> None:
        self.worker = Worker(f"channel-{name}", self._tick, deadline_s=float("inf"))
        self._name, self._source, self._device = name, source, device
        self._keys = PublicKeys(keys)
        self._interval_s, self._ca_file = interval_s, ca_file
        self._repositories, self._cache = tuple(repositories), cache
        self._marks, self._surroundings, self._verdict = marks, surroundings, verdict
        self._on_news = on_news
        self._mark = marks.channel(name)
        self._placed_ns = 0
        self._release: Release | None = None
        with suppress(ModelConfigError):  # of a later version, which ran here before
            self._release = Release.parse(self._mark.index)
        self._retry = Backoff(min(_RETRY_S, interval_s), interval_s)
        self._fault = ""
        self._due_s = time.monotonic() + self._retry.next_s()
        self.report = self._look()

    def _tick(self, now: float) -> None:
        self.step(now)
        self.worker.wait(min(_LOOK_S, self._interval_s))

    def step(self, now: float) -> None:
        """Do what is due at `now`, of `time.monotonic()`; raises nothing."""
        before = self.report.state
        try:
            self.report = self._look()
            self._conclude()
            if self.report.state == "due" != before:
                # A fleet that waited for one moment does not come in that moment.
                soon_s = min(self._interval_s, 60.0)
                self._due_s = min(self._due_s, now + random.uniform(0, soon_s))  # noqa: S311
            if now < self._due_s:
                return
            self._poll()
            self._note("")
        except (Unavailable, NotFound) as error:
            self._note(f"{UNREACHABLE}: {error}")
        except ModelConfigError as error:
            self._note(f"{REFUSED}: {error}")
        except EdgeServerError as error:
            self._note(f"failed: {error}")
        except Exception as error:
            log.exception("channel %s: cannot be followed; it is tried again", self._name)
            self._note(f"failed: {type(error).__name__}: {error}")
        # Not from `now`: a pull may have taken minutes.
        pause = self._retry if self._fault else Backoff(self._interval_s, self._interval_s)
        self._due_s = time.monotonic() + pause.next_s()
        self.report = self._look()

    def _note(self, fault: str) -> None:
        if not fault:
            self._retry.reset()
        if as_utf8(fault) != self._fault:
            text = fault or "is followed again"
            log.log(logging.WARNING if fault else logging.INFO, "channel %s: %s", self._name, text)
            if fault.startswith(REFUSED):
                self._on_news("index_refused", replace(self.report, fault=fault))
        self._fault = as_utf8(fault)

    def _poll(self) -> None:
        with closing(open_origin(self._source, ca_file=self._ca_file)) as origin:
            index = index_of(origin, self._source, self._keys)
            release = require_newer(self._source, index, self._mark.index)
            if index != self._mark.index:
                # Durable before anything follows from it.
                self._keep(replace(self._mark, index=index))
                self._release = release
                log.info(
                    "channel %s: serial %d: %s for %g %%",
                    *(self._name, release.serial, release.model, release.share),
                )
            self.report = self._look()
            if self.report.state == "due":
                self._place(origin, release)

    def _place(self, origin: Origin, release: Release) -> None:
        """Fetch the model, and place it where the vehicle still takes it."""
        if [file.sha256 for file in origin.files] != [release.archive]:
            raise ModelConfigError(
                f"{self._source}: has another archive than its signed index names"
            )
        model, cache = release.model, self._cache / release.archive
        origin = dataclasses.replace(origin, name=model)
        # Looked at meanwhile, too: how long the vehicle stands is counted from look to look.
        place, fetched = fetch(origin, cache, lambda _: self._surroundings(), model)
        if fetched.content.digest != release.content:
            raise ModelConfigError(
                f"{self._source}: its archive has {fetched.content.digest[:12]}, and its index "
                f"says {release.content[:12]}"
            )
        if self._decide(release).state != "due":  # the vehicle drives off during a download
            return
        known = (each for each in self._repositories if (each / model).exists())
        self._placed_ns = time.monotonic_ns()
        receive(next(known, self._repositories[0]), entries_of(usable_tree(place.parent, model)))
        self._keep(ChannelMark(self._mark.index, release.content, int(time.time())))
        shutil.rmtree(self._cache, ignore_errors=True)
        log.info("channel %s: placed model %s, %.12s", self._name, model, release.content)
        self._on_news("placed", self._look())

    def _conclude(self) -> None:
        """Report the outcome of the release, once, over restarts too."""
        state, content, mark = self.report.state, self.report.content, self._mark
        if state not in _OUTCOMES:
            return
        if mark.placed != content:  # it was there already, or somebody pushed it
            mark = ChannelMark(mark.index, content, int(time.time()))
        if state != mark.outcome:
            self._keep(replace(mark, outcome=state))
            self._on_news(state, self.report)

    def _keep(self, mark: ChannelMark) -> None:
        self._marks.mark_channel(self._name, mark)
        self._mark = mark

    def _decide(self, release: Release) -> Decision:
        return decide(release, self._device, self._surroundings())

    def _look(self) -> ChannelReport:
        release, mark = self._release, self._mark
        if release is None:
            return ChannelReport(self._name, self._source, fault=self._fault)
        verdict = self._verdict(release.model)
        if verdict.digest == release.content and verdict.outcome:
            state, reason = verdict.outcome.replace(" ", "_"), verdict.reason
            if state == REFUSED and mark.outcome == _ROLLED_BACK:  # it is in quarantine since
                state = _ROLLED_BACK
        elif mark.placed == release.content:
            state, reason = "replaced" if verdict.told_ns > self._placed_ns else "loading", ""
        else:
            state, reason = self._decide(release)
        since = datetime.fromtimestamp(mark.since_s, timezone.utc) if mark.since_s else None
        return ChannelReport(
            *(self._name, self._source, state, as_utf8(reason), self._fault, release.serial),
            *(release.model, release.content, release.share, verdict.serves, since),
        )

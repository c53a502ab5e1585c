"""Channels: a tag of an OCI registry says which model a fleet's vehicles have, and which of them.

The tag is a model's artifact, which any registry keeps, copies and serves. Its annotations have the
index, a line of JSON, and the signature of that line; the index names the model's archive by its
digest. One request reads both.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
import random
import shutil
import time
from contextlib import closing, suppress
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from edge_server.errors import (
    EdgeServerError,
    ModelConfigError,
    NotFound,
    SettingsError,
    Unavailable,
)
from edge_server.process.disk import file_sha256
from edge_server.process.text import as_utf8, shortened
from edge_server.process.threads import Backoff, Worker
from edge_server.repository.content import usable_tree
from edge_server.repository.manifest import SIGNATURE_BYTES, PublicKeys
from edge_server.repository.remote import fetch, open_origin
from edge_server.repository.remote_files import oci_client
from edge_server.repository.scan import is_model_name
from edge_server.repository.store_state import ChannelMark
from edge_server.repository.transfer import entries_of, receive, write_archive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Protocol

    from edge_server.repository.manifest import SigningKey
    from edge_server.repository.remote import Origin
    from edge_server.repository.transfer import Entry
    from edge_server.repository.verdicts import Verdict

    class Marks(Protocol):
        """A `ModelStore`."""

        def channel(self, name: str) -> ChannelMark: ...

        def mark_channel(self, name: str, mark: ChannelMark) -> None: ...


_INDEX = "edge-server.channel"
_SIGNATURE = "edge-server.channel.signature"
# What a vehicle knows of itself.
CONDITIONS = ("parked_s", "max_celsius")
_PUBLISH = "publish it again with `edge-server models publish`"

_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Time = Annotated[datetime, msgspec.Meta(tz=True)]


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the index of a channel says.

    Attributes:
        channel: the path and the tag in the registry, so that no other channel's index fits.
        serial: greater than that of every index before.
        archive, content: the SHA-256 of the model's archive; its digest, as `models list` has it.
        share: of the vehicles, in percent.
        not_before, not_after: when a vehicle may take it; None is always.
        conditions: of `CONDITIONS`; all must hold when a vehicle takes it.
    """

    channel: str
    serial: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    model: str
    archive: _Digest
    content: _Digest
    share: Annotated[float, msgspec.Meta(ge=0, le=100)]
    not_before: _Time | None = None
    not_after: _Time | None = None
    conditions: dict[str, float] = {}
    format: Literal[1] = 1

    @staticmethod
    def parse(index: str) -> Release:
        """Raises: ModelConfigError: it is none, or has a condition that no device can know."""
        try:
            release = msgspec.json.decode(index, type=Release)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ModelConfigError(f"its index cannot be read: {error}") from error
        if not is_model_name(release.model):
            raise ModelConfigError(f"its index names '{release.model[:200]}', which is no model")
        if unknown := sorted(release.conditions.keys() - set(CONDITIONS)):
            raise ModelConfigError(
                f"its condition '{unknown[0][:64]}' is nothing that this device can know; it knows "
                f"{', '.join(CONDITIONS)}"
            )
        return release


class _Serial(msgspec.Struct):
    serial: int


class Surroundings(NamedTuple):
    """What a vehicle knows of itself; None is not known, as the time of a clock that cannot be
    believed. `parked_s`: for how long its speed has been 0; `celsius`: the board's hottest zone."""

    now: datetime | None = None
    parked_s: float | None = None
    celsius: float | None = None


class Decision(NamedTuple):
    """Whether a vehicle takes a release: `due`, or why not: `not_in_share`, `waiting`, `ended`."""

    state: str
    reason: str = ""


def position(content: str, device: str) -> float:
    """Return where a vehicle stands among all, from 0 to below 100; another order for each content.
    A vehicle that is in a share of some percent is in each larger one."""
    digest = hashlib.sha256(f"{content} {device}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48 * 100


def decide(release: Release, device: str, of: Surroundings) -> Decision:
    """Return whether `device` takes `release` now. Nothing else decides about that."""
    if position(release.content, device) >= release.share:
        return Decision("not_in_share", f"{release.share:g} % of the vehicles take it")
    if (release.not_before or release.not_after) and of.now is None:
        return Decision("waiting", "the release has times, and the clock cannot be believed")
    if release.not_after and of.now and of.now >= release.not_after:
        return Decision("ended", f"not taken before {release.not_after.isoformat()}")
    waits = []
    if release.not_before and of.now and of.now < release.not_before:
        waits.append(f"for {release.not_before.isoformat()}")
    if (least_s := release.conditions.get("parked_s")) is not None:
        if of.parked_s is None:
            waits.append("parked: the vehicle's speed is not known (docs/lanes.md)")
        elif of.parked_s < least_s:
            waits.append(f"parked for {of.parked_s:.0f} of {least_s:g} s")
    if (most := release.conditions.get("max_celsius")) is not None:
        if of.celsius is None:
            waits.append("the board's temperature is not known")
        elif of.celsius > most:
            waits.append(f"the board has {of.celsius:.0f} °C, more than {most:g}")
    return Decision("waiting", "; ".join(waits)) if waits else Decision("due")


def channel_of(source: str) -> str:
    """Return the path and the tag of `source`: mirrors of a registry have the same."""
    return urlsplit(source).path.lstrip("/")


def index_of(origin: Origin, source: str, keys: PublicKeys) -> str:
    """Return the index of the channel.
    Raises: ModelConfigError: there is none, another key signed it, or it was changed since."""
    index, signature = (origin.annotations.get(name, "") for name in (_INDEX, _SIGNATURE))
    if not index or not signature:
        raise ModelConfigError(f"{source}: is no channel: it has no signed index; {_PUBLISH}")
    try:
        raw = base64.b64decode(signature, validate=True)
    except ValueError:
        raw = b""
    if len(raw) != SIGNATURE_BYTES or not keys.have_signed(index.encode(), raw):
        raise ModelConfigError(
            f"{source}: its index is not signed by {keys}: another key signed it, or it was "
            "changed since"
        )
    return index


def require_newer(source: str, index: str, known: str) -> Release:
    """Return the release of `index`, which may follow the index `known`, or be it.
    Raises: ModelConfigError: it is older, of another channel, or another one of the same serial."""
    release = Release.parse(index)
    if release.channel != channel_of(source):
        raise ModelConfigError(f"{source}: its index is that of {release.channel[:200]}")
    # `known` may be of a later version of this program.
    before = msgspec.json.decode(known, type=_Serial).serial if known else 0
    if release.serial < before:
        raise ModelConfigError(
            f"{source}: its serial {release.serial} is older than {before}, which this device has "
            f"seen; {_PUBLISH}"
        )
    if release.serial == before and index != known:
        raise ModelConfigError(
            f"{source}: another index has the serial {before} by now; {_PUBLISH}"
        )
    return release


class ChannelPublisher:
    """Writes the index of one channel, as whoever holds the key."""

    def __init__(self, source: str, key: SigningKey) -> None:
        self._source, self._key = source, key
        self.before: Release | None = None
        self._is_ours = False
        try:
            origin = open_origin(source)
        except NotFound:
            return
        with closing(origin):
            index, signature = (origin.annotations.get(name, "") for name in (_INDEX, _SIGNATURE))
        if index:
            self.before = Release.parse(index)
            self._is_ours = signature == _text(key.sign(index.encode()))

    def publish(self, entries: Iterable[Entry], **fields: Any) -> Release:
        """Send a model, and publish it; `fields` are those of `Release` beside its archive."""
        with TemporaryDirectory() as folder:
            # Its name has no colon, behind which oras looks for a media type.
            archive, about = Path(folder) / "model.tar", Path(folder) / "annotations.json"
            with archive.open("wb") as file:
                write_archive(file, entries)
            release = self._release(archive=file_sha256(archive), **fields)
            annotations = self._annotations(release)
            unpack = {"io.deis.oras.content.unpack": "true"}
            about.write_text(json.dumps({"$manifest": annotations, str(archive): unpack}))
            with oci_client(self._source) as client:
                client.push(
                    target=self._source.removeprefix("oci://"),
                    files=[f"{archive}:application/vnd.oci.image.layer.v1.tar"],
                    annotation_file=str(about),
                    disable_path_validation=True,
                    quiet=True,
                )
        return release

    def change(self, **fields: Any) -> Release:
        """Publish the present model again, with other `fields`; its archive is not sent.
        Raises: SettingsError: there is no index that this key has signed."""
        if self.before is None or not self._is_ours:
            raise SettingsError(
                f"{self._source}: has no index that this key has signed; give the model's DIR"
            )
        release = self._release(**{**msgspec.structs.asdict(self.before), **fields})
        with oci_client(self._source) as client:
            container = client.get_container(self._source.removeprefix("oci://"))
            manifest = client.get_manifest(container)
            manifest["annotations"] = self._annotations(release)
            response = client.upload_manifest(manifest, container)
            if response.status_code >= 300:
                raise ValueError(f"{response.status_code} {response.reason}")
        return release

    def _release(self, **fields: Any) -> Release:
        # Seconds, so that serials go on where a registry has lost its tag.
        serial = max(self.before.serial + 1 if self.before else 1, int(time.time()))
        fields |= {"channel": channel_of(self._source), "serial": serial}
        return msgspec.convert(fields, Release)

    def _annotations(self, release: Release) -> dict[str, str]:
        index = msgspec.json.encode(release, order="sorted")
        return {_INDEX: index.decode(), _SIGNATURE: _text(self._key.sign(index))}


def _text(signature: bytes) -> str:
    return base64.b64encode(signature).decode()


log = logging.getLogger(__name__)

_LOOK_S = 1.0
# The first attempt after the start, and after one that failed; later ones up to the interval.
_RETRY_S = 10.0
# A registry that drips has sent no piece of a download for that long, or no index.
_SILENT_S = 150.0
_LONGEST_FAULT = 1000
UNREACHABLE = "unreachable"
REFUSED = "refused"
_ROLLED_BACK = "rolled_back"
_OUTCOMES = ("good", REFUSED, _ROLLED_BACK)


class ChannelReport(msgspec.Struct, frozen=True):
    """What a vehicle says of a channel; its JSON is the message.

    Attributes:
        state: of the release: a state of `Decision`, `replaced` (the repository has other content
            by now), or, once it is placed, the outcome of its verdict; `none` before the first
            index.
        fault: why the channel itself is `unreachable`, its present index or archive `refused`, or
            a model cannot be placed (`failed`), behind that word; the release before counts until
            then.
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
    """One vehicle follows one channel; for one thread, beside `report`. A registry that cannot be
    reached, and an index that is refused, change nothing.

    Args:
        interval_s: between two requests, less up to a half, so that a fleet's requests spread.
        repositories: what is placed goes into the one that has the model, or else the first.
        on_news: called with a cause and a report: `placed`, `index_refused`, and once for each
            outcome: `good`, `refused`, `rolled_back`.
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
        self._report = self._look()

    @property
    def report(self) -> ChannelReport:
        """What there is to say of the channel now; for any thread."""
        at_s, _ = self.worker.heartbeat
        if not self.worker.alive or time.monotonic() - at_s < _SILENT_S:
            return self._report
        fault = (
            f"{UNREACHABLE}: {self._source}: no piece of what it sends has come for {_SILENT_S:g} s"
        )
        return replace(self._report, fault=fault)

    def _tick(self, now: float) -> None:
        self.step(now)
        self.worker.wait(min(_LOOK_S, self._interval_s))

    def step(self, now: float) -> None:
        """Do what is due at `now`, of `time.monotonic()`; raises nothing."""
        before = self._report.state
        try:
            self._report = self._look()
            self._conclude()
            if self._report.state == "due" != before:
                # A fleet that waited for one moment does not come in that moment.
                soon_s = min(self._interval_s, 60.0)
                self._due_s = min(self._due_s, now + random.uniform(0, soon_s))  # noqa: S311 - no secret
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
        self._report = self._look()

    def _note(self, fault: str) -> None:
        if not fault:
            self._retry.reset()
        fault = shortened(as_utf8(fault), _LONGEST_FAULT)  # a registry's words may be in it
        if fault != self._fault:
            text = fault or "is followed again"
            log.log(logging.WARNING if fault else logging.INFO, "channel %s: %s", self._name, text)
            if fault.startswith(REFUSED):
                self._on_news("index_refused", replace(self._report, fault=fault))
        self._fault = fault

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
            self._report = self._look()
            if self._report.state == "due":
                self._place(origin, release)

    def _place(self, origin: Origin, release: Release) -> None:
        """Fetch the model, and place it where the vehicle still takes it."""
        if [file.sha256 for file in origin.files] != [release.archive]:
            raise ModelConfigError(
                f"{self._source}: has another archive than its signed index names"
            )
        model, cache = release.model, self._cache / release.archive
        origin = dataclasses.replace(origin, name=model)
        place, fetched = fetch(origin, cache, self._progress, model)
        if fetched.content.digest != release.content:
            raise ModelConfigError(
                f"{self._source}: its archive has {fetched.content.digest[:12]}, and its index "
                f"says {release.content[:12]}"
            )
        # The vehicle may drive off during a download.
        if decide(release, self._device, self._surroundings()).state != "due":
            return
        known = (each for each in self._repositories if (each / model).exists())
        self._placed_ns = time.monotonic_ns()
        receive(next(known, self._repositories[0]), entries_of(usable_tree(place.parent, model)))
        self._keep(ChannelMark(self._mark.index, release.content, int(time.time())))
        shutil.rmtree(self._cache, ignore_errors=True)
        log.info("channel %s: placed model %s, %.12s", self._name, model, release.content)
        self._on_news("placed", self._look())

    def _progress(self, _bytes: int) -> None:
        self.worker.beat()
        # How long the vehicle stands is counted from look to look.
        self._surroundings()

    def _conclude(self) -> None:
        """Report the outcome of the release, once, over restarts too."""
        state, content, mark = self._report.state, self._report.content, self._mark
        if state not in _OUTCOMES:
            return
        if mark.placed != content:  # it was there already, or somebody pushed it
            mark = ChannelMark(mark.index, content, int(time.time()))
        if state != mark.outcome:
            self._keep(replace(mark, outcome=state))
            self._on_news(state, self._report)

    def _keep(self, mark: ChannelMark) -> None:
        self._marks.mark_channel(self._name, mark)
        self._mark = mark

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
            state, reason = decide(release, self._device, self._surroundings())
        since = datetime.fromtimestamp(mark.since_s, timezone.utc) if mark.since_s else None
        return ChannelReport(
            *(self._name, self._source, state, as_utf8(reason), self._fault, release.serial),
            *(release.model, release.content, release.share, verdict.serves, since),
        )

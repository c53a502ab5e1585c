"""The state of a model store: last known good copies, quarantine, interrupted loads; its file."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from edge_server.errors import AlreadyRunning, SettingsError
from edge_server.process.disk import (
    atomic_write,
    error_of_place,
    installed_state,
    lock_file,
    states_here,
)
from edge_server.repository.scan import SeenFile  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

log = logging.getLogger(__name__)

# Copies kept per model: the serving copy and its predecessors.
MOST_KEPT = 3
# A process that dies twice while it loads a model dies of that model. A board goes down for other
# reasons, often while an engine is cranked, but not again and again.
MOST_CRASHES = 2
MOST_RESETS = 5
# Earlier sets of repositories that a store remembers.
MOST_SETS = 8
_LONGEST_REASON = 1000
FORMAT = 1
_LOCK = "lock"


class KeptCopy(msgspec.Struct, frozen=True):
    """A copy that served; `key` names its directory in the store. `turn` is greater than that of
    every copy that served before; 0 until it serves."""

    digest: str
    key: str
    source: tuple[SeenFile, ...]
    turn: int = 0


class Load(msgspec.Struct, frozen=True):
    digest: str
    boot: str


class Deaths(msgspec.Struct, frozen=True):
    """The consecutive crashes of the process and resets of the board during loads of a digest."""

    crashes: int = 0
    resets: int = 0


class ChannelMark(msgspec.Struct, frozen=True):
    """What is known of a channel over restarts.

    Attributes:
        index: the newest index that was accepted, whose serial is the least that counts.
        placed: the digest of the content that was last placed in a repository for it, at `since_s`.
        outcome: what became of it, as it was last reported; empty while that is open."""

    index: str = ""
    placed: str = ""
    since_s: int = 0
    outcome: str = ""


class StoreState(msgspec.Struct, frozen=True):
    """The immutable state of a store; each change returns a new state.

    Attributes:
        models: name → the copies that served, newest first; the first is the last known good.
        quarantined, quarantined_as: digest → the reason, and the name of the model that had it.
        deaths: digest → the deaths during its loads since the last successful load.
        repositories: the repositories of these models, sorted; empty if not known yet.
        elsewhere: the states for other sets of repositories, the last used first.
        channels: name of a channel → what is known of it, whatever the repositories."""

    models: dict[str, tuple[KeptCopy, ...]] = {}
    quarantined: dict[str, str] = {}
    loading: dict[str, Load] = {}
    deaths: dict[str, Deaths] = {}
    turn: int = 0
    quarantined_as: dict[str, str] = {}
    repositories: tuple[str, ...] = ()
    elsewhere: tuple[StoreState, ...] = ()
    channels: dict[str, ChannelMark] = {}

    @property
    def kept(self) -> list[KeptCopy]:
        """All copies that served, including those of other repositories."""
        here = [kept for history in self.models.values() for kept in history]
        return [*here, *(kept for other in self.elsewhere for kept in other.kept)]

    @property
    def spare(self) -> list[KeptCopy]:
        """The copies that may be dropped for space, in that order: all but the last known good
        copies of these repositories."""
        elsewhere = [history for other in self.elsewhere for history in other.models.values()]
        here = list(self.models.values())
        older = (
            sorted((kept for history in each for kept in history[1:]), key=attrgetter("turn"))
            for each in (elsewhere, here)
        )
        last = sorted((history[0] for history in elsewhere), key=attrgetter("turn"))
        serves = {history[0].key for history in here}
        return [kept for kept in (*chain(*older), *last) if kept.key not in serves]

    def followed(self, repositories: tuple[str, ...]) -> StoreState:
        """Return the state for these repositories, with the other states kept in `elsewhere`."""
        if repositories in ((), self.repositories):
            return self
        if not self.repositories:
            return replace(self, repositories=repositories)
        others = {other.repositories: other for other in self.elsewhere}
        known = others.pop(repositories, StoreState(repositories=repositories))
        left = (replace(self.stopped(), elsewhere=(), channels={}), *others.values())
        turn = max(each.turn for each in (*left, known))
        return replace(known, turn=turn, elsewhere=left[:MOST_SETS], channels=self.channels)

    def committed(self, name: str, copy: KeptCopy) -> StoreState:
        """Return the state in which `copy` is the last known good copy of `name`."""
        newest = replace(copy, turn=self.turn + 1)
        older = [kept for kept in self.models.get(name, ()) if kept.digest != copy.digest]
        history = (newest, *older)[:MOST_KEPT]
        return replace(self, models={**self.models, name: history}, turn=newest.turn)

    def without(self, keys: Collection[str]) -> StoreState:
        models = {
            name: tuple(kept for kept in history if kept.key not in keys)
            for name, history in self.models.items()
        }
        return replace(
            self,
            models={name: history for name, history in models.items() if history},
            elsewhere=tuple(other.without(keys) for other in self.elsewhere),
        )

    def forgotten(self, name: str) -> StoreState:
        return replace(self, models={n: h for n, h in self.models.items() if n != name})

    def began(self, name: str, digest: str, boot: str) -> StoreState:
        return replace(self, loading={**self.loading, name: Load(digest, boot)})

    def ended(self, name: str, *, loaded: bool) -> StoreState:
        """Return the state after the load of `name`; a successful load clears earlier deaths."""
        loading = dict(self.loading)
        load = loading.pop(name, None)
        deaths = self.deaths
        if load is not None and loaded:
            deaths = {digest: d for digest, d in deaths.items() if digest != load.digest}
        return replace(self, loading=loading, deaths=deaths)

    def stopped(self) -> StoreState:
        """Return the state without loads in progress, so that none counts as a death."""
        return replace(self, loading={})

    def recovered(self, there: Collection[str], boot: str) -> StoreState:
        """Return the state after the last process has ended, and log what has become of it.
        Args: there: the keys of the copies that the store holds."""
        for name, history in self.models.items():
            for kept in history:
                if kept.key not in there:
                    log.warning("model %s: its copy %s is gone", name, kept.key)
        state = self.without({kept.key for kept in self.kept} - {*there}).interrupted(boot)
        for name, load in self.loading.items():
            log.warning("model %s: the process died while it was loaded (%s)", name, load.digest)
            if load.digest in state.quarantined:
                log.error("model %s: quarantined: %s", name, state.quarantined[load.digest])
        return state

    def interrupted(self, boot: str) -> StoreState:
        """Count each load left in `loading` at a start as a death; quarantine after too many."""
        state = self.stopped()
        was_up = {load.digest: load.boot == boot for load in self.loading.values()}
        names = {load.digest: name for name, load in self.loading.items()}
        for digest, name in names.items():
            before = self.deaths.get(digest, Deaths())
            crashed = was_up[digest]
            now = Deaths(before.crashes + crashed, before.resets + (not crashed))
            state = replace(state, deaths={**state.deaths, digest: now})
            if now.crashes >= MOST_CRASHES or now.resets >= MOST_RESETS:
                state = state.quarantine(digest, _reason(now), name)
        return state

    def quarantine(self, digest: str, reason: str, name: str = "") -> StoreState:
        names = {**self.quarantined_as, digest: name}
        return replace(
            self,
            quarantined={**self.quarantined, digest: reason[:_LONGEST_REASON]},
            quarantined_as={d: n for d, n in names.items() if n},
        )

    def released(self, digest: str) -> StoreState:
        return replace(
            self,
            quarantined={d: reason for d, reason in self.quarantined.items() if d != digest},
            quarantined_as={d: name for d, name in self.quarantined_as.items() if d != digest},
            deaths={d: deaths for d, deaths in self.deaths.items() if d != digest},
        )


def _reason(deaths: Deaths) -> str:
    what = (
        f"the daemon died {deaths.crashes} times in a row"
        if deaths.crashes >= MOST_CRASHES
        else f"the board went down {deaths.resets} times in a row"
    )
    return f"{what} while this was loaded; it is not tried again until the files change"


def installed_store() -> Path:
    """Return the store of the installed daemon if there is one, otherwise this user's store."""
    return installed_state() / "store"


def stores_here() -> list[Path]:
    """Return the possible stores on this machine: the installed daemon's, then this user's."""
    return [state / "store" for state in states_here()]


def lock_store(directory: Path) -> int:
    """Create `directory` if missing and lock it; return the descriptor that holds the lock.
    Raises: AlreadyRunning: another process has it. SettingsError: it is unsafe, or holds other
        files. Unavailable: its disk may be mounted, or have space, later."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(directory)
        return lock_file(directory / _LOCK)
    except BlockingIOError:
        raise AlreadyRunning(
            f"model store {directory}: another daemon keeps its models there; stop it, or give "
            "this one a directory of its own with repository.store (--repository-copies)"
        ) from None
    except OSError as error:
        raise error_of_place(
            error,
            f"model store {directory}: {error.strerror}; give it a directory that the daemon may "
            "write to (systemd: StateDirectory=)",
        ) from error


def _require_own(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise SettingsError(
            f"model store {directory}: it belongs to another user; chown it, or choose another"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SettingsError(
            f"model store {directory}: others could put models there; chmod go-w it"
        )
    # The store removes unknown files in its directory, which must therefore be no repository.
    there = {entry.name for entry in directory.iterdir()} - {"lost+found"}
    if there and _LOCK not in there:
        raise SettingsError(
            f"model store {directory}: holds something else ({min(there)}); choose an empty "
            "directory"
        )


class _Envelope(msgspec.Struct, frozen=True):
    """The file's content; `sha256` is the checksum of `state`, against flipped bits."""

    format: int
    sha256: str
    state: msgspec.Raw


class _OtherFormat(ValueError):
    """The file is of another version of this program, and is kept for that version."""

    def __init__(self, number: int) -> None:
        super().__init__(f"it is of format {number}, this is {FORMAT}")
        self.format = number


class StateFile:
    """`state.json` in `directory`, with the previous state in `state.before.json`. After a crash
    the file holds the old or the new state."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "state.json"
        self._before = directory / "state.before.json"
        self._new = directory / "state.json.tmp"

    def read(self) -> StoreState | None:
        """Return the last state that was written, or the one before; set an unreadable file aside
        and log that once. None where there is a file, and none that can be read."""
        lost = False
        for path in (self._path, self._before):
            try:
                return _decode(path.read_bytes())
            except FileNotFoundError:
                # The very first start, or a crash between the two renames of `write`.
                continue
            except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
                lost = True
                suffix = (
                    f".format-{error.format}" if isinstance(error, _OtherFormat) else ".damaged"
                )
                aside = path.with_suffix(suffix)
                log.warning("model store: %s is not used: %s; kept as %s", path, error, aside.name)
                try:
                    path.replace(aside)
                except OSError as refusal:
                    log.error(  # noqa: TRY400 - the reason is whole without a traceback
                        "model store: %s cannot be set aside and will be overwritten: %s; "
                        "remove %s",
                        path,
                        refusal.strerror,
                        aside,
                    )
        return None if lost else StoreState()

    def peek(self) -> StoreState:
        """Return the last state as `read` does, for a process that does not own the store. The
        method changes and logs nothing."""
        for path in (self._path, self._before):
            try:
                return _decode(path.read_bytes())
            except (FileNotFoundError, ValueError, RecursionError, msgspec.MsgspecError):
                continue
        return StoreState()

    def write(self, state: StoreState) -> None:
        """Write `state` and return once it is durable; until then the previous state is."""
        data = msgspec.json.encode(state)
        envelope = _Envelope(FORMAT, hashlib.sha256(data).hexdigest(), msgspec.Raw(data))
        data = msgspec.json.encode(envelope)
        atomic_write(self._path, data, mode=0o600, beside=self._new, previous=self._before)


def _decode(data: bytes) -> StoreState:
    envelope = msgspec.json.decode(data, type=_Envelope)
    if envelope.format != FORMAT:
        raise _OtherFormat(envelope.format)
    state = bytes(envelope.state)
    if hashlib.sha256(state).hexdigest() != envelope.sha256:
        raise ValueError("it is damaged")
    return msgspec.json.decode(state, type=StoreState)

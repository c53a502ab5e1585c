"""The files of a model store beside its copies: the lock, and the state after the last change."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
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
from edge_server.repository.store_state import StoreState

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

FORMAT = 1
_LOCK = "lock"


def installed_store() -> Path:
    """Return the store of the installed daemon if there is one, otherwise this user's store."""
    return installed_state() / "store"


def stores_here() -> list[Path]:
    """Return the possible stores on this machine: the installed daemon's, then this user's."""
    return [state / "store" for state in states_here()]


def lock_store(directory: Path) -> int:
    """Create `directory` if missing and lock it; return the descriptor that holds the lock.

    Raises:
        AlreadyRunning: another process has locked the directory.
        SettingsError: the directory is unsafe, or holds other files.
        Unavailable: the directory cannot be created or written; its disk may be mounted, or have
            space, later.
    """
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
    """`state.json` in `directory`, with the previous state in `state.before.json`.

    After a crash the file holds the old or the new state.

    Attributes:
        was_unreadable: True if the last `read` found a file that it could not use.
    """

    def __init__(self, directory: Path) -> None:
        self.was_unreadable = False
        self._directory = directory
        self._path = directory / "state.json"
        self._before = directory / "state.before.json"
        self._new = directory / "state.json.tmp"

    def read(self) -> StoreState:
        """Return the last state that was written; set an unreadable file aside and log that once.

        A store starts with the previous or an empty state rather than not at all.
        """
        self.was_unreadable = False
        for path in (self._path, self._before):
            try:
                return _decode(path.read_bytes())
            except FileNotFoundError:
                # The very first start, or a crash between the two renames of `write`.
                continue
            except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
                self.was_unreadable = True
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
        return StoreState()

    def look(self) -> StoreState:
        """Return the last state as `read` does, for a process that does not own the store.

        The method changes and logs nothing.

        Raises:
            OSError: the file cannot be read.
        """
        for path in (self._path, self._before):
            try:
                return _decode(path.read_bytes())
            except (FileNotFoundError, ValueError, RecursionError, msgspec.MsgspecError):
                continue
        return StoreState()

    def write(self, state: StoreState) -> None:
        """Write `state` and return once it is durable; until then the previous state is.

        Raises:
            OSError: the state cannot be written; the previous state stays.
        """
        data = msgspec.json.encode(state)
        envelope = _Envelope(FORMAT, hashlib.sha256(data).hexdigest(), msgspec.Raw(data))
        data = msgspec.json.encode(envelope)
        atomic_write(self._path, data, mode=0o600, beside=self._new, previous=self._before)

    def recovered(
        self, state: StoreState, there: set[str], boot: str, repositories: tuple[str, ...]
    ) -> StoreState:
        """Return the state after the last process has ended, and log what has become of it.

        Args:
            state: the last state that was written.
            there: the keys of the copies in the store.
            boot: the start of the board.
            repositories: the repositories that are followed now; empty for the last ones.
        """
        before, known = state, {kept.key for kept in state.kept}
        for name, history in before.models.items():
            for kept in history:
                if kept.key not in there:
                    log.warning("model %s: its copy %s is gone", name, kept.key)
        state = before.without({*known, *before.unclaimed} - there).interrupted(boot)
        for name, load in before.loading.items():
            log.warning("model %s: the process died while it was loaded (%s)", name, load.digest)
            if load.digest in state.quarantined:
                log.error("model %s: quarantined: %s", name, state.quarantined[load.digest])
        if self.was_unreadable:
            state = replace(state, unclaimed=tuple(sorted(there - known)))
            log.warning(
                "model store %s: its state is lost, at least in part; its %d copies of unknown "
                "models stay in its directory copies until their room is needed",
                self._directory,
                len(state.unclaimed),
            )
        followed = state.followed(repositories)
        if state.repositories and followed.repositories != state.repositories:
            log.warning(
                "model store %s: was last used for %s, now for %s: the models and the quarantine "
                "of those are not used, but kept until they are followed again; of these %d models "
                "are known",
                self._directory,
                ", ".join(state.repositories),
                ", ".join(repositories),
                len(followed.models),
            )
        return followed


def _decode(data: bytes) -> StoreState:
    envelope = msgspec.json.decode(data, type=_Envelope)
    if envelope.format != FORMAT:
        raise _OtherFormat(envelope.format)
    state = bytes(envelope.state)
    if hashlib.sha256(state).hexdigest() != envelope.sha256:
        raise ValueError("it is damaged")
    return msgspec.json.decode(state, type=StoreState)

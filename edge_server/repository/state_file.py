"""The state file of a model store, written atomically: after a crash the old or the new state."""

from __future__ import annotations

import hashlib
import logging
import os
from typing import TYPE_CHECKING

import msgspec

from edge_server.repository.staged_copy import sync
from edge_server.repository.store_state import StoreState

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

FORMAT = 1


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
        self._new.unlink(missing_ok=True)
        descriptor = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(envelope))
            file.flush()
            os.fsync(file.fileno())
        if self._path.exists():
            self._path.replace(self._before)
        self._new.replace(self._path)
        sync(self._directory)


def _decode(data: bytes) -> StoreState:
    envelope = msgspec.json.decode(data, type=_Envelope)
    if envelope.format != FORMAT:
        raise _OtherFormat(envelope.format)
    state = bytes(envelope.state)
    if hashlib.sha256(state).hexdigest() != envelope.sha256:
        raise ValueError("it is damaged")
    return msgspec.json.decode(state, type=StoreState)

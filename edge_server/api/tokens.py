"""Tokens: who may call what, by bearer tokens (RFC 6750) in a file; read again when it changes.

A line is the scopes of a token, separated by commas, and the token; `#` begins a comment:

    read          kLm3…     # see states, metadata, metrics, lanes
    read,infer    9fQx…     # and run models
    read,control  aa0Z…     # and load models, change settings
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from edge_server.errors import PermissionDenied, SettingsError, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

log = logging.getLogger(__name__)

Scope = Literal["read", "infer", "control"]
SCOPES: frozenset[str] = frozenset(get_args(Scope))
# Those of a credential; the file's group may read it, as that of a TLS key.
_TOO_OPEN = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_LONGEST_FILE_BYTES = 1024 * 1024


class Tokens:
    """The tokens in a file; every call sees its present content.

    A file that becomes unreadable or invalid leaves the tokens as they were, and the log says why.
    One that cannot be read is tried again at every call: what prevents it, like a missing group or
    a lack of file descriptors, may pass without a trace in the file.

    Raises:
        SettingsError: the file cannot be read, is open to everyone, or has an invalid line.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._logged = ""
        self._seen = self._signature()
        self._scopes = _read(self._path)

    def refusal(
        self, scope: Scope | None, metadata: Iterable[tuple[str, str | bytes]]
    ) -> Unauthenticated | PermissionDenied | None:
        """Return why a call with these headers is refused; None where it is allowed.

        Args:
            scope: that it needs; None needs no token.
        """
        if scope is None:
            return None
        given = next((value for key, value in metadata if key == "authorization"), "")
        text = given.decode("latin-1") if isinstance(given, bytes) else given
        kind, _, token = text.partition(" ")
        if kind.lower() != "bearer" or not token:
            return Unauthenticated("this call needs a token: send 'authorization: Bearer <token>'")
        found = self.scopes_of(token.strip())
        if not found:
            return Unauthenticated("the token is not valid")
        if scope not in found:
            return PermissionDenied(f"the token has not the scope '{scope}'")
        return None

    def scopes_of(self, token: str) -> frozenset[str]:
        """Return the scopes of a token, after as long for every token; none where it is wrong."""
        self._look()
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        found: frozenset[str] = frozenset()
        for known, scopes in self._scopes.items():
            if hmac.compare_digest(known, digest):
                found = scopes
        return found

    def may_read(self, token: str) -> bool:
        return "read" in self.scopes_of(token)

    def _look(self) -> None:
        if self._signature() == self._seen:
            return
        with self._lock:
            signature = self._signature()
            if signature == self._seen:
                return
            try:
                self._scopes = _read(self._path)
            except SettingsError as error:
                if str(error) != self._logged:
                    # The text is complete; a traceback adds nothing.
                    log.error("access: tokens stay as they were: %s", error)  # noqa: TRY400
                self._logged = str(error)
                if isinstance(error.__cause__, OSError):
                    return
            else:
                log.info("access: %s tokens of %s", len(self._scopes), self._path)
                self._logged = ""
            # Last: until then no call may take the former tokens for the present ones.
            self._seen = signature

    def _signature(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._path)  # noqa: PTH116 - half the time, at every call
        except OSError:
            return ()
        # A copy with the time of its original changes `st_ctime_ns` alone.
        times = found.st_mtime_ns, found.st_ctime_ns
        return *times, found.st_size, found.st_ino, found.st_mode


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read(path: Path) -> Mapping[bytes, frozenset[str]]:
    """Return the scopes by the digest of their token."""
    where = f"access.tokens_file: {path}"
    try:
        # A pipe would have every call wait for its writer.
        with open(path, "rb", opener=_open_at_once) as file:
            found_mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(found_mode):
                raise SettingsError(f"{where}: is no file")
            mode = stat.S_IMODE(found_mode)
            content = file.read(_LONGEST_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(
            f"{where}: cannot be read: {error.strerror}; put a file there that this user may read"
        ) from error
    if mode & _TOO_OPEN:
        raise SettingsError(f"{where}: others may read or change it (mode {mode:o}): chmod 600 it")
    if len(content) > _LONGEST_FILE_BYTES:
        raise SettingsError(f"{where}: has more than {_LONGEST_FILE_BYTES} bytes")
    found: dict[bytes, frozenset[str]] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        scopes = frozenset(words[0].split(","))
        if len(words) != 2 or not scopes <= SCOPES or not _TOKEN.fullmatch(words[1]):
            raise SettingsError(
                f"{where}: line {number} is not scopes (of {', '.join(sorted(SCOPES))}; separated "
                "by commas) and a token of 16 to 512 letters, digits and ._~+/=-"
            )
        digest = hashlib.sha256(words[1].encode()).digest()
        if digest in found:
            raise SettingsError(f"{where}: line {number} has a token for a second time")
        found[digest] = scopes
    return found
